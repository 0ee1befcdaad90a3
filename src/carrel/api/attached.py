"""Commands over a WebSocket, for a caller that passes its own streams on. The command ends with the socket.

The first message is the `CommandRequest` as text. Then binary messages are input, an empty one its end. The server
sends `{"started": …}`, output as binary messages (the first byte is 1 for standard output, 2 for standard error),
`{"stopped": true}` when a signal has stopped the program, and at last `{"exit": …}` or `{"error": …}`. Signals and
sizes are requests of their own, so that they do not wait behind input.
"""

from __future__ import annotations

import asyncio
import json

from pydantic import ValidationError
from starlette.websockets import WebSocket, WebSocketDisconnect

from carrel.api.guard import GuardedRouter, permit
from carrel.api.parts import caller_of, plane_of
from carrel.api.problems import invalid
from carrel.api.terminals import TerminalEnded, close_with, serve_command
from carrel.control.operations.caller import Caller
from carrel.control.operations.operations import Operations
from carrel.errors import CarrelError, InvalidRequest, NotRunning
from carrel.models import CommandInfo, CommandRequest
from carrel.models.operations import ATTACH_COMMAND

router = GuardedRouter(tags=["commands"])

_MOST_WAITING = 64
"""Messages of input that may wait for the program."""
_STREAMS = {"stdout": b"\x01", "stderr": b"\x02"}


@router.socket(ATTACH_COMMAND)
async def attached(socket: WebSocket) -> None:
    """Run a command with the streams of the caller."""
    caller = caller_of(socket)
    await permit(caller, ATTACH_COMMAND, socket.scope)
    operations, id = plane_of(socket).operations, socket.path_params["id"]
    await socket.accept()
    try:
        info = await operations.start_command(caller, id, await _request(socket), attached=True)
    except WebSocketDisconnect:
        return
    except CarrelError as error:
        await close_with(socket, error)
        return
    started = socket.send_text(json.dumps({"started": {"id": info.id}}))
    arrived: asyncio.Queue[bytes] = asyncio.Queue(_MOST_WAITING)
    inputs = [lambda: _receive(socket, arrived), lambda: _feed(caller, operations, id, info, arrived)]
    await serve_command(caller, socket, operations, id, info.id, started, inputs, _STREAMS)


async def _request(socket: WebSocket) -> CommandRequest:
    message = await socket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect
    text = message.get("text")
    if text is None:
        raise InvalidRequest("the first message is the command as JSON text", field="command")
    try:
        return CommandRequest.model_validate_json(text)
    except ValidationError as error:
        raise invalid(error.errors(include_url=False, include_input=False), CommandRequest) from None


async def _receive(socket: WebSocket, arrived: asyncio.Queue[bytes]) -> None:
    while True:
        message = await socket.receive()
        if message["type"] == "websocket.disconnect":
            raise TerminalEnded
        data = message.get("bytes")
        if data is None:
            raise InvalidRequest("messages after the first are input, as bytes", field="input")
        await arrived.put(data)


async def _feed(
    caller: Caller, operations: Operations, sandbox: str, command: CommandInfo, arrived: asyncio.Queue[bytes]
) -> None:
    """Pass input on. What has arrived meanwhile is one piece: each piece is an operation, and a paste has thousands."""
    while True:
        data = [await arrived.get()]
        while data[-1] and not arrived.empty():
            data.append(arrived.get_nowait())
        ends = not data[-1] and not command.terminal
        try:
            await operations.send_input(caller, sandbox, command.id, b"".join(data), close=ends)
        except NotRunning:
            continue  # it has ended or closed its input: the output shows it
