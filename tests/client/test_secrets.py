from __future__ import annotations

import uuid

import pytest

from carrel.client import AsyncClient, Client
from carrel.errors import NotFound


def test_secrets_of_a_context(client: Client) -> None:
    secrets = client.secrets(f"sec-{uuid.uuid4().hex}")
    assert secrets.put("KEY", "open-sesame").version == 1
    assert secrets.put("KEY", b"\xff\xfeopen-sesame").version == 2
    assert [each.name for each in secrets.list()] == ["KEY"]
    box = client.sandbox(secrets.context_id)
    try:
        shown = box.commands.run("wc -c < /run/secrets/KEY; cat /run/secrets/KEY").stdout_bytes
        assert shown == b"13\n[secret:KEY]"
    finally:
        box.terminate(delete_files=True)
    secrets.delete("KEY")
    with pytest.raises(NotFound):
        secrets.delete("KEY")


async def test_async(async_client: AsyncClient) -> None:
    secrets = async_client.secrets(f"sec-{uuid.uuid4().hex}")
    await secrets.put("KEY", "open-sesame")
    assert len(await secrets.list()) == 1
    await secrets.delete("KEY")
