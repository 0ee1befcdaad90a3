"""Types and base classes that all models of the public API share.

Modules with models do without `from __future__ import annotations`: pydantic would evaluate the text of each
annotation, which takes a third of the time to import them.
"""

import math
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, GetCoreSchemaHandler, StringConstraints, WithJsonSchema
from pydantic_core import CoreSchema

ContextId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$")]
"""Letters, digits, `.`, `_`, `:`, `-`; 1 to 128 characters; starts with a letter or digit."""

ShortName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""Letters, digits, `.`, `_`, `-`; 1 to 64 characters; starts with a letter or digit."""

TemplateName = ShortName
"""The name of a template and of its directory."""

EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,255}$")]

SecretFileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,127}$")]
"""The name of a secret, as that of its file in the sandbox."""

NoNul = Annotated[str, StringConstraints(pattern=r"^[^\x00]*$")]

OwnId = Annotated[str, StringConstraints(pattern=r"^k[A-Za-z0-9_-]{7,63}$")]
"""An id that the caller chooses for one command or edit, so that a repeated request does not run it again."""

DEFAULT_NAMESPACE = "default"

MAX_PATH = 4096
WorkspacePath = Annotated[NoNul, StringConstraints(min_length=1, max_length=MAX_PATH)]

MAX_CODE = 1_048_576
Code = Annotated[str, StringConstraints(min_length=1, max_length=MAX_CODE)]

CommandText = Annotated[NoNul, StringConstraints(min_length=1, max_length=131_072)]

Stdin = Annotated[str, StringConstraints(max_length=16 * 1024 * 1024)]


def _not_a_number(value: object) -> object:
    if isinstance(value, int | float) or (isinstance(value, str) and "-" not in value[1:]):
        raise ValueError("write a date with its time, such as 2026-01-31T12:00:00Z")
    return value


Moment = Annotated[datetime, BeforeValidator(_not_a_number)]
"""A date with its time. Numbers are refused."""

MAX_TIMEOUT_S = 86_400.0


def _checked_deadline(value: object) -> object:
    """Accept seconds or `default`. None and infinity become 0."""
    if value is None or value == "default":
        return value or 0.0
    if value == math.inf:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_TIMEOUT_S:
        raise ValueError(f"it must be from 0 to {MAX_TIMEOUT_S:.0f} seconds; 0 means no deadline")
    return float(value)


Deadline = Annotated[
    float | Literal["default"] | None,
    BeforeValidator(_checked_deadline),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "minimum": 0, "maximum": MAX_TIMEOUT_S},
                {"type": "string", "const": "default"},
                {"type": "null"},
            ]
        }
    ),
]
"""The deadline of a command in seconds; 0 or null: no deadline; `default`: the sandbox's default. In a parsed request
None means that the field was left out, and 0 that there is no deadline.
"""

MAX_OUTPUT_BYTES = 100 * 1024 * 1024

DEFAULT_OUTPUT_BYTES = 10 * 1024 * 1024


def _make_strict(schema: object) -> None:
    if isinstance(schema, dict):
        if schema.get("type") in {"bool", "int", "float"}:
            schema["strict"] = True
        for part in schema.values():
            _make_strict(part)
    elif isinstance(schema, list):
        for part in schema:
            _make_strict(part)


class Request(BaseModel):
    """The body of a request. Unknown fields and values of a wrong type are errors; nothing is converted."""

    model_config = ConfigDict(extra="forbid", defer_build=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Make booleans and numbers strict. The option `strict` of a model would also refuse text for enumerations and
        dates, and JSON has no other form for them.
        """
        schema = handler(source)
        _make_strict(schema)
        return schema


class Answer(BaseModel):
    """The body of a response. Unknown fields are ignored, so that a newer server may add fields."""

    model_config = ConfigDict(extra="ignore", defer_build=True)


def namespace_of(context_id: str) -> str:
    """Return the namespace of a context: the part of its id before the first colon, or the default one."""
    name, colon, _ = context_id.partition(":")
    return name if colon else DEFAULT_NAMESPACE
