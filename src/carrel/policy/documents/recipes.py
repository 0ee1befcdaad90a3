"""`template.toml`: what a sandbox made by a template gets that asks for nothing else. A template's rules are in its
`settings.json` and `sources.json`.
"""

from __future__ import annotations

import tomllib

from pydantic import ConfigDict, Field

from carrel.errors import InvalidRequest
from carrel.models import EnvName, Limits, Network, NoNul
from carrel.models.environments import ModuleName, PythonVersion, Requirement
from carrel.policy.documents.documents import MAX_DOCUMENT, Part, build

NAME = "template.toml"


class Recipe(Part):
    """A recipe. Everything in it may be left out."""

    model_config = ConfigDict(strict=False)

    description: str = Field(default="", max_length=500, description="what it is for, in a line")
    provider: str | None = Field(default=None, max_length=64, description="where its sandboxes run")
    network: Network | None = Field(default=None, description="what they reach")
    limits: Limits = Field(default_factory=Limits, description="what they may use")
    env: dict[EnvName, NoNul] = Field(default_factory=dict, max_length=256, description="variables of every command")
    labels: dict[NoNul, NoNul] = Field(default_factory=dict, max_length=32, description="labels of the session")
    packages: list[Requirement] = Field(
        default_factory=list, max_length=256, description="Python packages that they have, as PEP 508 writes them"
    )
    python: PythonVersion | None = Field(default=None, description="of the packages; without, the sandbox's own")
    imports: list[ModuleName] | None = Field(
        default=None, max_length=64, description="what is imported before code comes; without, what the packages are"
    )


def load(text: bytes, source: str = NAME) -> Recipe:
    """Read a recipe. Raises `UnknownSetting` or `InvalidRequest` with the place in it as `field`."""
    if len(text) > MAX_DOCUMENT:
        raise InvalidRequest(f"{source} is larger than {MAX_DOCUMENT} bytes", field=source, hint="shorten it")
    try:
        table = tomllib.loads(text.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"{source} is not TOML: {error}", field=source, hint="mend the file") from None
    return build(table, Recipe, source)
