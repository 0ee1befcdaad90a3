"""`client.python`: Python code without a sandbox of its own."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Sequence
from pathlib import Path

from carrel.client._async.bundles import AsyncUnbundled, GivenFiles, bundled, encoded_files
from carrel.client._async.connection import AsyncConnection, encoded
from carrel.client._async.files import save_all
from carrel.client.deadlines import bounded_timeout
from carrel.errors import PlatformError
from carrel.models import MAX_PYTHON_TIMEOUT_S, EnvironmentInfo, StatelessResult

MOST_RETURNED = 8 * 1024 * 1024


class AsyncStatelessPython:
    """`client.python`: run code once in a pooled sandbox; nothing of it stays."""

    def __init__(self, connection: AsyncConnection):
        self._connection = connection

    async def run(
        self,
        code: str,
        *,
        env: str | EnvironmentInfo | None = None,
        requirements: Sequence[str] | None = None,
        template: str | None = None,
        timeout: float | None = None,
        files: GivenFiles | None = None,
        into: str | os.PathLike[str] | None = None,
        index: str | None = None,
    ) -> StatelessResult:
        """Run code and wait for its result. Raises `LimitExceeded` when all pooled sandboxes stay busy for too long.

            print((await client.python.run("print(6 * 7)")).output)

        `files` are present when the code runs: path to bytes, or to the path of a local file. Files that the code
        produced are saved into the local directory `into`. Both may be of any size. Without `into`, `files` of the
        result has the small ones in base64.
        """
        given = None if files is None else encoded_files(files)
        body: dict[str, object] = {
            "code": code,
            "env_name": env.name if isinstance(env, EnvironmentInfo) else env,
            "requirements": requirements,
            "template": template,
            "timeout": bounded_timeout(timeout, MAX_PYTHON_TIMEOUT_S),
            "files": given,
            "python_index": index,
        }
        # No deadlines: a sandbox or an environment may have to be made first.
        if into is None and (files is None or given is not None):
            return await self._connection.post(StatelessResult, "/v1/execute", body, deadline=None)
        source = bundled({} if files is None or given is not None else files, encoded(body))
        response = await self._connection.send("POST", "/v1/execute/bundle", body=source, deadline=None, stream=True)
        async with AsyncUnbundled(self._connection, response) as incoming:
            part = incoming.part()
            if part is None or part.kind != "result":
                raise PlatformError("the server's answer has no result", hint="client and server may differ in version")
            result = StatelessResult.model_validate(json.loads(await incoming.whole()))
            if into is not None:
                await save_all(incoming, Path(into))
                return result
            return result.model_copy(update={"files": await _small(incoming)})


async def _small(incoming: AsyncUnbundled) -> dict[str, str]:
    """Read the produced files that are small enough for a result, in base64."""
    found: dict[str, str] = {}
    left = MOST_RETURNED
    while (part := incoming.part()) is not None:
        if part.kind == "file" and part.size <= left:
            found[part.path] = base64.b64encode(await incoming.whole()).decode()
            left -= part.size
        else:
            async for _ in incoming.pieces():
                pass
    return found
