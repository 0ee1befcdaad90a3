"""The policy of one context: its documents, and why it allows or denies a command."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from urllib.parse import quote

from carrel.client._async.connection import AsyncConnection
from carrel.client.requests import UNCHANGED, Unchanged
from carrel.errors import InvalidRequest
from carrel.models import Explanation, PolicyInfo


class AsyncPolicy:
    """`client.policy(context)`."""

    def __init__(self, connection: AsyncConnection, context_id: str):
        self.context_id = context_id
        self._connection = connection
        self._path = f"/v1/contexts/{quote(context_id, safe='')}/policy"

    async def get(self) -> PolicyInfo:
        """Get the policy documents of the context; version 0 when there are none."""
        return await self._connection.get(PolicyInfo, self._path)

    async def put(
        self,
        *,
        settings: Mapping[str, object] | Unchanged | None = UNCHANGED,
        sources: Mapping[str, object] | Unchanged | None = UNCHANGED,
        version: int | None = None,
        restart: bool = False,
    ) -> PolicyInfo:
        """Replace policy documents. None removes a document; one that is not given does not change.

        With `version`, raises `Conflict` when the policy has another version now. `restart=True` restarts a running
        sandbox if the new policy needs that.
        """
        body: dict[str, object] = {"restart": restart}
        for name, document in (("settings", settings), ("sources", sources)):
            if not isinstance(document, Unchanged):
                body[name] = None if document is None else {**document}
        if version is not None:
            body["version"] = version
        try:
            text = json.dumps(body).encode()
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"the policy cannot be written as JSON: {error}") from None
        return await self._connection.put(PolicyInfo, self._path, text)

    async def delete(self) -> None:
        """Delete the documents: from now on the server's own policy applies."""
        await self._connection.send("DELETE", self._path)

    async def explain(self, command: str | Sequence[str], *, cwd: str | None = None) -> Explanation:
        """Explain how the policy decides on each part of a command. Runs nothing."""
        return await self._connection.post(Explanation, f"{self._path}/explain", {"command": command, "cwd": cwd})
