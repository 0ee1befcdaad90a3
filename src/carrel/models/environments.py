"""Models of environments: sets of Python packages, built once."""

from datetime import datetime
from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from carrel.models.base import Answer, Request, ShortName

Requirement = Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=r"^[^\x00-\x1f\x7f]+$")]
"""A requirement in the form of PEP 508: `pandas>=2`."""
Requirements = Annotated[list[Requirement], Field(min_length=1, max_length=256)]

EnvironmentName = ShortName
"""The name of an environment, or a label on one."""

PythonVersion = Annotated[str, StringConstraints(pattern=r"^3\.[0-9]{1,2}$")]

ModuleName = Annotated[
    str, StringConstraints(max_length=200, pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$")
]
"""A module of Python, such as `matplotlib.pyplot`."""

IndexName = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]+$")]


class EnvironmentRequest(Request):
    """The packages of an environment."""

    requirements: Requirements = Field(description="in the form of PEP 508")
    python: PythonVersion | None = Field(default=None, description="such as 3.11; by default the sandbox's python3")
    index: IndexName | None = Field(
        default=None, description="the registry of the policy to use; by default all of them in order"
    )


class EnvironmentBuild(EnvironmentRequest):
    """An environment to build, and its label."""

    name: EnvironmentName | None = Field(default=None, description="a label; another environment loses it")


class EnvironmentAttach(Request):
    """An environment for one sandbox: by its name or label, by its packages, or the one of the template."""

    env: EnvironmentName | None = None
    template: bool = Field(default=False, description="the packages of the template, which the sandbox has in any case")
    requirements: Requirements | None = None
    python: PythonVersion | None = None
    index: IndexName | None = None
    venv: bool = Field(
        default=False, description="create the workspace's own virtual environment, /workspace/.venv, on top of it"
    )

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.env is not None) + (self.requirements is not None) + self.template != 1:
            raise ValueError("give exactly one of env, requirements and template")
        if self.template and self.venv:
            raise ValueError("venv is not needed with template: /workspace/.venv is on top of its packages anyway")
        if self.requirements is None and (self.python is not None or self.index is not None):
            raise ValueError("python and index need requirements")
        return self


class EnvironmentPackage(Answer):
    """A package of an environment."""

    name: str
    version: str


class EnvironmentInfo(Answer):
    """An environment. `path` is its directory in a sandbox."""

    name: str
    path: str = Field(description="its path in sandboxes, read-only; empty if no sandbox of the caller has it")
    hash: str = Field(description="hash of the lock that it was built from")
    labels: list[str]
    templates: list[str] = Field(default_factory=list, description="the templates with exactly these packages")
    python: str
    requirements: list[str] = Field(description="the requirements of the request")
    packages: list[EnvironmentPackage]
    imports: list[str] = Field(description="the modules of the requirements")
    size: int = Field(description="bytes")
    created_at: datetime
    last_used_at: datetime
    built_by: str | None = Field(default=None, description="the context that it was first built for")
    in_use: bool = Field(default=False, description="whether a session uses it; then it is never removed")


class EnvironmentList(Answer):
    """Environments, most recently used first."""

    items: list[EnvironmentInfo]


class EnvironmentEvent(Answer):
    """One line of the progress of a build. The last line has the environment or the problem."""

    progress: str | None = None
    environment: EnvironmentInfo | None = None
    problem: dict[str, object] | None = None

    @staticmethod
    def said(progress: str) -> "EnvironmentEvent":
        """Return the line for progress."""
        return EnvironmentEvent(progress=progress)

    @staticmethod
    def done(result: EnvironmentInfo) -> "EnvironmentEvent":
        """Return the last line."""
        return EnvironmentEvent(environment=result)

    @staticmethod
    def failed(problem: dict[str, object]) -> "EnvironmentEvent":
        """Return the last line of work that failed."""
        return EnvironmentEvent(problem=problem)
