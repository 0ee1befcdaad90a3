"""Images on disk: shared layers, names, collection by use, and processes that are killed."""

from __future__ import annotations

import asyncio
import gzip
import os
import random
import signal
import time
from pathlib import Path

import pytest
from tests.support.registry import store_blobs, tar_entry, tar_of

from carrel.errors import ImageRefused, NotFound
from carrel.images.layer_reading import LayerLimits
from carrel.images.reference import ImageReference
from carrel.images.storage import ImageStorage, LayerProgress

APP, TOOL = ImageReference.parse("r.example/app:1"), ImageReference.parse("r.example/tool:1")
BASE = tar_of([tar_entry("bin/sh", b"shell"), tar_entry("etc/passwd", b"root")])
TOP = tar_of([tar_entry("app", b"app"), tar_entry("etc/.wh.passwd")])
OTHER = tar_of([tar_entry("tool", b"tool" * 1000)])


def quiet(_progress: LayerProgress) -> None:
    pass


def layers(*tars: bytes) -> list[tuple[bytes, bytes]]:
    return [(gzip.compress(tar, 1, mtime=0), tar) for tar in tars]


async def add(storage: ImageStorage, name: ImageReference, *tars: bytes) -> str:
    with storage.adding():
        return (await storage.add_image(store_blobs(storage, layers(*tars)), [name], quiet)).digest


def listed(storage: ImageStorage, folder: str) -> list[str]:
    return os.listdir(os.path.join(storage.directory, folder))


async def test_layers_are_shared_and_collected_by_use(storage: ImageStorage) -> None:
    app, tool = await add(storage, APP, BASE, TOP), await add(storage, TOOL, BASE, OTHER)
    first, second = storage.open(APP), storage.open(TOOL.pinned(tool))
    assert sorted(os.listdir(first.root)) == ["app", "bin", "etc"] and os.listdir(f"{first.root}/etc") == []
    assert os.path.samefile(f"{first.root}/bin/sh", f"{second.root}/bin/sh"), "shared layers share their files"
    assert first.layers[0] == second.layers[0] and len(listed(storage, "layers")) == 3
    assert os.stat(storage.directory).st_mode & 0o077 == 0, "nobody else may run what an image has"
    assert {image.digest for image in storage.list()} == {app, tool}

    with storage.hold(tool):  # the most recently used; the other is not used by anybody
        os.utime(os.path.join(storage.directory, "images", app[7:]), (1, 1))
        assert storage.collect([app], max_bytes=0, unused_s=60).images == (), "in use, and held"
        collected = storage.collect([], max_bytes=1 << 40, unused_s=60)
        assert collected.images == (app,) and collected.freed > 0
        assert storage.find(APP) is None and os.path.exists(f"{second.root}/bin/sh")
        assert len(listed(storage, "layers")) == 2 and len(listed(storage, "roots")) == 1
    assert storage.remove_name(TOOL) == tool and storage.find(TOOL) is None
    assert storage.collect([], max_bytes=1 << 40, unused_s=60).images == (tool,), "an image without a name"
    assert [listed(storage, folder) for folder in ("blobs", "layers", "roots", "images", "names", "temporary")] == [
        []
    ] * 6
    with pytest.raises(NotFound):
        storage.hold(tool)


async def test_what_is_being_added_is_not_collected(storage: ImageStorage) -> None:
    with storage.adding():
        digest = store_blobs(storage, layers(BASE))
        another = ImageStorage(storage.directory, storage.limits)
        another.prepare()
        another.collect([], max_bytes=0, unused_s=0)
        await storage.add_image(digest, [APP], quiet)
    assert storage.open(APP).digest == digest


@pytest.mark.parametrize("bad", ["hostile", "lying"])
async def test_nothing_of_a_refused_image_stays(storage: ImageStorage, bad: str) -> None:
    hostile = tar_of([tar_entry("fine", b"x"), tar_entry("../out", b"x")])
    top = layers(hostile)[0] if bad == "hostile" else (gzip.compress(TOP), OTHER)
    with storage.adding(), pytest.raises(ImageRefused):
        await storage.add_image(store_blobs(storage, [*layers(BASE), top]), [APP], quiet)
    assert storage.find(APP) is None and listed(storage, "temporary") == listed(storage, "roots") == []
    assert len(listed(storage, "layers")) <= 1, "at most the good one, for the next attempt"
    storage.collect([], max_bytes=0, unused_s=0)
    assert len(listed(storage, "blobs")) == 4, "they are kept for a day"
    with storage.adding():  # somebody else adds an image: the next collection removes them
        storage.forget_refused()
        assert len(listed(storage, "blobs")) == 4
    storage.collect([], max_bytes=0, unused_s=0)
    assert listed(storage, "layers") == listed(storage, "blobs") == []


def _work(directory: str) -> None:
    """Add two images and collect one."""

    async def run() -> None:
        storage = ImageStorage(directory, LayerLimits(64 << 20, 10_000, 100))
        storage.prepare()
        await add(storage, APP, BASE, TOP)
        await add(storage, TOOL, BASE, OTHER, TOP)
        storage.remove_name(TOOL)
        storage.collect([], max_bytes=1 << 40, unused_s=1000)

    asyncio.run(run())


def _start(directory: str) -> int:
    child = os.fork()
    if child == 0:
        try:
            _work(directory)
        finally:
            os._exit(0)
    return child


def test_killed_at_any_point(tmp_path: Path) -> None:
    """Nothing half-made is used, and the next start removes what was left."""
    rng = random.Random(17)
    began = time.monotonic()
    os.waitpid(_start(str(tmp_path / "whole")), 0)
    whole = time.monotonic() - began
    complete = 0
    for number in range(8):
        directory = str(tmp_path / str(number % 4))
        child = _start(directory)
        time.sleep(rng.uniform(0, whole))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        storage = ImageStorage(directory, LayerLimits(64 << 20, 10_000, 100))
        until = time.monotonic() + 10
        while True:  # the process that unpacked for it dies with it, at most a moment later
            storage.prepare()
            if not listed(storage, "temporary") or time.monotonic() > until:
                break
        assert listed(storage, "temporary") == []
        images = storage.list()
        complete += len(images)
        wanted = {each for image in images for each in image.layers}
        assert {f"sha256:{each}" for each in listed(storage, "layers")} == wanted
        assert {image.root for image in images} == {
            os.path.join(directory, "roots", each) for each in listed(storage, "roots")
        }
        for image in images:
            assert (
                Path(image.root, "bin/sh").read_bytes() == b"shell" and Path(image.root, "app").read_bytes() == b"app"
            )
            assert not Path(image.root, "etc/passwd").exists()
            assert len(image.layers) == 2 or Path(image.root, "tool").read_bytes() == b"tool" * 1000
        assert len(listed(storage, "names")) <= len(images)
    assert complete, "the kills were not all before the first image"
    assert asyncio.run(add(storage, APP, BASE, TOP)) == storage.open(APP).digest
