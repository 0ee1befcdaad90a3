"""`box.python`: code in fresh processes, and contexts that keep their variables. Knows only their routes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from urllib.parse import quote

from carrel.client._async.bundles import GivenFiles, encoded_files
from carrel.client._async.commands import AsyncCommand, AsyncOutputStream
from carrel.client._async.connection import AsyncConnection, encoded
from carrel.client._async.files import AsyncFiles
from carrel.client.deadlines import Timeout, attended, limited
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
    """`box.python`."""

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
        """Run a code in a fresh process and wait. What it raises is a result; with `check` it raises `CommandFailed`.

        `env` names an environment, `requirements` make one. `files` are put into the workspace first: bytes, or the
        paths of local files. What was produced is saved beneath the local directory `into`. Both may be of any size.
        """
        inline = await self._put(files)
        body = _body(
            code, env, requirements, timeout=limited(timeout, MAX_PYTHON_TIMEOUT_S), files=inline, args=args,
            variables=variables, cwd=cwd, stdin=stdin, output_limit=output_limit,
        )  # fmt: skip
        patience = self._connection.patience(None)  # an interpreter or an environment may have to be made first
        result = await self._connection.post(PythonResult, self._path, body, timeout=patience)
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
        """Run a code and iterate over its output while it is written."""
        body = _body(
            code, env, None, timeout=limited(timeout, MAX_PYTHON_TIMEOUT_S), args=args, variables=variables, cwd=cwd,
            stdin=stdin,
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
        """Start a code in the background: a command like any other, also in what an `id` of your own means."""
        body = _body(
            code, env, requirements, timeout=limited(timeout, MAX_PYTHON_TIMEOUT_S), args=args, variables=variables,
            cwd=cwd, stdin=stdin, interactive=interactive or None, id=id,
        )  # fmt: skip
        patience = self._connection.patience(None)
        info = await self._connection.post(CommandInfo, f"{self._path}/start", body, timeout=patience)
        return AsyncCommand(self._connection, f"{self._base}/commands", info.id)

    def context(
        self,
        name: str,
        *,
        env: str | EnvironmentInfo | None = None,
        requirements: Sequence[str] | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> AsyncCodeContext:
        """A context that keeps its variables. Asks nothing of the server: it starts with its first cell."""
        return AsyncCodeContext(self._connection, self._base, name, env, requirements, variables)

    async def contexts(self) -> list[CodeContextInfo]:
        """The code contexts of the sandbox."""
        return (await self._connection.get(CodeContextList, f"{self._base}/code-contexts")).items

    async def _put(self, files: GivenFiles | None) -> dict[str, str] | None:
        if not files:
            return None
        inline = encoded_files(files)
        if inline is None:
            await AsyncFiles(self._connection, self._base).write_many(files)
        return inline


class AsyncCodeContext:
    """A Python that keeps its variables from cell to cell. The handle holds its name and how it is to start."""

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
        """Run a cell and wait. What it raises is a result. `timeout` means what it means for `box.commands.run`.

        `figures` says how figures of matplotlib are drawn: `png`, `svg`, or both.
        """
        body, patience = self._cell(code, timeout, figures), self._connection.patience(None)
        return await self._connection.post(CellResult, f"{self._path}/cells", body, timeout=patience)

    def stream(
        self, code: str, *, timeout: Timeout = "default", figures: Sequence[str] | None = None
    ) -> AsyncCellStream:
        """Run a cell and iterate over what it prints; `result()` afterwards has all of it."""
        return AsyncCellStream(self._connection, self._path, self._cell(code, timeout, figures))

    async def cell(self, id: str) -> CellResult:
        """The result of a cell by its id, once there is one."""
        return await self._connection.wait(CellResult, f"{self._path}/cells/{quote(id, safe='')}")

    async def info(self) -> CodeContextInfo:
        """The context as it is now."""
        return await self._connection.get(CodeContextInfo, self._path)

    async def interrupt(self) -> CodeContextInfo:
        """Interrupt the cell that runs; the variables stay."""
        return await self._connection.post(CodeContextInfo, f"{self._path}/interrupt", b"")

    async def restart(self) -> CodeContextInfo:
        """Begin anew without the variables; what runs is ended."""
        patience = self._connection.patience(None)
        return await self._connection.post(CodeContextInfo, f"{self._path}/restart", b"", timeout=patience)

    async def delete(self) -> None:
        """End it, with all it started."""
        await self._connection.call("DELETE", self._path)

    def _cell(self, code: str, timeout: Timeout, figures: Sequence[str] | None) -> bytes:
        chosen = None if figures is None else [*figures]
        return _body(
            code, self._env, self._requirements, timeout=attended(timeout), figures=chosen, variables=self._variables
        )


class AsyncCellStream(AsyncOutputStream):
    """What a cell prints, while it does."""

    def __init__(self, connection: AsyncConnection, path: str, body: bytes):
        super().__init__(connection, "POST", f"{path}/cells/stream", body=body)
        self._cells = f"{path}/cells"

    async def result(self) -> CellResult:
        """All of the cell, once it has ended."""
        async for _ in self:
            pass
        assert self._response is not None
        id = self._response.headers["carrel-cell-id"]
        return await self._connection.wait(CellResult, f"{self._cells}/{quote(id, safe='')}")


def _body(code: str, env: str | EnvironmentInfo | None, requirements: Sequence[str] | None, **more: object) -> bytes:
    shown = {key: list(value) if isinstance(value, tuple) else value for key, value in more.items()}
    variables = more.get("variables")
    if isinstance(variables, Mapping):
        shown["variables"] = {**variables}
    return encoded(
        {
            "code": code,
            "env": env.name if isinstance(env, EnvironmentInfo) else env,
            "requirements": None if requirements is None else [*requirements],
            **shown,
        }
    )
