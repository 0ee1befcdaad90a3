"""Reads policy documents: strict JSON into a model. Errors name the position and the most similar known key."""

import difflib
import json
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from carrel.errors import InvalidRequest, UnknownSetting

MAX_DOCUMENT = 4 * 1024 * 1024


class DocumentPart(BaseModel):
    """A part of a policy document. Unknown keys are errors; keys that begin with `_comment` are ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True, defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _without_comments(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: each for key, each in value.items() if not str(key).startswith("_comment")}
        return value


Model = TypeVar("Model", bound=DocumentPart)


def load(text: str | bytes, model: type[Model], source: str) -> Model:
    """Read a document into a model. Raises `UnknownSetting` or `InvalidRequest`; their `field` is the position."""
    return build(parse(text, source), model, source)


def parse(text: str | bytes, source: str) -> object:
    """Parse a document as JSON. A duplicate key is an error, because it is not clear which one counts."""
    if len(text) > MAX_DOCUMENT:
        raise InvalidRequest(f"{source} is larger than {MAX_DOCUMENT} bytes", field=source, hint="split the rules")
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except _Twice as error:
        raise InvalidRequest(f"{source} has the key '{error}' twice", field=str(error), hint="keep one") from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{source} is not JSON: {error}", field=source, hint="correct the file") from None


def build(value: object, model: type[Model], source: str) -> Model:
    """Validate a parsed document."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = path(first["loc"])
        if first["type"] == "extra_forbidden":
            raise _unknown(model, first["loc"], source) from None
        message = first["msg"].removeprefix("Value error, ")
        raise InvalidRequest(f"{source}: {place}: {message}", field=place) from None


def path(location: tuple[int | str, ...]) -> str:
    """A position in a document as a person would write it: `permissions.allow[3]`."""
    written = ""
    for part in location:
        written += f"[{part}]" if isinstance(part, int) else f".{part}" if written else str(part)
    return written or "document"


class _Twice(ValueError):
    pass


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made: dict[str, object] = {}
    for key, value in pairs:
        if key in made and not key.startswith("_comment"):
            raise _Twice(key[:100])
        made[key] = value
    return made


def _unknown(model: type[BaseModel], location: tuple[int | str, ...], source: str) -> UnknownSetting:
    group: type[BaseModel] | None = model
    for part in location[:-1]:
        group = _below(group, part)
    keys = [] if group is None else list(group.model_fields)
    name = str(location[-1])[:100]
    near = difflib.get_close_matches(name, keys, n=1, cutoff=0.4)
    hint = f"did you mean '{near[0]}'?" if near else f"the keys here are: {', '.join(sorted(keys))}"
    return UnknownSetting(f"{source} has no key '{path(location)[:200]}'", field=path(location)[:200], hint=hint)


def _below(group: type[BaseModel] | None, part: int | str) -> type[BaseModel] | None:
    if group is None or isinstance(part, int):
        return group
    field = group.model_fields.get(part)
    pending: list[Any] = [field.annotation] if field else []
    while pending:
        kind = pending.pop()
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
        pending += getattr(kind, "__args__", ())
    return None
