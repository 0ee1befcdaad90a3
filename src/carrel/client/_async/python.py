"""`box.python`: Python code in fresh processes, and code contexts that keep their variables."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from urllib.parse import quote

from carrel.client._async.bundles import GivenFiles, encoded_files
from carrel.client._async.commands import AsyncCommand, AsyncOutputStream
from carrel.client._async.connection import AsyncConnection
from carrel.client._async.files import AsyncFiles
from carrel.client.deadlines import Timeout, bounded_timeout, run_timeout
from carrel.client.output import checked
from carrel.models import (
    MAX_PYTHON_TIMEOUT_S,
    CellResult,
    CodeContextInfo,
    CodeContextList,
    CommandInfo,
    EnvironmentInfo,
    PythonResult,
)


class AsyncPython:
    """`box.python`.

    result = await box.python.run("import pandas; print(pandas.__version__)", requirements=["pandas"])
    analysis = box.python.context("analysis")
    await analysis.run("x = 41")
    print((await analysis.run("x + 1")).results[0].text)
    """

    def __init__(self, connection: AsyncConnection, sandbox_path: str):
        self._connection = connection
        self._base = sandbox_path
        self._path = f"{sandbox_path}/python"

    async def run(
        self,
        code: str,
        *,
        env: str | EnvironmentInfo | None = None,
        requirements: Sequence[str] | None = None,
        timeout: float | None = None,
        files: GivenFiles | None = None,
        into: str | os.PathLike[str] | None = None,
        args: Sequence[str] | None = None,
        variables: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: str | None = None,
        output_limit: int | None = None,
        check: bool = False,
    ) -> PythonResult:
        """Run code in a fresh process and wait for its result. With `check` an exception raises `CommandFailed`.

        `env` names an environment; `requirements` builds one. `files` are written to the workspace first: path to
        bytes, or to the path of a local file. Files that the code produced are saved into the local directory `into`.
        Both may be of any size.
        """
        inline = await self._put(files)
        body = _body(
            code, env, requirements, timeout=bounded_timeout(timeout, MAX_PYTHON_TIMEOUT_S), files=inline, args=args,
            variables=variables, cwd=cwd, stdin=stdin, output_limit=output_limit,
        )  # fmt: skip
        # No deadline: an environment may have to be built first.
        result = await self._connection.post(PythonResult, self._path, body, deadline=None)
        if into is not None and result.files_produced:
            await AsyncFiles(self._connection, self._base).download_many(result.files_produced, into)
        return checked(result) if check else result

    def stream(
        self,
        code: str,
        *,
        env: str | EnvironmentInfo | None = None,
        timeout: float | None = None,
        args: Sequence[str] | None = None,
        variables: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: str | None = None,
    ) -> AsyncOutputStream:
        """Run code and iterate over its output while it runs."""
        body = _body(
            code, env, None, timeout=bounded_timeout(timeout, MAX_PYTHON_TIMEOUT_S), args=args, variables=variables,
            cwd=cwd, stdin=stdin,
        )  # fmt: skip
        deadline = timeout or MAX_PYTHON_TIMEOUT_S
        return AsyncOutputStream(self._connection, "POST", f"{self._path}/stream", body=body, deadline=deadline)

    async def start(
        self,
        code: str,
        *,
        env: str | EnvironmentInfo | None = None,
        requirements: Sequence[str] | None = None,
        timeout: float | None = None,
        args: Sequence[str] | None = None,
        variables: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: str | None = None,
        interactive: bool = False,
        id: str | None = None,
    ) -> AsyncCommand:
        """Start code in the background. It is a command: see `box.commands.start`, also for `id`."""
        body = _body(
            code, env, requirements, timeout=bounded_timeout(timeout, MAX_PYTHON_TIMEOUT_S), args=args,
            variables=variables, cwd=cwd, stdin=stdin, interactive=interactive or None, id=id,
        )  # fmt: skip
        info = await self._connection.post(CommandInfo, f"{self._path}/start", body, deadline=None)
        return AsyncCommand(self._connection, f"{self._base}/commands", info.id)

    def context(
        self,
        name: str,
        *,
        env: str | EnvironmentInfo | None = None,
        requirements: Sequence[str] | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> AsyncCodeContext:
        """Return a code context, which keeps its variables. Sends no request: it starts with its first cell."""
        return AsyncCodeContext(self._connection, self._base, name, env, requirements, variables)

    async def contexts(self) -> list[CodeContextInfo]:
        """List the code contexts of the sandbox."""
        return (await self._connection.get(CodeContextList, f"{self._base}/code-contexts")).items

    async def _put(self, files: GivenFiles | None) -> dict[str, str] | None:
        if not files:
            return None
        inline = encoded_files(files)
        if inline is None:
            await AsyncFiles(self._connection, self._base).write_many(files)
        return inline


class AsyncCodeContext:
    """A Python interpreter that keeps its variables from cell to cell."""

    def __init__(
        self,
        connection: AsyncConnection,
        sandbox_path: str,
        name: str,
        env: str | EnvironmentInfo | None = None,
        requirements: Sequence[str] | None = None,
        variables: Mapping[str, str] | None = None,
    ):
        self.name = name
        self._connection = connection
        self._path = f"{sandbox_path}/code-contexts/{quote(name, safe='')}"
        self._env = env
        self._requirements = requirements
        self._variables = variables

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    async def run(self, code: str, *, timeout: Timeout = "default", figures: Sequence[str] | None = None) -> CellResult:
        """Run a cell and wait. An exception is part of the result. `timeout` is the same as for `box.commands.run`.

        `figures` are the formats of matplotlib figures: `png`, `svg`, or both.
        """
        body = self._cell(code, timeout, figures)
        return await self._connection.post(CellResult, f"{self._path}/cells", body, deadline=None)

    def stream(
        self, code: str, *, timeout: Timeout = "default", figures: Sequence[str] | None = None
    ) -> AsyncCellStream:
        """Run a cell and iterate over its output; `result()` waits for the whole result."""
        return AsyncCellStream(self._connection, self._path, self._cell(code, timeout, figures))

    async def cell(self, id: str) -> CellResult:
        """Get the result of a cell by its id; waits until the cell has ended."""
        return await self._connection.get(CellResult, f"{self._path}/cells/{quote(id, safe='')}", deadline=None)

    async def info(self) -> CodeContextInfo:
        """Get the state of the code context."""
        return await self._connection.get(CodeContextInfo, self._path)

    async def interrupt(self) -> CodeContextInfo:
        """Interrupt the running cell; the variables stay."""
        return await self._connection.post(CodeContextInfo, f"{self._path}/interrupt")

    async def restart(self) -> CodeContextInfo:
        """Kill the interpreter and start a new one without variables."""
        return await self._connection.post(CodeContextInfo, f"{self._path}/restart", deadline=None)

    async def delete(self) -> None:
        """Kill the interpreter and every process it started."""
        await self._connection.send("DELETE", self._path)

    def _cell(self, code: str, timeout: Timeout, figures: Sequence[str] | None) -> Mapping[str, object]:
        return _body(
            code,
            self._env,
            self._requirements,
            timeout=run_timeout(timeout),
            figures=figures,
            variables=self._variables,
        )


class AsyncCellStream(AsyncOutputStream):
    """The output of a cell while it runs."""

    def __init__(self, connection: AsyncConnection, path: str, body: Mapping[str, object]):
        super().__init__(connection, "POST", f"{path}/cells/stream", body=body)
        self._cells = f"{path}/cells"

    async def result(self) -> CellResult:
        """Wait until the cell has ended and get its result."""
        async for _ in self:
            pass
        assert self._response is not None
        id = self._response.headers["carrel-cell-id"]
        return await self._connection.get(CellResult, f"{self._cells}/{quote(id, safe='')}", deadline=None)


def _body(
    code: str, env: str | EnvironmentInfo | None, requirements: Sequence[str] | None, **more: object
) -> Mapping[str, object]:
    name = env.name if isinstance(env, EnvironmentInfo) else env
    return {"code": code, "env": name, "requirements": requirements, **more}
