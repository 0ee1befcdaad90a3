"""Environments of a server, and those of one sandbox. Knows their routes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import quote

from carrel.client._async.connection import AsyncConnection, encoded
from carrel.client._async.wire import FAILED
from carrel.errors import PlatformError, ServerUnreachable, from_problem
from carrel.models import EnvironmentInfo, EnvironmentList

Say = Callable[[str], object]
"""Told what goes on, a line at a time."""


class AsyncEnvironments:
    """`client.envs`."""

    def __init__(self, connection: AsyncConnection):
        self._connection = connection

    async def build(
        self,
        requirements: Sequence[str],
        *,
        name: str | None = None,
        python: str | None = None,
        index: str | None = None,
        progress: Say | None = None,
    ) -> EnvironmentInfo:
        """An environment that holds these packages, built once however often it is asked for; `name` labels it."""
        body = {"requirements": [*requirements], "name": name, "python": python, "index": index}
        return await made(self._connection, "/v1/envs", body, progress)

    async def list(self) -> list[EnvironmentInfo]:
        """The environments of the server, the last used first."""
        return (await self._connection.get(EnvironmentList, "/v1/envs")).items

    async def get(self, name: str) -> EnvironmentInfo:
        """One environment, by its name or a label."""
        return await self._connection.get(EnvironmentInfo, f"/v1/envs/{quote(name, safe='')}")

    async def delete(self, name: str) -> None:
        """Remove an environment; `Conflict` while a session has it."""
        await self._connection.call("DELETE", f"/v1/envs/{quote(name, safe='')}")


class AsyncSandboxEnvironments:
    """`box.envs`."""

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
        progress: Say | None = None,
    ) -> EnvironmentInfo:
        """An environment for this sandbox, at `.path` in it: by its name or label, or a list of requirements. Without,
        it is the packages of its template: they come by themselves too, but not with `progress`.

        With `venv` the workspace gets a virtual environment of its own, `/workspace/.venv`, on top of it.
        """
        named = env.name if isinstance(env, EnvironmentInfo) else env if isinstance(env, str) else None
        requirements = None if env is None or isinstance(env, EnvironmentInfo | str) else [*env]
        body = {"env": named, "requirements": requirements, "python": python, "index": index, "venv": venv}
        body["template"] = env is None
        return await made(self._connection, self._path, body, progress)

    async def list(self) -> list[EnvironmentInfo]:
        """The environments this sandbox has."""
        return (await self._connection.get(EnvironmentList, self._path)).items

    async def detach(self, env: str | EnvironmentInfo) -> None:
        """Let go of an environment, so that it may be removed when nobody else has it."""
        name = env.name if isinstance(env, EnvironmentInfo) else env
        await self._connection.call("DELETE", f"{self._path}/{quote(name, safe='')}")


async def made(
    connection: AsyncConnection, path: str, body: Mapping[str, object], progress: Say | None
) -> EnvironmentInfo:
    """The environment that a request gives, once it is built."""
    sent, patience = encoded(body), connection.patience(None)
    if progress is None:
        return await connection.post(EnvironmentInfo, path, sent, timeout=patience)
    response = await connection.stream("POST", path, query={"follow": "true"}, body=sent, timeout=patience)
    held = b""
    try:
        async for piece in response.aiter_raw():
            *lines, held = (held + piece).split(b"\n")
            for line in lines:
                event = json.loads(line)
                if "environment" in event:
                    return EnvironmentInfo.model_validate(event["environment"])
                if "problem" in event:
                    raise from_problem(event["problem"])
                progress(str(event.get("progress", "")))
    except FAILED as error:
        raise connection.unreachable(error) from None
    except ValueError:
        raise PlatformError("the server's answer is not a line of JSON") from None
    finally:
        await response.aclose()
    raise ServerUnreachable("the server ended before the environment was built", hint="ask again")
