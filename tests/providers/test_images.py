"""Sandboxes that run from an image: an empty one, one with a single program, a small Debian."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.support import images
from tests.support.sandboxes import KINDS, Box, House

from carrel.errors import PlatformError, Unsupported
from carrel.models import Network
from carrel.providers import Masks
from carrel.providers.base import Capability, FolderMounts, HostMount, RootImage

pytestmark = pytest.mark.skipif("namespace" not in KINDS, reason="no namespaces on this host")


@pytest.fixture(scope="module")
def house(houses: dict[str, House]) -> House:
    return houses["namespace"]


@pytest.fixture(scope="module")
def roots(house: House) -> Iterator[Path]:
    """A directory of roots, made once."""
    place = house.directory / "images" / f"of-{os.getpid()}"
    for name, make in {"empty": images.empty, "static": images.static, "debian": images.debian}.items():
        make(place / name)
    yield place
    shutil.rmtree(place)


@asynccontextmanager
async def started(
    house: House, root: Path, *, more: dict[str, object] | None = None, **image: object
) -> AsyncIterator[Box]:
    async with house.box(image=images.image(root, **image), **(more or {})) as box:
        yield box


async def test_supervisor_needs_nothing_of_an_empty_image(house: House, roots: Path) -> None:
    async with started(house, roots / "empty") as box:
        inside = box.supervisor
        assert (await inside.ask("GET", "/health"))["status"] == "ok"
        assert (await inside.http.put("/files/content?path=a/b&parents=1", content=b"text")).status_code == 201
        assert (await inside.http.get("/files/content?path=a/b")).text == "text"
        assert (box.workspace / "a/b").read_text() == "text"
        listed = await inside.ask("GET", "/files/list", path_="", recursive=1) if False else None
        assert listed is None
        answer = (await inside.http.get("/files/list?path=.&recursive=1")).json()
        assert [each["path"] for each in answer["items"]] == ["a", "a/b"]
        await inside.ask("POST", "/files/edit", {"path": "a/b", "old": "text", "new": "more"})
        await inside.ask("PUT", "/secrets", {"secrets": {"key": "dmFsdWU="}})
        said = await inside.run("echo")
        assert said["exit_code"] == 127 and "has no shell (/bin/sh): give the command as a list" in said["stderr"]
        said = await inside.run(["tool"])
        assert said["exit_code"] == 127 and said["stderr"] == "carrel: tool: command not found\n"
        problem = await inside.refused("POST", "/python", {"code": "1"})
        assert problem["code"] == "unsupported" and "no python3" in problem["detail"]
        assert os.listdir(roots / "empty") == []
