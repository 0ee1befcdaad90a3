"""The service `process.Process` of E2B: commands and terminals, as commands of carrel.

A process has a number of ours, which is part of the id of its command: so it never means another one, also not
after the sandbox was stopped and started.
"""

from __future__ import annotations

import base64
import binascii
import posixpath
import re
import secrets
import shlex
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from carrel.api.e2b.answers import Failure, as_json, body_of, connect_stream, envelopes
from carrel.api.e2b.inner import InnerStream, Json, Refused
from carrel.api.e2b.sandboxes import HOME, WORKSPACE, Box
from carrel.api.e2b.users import require_user, user_of
from carrel.models.base import MAX_OUTPUT_BYTES

_PING_S = 90.0
_PREFIX = "ke2b-"
_ID = re.compile(_PREFIX + r"(\d{10})")
_PIECE = 32 * 1024
_SIGNALS = {"SIGNAL_SIGKILL": "KILL", "SIGNAL_SIGTERM": "TERM"}


def ping_of(request: Request) -> float:
    given = request.headers.get("keepalive-ping-interval", "")
    return float(given) if given.isdigit() and int(given[:6]) > 0 else _PING_S


def command_of(pid: object) -> str:
    if isinstance(pid, bool) or not isinstance(pid, int) or not 0 <= pid < 2**32:
        raise Failure(400, "a process is named by its pid")
    return f"{_PREFIX}{pid:010d}"


def selected(message: Json) -> str:
    """Return the id of the command that a message names."""
    selector = message.get("process")
    if not isinstance(selector, dict) or "pid" not in selector:
        raise Failure(501, "processes are named by their pid here, not by a tag")
    return command_of(selector["pid"])


async def start(request: Request, box: Box) -> Response:
    order, pty = _order(await first_of(request), user_of(request), request.headers.get("connect-timeout-ms"))
    pid = int(order["id"][len(_PREFIX) :])

    async def events() -> AsyncGenerator[Json, None]:
        async with box.stream("POST", "/commands/stream", order) as stream:
            async for event in _events(stream, pid, terminal=pty):
                yield event

    return connect_stream(events(), ping_of(request))


async def connect(request: Request, box: Box) -> Response:
    """All output that is kept comes first, then what is written from now on."""

    message = await first_of(request)
    command = selected(message)

    async def events() -> AsyncGenerator[Json, None]:
        info = (await box.ask("GET", f"/commands/{command}")).json()
        async with box.stream("GET", f"/commands/{command}/output") as stream:
            async for event in _events(stream, message["process"]["pid"], terminal=info["terminal"]):
                yield event

    return connect_stream(events(), ping_of(request))


async def first_of(request: Request) -> Json:
    """Return the message of a request. It is read before the answer begins, which then waits for the caller's end."""
    async for message in envelopes(request):
        return message
    raise Failure(400, "the request has no message")


def _order(message: Json, user: str | None, timeout_ms: str | None) -> tuple[Json, bool]:
    """Return the command of a message that starts a process, and whether it has a terminal."""
    process = message.get("process")
    if not isinstance(process, dict) or not isinstance(process.get("cmd"), str):
        raise Failure(400, "`process.cmd` is missing")
    require_user(user)
    pty = message.get("pty")
    envs = process.get("envs") or {}
    order: Json = {
        "id": command_of(secrets.randbelow(2**31)),
        "command": [process["cmd"], *(process.get("args") or [])],
        "env": {"HOME": HOME, "PWD": process.get("cwd") or HOME, **envs},
        "interactive": bool(message.get("stdin")) or pty is not None,
        "timeout": int(timeout_ms[:12]) / 1000 if timeout_ms and timeout_ms.isdigit() else 0,
        "output_limit": MAX_OUTPUT_BYTES,
    }
    if process.get("cwd"):
        _change_directory(order, process["cwd"])
    if pty is not None:
        order["terminal"] = _size(pty)
    return order, pty is not None


def _change_directory(order: Json, cwd: str) -> None:
    """Let a command start in a directory. Commands of carrel start in the workspace; a shell can go on from there."""
    path = directory_of(posixpath.normpath(cwd))
    if not path.startswith("/") or path == WORKSPACE or path.startswith(f"{WORKSPACE}/"):
        order["cwd"] = path
        return
    match order["command"]:
        case ["/bin/bash", "-l", "-c", str(text)]:
            order["command"] = ["/bin/bash", "-l", "-c", f"cd -- {shlex.quote(path)} || exit 1\n{text}"]
            order["env"]["PWD"] = HOME
        case _:
            raise Failure(400, f"'{cwd[:200]}' is not in the workspace: start below {HOME}, and change the directory")


