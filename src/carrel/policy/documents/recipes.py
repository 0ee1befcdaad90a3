"""`template.toml`: the defaults for sandboxes of a template. The rules of a template are in its `settings.json` and
`sources.json`.
"""

import tomllib

from pydantic import ConfigDict, Field

from carrel.errors import InvalidRequest
from carrel.models import EnvName, Limits, Network, NoNul
from carrel.models.environments import ModuleName, PythonVersion, Requirement
from carrel.models.images import ImageName
from carrel.policy.documents.documents import MAX_DOCUMENT, DocumentPart, build

NAME = "template.toml"


class PoolSize(DocumentPart):
    """`pool`: how many warm sandboxes wait for those who use the template."""

    size: int = Field(ge=0, le=10_000, description="how many are kept ready; 0 for none")
    max: int | None = Field(default=None, ge=0, le=10_000, description="how many there may be after the pool ran dry")


class Recipe(DocumentPart):
    """The content of `template.toml`. Every key is optional."""

    model_config = ConfigDict(strict=False)

    description: str = Field(default="", max_length=500, description="the purpose, in one line")
    provider: str | None = Field(default=None, max_length=64, description="where its sandboxes run")
    image: ImageName | None = Field(default=None, description="the OCI image that its sandboxes run from")
    build: str | None = Field(
        default=None,
        pattern=r"^(\.|[A-Za-z0-9][A-Za-z0-9._-]{0,63})$",
        description="a folder of the template with a `Dockerfile`, or `.`: the image of its sandboxes is built from it",
    )
    network: Network | None = Field(default=None, description="the network access of its sandboxes")
    limits: Limits = Field(default_factory=Limits, description="the limits of its sandboxes")
    env: dict[EnvName, NoNul] = Field(
        default_factory=dict, max_length=256, description="environment variables of every command"
    )
    labels: dict[NoNul, NoNul] = Field(default_factory=dict, max_length=32, description="labels of the session")
    pool: PoolSize | None = Field(default=None, description="the warm sandboxes of slow providers that are kept ready")
    packages: list[Requirement] = Field(
        default_factory=list, max_length=256, description="Python packages of its sandboxes, in the form of PEP 508"
    )
    python: PythonVersion | None = Field(
        default=None, description="the Python version of the packages; by default that of the sandbox"
    )
    imports: list[ModuleName] | None = Field(
        default=None,
        max_length=64,
        description="modules that are imported before any code runs; by default those of the packages",
    )


def load(text: bytes, source: str = NAME) -> Recipe:
    """Read a `template.toml`. Raises `UnknownSetting` or `InvalidRequest`; their `field` is the position."""
    if len(text) > MAX_DOCUMENT:
        raise InvalidRequest(f"{source} is larger than {MAX_DOCUMENT} bytes", field=source, hint="shorten it")
    try:
        table = tomllib.loads(text.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"{source} is not TOML: {error}", field=source, hint="correct the file") from None
    recipe = build(table, Recipe, source)
    if recipe.image is not None and recipe.build is not None:
        raise InvalidRequest(f"{source} has `image` and `build`", field="build", hint="keep one of the two")
    if recipe.pool is not None and recipe.pool.max is not None and recipe.pool.max < recipe.pool.size:
        raise InvalidRequest(
            f"the pool in {source} may have {recipe.pool.max} sandboxes at most, fewer than its size",
            field="pool",
            hint="raise `max` or lower `size`",
        )
    return recipe
