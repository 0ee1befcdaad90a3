"""Models of commands, code and tools."""

from base64 import b64decode
from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from carrel.models.base import (
    DEFAULT_OUTPUT_BYTES,
    MAX_OUTPUT_BYTES,
    MAX_PATH,
    Answer,
    Code,
    CommandText,
    Deadline,
    EnvName,
    NoNul,
    OwnId,
    Request,
    Stdin,
)
from carrel.models.environments import EnvironmentName, IndexName, Requirements


class TerminalSize(Request):
    """Rows and columns of a terminal."""

    rows: int = Field(default=24, ge=1, le=1000)
    cols: int = Field(default=80, ge=1, le=1000)


class CommandRequest(Request):
    """A command. A string runs with `/bin/sh -c`; a list runs without a shell."""

    command: CommandText | Annotated[list[NoNul], Field(min_length=1, max_length=4096)]
    cwd: NoNul | None = Field(default=None, max_length=MAX_PATH, description="relative to the workspace")
    env: dict[EnvName, NoNul] = Field(default_factory=dict, max_length=256)
    timeout: Deadline = Field(
        default=None,
        description="seconds until the whole process tree is killed; 0 or null: no deadline; `default`: the sandbox's "
        "`limits.timeout_s`. If left out: 0 for a command in the background, else `default`",
    )
    stdin: Stdin | None = Field(
        default=None,
        description="text for standard input, which is then closed; on a terminal it is typed, and then Ctrl-D",
    )
    output_limit: int = Field(default=DEFAULT_OUTPUT_BYTES, ge=0, le=MAX_OUTPUT_BYTES)
    terminal: TerminalSize | None = Field(default=None, description="run under a PTY of this size")
    interactive: bool = Field(
        default=False,
        description="in the background or as a stream: keep standard input open for `send_input`. Run to its end: give "
        "the command a terminal, in which `stdin` is typed, followed by Ctrl-D",
    )
    id: OwnId | None = Field(
        default=None, description="an id that the caller chooses; a second command with it is refused"
    )


class CommandResult(Answer):
    """A finished command. If a signal ended it, `signal` names the signal and `exit_code` is null."""

    id: str
    stdout: str
    stderr: str
    exit_code: int | None
    signal: str | None = None
    timed_out: bool = False
    oom_killed: bool = False
    duration_ms: float
    truncated: bool = False
    dropped_bytes: int = 0
    stdout_base64: str | None = Field(default=None, description="the exact bytes, if they are not UTF-8")
    stderr_base64: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the command ended with exit code 0."""
        return self.exit_code == 0

    @property
    def stdout_bytes(self) -> bytes:
        """The exact bytes of standard output."""
        return self.stdout.encode() if self.stdout_base64 is None else b64decode(self.stdout_base64)

    @property
    def stderr_bytes(self) -> bytes:
        """The exact bytes of standard error."""
        return self.stderr.encode() if self.stderr_base64 is None else b64decode(self.stderr_base64)


class CommandInfo(Answer):
    """A running or finished command."""

    id: str
    command: str | list[str]
    running: bool
    pid: int | None
    terminal: bool
    started_at: datetime
    duration_ms: float
    exit_code: int | None = None
    signal: str | None = None
    timed_out: bool = False
    oom_killed: bool = False
    output_bytes: int = Field(description="bytes of stored output; the offset of its end")
    dropped_bytes: int = 0
    progress: str | None = Field(
        default=None,
        max_length=1000,
        description="what it said last with `carrel-heartbeat`, for a command whose id the caller chose",
    )
    beat: int | None = Field(default=None, description="changes with each heartbeat")


class CommandList(Answer):
    """The recorded commands of a sandbox, newest last."""

    items: list[CommandInfo]


class SignalRequest(Request):
    """A signal for the process group of a command or, with `tree`, for every process of its tree."""

    signal: str = Field(default="TERM", max_length=16)
    tree: bool = False


class OutputEvent(Answer):
    """One line of an output stream: `text` for UTF-8, `base64` for other bytes, `result` on the last line."""

    stream: Literal["stdout", "stderr", "end"]
    offset: int = Field(description="the offset after this chunk; attach again from here")
    text: str | None = None
    base64: str | None = None
    result: CommandInfo | None = None


class ExecuteRequest(Request):
    """Code in a language, with files to write before. Python has 30 seconds by default, 120 at most."""

    code: Code
    language: Literal["shell", "python"] = "shell"
    timeout: Deadline = Field(
        default=None, description="seconds; 0 or null: no deadline (shell only); left out: the sandbox's default"
    )
    files: dict[NoNul, str] = Field(default_factory=dict, max_length=256, description="path → base64")
    env_name: EnvironmentName | None = Field(default=None, description="an environment by its name or label")
    requirements: Requirements | None = Field(
        default=None, description="an environment by its packages; it is built if necessary"
    )
    python_index: IndexName | None = Field(default=None, description="the registry of the policy to build it from")


class ExecuteResult(Answer):
    """The result of `/execute`."""

    output: str
    stderr: str
    exit_code: int | None
    signal: str | None = None
    timed_out: bool = False
    oom_killed: bool = False
    truncated: bool = False
    execution_time_ms: float
    files_produced: list[str]
    files_truncated: bool = Field(default=False, description="whether more files changed than are listed")


class ToolRequest(Request):
    """A named tool with its parameters."""

    tool_name: str = Field(max_length=64)
    params: dict[str, object] = Field(default_factory=dict)


class ToolResult(Answer):
    """The result of a tool."""

    tool_name: str
    result: dict[str, object]
