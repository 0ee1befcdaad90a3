"""`client.python`: code without a sandbox of one's own. Knows only its route."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence

from carrel.client._async.connection import AsyncConnection, encoded
from carrel.models import EnvironmentInfo, StatelessResult


class AsyncStatelessPython:
    """`client.python`."""

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
        files: Mapping[str, bytes] | None = None,
        index: str | None = None,
    ) -> StatelessResult:
        """Run a code in some sandbox and wait. Nothing of it stays; `files` of the result has what it produced, base64.

        Raises `LimitExceeded` when all sandboxes are busy for too long.
        """
        given = None if files is None else {path: base64.b64encode(data).decode() for path, data in files.items()}
        body = encoded(
            {
                "code": code,
                "env_name": env.name if isinstance(env, EnvironmentInfo) else env,
                "requirements": None if requirements is None else [*requirements],
                "template": template,
                "timeout": timeout,
                "files": given,
                "python_index": index,
            }
        )
        patience = self._connection.patience(None)  # a sandbox or an environment may have to be made first
        return await self._connection.post(StatelessResult, "/v1/execute", body, timeout=patience)
