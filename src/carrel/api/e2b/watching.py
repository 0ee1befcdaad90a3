"""Watching directories for E2B's SDKs: a program in the sandbox watches, and its output is its events."""

from __future__ import annotations

import json
import posixpath
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from carrel.api.e2b.answers import Failure, as_json, connect_stream
from carrel.api.e2b.filesystem import asked, entry, inside
from carrel.api.e2b.inner import Json, Refused
from carrel.api.e2b.process import command_of, first_of, ping_of
from carrel.api.e2b.sandboxes import Box
from carrel.api.e2b.users import require_user, user_of

_PROGRAM = Path(__file__).parents[2] / "sandbox_programs" / "watch.py"
_MOST_EVENTS = 1024 * 1024
"""Bytes of events that are kept for a caller that asks for them from time to time."""


@cache
def program() -> str:
    return _PROGRAM.read_text()


async def _order(box: Box, message: Json) -> tuple[Json, str]:
    """Return the command that watches, and the directory."""
    path = inside(message.get("path"))
    found = (await box.ask("GET", "/files/stat", query={"path": path})).json()
    if found["kind"] != "directory":
        raise Failure(400, f"'{path}' is not a directory")
    flags = ["--recursive"] if message.get("recursive") else []
    return {
        "id": command_of(2**31 + secrets.randbelow(2**31)).replace("ke2b-", "ke2bw-"),
        "command": ["python3", "-c", program(), *flags, path],
        "timeout": 0,
    }, path


async def _event(box: Box, path: str, line: Json, *, described: bool) -> Json:
    event: Json = {"name": line["name"], "type": f"EVENT_TYPE_{line['event']}"}
    if described and line["event"] not in {"REMOVE", "RENAME"}:
        try:
            found = await box.ask("GET", "/files/stat", query={"path": posixpath.join(path, line["name"])})
            event["entry"] = entry(found.json())
        except Refused:
            pass  # it is gone already
    return event


async def watch(request: Request, box: Box) -> Response:
    require_user(user_of(request))
    message = await first_of(request)
    order, path = await _order(box, message)

    async def events() -> AsyncGenerator[Json, None]:
        async with box.stream("POST", "/commands/stream", order) as stream:
            try:
                async for line in _lines(stream.lines()):
                    if "event" not in line:
                        yield {"start": {}}
                        continue
                    found = await _event(box, path, line, described=bool(message.get("includeEntry")))
                    yield {"filesystem": found}
            finally:
                await box.ask("DELETE", f"/commands/{order['id']}")

    return connect_stream(events(), ping_of(request))


async def _lines(output: AsyncIterator[Json]) -> AsyncIterator[Json]:
    """Yield the lines of the program, which are JSON; fails when it ends."""
    rest, said = "", ""
    async for piece in output:
        if piece["stream"] == "end":
            raise Failure(400, f"the directory cannot be watched: {said[:500] or 'the program that watches ended'}")
        if piece["stream"] == "stderr":
            said += piece.get("text", "")[:500]
            continue
        *whole, rest = (rest + piece.get("text", "")).split("\n")
        for line in whole:
            yield json.loads(line)


async def create_watcher(request: Request, box: Box) -> Response:
    message = await asked(request)
    order, path = await _order(box, message)
    order["output_limit"] = _MOST_EVENTS
    await box.ask("POST", "/commands/start", order)
    async with box.stream("GET", f"/commands/{order['id']}/output") as stream:
        async for _line in _lines(stream.lines()):
            break  # it watches now
    watcher = f"{order['id']}{'+' if message.get('includeEntry') else ''}"
    box.inner.watchers.put(f"{box.context} {watcher}", (0, path))
    return as_json({"watcherId": watcher})


async def watcher_events(request: Request, box: Box) -> Response:
    """The events since the last call."""
    watcher = _watcher(await asked(request))
    key = f"{box.context} {watcher}"
    offset, path = box.inner.watchers.get(key) or (0, ".")
    query = {"offset": offset, "follow": "false"}
    async with box.stream("GET", f"/commands/{watcher.rstrip('+')}/output", query=query) as stream:
        pieces = [piece.get("text", "") async for piece in stream.lines() if piece["stream"] == "stdout"]
    whole, newline, _ = "".join(pieces).rpartition("\n")
    box.inner.watchers.put(key, (offset + len((whole + newline).encode()), path))
    lines = [json.loads(line) for line in whole.split("\n") if line not in {"", "{}"}]
    return as_json({"events": [await _event(box, path, line, described=watcher.endswith("+")) for line in lines]})


async def remove_watcher(request: Request, box: Box) -> Response:
    await box.ask("DELETE", f"/commands/{_watcher(await asked(request)).rstrip('+')}")
    return as_json({})


def _watcher(message: Json) -> str:
    found = str(message.get("watcherId", ""))
    if not found.startswith("ke2bw-"):
        raise Failure(404, "there is no such watcher", "not_found")
    return found


CALLS = {
    "WatchDir": watch,
    "CreateWatcher": create_watcher,
    "GetWatcherEvents": watcher_events,
    "RemoveWatcher": remove_watcher,
}
STREAMS = frozenset({"WatchDir"})
