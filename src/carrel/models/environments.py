"""Environments: sets of Python packages, built once. They hold and check values; they do nothing."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import Field, StringConstraints, model_validator

from carrel.models.base import Answer, Request

Requirement = Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=r"^[^\x00-\x1f\x7f]+$")]
"""A requirement as PEP 508 writes it: `pandas>=2`."""

EnvironmentName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""The name of an environment, or a label on one."""

PythonVersion = Annotated[str, StringConstraints(pattern=r"^3\.[0-9]{1,2}$")]

ModuleName = Annotated[
    str, StringConstraints(max_length=200, pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$")
]
"""A module of Python, such as `matplotlib.pyplot`."""

IndexName = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]+$")]


class EnvironmentRequest(Request):
    """What an environment is to hold."""

    requirements: list[Requirement] = Field(min_length=1, max_length=256, description="as PEP 508 writes them")
    python: PythonVersion | None = Field(default=None, description="such as 3.11; without, the sandbox's own python3")
    index: IndexName | None = Field(
        default=None, description="the one registry of the policy to use; without, all of them in their order"
    )


class EnvironmentBuild(EnvironmentRequest):
    """An environment to build, and the label it is to have."""

    name: EnvironmentName | None = Field(default=None, description="a label, which may be moved from another")


class EnvironmentAttach(Request):
    """An environment for one sandbox: by its name or label, by what it is to hold, or the one of its template."""

    env: EnvironmentName | None = None
    template: bool = Field(default=False, description="the packages of its template, which it gets in any case")
    requirements: list[Requirement] | None = Field(default=None, min_length=1, max_length=256)
    python: PythonVersion | None = None
    index: IndexName | None = None
    venv: bool = Field(
        default=False, description="make the workspace's own virtual environment, /workspace/.venv, on top of it"
    )

    @model_validator(mode="after")
    def _one_of_two(self) -> EnvironmentAttach:
        if (self.env is not None) + (self.requirements is not None) + self.template != 1:
            raise ValueError("name an environment, or give requirements, or ask for those of the template")
        if self.template and self.venv:
            raise ValueError("the workspace's own virtual environment is on top of the template's packages anyway")
        if self.requirements is None and (self.python is not None or self.index is not None):
            raise ValueError("an environment that is named has its Python and its packages already")
        return self


class EnvironmentPackage(Answer):
    """A package of an environment."""

    name: str
    version: str


class EnvironmentInfo(Answer):
    """An environment. In a sandbox it is the directory `path`."""

    name: str
    path: str = Field(description="where sandboxes see it, read-only; empty while none of yours has it")
    hash: str = Field(description="of the lock it was built from")
    labels: list[str]
    templates: list[str] = Field(default_factory=list, description="the templates that ask for just these packages")
    python: str
    requirements: list[str] = Field(description="what was asked for")
    packages: list[EnvironmentPackage]
    imports: list[str] = Field(description="the modules of what was asked for")
    size: int = Field(description="bytes")
    created_at: datetime
    last_used_at: datetime
    built_by: str | None = Field(default=None, description="the context it was first built for")
    in_use: bool = Field(default=False, description="whether a session has it: then it is never removed")


class EnvironmentList(Answer):
    """Environments, the last used first."""

    items: list[EnvironmentInfo]


class EnvironmentEvent(Answer):
    """One line of a build that is followed: what is going on, then the environment or why there is none."""

    progress: str | None = None
    environment: EnvironmentInfo | None = None
    problem: dict[str, object] | None = None
