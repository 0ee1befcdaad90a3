from __future__ import annotations

import io
import uuid
from collections.abc import Iterator

import pytest

from carrel.client import AsyncClient, Client
from carrel.errors import FileMissing, InvalidPath
from carrel.models import SyncDirection


@pytest.fixture
def context(client: Client) -> Iterator[str]:
    name = f"fs-{uuid.uuid4().hex[:12]}"
    yield name
    for info in client.sandboxes():
        if info.context_id == name:
            client.attach(info).terminate(delete_files=True)


def test_files_go_both_ways(client: Client, context: str) -> None:
    space = client.filespace(context)
    assert list(space.list()) == []
    heard: list[int] = []
    made = space.write("data/in", io.BytesIO(b"from a file"), mode=0o640, progress=heard.append)
    assert (made.path, made.size, made.mode, sum(heard)) == ("data/in", 11, "640", 11)
    space.write("text", "text")
    box = client.sandbox(context, filespace=True)
    assert box.info().filespace and box.files.read("data/in") == b"from a file"
    box.files.write("data/out", b"made")
    done = box.sync()
    assert (done.direction, done.conflicts) == (SyncDirection.BOTH, [])
    assert space.read("data/out") == b"made" and b"".join(space.stream("text")) == b"text"
    assert [file.path for file in space.list("data/")] == ["data/in", "data/out"]
    space.delete("text")
    assert box.sync("pull").pull_deleted == 1 and not box.files.exists("text")
    with pytest.raises(FileMissing):
        space.delete("text")
    space.write("one", b"1")
    space.delete_all()
    assert list(space.list()) == []
    with pytest.raises(FileMissing):
        space.read("text")
    with pytest.raises(InvalidPath):
        space.write("../x", b"")


async def test_the_same_without_blocking(async_client: AsyncClient, context: str) -> None:
    space = async_client.filespace(context)
    await space.write("f", b"x")
    assert [file.path async for file in space.list()] == ["f"] and await space.read("f") == b"x"
    await space.delete("f")
