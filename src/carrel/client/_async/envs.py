"""Python environments: those of the server, and those attached to one sandbox."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from urllib.parse import quote

from carrel.client._async.connection import AsyncConnection
from carrel.errors import PlatformError, ServerUnreachable, from_problem
from carrel.models import EnvironmentInfo, EnvironmentList

OnLine = Callable[[str], object]
"""Called with each line that the build prints."""


class AsyncEnvironments:
    """`client.envs`: Python environments, built once and shared by sandboxes."""

    def __init__(self, connection: AsyncConnection):
        self._connection = connection

    async def build(
        self,
        requirements: Sequence[str],
        *,
        name: str | None = None,
        python: str | None = None,
        index: str | None = None,
        progress: OnLine | None = None,
    ) -> EnvironmentInfo:
        """Build an environment with these packages, or return the one that exists already. `name` labels it.

        env = await client.envs.build(["pandas>=2", "matplotlib"], name="data-analysis", progress=print)
        """
        body = {"requirements": [*requirements], "name": name, "python": python, "index": index}
        return await _build(self._connection, "/v1/envs", body, progress)

    async def list(self) -> list[EnvironmentInfo]:
        """List the environments of the server, the last used first."""
        return (await self._connection.get(EnvironmentList, "/v1/envs")).items

    async def get(self, name: str) -> EnvironmentInfo:
        """Get one environment, by its name or a label."""
        return await self._connection.get(EnvironmentInfo, f"/v1/envs/{quote(name, safe='')}")

    async def delete(self, name: str) -> None:
        """Remove an environment. Raises `Conflict` while a session uses it."""
        await self._connection.send("DELETE", f"/v1/envs/{quote(name, safe='')}")


class AsyncSandboxEnvironments:
    """`box.envs`: the environments attached to one sandbox."""

    def __init__(self, connection: AsyncConnection, path: str):
        self._connection = connection
        self._path = f"{path}/envs"

    async def attach(
        self,
        env: str | EnvironmentInfo | Sequence[str] | None = None,
        *,
        python: str | None = None,
        index: str | None = None,
        venv: bool = False,
        progress: OnLine | None = None,
    ) -> EnvironmentInfo:
        """Attach an environment to this sandbox, which then finds it at `.path`.

        `env` is a name, a label, or a list of requirements. None attaches the packages of the template; that happens
        by itself too, but without `progress`. `venv=True` also creates `/workspace/.venv` on top of the environment.
        """
        named = env.name if isinstance(env, EnvironmentInfo) else env if isinstance(env, str) else None
        requirements = None if env is None or isinstance(env, EnvironmentInfo | str) else env
        body = {"env": named, "requirements": requirements, "python": python, "index": index, "venv": venv}
        return await _build(self._connection, self._path, {**body, "template": env is None}, progress)

    async def list(self) -> list[EnvironmentInfo]:
        """List the environments attached to this sandbox."""
        return (await self._connection.get(EnvironmentList, self._path)).items

    async def detach(self, env: str | EnvironmentInfo) -> None:
        """Detach an environment. Once no session uses it, it may be removed."""
        name = env.name if isinstance(env, EnvironmentInfo) else env
        await self._connection.send("DELETE", f"{self._path}/{quote(name, safe='')}")


async def _build(
    connection: AsyncConnection, path: str, body: Mapping[str, object], progress: OnLine | None
) -> EnvironmentInfo:
    if progress is None:
        return await connection.post(EnvironmentInfo, path, body, deadline=None)
    try:
        async with aclosing(connection.lines("POST", path, {"follow": "true"}, body)) as lines:
            async for line in lines:
                event = json.loads(line)
                if "environment" in event:
                    return EnvironmentInfo.model_validate(event["environment"])
                if "problem" in event:
                    raise from_problem(event["problem"])
                progress(str(event.get("progress", "")))
    except ValueError:
        raise PlatformError("the server's answer is not a line of JSON") from None
    raise ServerUnreachable("the server stopped before the environment was built", hint="try again")
