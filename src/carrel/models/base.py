"""What every noun of the public API is made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, StringConstraints

ContextId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$")]
"""Letters, digits, `.`, `_`, `:`, `-`; 1 to 128 characters; starts with a letter or digit."""

TemplateName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""Letters, digits, `.`, `_`, `-`; 1 to 64 characters; starts with a letter or digit. Also the name of a directory."""

EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,255}$")]

NoNul = Annotated[str, StringConstraints(pattern=r"^[^\x00]*$")]

OwnId = Annotated[str, StringConstraints(pattern=r"^k[A-Za-z0-9_-]{7,63}$")]
"""A name of the caller's own for one command or edit: the same request again does not do the same again."""

MAX_TIMEOUT_S = 86_400.0

MAX_OUTPUT_BYTES = 100 * 1024 * 1024

DEFAULT_OUTPUT_BYTES = 10 * 1024 * 1024


class Request(BaseModel):
    """A body a caller sends: an unknown field is an error, not ignored."""

    model_config = ConfigDict(extra="forbid")


class Answer(BaseModel):
    """A body carrel sends: a newer server may add fields an older client ignores."""

    model_config = ConfigDict(extra="ignore", defer_build=True)
