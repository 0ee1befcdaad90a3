"""The form of requests to a supervisor, and the checks of its answers. Pure: no I/O.

Answers come from hostile code: one that does not have the form that was asked for is `SandboxLost`.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Mapping
from typing import Literal, TypeVar
from urllib.parse import quote

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from carrel.errors import InvalidPath, InvalidRequest, SandboxLost
from carrel.models import CommandRequest, CommandResult, TerminalSize
from carrel.models.operations import SMALL

GRACE = 15.0
"""How long the answer may take after the deadline of a command: the supervisor kills the process tree and collects the
output.
"""

M = TypeVar("M", bound=BaseModel)
R = TypeVar("R", bound=CommandResult)


class Emptied(BaseModel):
    """The answer of a sandbox that was emptied: whether it is in its first state, and how much memory it still uses."""

    model_config = ConfigDict(defer_build=True)

    clean: bool
    reason: str | None = Field(default=None, max_length=4096)
    memory_bytes: int = Field(ge=0)


def asked(request: CommandRequest) -> dict[str, object]:
    """Return everything that policy decides of a command."""
    return request.model_dump(
        include={"command", "cwd", "env", "secret_variables", "stdin", "interactive", "timeout"}, exclude_defaults=True
    )


def on_terminal(request: CommandRequest) -> CommandRequest:
    """Return an interactive command that runs to its end: on a terminal, with its input typed and then ended."""
    return request.model_copy(
        update={"terminal": request.terminal or TerminalSize(), "stdin": request.stdin or "", "interactive": False}
    )


def brought(files: Mapping[str, str]) -> dict[str, object]:
    """Return the names of the files that come with a call, and a digest of their contents."""
    held = blake3()
    for name, text in sorted(files.items()):
        held.update(json.dumps([name, len(text)]).encode() + text.encode("utf-8", "surrogatepass"))
    return {"files": sorted(files), "digest": held.hexdigest()} if files else {}


def deadline_of(given: float | Literal["default"] | None, default: float | None) -> float | None:
    """Return the deadline of a request in seconds; None for no deadline."""
    if given is None or given == "default":
        return default
    return given or None


def command_body(
    request: CommandRequest, default: float | None, *, attached: bool = False
) -> tuple[bytes, float | None]:
    """Return a command as the body of a request, and its deadline. `default` is for a request without one."""
    timeout = deadline_of(request.timeout, default)
    body = request.model_dump()
    body["timeout"] = timeout
    if attached:
        body["attached"] = True
    return json.dumps(body, separators=(",", ":")).encode(), timeout


def require_id(value: str) -> None:
    """Refuse what cannot be the id of a command: it becomes a part of a path."""
    if not value or len(value) > 128 or not value.isascii() or not value.replace("-", "").replace("_", "").isalnum():
        raise InvalidRequest(
            "a command id has letters, digits, '-' and '_'", field="command_id", hint="take the id the start gave"
        )


def query_of(**values: str | int | bool | None) -> str:
    """Return a query string without the values that are None. A path is sent as its bytes, which may not be UTF-8."""
    pairs = []
    for key, value in values.items():
        if value is not None:
            text = str(int(value)) if isinstance(value, bool | int) else value
            pairs.append(f"{key}={quote(text.encode('utf-8', 'surrogateescape'), safe='')}")
    return "?" + "&".join(pairs) if pairs else ""


def checked_path(path: str, name: str = "path") -> str:
    """Return a path that can be a file name; `InvalidPath`. The supervisor checks that it stays in the workspace."""
    if not path or "\0" in path or len(path) > 4096:
        raise InvalidPath(
            "a path has 1 to 4096 characters and no NUL", field=name, hint="give a path relative to the workspace"
        )
    try:
        path.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise InvalidPath("the path cannot be a file name", field=name, hint="use UTF-8 names") from None
    return path


def check(model: type[M], answer: object) -> M:
    """Return an answer as a model; `SandboxLost` when it does not fit."""
    try:
        return model.model_validate(answer)
    except (ValidationError, ValueError, OverflowError, RecursionError):
        raise SandboxLost(f"the sandbox's answer is not a {model.__name__}") from None


def json_object(answer: bytes) -> object:
    """Parse an answer as JSON; `SandboxLost` when it is not."""
    try:
        return json.loads(answer)
    except (ValueError, RecursionError):
        raise SandboxLost("the sandbox answered something that is not JSON") from None


def checked_result(answer: bytes, model: type[R]) -> R:
    """Return the result of a command. `oom_killed` is reset: only the provider knows it."""
    try:
        result = model.model_validate_json(answer)
    except ValidationError:
        # File names that are not UTF-8 come with surrogate escapes, which only the parser of `json` accepts.
        result = check(model, json_object(answer))
    result.oom_killed = False
    return result


def result_size(output_limit: int) -> int:
    """Return the largest size that the result of a command may have."""
    # A control character takes six bytes in JSON, and bytes that are not UTF-8 come as base64 too.
    return 8 * output_limit + SMALL


def size_of(text: str | None, exact: str | None = None) -> int:
    """Return the size of a text in bytes; `exact` has the bytes in base64 when they are not UTF-8."""
    if exact is not None:
        try:
            return len(b64decode(exact))
        except ValueError:
            raise SandboxLost("the sandbox's answer is not base64") from None
    if not text:
        return 0
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
