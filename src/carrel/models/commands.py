"""Commands, code and tools. They hold and check values; they do nothing."""

from __future__ import annotations

from base64 import b64decode
from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from carrel.models.base import (
    DEFAULT_OUTPUT_BYTES,
    MAX_OUTPUT_BYTES,
    Answer,
    Deadline,
    EnvName,
    NoNul,
    OwnId,
    Request,
)
from carrel.models.environments import EnvironmentName, IndexName, Requirement


class TerminalSize(Request):
    """Rows and columns of a terminal."""

    rows: int = Field(default=24, ge=1, le=1000)
    cols: int = Field(default=80, ge=1, le=1000)


class CommandRequest(Request):
    """A command: a string runs under `/bin/sh -c`, a list runs as it is."""

    command: (
        Annotated[NoNul, Field(min_length=1, max_length=131_072)]
        | Annotated[list[NoNul], Field(min_length=1, max_length=4096)]
    )
    cwd: NoNul | None = Field(default=None, max_length=4096, description="relative to the workspace")
    env: dict[EnvName, NoNul] = Field(default_factory=dict, max_length=256)
    timeout: Deadline = Field(
        default=None,
        description="seconds until the whole process tree is killed; 0 or null: no deadline; `default`: that of the "
        "sandbox (`limits.timeout_s`). Left out, it is `default`, and 0 for a command started in the background",
    )
    stdin: str | None = Field(default=None, max_length=16 * 1024 * 1024, description="text given, then closed")
    output_limit: int = Field(default=DEFAULT_OUTPUT_BYTES, ge=0, le=MAX_OUTPUT_BYTES)
    terminal: TerminalSize | None = Field(default=None, description="run under a PTY of this size")
    interactive: bool = Field(default=False, description="keep stdin open for `send_input`; implies background")
    id: OwnId | None = Field(default=None, description="an id of the caller's own; a second command of it is refused")


class CommandResult(Answer):
    """A finished command. `exit_code` is None when a signal ended it, then `signal` names it."""

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
    stdout_base64: str | None = Field(default=None, description="the exact bytes, when they are not UTF-8")
    stderr_base64: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the command ended with exit code 0."""
        return self.exit_code == 0

    @property
    def stdout_bytes(self) -> bytes:
        """Exactly what the command wrote to standard output."""
        return self.stdout.encode() if self.stdout_base64 is None else b64decode(self.stdout_base64)

    @property
    def stderr_bytes(self) -> bytes:
        """Exactly what the command wrote to standard error."""
        return self.stderr.encode() if self.stderr_base64 is None else b64decode(self.stderr_base64)


class CommandInfo(Answer):
    """A command as listed: running or ended."""

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
    output_bytes: int = Field(description="bytes kept; the offset of the end of the output")
    dropped_bytes: int = 0


class CommandList(Answer):
    """The commands a sandbox remembers, newest last."""

    items: list[CommandInfo]


class SignalRequest(Request):
    """A signal for a command: to its process group, or to every process of its tree."""

    signal: str = Field(default="TERM", max_length=16)
    tree: bool = False


class OutputEvent(Answer):
    """One line of an output stream. `text` for UTF-8, `base64` for other bytes, `result` on the last line."""

    stream: Literal["stdout", "stderr", "end"]
    offset: int = Field(description="offset after this chunk; re-attach from here")
    text: str | None = None
    base64: str | None = None
    result: CommandInfo | None = None


class ExecuteRequest(Request):
    """`/execute`: code in a language, files in, files produced out. Python has 30 seconds, and 120 at most."""

    code: str = Field(min_length=1, max_length=1_048_576)
    language: Literal["shell", "python"] = "shell"
    timeout: Deadline = Field(
        default=None, description="seconds; 0 or null: no deadline (shell only); left out: that of the sandbox"
    )
    files: dict[NoNul, str] = Field(default_factory=dict, max_length=256, description="path → base64")
    env_name: EnvironmentName | None = Field(default=None, description="an environment by its name or label")
    requirements: list[Requirement] | None = Field(
        default=None, min_length=1, max_length=256, description="an environment by what it holds; built if need be"
    )
    python_index: IndexName | None = Field(default=None, description="the one registry of the policy to build it from")


class ExecuteResult(Answer):
    """What `/execute` answers."""

    output: str
    stderr: str
    exit_code: int | None
    signal: str | None = None
    timed_out: bool = False
    oom_killed: bool = False
    truncated: bool = False
    execution_time_ms: float
    files_produced: list[str]
    files_truncated: bool = Field(default=False, description="whether more files changed than are named")


class ToolRequest(Request):
    """A named tool with its parameters."""

    tool_name: str = Field(max_length=64)
    params: dict[str, object] = Field(default_factory=dict)


class ToolResult(Answer):
    """What a tool answered."""

    tool_name: str
    result: dict[str, object]
