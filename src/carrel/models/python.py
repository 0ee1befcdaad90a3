"""Models of calls of Python, code contexts and their cells."""

from base64 import b64decode
from datetime import datetime
from typing import Literal, Self

from pydantic import Field, model_validator

from carrel.models.base import (
    MAX_PATH,
    Answer,
    Code,
    Deadline,
    EnvName,
    NoNul,
    OwnId,
    Request,
    ShortName,
    Stdin,
    TemplateName,
)
from carrel.models.commands import CommandResult, ExecuteResult
from carrel.models.environments import EnvironmentName, IndexName, Requirements

PYTHON_TIMEOUT_S = 30.0
MAX_PYTHON_TIMEOUT_S = 120.0
MAX_PYTHON_OUTPUT_BYTES = 1024 * 1024

CodeContextName = ShortName

Figure = Literal["png", "svg"]


class _InEnvironment(Request):
    env: EnvironmentName | None = Field(default=None, description="an environment by its name or label")
    requirements: Requirements | None = Field(
        default=None, description="an environment by its packages; it is built if necessary"
    )
    variables: dict[EnvName, NoNul] = Field(default_factory=dict, max_length=256)

    @model_validator(mode="after")
    def _at_most_one(self) -> Self:
        if self.env is not None and self.requirements is not None:
            raise ValueError("name an environment or give requirements, not both")
        return self


class PythonRequest(_InEnvironment):
    """Code that runs in a new process, as with `python -c`."""

    code: Code
    args: list[NoNul] = Field(default_factory=list, max_length=256, description="`sys.argv[1:]`")
    cwd: NoNul | None = Field(default=None, max_length=MAX_PATH, description="relative to the workspace")
    timeout: float | None = Field(
        default=None, gt=0, le=MAX_PYTHON_TIMEOUT_S, description=f"seconds; {PYTHON_TIMEOUT_S:.0f} by default"
    )
    stdin: Stdin | None = Field(default=None, description="text for standard input, which is then closed")
    files: dict[NoNul, str] = Field(
        default_factory=dict, max_length=256, description="files to write first: path → base64"
    )
    output_limit: int = Field(default=MAX_PYTHON_OUTPUT_BYTES, ge=0, le=MAX_PYTHON_OUTPUT_BYTES)
    interactive: bool = Field(default=False, description="keep stdin open for `send_input`; implies background")
    id: OwnId | None = Field(
        default=None, description="an id that the caller chooses; a second call with it is refused"
    )


class PythonResult(CommandResult):
    """A finished call of Python."""

    files_produced: list[str] = Field(
        default_factory=list, description="files of the workspace that changed during the call"
    )
    files_truncated: bool = Field(default=False, description="whether more files changed than are listed")


class CellRequest(_InEnvironment):
    """A cell for a code context. The environment and the variables apply only when the context starts."""

    code: Code
    timeout: Deadline = Field(
        default=None,
        description="seconds until it is interrupted; 0 or null: no deadline; left out: the sandbox's default",
    )
    figures: list[Figure] = Field(default=["png"], max_length=2, description="formats of matplotlib figures")


class RichResult(Answer):
    """An output of a cell in several forms, by media type. PNG images are base64."""

    kind: Literal["result", "display", "figure"] = Field(description="the last expression, `display(…)`, or a figure")
    data: dict[str, str]

    @property
    def text(self) -> str | None:
        """The plain text form."""
        return self.data.get("text/plain")

    @property
    def html(self) -> str | None:
        """The HTML form."""
        return self.data.get("text/html")

    @property
    def json_text(self) -> str | None:
        """The JSON form; for a data frame, its columns, index and data."""
        return self.data.get("application/json")

    @property
    def svg(self) -> str | None:
        """The SVG image."""
        return self.data.get("image/svg+xml")

    @property
    def png(self) -> bytes | None:
        """The PNG image."""
        encoded = self.data.get("image/png")
        return None if encoded is None else b64decode(encoded)


class CellError(Answer):
    """The exception of a cell."""

    name: str
    value: str
    traceback: str


class CellResult(Answer):
    """A finished cell. The status `died` means that the code context ended with it, and its variables are lost."""

    id: str
    context: str
    number: int = Field(description="the number of the cell since the start of its context")
    status: Literal["ok", "error", "interrupted", "died"]
    stdout: str
    stderr: str
    results: list[RichResult] = Field(default_factory=list)
    error: CellError | None = None
    exit_code: int | None = Field(default=None, description="exit code of the context, if it died")
    signal: str | None = None
    timed_out: bool = False
    oom_killed: bool = False
    fresh: bool = Field(default=False, description="whether the context started for this cell")
    duration_ms: float
    truncated: bool = Field(default=False, description="whether output or results were dropped")
    dropped_bytes: int = 0

    @property
    def ok(self) -> bool:
        """Whether the cell ran without an error."""
        return self.status == "ok"

    @property
    def text(self) -> str | None:
        """The value of the last expression, as text."""
        return next((each.text for each in reversed(self.results) if each.kind == "result"), None)


class CodeContextInfo(Answer):
    """A code context: a Python process that keeps its variables from cell to cell."""

    name: str
    state: Literal["starting", "idle", "busy", "dead"]
    env: str | None = None
    pid: int | None = None
    cells: int = Field(description="cells that ran since it started")
    queued: int = 0
    started_at: datetime | None = None


class CodeContextList(Answer):
    """The code contexts of a sandbox."""

    items: list[CodeContextInfo]


class StatelessRequest(Request):
    """A call of Python without a context. Any sandbox of the template runs it, and its files are deleted."""

    code: Code
    template: TemplateName | None = Field(default=None, description="the template of the sandbox")
    timeout: float | None = Field(
        default=None, gt=0, le=MAX_PYTHON_TIMEOUT_S, description=f"seconds; {PYTHON_TIMEOUT_S:.0f} by default"
    )
    files: dict[NoNul, str] = Field(default_factory=dict, max_length=256, description="path → base64")
    env_name: EnvironmentName | None = Field(default=None, description="an environment by its name or label")
    requirements: Requirements | None = Field(
        default=None, description="an environment by its packages; it is built if necessary"
    )
    python_index: IndexName | None = Field(default=None, description="the registry of the policy to build it from")

    @model_validator(mode="after")
    def _at_most_one(self) -> Self:
        if self.env_name is not None and self.requirements is not None:
            raise ValueError("name an environment or give requirements, not both")
        return self


class StatelessResult(ExecuteResult):
    """The result of a call of Python without a context."""

    files: dict[str, str] = Field(
        default_factory=dict, description="produced files, path → base64, up to 8 MB in all; others are only listed"
    )
