"""The policy of one context: its documents, and what they say of a command. Knows their routes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from urllib.parse import quote

from carrel.client._async.connection import AsyncConnection, encoded
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
        """The documents as they were given; version 0 when there are none."""
        return await self._connection.get(PolicyInfo, self._path)

    async def put(
        self,
        *,
        settings: Mapping[str, object] | Unchanged | None = UNCHANGED,
        sources: Mapping[str, object] | Unchanged | None = UNCHANGED,
        version: int | None = None,
        restart: bool = False,
    ) -> PolicyInfo:
        """Replace a document, or remove it with None; one that is not given is left as it is.

        With `version` only that one is changed, else `Conflict`. `restart` restarts a running sandbox if it must be.
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
        """Forget the documents: the server's own policy holds from now on."""
        await self._connection.call("DELETE", self._path)

    async def explain(self, command: str | Sequence[str], *, cwd: str | None = None) -> Explanation:
        """What the policy says of a command, part by part. Nothing is run."""
        body = encoded({"command": command if isinstance(command, str) else [*command], "cwd": cwd})
        return await self._connection.post(Explanation, f"{self._path}/explain", body)
