"""The secrets of one context or template. No call returns a value."""

from __future__ import annotations

import base64
from urllib.parse import quote

from carrel.client._async.connection import AsyncConnection
from carrel.errors import InvalidRequest
from carrel.models import SecretList, SecretName


class AsyncSecrets:
    """`client.secrets(context)`, or `client.secrets(template=name)`. Values can be written but not read."""

    def __init__(self, connection: AsyncConnection, context_id: str | None, template: str | None = None):
        if (context_id is None) == (template is None):
            raise InvalidRequest("secrets belong to a context or to a template", field="context_id", hint="name one")
        self.context_id = context_id
        self.template = template
        self._connection = connection
        owner = (
            f"contexts/{quote(context_id, safe='')}" if context_id else f"templates/{quote(template or '', safe='')}"
        )
        self._path = f"/v1/{owner}/secrets"

    async def put(self, name: str, value: str | bytes) -> SecretName:
        """Store a secret. Sandboxes, also running ones, see it as the file `/run/secrets/NAME`."""
        raw = value.encode() if isinstance(value, str) else value
        body = {"value_base64": base64.b64encode(raw).decode()}
        return await self._connection.put(SecretName, f"{self._path}/{quote(name, safe='')}", body)

    async def list(self) -> list[SecretName]:
        """List names and versions, never values."""
        return (await self._connection.get(SecretList, self._path)).items

    async def delete(self, name: str) -> None:
        """Delete a secret, also from running sandboxes."""
        await self._connection.send("DELETE", f"{self._path}/{quote(name, safe='')}")
