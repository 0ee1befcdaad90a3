"""Python: calls, code contexts and their cells. They hold and check values; they do nothing."""

from __future__ import annotations

from base64 import b64decode
from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from carrel.models.base import Answer, Deadline, EnvName, NoNul, OwnId, Request, TemplateName
from carrel.models.commands import CommandResult, ExecuteResult
from carrel.models.environments import EnvironmentName, IndexName, Requirement

PYTHON_TIMEOUT_S = 30.0
MAX_PYTHON_TIMEOUT_S = 120.0
MAX_PYTHON_OUTPUT_BYTES = 1024 * 1024
MAX_CODE = 1_048_576

CodeContextName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""Letters, digits, `.`, `_`, `-`; 1 to 64 characters; starts with a letter or digit."""

Figure = Literal["png", "svg"]


class _InEnvironment(Request):
    env: EnvironmentName | None = Field(default=None, description="an environment by its name or label")
    requirements: list[Requirement] | None = Field(
        default=None, min_length=1, max_length=256, description="an environment by what it holds; built if need be"
    )
    variables: dict[EnvName, NoNul] = Field(default_factory=dict, max_length=256)

    @model_validator(mode="after")
    def _at_most_one(self) -> _InEnvironment:
        if self.env is not None and self.requirements is not None:
            raise ValueError("name an environment or give requirements, not both")
        return self


class PythonRequest(_InEnvironment):
    """A code that runs in a fresh process, as `python -c` would run it."""

    code: str = Field(min_length=1, max_length=MAX_CODE)
    args: list[NoNul] = Field(default_factory=list, max_length=256, description="`sys.argv` from 1 on")
    cwd: NoNul | None = Field(default=None, max_length=4096, description="relative to the workspace")
    timeout: float | None = Field(
        default=None, gt=0, le=MAX_PYTHON_TIMEOUT_S, description=f"seconds; {PYTHON_TIMEOUT_S:.0f} when not given"
    )
    stdin: str | None = Field(default=None, max_length=16 * 1024 * 1024, description="text given, then closed")
    files: dict[NoNul, str] = Field(
        default_factory=dict, max_length=256, description="path → base64, put in place first"
    )
    output_limit: int = Field(default=MAX_PYTHON_OUTPUT_BYTES, ge=0, le=MAX_PYTHON_OUTPUT_BYTES)
    interactive: bool = Field(default=False, description="keep stdin open for `send_input`; implies background")
    id: OwnId | None = Field(default=None, description="an id of the caller's own; a second call of it is refused")


class PythonResult(CommandResult):
    """A finished call of Python."""

    files_produced: list[str] = Field(default_factory=list, description="files of the workspace that changed meanwhile")
    files_truncated: bool = Field(default=False, description="whether more files changed than are named")


class CellRequest(_InEnvironment):
    """A cell for a code context. The environment and the variables count when the context starts."""

    code: str = Field(min_length=1, max_length=MAX_CODE)
    timeout: Deadline = Field(
        default=None,
        description="seconds until it is interrupted; 0 or null: no deadline; left out: that of the sandbox",
    )
    figures: list[Figure] = Field(default=["png"], max_length=2, description="how figures of matplotlib are drawn")


class RichResult(Answer):
    """Something a cell shows: the same thing in several forms, by media type. Images that are no text are base64."""

    kind: Literal["result", "display", "figure"] = Field(description="the last expression, `display(…)`, or a figure")
    data: dict[str, str]

    @property
    def text(self) -> str | None:
        """As plain text."""
        return self.data.get("text/plain")

    @property
    def html(self) -> str | None:
        """As HTML."""
        return self.data.get("text/html")

    @property
    def json_text(self) -> str | None:
        """As JSON; of a data frame its columns, index and data."""
        return self.data.get("application/json")

    @property
    def svg(self) -> str | None:
        """As an SVG image."""
        return self.data.get("image/svg+xml")

    @property
    def png(self) -> bytes | None:
        """As a PNG image."""
        encoded = self.data.get("image/png")
        return None if encoded is None else b64decode(encoded)


class CellError(Answer):
    """What a cell raised."""

    name: str
    value: str
    traceback: str


class CellResult(Answer):
    """A finished cell. `died` says that the whole context ended with it: its variables are gone."""

    id: str
    context: str
    number: int = Field(description="which cell of its context this is, since it started")
    status: Literal["ok", "error", "interrupted", "died"]
    stdout: str
    stderr: str
    results: list[RichResult] = Field(default_factory=list)
    error: CellError | None = None
    exit_code: int | None = Field(default=None, description="of the context, when it died")
    signal: str | None = None
    timed_out: bool = False
    oom_killed: bool = False
    fresh: bool = Field(default=False, description="whether the context started for this cell")
    duration_ms: float
    truncated: bool = Field(default=False, description="whether output or results were dropped")
    dropped_bytes: int = 0

    @property
    def ok(self) -> bool:
        """Whether the cell ran to its end."""
        return self.status == "ok"

    @property
    def text(self) -> str | None:
        """The value of the last expression, as text."""
        return next((each.text for each in reversed(self.results) if each.kind == "result"), None)


class CodeContextInfo(Answer):
    """A code context: a Python that keeps its variables from cell to cell."""

    name: str
    state: Literal["starting", "idle", "busy", "dead"]
    env: str | None = None
    pid: int | None = None
    cells: int = Field(description="how many ran since it started")
    queued: int = 0
    started_at: datetime | None = None


class CodeContextList(Answer):
    """The code contexts of a sandbox."""

    items: list[CodeContextInfo]


class StatelessRequest(Request):
    """A call of Python that has no context: some sandbox of the template runs it, and keeps nothing."""

    code: str = Field(min_length=1, max_length=MAX_CODE)
    template: TemplateName | None = Field(default=None, description="the recipe of the sandbox")
    timeout: float | None = Field(
        default=None, gt=0, le=MAX_PYTHON_TIMEOUT_S, description=f"seconds; {PYTHON_TIMEOUT_S:.0f} when not given"
    )
    files: dict[NoNul, str] = Field(default_factory=dict, max_length=256, description="path → base64")
    env_name: EnvironmentName | None = Field(default=None, description="an environment by its name or label")
    requirements: list[Requirement] | None = Field(
        default=None, min_length=1, max_length=256, description="an environment by what it holds; built if need be"
    )
    python_index: IndexName | None = Field(default=None, description="the one registry of the policy to build it from")

    @model_validator(mode="after")
    def _at_most_one(self) -> StatelessRequest:
        if self.env_name is not None and self.requirements is not None:
            raise ValueError("name an environment or give requirements, not both")
        return self


class StatelessResult(ExecuteResult):
    """What such a call answers."""

    files: dict[str, str] = Field(
        default_factory=dict, description="produced files, path → base64; what is beyond 8 MB in all is only named"
    )
