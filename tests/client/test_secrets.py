from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from carrel.client import AsyncClient, Client
from carrel.errors import InvalidRequest, NotFound


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
    assert secrets.list() == [], "they go with the context"
    with pytest.raises(NotFound):
        secrets.delete("KEY")


async def test_async(async_client: AsyncClient) -> None:
    secrets = async_client.secrets(f"sec-{uuid.uuid4().hex}")
    await secrets.put("KEY", "open-sesame")
    assert len(await secrets.list()) == 1
    await secrets.delete("KEY")


def test_secrets_belong_to_one_thing(client: Client) -> None:
    for wrong in ({}, {"context_id": "c", "template": "t"}):
        with pytest.raises(InvalidRequest):
            client.secrets(**wrong)
    assert client.secrets(template="absent").list() == []
    with pytest.raises(InvalidRequest, match="there is no template"):
        client.secrets(template="absent").put("KEY", "open-sesame")


def test_templates(client: Client, data_dir: Path) -> None:
    name = f"t{uuid.uuid4().hex[:12]}"
    folder = data_dir / "templates" / name
    folder.mkdir(parents=True)
    (folder / "template.toml").write_text('env = { MODE = "test" }')
    try:
        assert name in [each.name for each in client.templates()]
        client.secrets(template=name).put("KEY", "open-sesame")
        with client.sandbox(template=name) as box:
            assert box.commands.run("echo $MODE; cat /run/secrets/KEY").stdout == "test\n[secret:KEY]"
        client.secrets(template=name).delete("KEY")
    finally:
        (folder / "template.toml").unlink()
        folder.rmdir()