def directory_of(path: str) -> str:
    """Return a directory for a command: the home is the workspace, and others are as they are."""
    if path in {"~", HOME, f"{HOME}/"}:
        return "."
    for home in ("~/", f"{HOME}/"):
        if path.startswith(home):
            return path[len(home) :]
    return path


def _size(pty: Json) -> Json:
    size = pty.get("size") or {}
    return {"rows": size.get("rows") or 24, "cols": size.get("cols") or 80}


async def _events(stream: InnerStream, pid: int, *, terminal: bool) -> AsyncIterator[Json]:
    yield {"event": {"start": {"pid": pid}}}
    async for line in stream.lines():
        if line["stream"] == "end":
            result = line["result"]
            if result["timed_out"]:
                raise Failure(504, "the process ran longer than its timeout and was killed", "deadline_exceeded")
            yield {"event": {"end": _end(result)}}
            return
        data = line["text"].encode("utf-8", "surrogatepass") if "text" in line else base64.b64decode(line["base64"])
        for start in range(0, len(data), _PIECE):
            piece = base64.b64encode(data[start : start + _PIECE]).decode()
            yield {"event": {"data": {"pty" if terminal else line["stream"]: piece}}}
    raise Failure(503, "the connection to the sandbox ended before the process did", "unavailable")


def _end(result: Json) -> Json:
    if result["signal"] is not None:
        said = f"signal: {result['signal'].lower().removeprefix('sig').replace('kill', 'killed')}"
        memory = " (out of memory)" if result.get("oom_killed") else ""
        return {"exitCode": -1, "exited": False, "status": said, "error": said + memory}
    code = result["exit_code"]
    end: Json = {"exitCode": code, "exited": True, "status": f"exit status {code}"}
    return end if not code else {**end, "error": f"exit status {code}"}


async def list_processes(request: Request, box: Box) -> Response:
    found = []
    for item in (await box.ask("GET", "/commands")).json()["items"]:
        named = _ID.fullmatch(item["id"])
        if named is None or not item["running"]:
            continue
        words = [item["command"]] if isinstance(item["command"], str) else item["command"]
        found.append({"config": {"cmd": words[0], "args": words[1:]}, "pid": int(named[1])})
    return as_json({"processes": found})


def acting(act: Callable[[Box, str, Json], Any]) -> Callable[[Request, Box], Any]:
    """Return the handler of a call that acts on one process, and answers with nothing."""

    async def handle(request: Request, box: Box) -> Response:
        message = await body_of(request)
        try:
            await act(box, selected(message), message)
        except Refused as error:
            if error.code == "not_running":
                raise Failure(404, "the process has ended", "not_found") from None
            raise
        return as_json({})

    return handle


async def _update(box: Box, command: str, message: Json) -> None:
    if message.get("pty"):
        await box.ask("POST", f"/commands/{command}/resize", _size(message["pty"]))


async def _signal(box: Box, command: str, message: Json) -> None:
    signal = _SIGNALS.get(str(message.get("signal")))
    if signal is None:
        raise Failure(400, f"the signal is one of {', '.join(_SIGNALS)}")
    if not (await box.ask("GET", f"/commands/{command}")).json()["running"]:
        raise Failure(404, "the process has ended", "not_found")
    await box.ask("POST", f"/commands/{command}/signal", {"signal": signal, "tree": signal == "KILL"})


async def _send(box: Box, command: str, message: Json) -> None:
    await box.ask("POST", f"/commands/{command}/stdin", content=_typed(message))


async def _close(box: Box, command: str, _message: Json) -> None:
    await box.ask("POST", f"/commands/{command}/stdin", content=b"", query={"close": "true"})


def _typed(message: Json) -> bytes:
    given = message.get("input") or {}
    try:
        return base64.b64decode(given.get("stdin") or given.get("pty") or "", validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise Failure(400, "the input is not base64") from None


async def stream_input(request: Request, box: Box) -> Response:
    command: str | None = None
    async for message in envelopes(request):
        if "start" in message:
            command = selected(message["start"])
            await box.ask("GET", f"/commands/{command}")
        elif "data" in message:
            if command is None:
                raise Failure(400, "the first message says `start`")
            await _send(box, command, message["data"])

    async def events() -> AsyncGenerator[Json, None]:
        yield {}

    return connect_stream(events(), _PING_S)


CALLS = {
    "Start": start,
    "Connect": connect,
    "List": list_processes,
    "Update": acting(_update),
    "SendInput": acting(_send),
    "StreamInput": stream_input,
    "SendSignal": acting(_signal),
    "CloseStdin": acting(_close),
}
STREAMS = frozenset({"Start", "Connect", "StreamInput"})
