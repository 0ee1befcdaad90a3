"""File calls while somebody else renames what they walk through: none leaves the workspace."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.support.files_ground import Box, serve


@pytest.fixture
async def box() -> AsyncIterator[Box]:
    # Not pytest's own folder: a socket's address must be short.
    with tempfile.TemporaryDirectory(prefix="carrel-") as top:
        async for made in serve(Path(top)):
            yield made


@pytest.fixture
def swapping(box: Box) -> Iterator[None]:
    """`d` in the workspace is in turn a directory and a symlink to what lies outside, as fast as can be."""
    workspace = box.workspace
    (workspace / "real").mkdir()
    (workspace / "real" / "canary").write_text("inside")
    (workspace / "evil").symlink_to("..")
    (workspace / "absolute").symlink_to(box.top)
    done = threading.Event()

    def swap() -> None:
        while not done.is_set():
            for name in ("real", "evil", "real", "absolute"):
                try:
                    os.rename(workspace / name, workspace / "d")
                except OSError:  # a write has made the directory meanwhile
                    os.rename(workspace / "d", workspace / os.urandom(8).hex())
                    continue
                os.rename(workspace / "d", workspace / name)

    thread = threading.Thread(target=swap)
    thread.start()
    yield
    done.set()
    thread.join()


@pytest.mark.usefixtures("swapping")
async def test_races_never_leave_the_workspace(box: Box) -> None:
    outcomes: set[int] = set()
    for turn in range(500):
        got = await box.get("d/canary")
        assert b"outside" not in got.body
        if got.status == 200:
            assert got.body == b"inside"
        wrote = await box.put("d/canary", b"inside", parents=turn % 2)
        listed = await box.call("GET", "/files/list", path="d")
        assert b"socket" not in listed.body
        deleted = await box.call("DELETE", "/files", path="d/socket")
        assert deleted.status != 204
        outcomes |= {got.status, wrote.status, listed.status}
    assert outcomes <= {200, 400, 404, 409}
    assert (box.top / "canary").read_text() == "outside"


async def test_removal_races_never_leave_the_workspace(box: Box) -> None:
    victim = box.top / "workspace" / "t"
    done = threading.Event()

    def swap() -> None:
        while not done.is_set():
            try:
                os.rename(victim / "sub", victim / "was")
                os.symlink(box.top, victim / "sub")
                os.unlink(victim / "sub")
                os.rename(victim / "was", victim / "sub")
            except OSError:
                continue

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for _ in range(100):
            await box.put("t/sub/deep/file", b"", parents=1)
            answer = await box.call("DELETE", "/files", path="t", recursive=1)
            assert answer.status in {204, 404, 409, 400}, answer
    finally:
        done.set()
        thread.join()
