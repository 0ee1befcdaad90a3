"""Terminals over WebSockets: binary frames are bytes in both directions, text frames are JSON. The terminal ends with
the socket.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.websockets import WebSocket, WebSocketDisconnect

from carrel.api.gate import SUBPROTOCOL
from carrel.api.guard import GuardedRouter, permit
from carrel.api.parts import caller_of, plane_of, query_of
from carrel.api.problems import invalid
from carrel.control.operations.caller import Caller
from carrel.control.operations.operations import Operations
from carrel.errors import CarrelError, InvalidRequest, NotFound, NotRunning, SandboxLost
from carrel.models import MAX_OUTPUT_BYTES, CommandRequest, TerminalSize
from carrel.models.operations import OPEN_TERMINAL

router = GuardedRouter(tags=["terminals"])

_SHELL = "if command -v bash >/dev/null 2>&1; then exec bash -i; else exec sh -i; fi"
_MAX_TEXT = 4096


class TerminalQuery(BaseModel):
    """The query of the route that opens a terminal."""

    model_config = ConfigDict(defer_build=True)

    rows: int = Field(default=24, ge=1, le=1000)
    cols: int = Field(default=80, ge=1, le=1000)
    command: str = Field(default=_SHELL, min_length=1, max_length=8192)
    word: list[str] = Field(default_factory=list, max_length=256, description="a command without a shell, word by word")


class TerminalEnded(Exception):
    """The command or its caller has gone: the other tasks of the socket end."""


@router.socket(OPEN_TERMINAL)
async def terminal(socket: WebSocket) -> None:
    """Open a terminal. A refusal is a problem answer, before the socket is accepted."""
    caller = caller_of(socket)
    await permit(caller, OPEN_TERMINAL, socket.scope)
    operations, id = plane_of(socket).operations, socket.path_params["id"]
    asked = query_of(socket, TerminalQuery, "word")
    try:
        request = CommandRequest(
            command=asked.word or asked.command,
            terminal=TerminalSize(rows=asked.rows, cols=asked.cols),
            interactive=True,
            output_limit=MAX_OUTPUT_BYTES,
            env={"TERM": "xterm-256color"},
        )
    except ValidationError as error:
        raise invalid(error.errors(include_url=False, include_input=False), CommandRequest) from None
    info = await operations.start_command(caller, id, request)
    offered = socket.scope.get("subprotocols", [])
    accepted = socket.accept(SUBPROTOCOL if SUBPROTOCOL in offered else None)
    inputs = [lambda: _input(caller, socket, operations, id, info.id)]
    await serve_command(caller, socket, operations, id, info.id, accepted, inputs)


async def serve_command(
    caller: Caller,
    socket: WebSocket,
    operations: Operations,
    sandbox: str,
    command: str,
    begin: Coroutine[Any, Any, None],
    inputs: Sequence[Callable[[], Coroutine[Any, Any, None]]],
    prefixes: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Pass the streams of a command on until the command or the caller has gone, then end the command.

    `begin` comes first. `prefixes` are the first bytes of messages with output, by stream.
    """
    try:
        async with asyncio.TaskGroup() as group:
            await begin
            for each in inputs:
                group.create_task(each())
            async for chunk in operations.command_output(caller, sandbox, command):
                if chunk.stream == "end":
                    await socket.send_text(json.dumps({"exit": json.loads(chunk.data)}))
                    await socket.close(1000)
                elif chunk.stream == "stopped":
                    await socket.send_text(json.dumps({"stopped": True}))
                elif chunk.data:
                    await socket.send_bytes(prefixes.get(chunk.stream, b"") + chunk.data)
            raise TerminalEnded
    except* (TerminalEnded, WebSocketDisconnect):
        pass
    except* CarrelError as errors:
        await close_with(socket, errors.exceptions[0])
    finally:
        try:
            await asyncio.shield(operations.delete_command(caller, sandbox, command))
        except (NotFound, NotRunning, SandboxLost):
            pass  # the sandbox has ended, and the command with it


async def _input(caller: Caller, socket: WebSocket, operations: Operations, sandbox: str, command: str) -> None:
    while True:
        message = await socket.receive()
        if message["type"] == "websocket.disconnect":
            raise TerminalEnded
        data, text = message.get("bytes"), message.get("text")
        try:
            if data:
                await operations.send_input(caller, sandbox, command, data)
            elif text is not None:
                await operations.resize_terminal(caller, sandbox, command, _size(text))
        except NotRunning:
            continue  # it has just ended: the output shows it


def _size(text: str) -> TerminalSize:
    try:
        value = json.loads(text[:_MAX_TEXT])
        return TerminalSize.model_validate(value["resize"])
    except ValidationError as error:
        raise invalid(error.errors(include_url=False, include_input=False), TerminalSize) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InvalidRequest(
            "a text frame is a JSON object with `resize`", field="resize", hint="send keystrokes as binary frames"
        ) from None


async def close_with(socket: WebSocket, error: BaseException) -> None:
    """Send an error and close the socket."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, CarrelError)
    try:
        await socket.send_text(json.dumps({"error": error.problem()}, default=str))
        await socket.close(1008 if error.status < 500 else 1011, error.code)
    except (RuntimeError, WebSocketDisconnect):
        pass  # the caller has already gone
