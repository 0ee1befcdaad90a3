"""Commands of one sandbox: run and wait, stream, start in the background, re-attach."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial

from carrel.client._async.connection import AsyncConnection
from carrel.client._async.wire import FAILED, AsyncReply
from carrel.client.deadlines import Timeout, answer_limit, run_timeout, start_timeout
from carrel.client.output import Chunk, Output, OutputDecoder, checked
from carrel.errors import CarrelError, NotRunning, SandboxLost
from carrel.models import CommandInfo, CommandList, CommandResult


class AsyncOutputStream:
    """The output of a command while it runs. Iterate over chunks; after the last one, `info` is the exit status.

    async for chunk in box.commands.stream("make test"):
        print(chunk.text, end="")
    """

    def __init__(
        self,
        connection: AsyncConnection,
        method: str,
        path: str,
        *,
        query: Mapping[str, str | int] | None = None,
        body: Mapping[str, object] | None = None,
        deadline: float | None = None,
    ):
        self._connection = connection
        self._send = partial(connection.send, method, path, query=query, body=body, deadline=deadline, stream=True)
        self._decoder = OutputDecoder()
        self._ready: deque[Chunk] = deque()
        self._raw: AsyncIterator[bytes] | None = None
        self._over = False
        self._response: AsyncReply | None = None

    @property
    def info(self) -> CommandInfo | None:
        """The exit status; None until the stream has been read to its end."""
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
        """Send the request now instead of at the first iteration. Returns the id of the command that was started."""
        try:
            if self._response is None:
                self._response = await self._send()
                self._raw = self._response.aiter_raw()
        except CarrelError:
            await self.close()
            raise
        return self._response.headers.get("carrel-command-id")

    async def _more(self) -> None:
        """Read the next bytes. This is no generator: a generator that refers to this object would keep an abandoned
        stream open until garbage collection, which may run while the connection pool is locked.
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
        """Stop reading and release the connection. The command goes on."""
        self._over = True
        self._raw = None
        if self._response is not None:
            await self._response.aclose()

    async def __aenter__(self) -> AsyncOutputStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncCommand:
    """A command in the background. The handle holds only the id, so `commands.get(id)` makes another one."""

    def __init__(self, connection: AsyncConnection, base: str, id: str):
        self.id = id
        self._connection = connection
        self._path = f"{base}/{id}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}>"

    async def info(self) -> CommandInfo:
        """Get the state of the command."""
        return await self._connection.get(CommandInfo, self._path)

    async def wait(self, *, check: bool = False) -> CommandResult:
        """Wait until the command ends. With `check` a failure raises `CommandFailed`."""
        result = await self._connection.get(CommandResult, f"{self._path}/result", deadline=None)
        return checked(result) if check else result

    async def output(self, offset: int = 0) -> Output:
        """Get the output from `offset` up to now, without waiting for more."""
        stream = self.written(offset)
        chunks = [chunk async for chunk in stream]
        return Output.of(chunks, offset, stream.info)

    def stream(self, offset: int = 0) -> AsyncOutputStream:
        """Stream the output from `offset` until the command ends."""
        return self._stream(offset, follow=True)

    def written(self, offset: int = 0) -> AsyncOutputStream:
        """Stream the output from `offset` up to now, in chunks, for output of any size."""
        return self._stream(offset, follow=False)

    def _stream(self, offset: int, *, follow: bool) -> AsyncOutputStream:
        query = {"offset": offset, "follow": int(follow)}
        return AsyncOutputStream(self._connection, "GET", f"{self._path}/output", query=query)

    async def signal(self, signal: str = "TERM", *, tree: bool = False) -> None:
        """Send a signal to the command's process group, or with `tree` to every process it started."""
        await self._connection.send("POST", f"{self._path}/signal", body={"signal": signal, "tree": tree})

    async def kill(self) -> None:
        """Kill every process of the command; its output stays readable. Does nothing when it has ended."""
        try:
            await self.signal("KILL", tree=True)
        except NotRunning:
            pass

    async def forget(self) -> None:
        """Kill the command and delete its output."""
        await self._connection.send("DELETE", self._path)

    async def send_input(self, data: bytes | str, *, close: bool = False) -> None:
        """Write to the standard input of a command started with `interactive=True` or a terminal."""
        body, query = data.encode() if isinstance(data, str) else data, {"close": 1} if close else None
        await self._connection.send("POST", f"{self._path}/stdin", query=query, body=body)

    async def close_input(self) -> None:
        """Close standard input: the command reads end of file."""
        await self.send_input(b"", close=True)

    async def resize(self, rows: int, cols: int) -> None:
        """Resize the terminal of the command."""
        await self._connection.send("POST", f"{self._path}/resize", body={"rows": rows, "cols": cols})


class AsyncCommands:
    """`box.commands`. A string runs under `/bin/sh -c`, a list of words runs without a shell."""

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
        interactive: bool = False,
        terminal: tuple[int, int] | None = None,
    ) -> CommandResult:
        """Run a command and wait for its result. With `check` a non-zero exit raises `CommandFailed`.

            result = await box.commands.run("pytest -q", timeout=600)
            print(result.exit_code, result.stdout)

        The command is killed after `timeout` seconds: by default the timeout of the sandbox; None or 0 is no timeout.

        With `interactive` the command has a terminal, of `terminal` (rows, columns) or 24 × 80: `stdin` is typed into
        it, then Ctrl-D. What the terminal shows is `stdout`.
        """
        body = _body(
            command,
            cwd=cwd,
            env=env,
            timeout=run_timeout(timeout),
            stdin=stdin,
            output_limit=output_limit,
            interactive=interactive,
            terminal=terminal,
        )
        result = await self._connection.post(CommandResult, self._path, body, deadline=answer_limit(timeout))
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
        """Run a command and iterate over its output while it runs. `timeout` is the same as for `run`."""
        body = _body(command, cwd=cwd, env=env, timeout=run_timeout(timeout), stdin=stdin, output_limit=output_limit)
        return AsyncOutputStream(
            self._connection, "POST", f"{self._path}/stream", body=body, deadline=answer_limit(timeout)
        )

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
        """Start a command in the background. `interactive` keeps its input open; `terminal` is (rows, columns).

        Without a `timeout` it runs until it ends, is killed or the sandbox stops; `default` is the timeout of the
        sandbox. To retry a start safely, give an `id` (`k` and 7 to 63 letters, digits, `_`, `-`): a second start with
        the same id raises `AlreadyExists`, and `get(id)` returns the running command.
        """
        body = _body(
            command,
            cwd=cwd,
            env=env,
            timeout=start_timeout(timeout),
            stdin=stdin,
            output_limit=output_limit,
            interactive=interactive,
            terminal=terminal,
            id=id,
        )
        info = await self._connection.post(CommandInfo, f"{self._path}/start", body)
        return self.get(info.id)

    async def list(self) -> Sequence[CommandInfo]:
        """List the commands that the sandbox remembers, newest last."""
        return (await self._connection.get(CommandList, self._path)).items

    def get(self, id: str) -> AsyncCommand:
        """Return the handle of a command by its id. Sends no request."""
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
) -> Mapping[str, object]:
    return {
        "command": command,
        "cwd": cwd,
        "env": env,
        "timeout": timeout,
        "stdin": stdin,
        "output_limit": output_limit,
        "interactive": interactive or None,
        "terminal": None if terminal is None else {"rows": terminal[0], "cols": terminal[1]},
        "id": id,
    }
