"""How MCP servers are started, and what is believed of what they say. Pure: no I/O.

Everything an MCP server says comes from inside a sandbox: it is bounded in size, number and depth, and what a tool, a
prompt or a resource is called decides nothing but how it is shown. A tool is named by its server and its name together,
and the server is the one that was asked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from carrel.errors import CarrelError, InvalidRequest, TooLarge
from carrel.models import McpServerRequest
from carrel.store.mcp_servers import McpServerRecord

Json = dict[str, Any]

"""What a sandbox of carrel's own is labelled with that asks an MCP server what it offers."""

MOST_TOOLS = 512
MOST_CATALOGUE = 1024 * 1024
MOST_ENTRY = 64 * 1024
"""Bytes of one tool, prompt or resource, as JSON."""
MOST_WORDS = 16_384
MOST_DEPTH = 64
MOST_PARTS = 100_000
MOST_GIVEN, MOST_GIVEN_DEPTH = 15 * 1024 * 1024, 48
"""Bytes and levels of what a server is given. It may send them back inside of an answer, which has bounds too."""
LONGEST_REASON = 1000

RESERVED = ("resources/", "prompts/", "completion/")
"""What a tool's name cannot begin with: rules name the other requests of a server so."""
_NAME = re.compile(r"[A-Za-z0-9._/-]{1,128}")
_FIELDS = {
    "tools": ("name", "title", "description", "inputSchema", "outputSchema", "annotations"),
    "prompts": ("name", "title", "description", "arguments"),
    "resources": ("uri", "name", "title", "description", "mimeType", "size"),
    "resource_templates": ("uriTemplate", "name", "title", "description", "mimeType"),
}
_KEY = {"tools": "name", "prompts": "name", "resources": "uri", "resource_templates": "uriTemplate"}

NPM_PLACE = ".mcp"
"""Where in the workspace npm packages are installed, a directory for each server."""

_LAUNCHER = """\
import os, sys
cut = sys.argv.index("--")
for each in sys.argv[1:cut]:
    name, _, secret = each.partition("=")
    try:
        with open("/run/secrets/" + secret, encoding="utf-8") as file:
            os.environ[name] = file.read().rstrip("\\r\\n")
    except (OSError, ValueError) as error:
        sys.exit(f"carrel: the secret {secret} cannot be used: {getattr(error, 'strerror', None) or error}")
try:
    os.execvp(sys.argv[cut + 1], sys.argv[cut + 1:])
except OSError as error:
    sys.exit(f"carrel: {sys.argv[cut + 1]} cannot be run: {error.strerror}")
"""
"""Gives a program secrets as variables. Its arguments name them; only the program's environment has their values."""


class Refused(Exception):
    """A server answered a request with an error of the protocol."""

    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code = code
        self.message = message


class NoAnswer(Exception):
    """A server did not answer in time."""


def told_by(group: BaseExceptionGroup[BaseException]) -> BaseException | None:
    """What a caller is told of a group of errors: one of ours, or what a server answered."""
    for each in group.exceptions:
        found = told_by(each) if isinstance(each, BaseExceptionGroup) else each
        if isinstance(found, CarrelError | Refused | NoAnswer):
            return found
    return None


TIMED_OUT, REFUSED = "carrel/timedOut", "carrel/error"
"""Keys of an answer that stands for none; a server's own answer never has them."""


def no_answer(timeout: float) -> Json:
    """What stands for the answer of a server that gave none."""
    text = f"the MCP server did not answer within {timeout:g} seconds"
    return {"content": [{"type": "text", "text": text}], "isError": True, TIMED_OUT: True}


def refused(error: Refused) -> Json:
    """What stands for the answer of a server that refused a request."""
    told = {"code": error.code, "message": error.message}
    return {"content": [{"type": "text", "text": error.message}], "isError": True, REFUSED: told}


# starting


def declared(record: McpServerRecord) -> McpServerRequest:
    """A server as it was declared."""
    return McpServerRequest.model_validate(record.declaration)


def launch(record: McpServerRecord, environment: str | None) -> Json:
    """What the supervisor is told to start a server. `environment` is where its Python environment lies."""
    request = declared(record)
    command = list(request.command)
    if record.program is not None:
        command[0] = record.program
    if request.secret_variables:
        named = [f"{name}={secret}" for name, secret in sorted(request.secret_variables.items())]
        command = ["/usr/bin/python3", "-I", "-S", "-c", _LAUNCHER, *named, "--", *command]
    return {
        "command": command,
        "cwd": request.cwd,
        "variables": dict(request.variables),
        "environment": environment,
        "generation": record.generation,
    }


def decided(server: str, request: McpServerRequest) -> dict[str, object]:
    """Everything of a declaration that decides what it does."""
    arguments: dict[str, object] = {"server": server, "command": list(request.command)}
    if request.cwd is not None:
        arguments["cwd"] = request.cwd
    if request.variables or request.secret_variables:
        arguments["env"] = request.variables | {
            name: f"the secret {secret}" for name, secret in request.secret_variables.items()
        }
    if request.requirements is not None:
        arguments["install"] = [["pip", "install", *request.requirements]]
    if request.npm is not None:
        installs = arguments.setdefault("install", [])
        assert isinstance(installs, list)
        installs.append(["npm", "install", *request.npm])
    return arguments


