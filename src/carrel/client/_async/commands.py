"""Commands of one sandbox: run and wait, stream, background, re-attach. Knows only their routes."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence

from carrel.client._async.connection import AsyncConnection, encoded
from carrel.client._async.wire import FAILED, AsyncReply
from carrel.client.deadlines import Timeout, attended, background, waited
from carrel.client.output import Chunk, Output, OutputDecoder, checked
from carrel.errors import CarrelError, NotRunning, SandboxLost
from carrel.models import CommandInfo, CommandList, CommandResult


class AsyncOutputStream:
    """A command's output while it is written. Iterate for chunks; afterwards `info` tells how it ended."""

    def __init__(
        self,
        connection: AsyncConnection,
        method: str,
        path: str,
        *,
        query: Mapping[str, str | int] | None = None,
        body: bytes | None = None,
        deadline: float | None = None,
    ):
        self._connection = connection
        self._method = method
        self._path = path
        self._query = query
        self._body = body
        self._deadline = deadline
        self._decoder = OutputDecoder()
        self._ready: deque[Chunk] = deque()
        self._raw: AsyncIterator[bytes] | None = None
        self._over = False
        self._response: AsyncReply | None = None

    @property
    def info(self) -> CommandInfo | None:
        """How the command ended; None while the stream has not been read to its end."""
        return self._decoder.info

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        while not self._ready:
            if self._over:
                raise StopAsyncIteration
            await self._more()
        return self._ready.popleft()

    async def open(self) -> str | None:
        """Send the request, as the first step of iterating does: what it asks for has then begun, or it raises. Gives
        the id of a command that it started.
        """
        connection = self._connection
        try:
            if self._response is None:
                self._response = await connection.stream(
                    self._method,
                    self._path,
                    query=self._query,
                    body=self._body,
                    timeout=connection.patience(self._deadline),
                )
                self._raw = self._response.aiter_raw()
        except FAILED as error:
            await self.close()
            raise connection.unreachable(error) from None
        except CarrelError:
            await self.close()
            raise
        return self._response.headers.get("carrel-command-id")

    async def _more(self) -> None:
        """Read on. No generator of our own: one that knew this object would keep an abandoned stream from being closed
        at once, and the garbage collector may come to close it while the connection pool is locked.
        """
        await self.open()
        assert self._raw is not None
        try:
            self._ready.extend(self._decoder.feed(await self._raw.__anext__()))
        except StopAsyncIteration:
            await self.close()
            if not self._decoder.ended:
                raise SandboxLost(
                    "the output ended before the command did", hint="re-attach with commands.get(id)"
                ) from None
        except FAILED as error:
            await self.close()
            raise self._connection.unreachable(error) from None
        except CarrelError:
            await self.close()
            raise

    async def close(self) -> None:
        """Stop reading; the connection is free again."""
        self._over = True
        self._raw = None
        if self._response is not None:
            await self._response.aclose()

    async def __aenter__(self) -> AsyncOutputStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncCommand:
    """A command in the background. The handle holds its id alone: `commands.get(id)` makes another."""

    def __init__(self, connection: AsyncConnection, base: str, id: str):
        self.id = id
        self._connection = connection
        self._path = f"{base}/{id}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}>"

    async def info(self) -> CommandInfo:
        """The command as it is now."""
        return await self._connection.get(CommandInfo, self._path)

    async def wait(self, *, check: bool = False) -> CommandResult:
        """Wait for the end. With `check` a failure raises `CommandFailed`."""
        result = await self._connection.wait(CommandResult, f"{self._path}/result")
        return checked(result) if check else result

    async def output(self, offset: int = 0) -> Output:
        """What has been written from `offset` on, without waiting for more."""
        stream = self.written(offset)
        chunks = [chunk async for chunk in stream]
        return Output.of(chunks, offset, stream.info)

    def stream(self, offset: int = 0) -> AsyncOutputStream:
        """The output from `offset` on, until the command ends."""
        return self._stream(offset, follow=True)

    def written(self, offset: int = 0) -> AsyncOutputStream:
        """What has been written so far from `offset` on, in chunks, for output of any size."""
        return self._stream(offset, follow=False)

    def _stream(self, offset: int, *, follow: bool) -> AsyncOutputStream:
        query = {"offset": offset, "follow": int(follow)}
        return AsyncOutputStream(self._connection, "GET", f"{self._path}/output", query=query)

    async def signal(self, signal: str = "TERM", *, tree: bool = False) -> None:
        """Send a signal to the command's process group, or with `tree` to every process it started."""
        body = encoded({"signal": signal, "tree": tree})
        await self._connection.call("POST", f"{self._path}/signal", body=body)

    async def kill(self) -> None:
        """Kill every process of the command; what it wrote stays readable. Harmless when it has ended."""
        try:
            await self.signal("KILL", tree=True)
        except NotRunning:
            pass

    async def forget(self) -> None:
        """Kill the command and drop its output."""
        await self._connection.call("DELETE", self._path)

    async def send_input(self, data: bytes | str, *, close: bool = False) -> None:
        """Write to standard input of a command started with `interactive=True` or a terminal."""
        body = data.encode() if isinstance(data, str) else data
        await self._connection.call(
            "POST", f"{self._path}/stdin", query={"close": 1} if close else None, body=body, json=False
        )

    async def close_input(self) -> None:
        """Close standard input: the command reads the end of file."""
        await self.send_input(b"", close=True)

    async def resize(self, rows: int, cols: int) -> None:
        """Give the command's terminal another size."""
        body = encoded({"rows": rows, "cols": cols})
        await self._connection.call("POST", f"{self._path}/resize", body=body)


