"""The secrets of one context. Knows their routes; nothing gives a value back."""

from __future__ import annotations

import base64
import json
from urllib.parse import quote

from carrel.client._async.connection import AsyncConnection
from carrel.models import SecretList, SecretName


class AsyncSecrets:
    """`client.secrets(context)`."""

    def __init__(self, connection: AsyncConnection, context_id: str):
        self.context_id = context_id
        self._connection = connection
        self._path = f"/v1/contexts/{quote(context_id, safe='')}/secrets"

    async def put(self, name: str, value: str | bytes) -> SecretName:
        """Keep a secret: the file `/run/secrets/NAME` of the context's sandbox, at once where one runs."""
        raw = value.encode() if isinstance(value, str) else value
        body = json.dumps({"value_base64": base64.b64encode(raw).decode()}).encode()
        return await self._connection.put(SecretName, f"{self._path}/{quote(name, safe='')}", body)

    async def list(self) -> list[SecretName]:
        """Names and versions, never values."""
        return (await self._connection.get(SecretList, self._path)).items

    async def delete(self, name: str) -> None:
        """Forget a secret; a running sandbox loses it at once."""
        await self._connection.call("DELETE", f"{self._path}/{quote(name, safe='')}")