def given_size(given: Mapping[str, object]) -> int:
    """How many bytes a server is given; `InvalidRequest` for what it cannot be given. Others speak to it at the same
    time, and what broke on the way to it would break their calls off.
    """
    if not sane(given, MOST_GIVEN_DEPTH):
        why = "the arguments are nested too deeply or have too many parts"
        hint = f"at most {MOST_GIVEN_DEPTH - 1} levels and {MOST_PARTS} values"
        raise InvalidRequest(why, field="arguments", hint=hint)
    try:
        size = len(json.dumps(given, ensure_ascii=False).encode())
    except (UnicodeEncodeError, TypeError):
        raise InvalidRequest("the arguments are no JSON", field="arguments", hint="send text as UTF-8") from None
    if size > MOST_GIVEN:
        why = f"the arguments have {size} bytes, and {MOST_GIVEN} is the most"
        raise TooLarge(why, field="arguments", hint="write them to a file of the workspace, and name that")
    return size


# believing


def sane(value: object, depth: int = MOST_DEPTH) -> bool:
    """Whether a value is neither too deep nor too large to work with."""
    left = MOST_PARTS
    waiting: list[tuple[object, int]] = [(value, depth)]
    while waiting:
        each, depth = waiting.pop()
        left -= 1
        if left < 0 or depth < 0:
            return False
        if isinstance(each, dict):
            waiting += [(inner, depth - 1) for inner in each.values()]
        elif isinstance(each, list):
            waiting += [(inner, depth - 1) for inner in each]
    return True


def words(value: object, most: int = MOST_WORDS) -> str:
    """A text of a server as it can be kept and shown: bounded, without what no database holds."""
    text = value if isinstance(value, str) else str(value)
    text = text[:most].replace("\0", "\ufffd")
    return text.encode("utf-8", "replace").decode() if not text.isascii() else text


def tool_name(name: object) -> bool:
    """Whether a tool can be called so."""
    return isinstance(name, str) and bool(_NAME.fullmatch(name)) and not name.startswith(RESERVED)


def catalogue(
    *,
    protocol_version: str | None,
    server_info: Mapping[str, Any] | None,
    instructions: str | None,
    found: Mapping[str, Sequence[Mapping[str, Any]]],
) -> tuple[Json, str | None]:
    """What a server offers as it is kept, and what was left out of it. `found` has the lists by the names of
    `_FIELDS`.
    """
    kept: Json = {
        "protocol_version": None if protocol_version is None else words(protocol_version, 32),
        "server_info": _strings(server_info or {}, ("name", "version", "title"), 256),
        "instructions": None if instructions is None else words(instructions),
    }
    left: list[str] = []
    room = MOST_CATALOGUE
    for kind, fields in _FIELDS.items():
        items, why = _listed(kind, fields, found.get(kind, ()), room)
        kept[kind] = items
        room -= sum(len(json.dumps(each)) for each in items)
        left += why
    return kept, "; ".join(left)[:LONGEST_REASON] or None


def _listed(
    kind: str, fields: Iterable[str], found: Sequence[Mapping[str, Any]], room: int
) -> tuple[list[Json], list[str]]:
    kept: dict[str, Json] = {}
    wrong: dict[str, int] = {}
    shown, key = kind.replace("_", " "), _KEY[kind]
    for each in found:
        reason = None
        item = {field: each[field] for field in fields if each.get(field) is not None}
        name = item.get(key)
        if (kind == "tools" and not tool_name(name)) or not isinstance(name, str) or not 0 < len(name) <= 2048:
            reason = "whose names are not allowed"
        elif name in kept:
            reason = "that are listed twice"
        elif len(kept) >= MOST_TOOLS:
            reason = f"beyond the first {MOST_TOOLS}"
        else:
            item = {field: words(value) if isinstance(value, str) else value for field, value in item.items()}
            text = json.dumps(item) if sane(item) else ""
            if not text or len(text) > MOST_ENTRY:
                reason = f"of more than {MOST_ENTRY // 1024} KB, or nested too deeply"
            elif len(text) > room:
                reason = f"beyond {MOST_CATALOGUE // 1024} KB altogether"
            else:
                room -= len(text)
                # Read again from what is kept: nothing of it is shared with anything, and it is surely JSON.
                kept[words(name, 2048)] = json.loads(text)
        if reason is not None:
            wrong[reason] = wrong.get(reason, 0) + 1
    return list(kept.values()), [f"left out {count} {shown} {reason}" for reason, count in wrong.items()]


def _strings(given: Mapping[str, Any], fields: Iterable[str], most: int) -> Json:
    return {field: words(given[field], most) for field in fields if isinstance(given.get(field), str)}