class AsyncCommands:
    """`box.commands`. A string runs under `/bin/sh -c`, a list of words runs as it is."""

    def __init__(self, connection: AsyncConnection, sandbox_path: str):
        self._connection = connection
        self._path = f"{sandbox_path}/commands"

    async def run(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: Timeout = "default",
        stdin: str | None = None,
        output_limit: int | None = None,
        check: bool = False,
    ) -> CommandResult:
        """Run a command and wait. A non-zero exit is a result; with `check` it raises `CommandFailed`.

        It is killed after `timeout` seconds; by default after those of the sandbox, with None or 0 never.
        """
        body = _body(command, cwd=cwd, env=env, timeout=attended(timeout), stdin=stdin, output_limit=output_limit)
        connection = self._connection
        result = await connection.post(CommandResult, self._path, body, timeout=connection.patience(waited(timeout)))
        return checked(result) if check else result

    def stream(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: Timeout = "default",
        stdin: str | None = None,
        output_limit: int | None = None,
    ) -> AsyncOutputStream:
        """Run a command and iterate over its output while it is written. `timeout` means what it means for `run`."""
        body = _body(command, cwd=cwd, env=env, timeout=attended(timeout), stdin=stdin, output_limit=output_limit)
        return AsyncOutputStream(self._connection, "POST", f"{self._path}/stream", body=body, deadline=waited(timeout))

    async def start(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: Timeout = None,
        stdin: str | None = None,
        output_limit: int | None = None,
        interactive: bool = False,
        terminal: tuple[int, int] | None = None,
        id: str | None = None,
    ) -> AsyncCommand:
        """Start in the background. `interactive` keeps its input open; `terminal` is (rows, columns).

        It runs until it ends, is killed or the sandbox stops, unless a `timeout` is given; `default` is that of the
        sandbox.

        An `id` of your own (`k` and 7 to 63 letters, digits, `_`, `-`) starts one command only: `AlreadyExists` says
        that `get(id)` has it.
        """
        body = _body(
            command,
            cwd=cwd,
            env=env,
            timeout=background(timeout),
            stdin=stdin,
            output_limit=output_limit,
            interactive=interactive,
            terminal=terminal,
            id=id,
        )
        info = await self._connection.post(CommandInfo, f"{self._path}/start", body)
        return self.get(info.id)

    async def list(self) -> Sequence[CommandInfo]:
        """The commands the sandbox remembers, newest last."""
        return (await self._connection.get(CommandList, self._path)).items

    def get(self, id: str) -> AsyncCommand:
        """A handle of a command by its id. Asks nothing of the server."""
        return AsyncCommand(self._connection, self._path, id)


def _body(
    command: str | Sequence[str],
    *,
    cwd: str | None,
    env: Mapping[str, str] | None,
    timeout: float | str | None,
    stdin: str | None,
    output_limit: int | None,
    interactive: bool = False,
    terminal: tuple[int, int] | None = None,
    id: str | None = None,
) -> bytes:
    return encoded(
        {
            "command": command if isinstance(command, str) else [*command],
            "cwd": cwd,
            "env": None if env is None else {**env},
            "timeout": timeout,
            "stdin": stdin,
            "output_limit": output_limit,
            "interactive": interactive or None,
            "terminal": None if terminal is None else {"rows": terminal[0], "cols": terminal[1]},
            "id": id,
        }
    )
