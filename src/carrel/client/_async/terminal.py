"""A terminal of a sandbox over a WebSocket: bytes in both directions, size, exit status. Draws nothing."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Literal
from urllib.parse import urlencode

from pydantic import ValidationError
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from carrel.client._async.connection import AsyncConnection, problem_of
from carrel.client.requests import trace_headers
from carrel.errors import NotRunning, PlatformError, from_problem
from carrel.models import CommandInfo

MAX_MESSAGE = 16 * 1024 * 1024
MAX_SENT = 256 * 1024
OPEN_S = 10.0


class AsyncTerminal:
    """An open terminal. Iterate over its output; afterwards `exit` is the exit status of its program."""

    def __init__(self, socket: ClientConnection):
        self.exit: CommandInfo | None = None
        self._socket = socket

    @classmethod
    async def open(
        cls,
        connection: AsyncConnection,
        sandbox_path: str,
        rows: int,
        cols: int,
        command: str | Sequence[str] | None,
    ) -> AsyncTerminal:
        """Connect to a new terminal."""
        query: list[tuple[str, str | int]] = [("rows", rows), ("cols", cols)]
        if isinstance(command, str):
            query.append(("command", command))
        elif command is not None:
            query += [("word", word) for word in command]
        url = f"ws{connection.address.url.removeprefix('http')}{sandbox_path}/terminals?{urlencode(query)}"
        token = connection.address.token
        headers = {**({"authorization": f"Bearer {token}"} if token else {}), **trace_headers(), **connection.carried}
        proxy: Literal[True] | None = None if connection.address.loopback else True
        try:
            # `__aenter__` is called directly, because the blocking `connect` works only as a context manager.
            opening = connect(
                url,
                additional_headers=headers,
                compression=None,
                max_size=MAX_MESSAGE,
                proxy=proxy,
                open_timeout=OPEN_S + connection.wait_s,
            )
            return cls(await opening.__aenter__())
        except InvalidStatus as error:
            raise problem_of(error.response.status_code, error.response.body) from None
        except (OSError, WebSocketException, TimeoutError) as error:
            raise connection.unreachable(error) from None

    async def send(self, data: bytes | str) -> None:
        """Type into the terminal."""
        typed = data.encode() if isinstance(data, str) else data
        try:
            for start in range(0, len(typed), MAX_SENT):
                await self._socket.send(typed[start : start + MAX_SENT])
        except ConnectionClosed:
            raise NotRunning("the terminal has ended") from None

    async def resize(self, rows: int, cols: int) -> None:
        """Resize the terminal."""
        try:
            await self._socket.send(json.dumps({"resize": {"rows": rows, "cols": cols}}))
        except ConnectionClosed:
            raise NotRunning("the terminal has ended") from None

    async def recv(self) -> bytes:
        """Wait for the next output; empty once the program has ended."""
        while True:
            try:
                message = await self._socket.recv()
            except ConnectionClosed as closed:
                if self.exit is None and closed.rcvd is not None and closed.rcvd.code != 1000:
                    raise PlatformError(
                        closed.rcvd.reason or "the server closed the terminal",
                        hint="is the sandbox still running?",
                    ) from None
                return b""
            if isinstance(message, bytes):
                if message:
                    return message
                continue
            self._control(message)

    def _control(self, text: str) -> None:
        try:
            message = json.loads(text)
            if isinstance(message, dict) and "exit" in message:
                self.exit = CommandInfo.model_validate(message["exit"])
                return
        except (ValueError, ValidationError):
            raise PlatformError("the server sent a terminal message that cannot be read") from None
        if isinstance(message, dict) and isinstance(message.get("error"), dict):
            raise from_problem(message["error"])

    async def close(self) -> None:
        """Close the terminal; its program is killed."""
        await self._socket.close()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        data = await self.recv()
        if not data:
            raise StopAsyncIteration
        return data

    async def __aenter__(self) -> AsyncTerminal:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
