"""Attacks on the cap of a workspace that the kernel holds: every one runs in a real sandbox on a btrfs volume."""

from __future__ import annotations

import inspect
import os
import shutil
import tempfile
import textwrap
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.images import image
from tests.support.sandboxes import Supervisor
from tests.support.volumes import stored_bytes

from carrel.models import Network
from carrel.primitives import walk
from carrel.providers import Launch, open_providers
from carrel.workspaces.volumes import BtrfsDriver, btrfs_ioctls

MB = 1 << 20
CAP = 8 * MB
SLACK = 2 * MB


def words(attack: Callable[[], object]) -> list[str]:
    """The command that performs an attack in its workspace and prints what it brought."""
    code = f"{textwrap.dedent(inspect.getsource(attack))}\nprint(attack())"
    return ["/usr/bin/python3", "-I", "-c", code]


@dataclass
class Capped:
    """A sandbox whose workspace is a volume with a small cap."""

    driver: BtrfsDriver
    supervisor: Supervisor

    async def attack(self, attack: Callable[[], object]) -> str:
        """What an attack brings back, as text; it must have run to its end."""
        done = await self.supervisor.run(words(attack), timeout=60)
        assert done["exit_code"] == 0, done
        return str(done["stdout"]).strip()

    def held(self) -> int:
        """What the volume takes on the disk."""
        stored_bytes(self.driver)  # everything is on the disk
        return self.driver.usage("a")


@pytest.fixture
async def capped(request: pytest.FixtureRequest) -> AsyncIterator[Capped]:
    place = Path(tempfile.mkdtemp(prefix="cap"))
    place.chmod(0o755)
    driver = BtrfsDriver(str(place / "s"), pool_bytes=256 * MB, pool_max_bytes=256 * MB)
    if (reason := driver.missing()) is not None:
        shutil.rmtree(place)
        pytest.skip(reason)
    driver.open()
    try:
        driver.create("a", CAP)
        (place / "run").mkdir()
        images, root = "", None
        if request.config.getoption("--on-image"):
            debian: Path = request.getfixturevalue("debian_root")
            images, root = str(debian.parent), image(debian)
        provider = open_providers(str(place / "run"), driver.directory, allow_process=False, images=images)["namespace"]
        handle = await provider.start(Launch("s1", driver.path("a"), Network.NONE, image=root))
        supervisor = Supervisor(str(handle["socket"]))
        try:
            yield Capped(driver, supervisor)
        finally:
            await supervisor.http.aclose()
            await provider.remove(handle)
            await provider.close()
    finally:
        driver.close()
        shutil.rmtree(place)


async def test_a_subvolume_of_ones_own(capped: Capped) -> None:
    """Make a subvolume, which has no cap and is in no snapshot, in every way there is."""

    def attack() -> object:
        import fcntl
        import os
        import struct

        here = os.open(".", os.O_RDONLY)
        os.mkdir("plain")
        for name, request, argument in (
            ("one", 0x5000940E, struct.pack("<q4088s", 0, b"one")),
            ("two", 0x50009418, struct.pack("<qQQ32x4040s", 0, 0, 0, b"two")),
            ("picture", 0x50009417, struct.pack("<qQQ32x4040s", here, 0, 0, b"picture")),
            ("old", 0x50009401, struct.pack("<q4088s", here, b"old")),
        ):
            try:
                fcntl.ioctl(here, request, bytearray(argument))
            except OSError:
                pass
            if os.path.exists(name):
                return name
        return None

    assert await capped.attack(attack) == "None"
    fd = os.open(capped.driver.path("a"), walk.DIRECTORY)
    try:
        assert btrfs_ioctls.subvolumes_in(fd, btrfs_ioctls.number_of(fd)) == []
    finally:
        os.close(fd)


async def test_bytes_in_every_form(capped: Capped) -> None:
    """Hold more than the cap by noise, promises, deleted files, shared blocks and files without check sums."""

    def attack() -> None:
        import fcntl
        import os
        import signal
        import struct

        def until_refused(act: object) -> None:
            try:
                for number in range(40):
                    act(number)  # type: ignore[operator]
            except OSError:
                pass

        kept = []

        def deleted(number: int) -> None:
            fd = os.open(f"gone{number}", os.O_RDWR | os.O_CREAT)
            kept.append(fd)
            os.unlink(f"gone{number}")
            os.write(fd, os.urandom(1 << 20))

        def promised(number: int) -> None:
            fd = os.open(f"promised{number}", os.O_RDWR | os.O_CREAT)
            kept.append(fd)
            os.posix_fallocate(fd, 0, 1 << 20)

        def plain(number: int) -> None:
            fd = os.open(f"plain{number}", os.O_RDWR | os.O_CREAT)
            kept.append(fd)
            fcntl.ioctl(fd, 0x40086602, struct.pack("<Q", 0x00800000))  # no copy on write, so no check sums
            os.write(fd, os.urandom(1 << 20))

        def cloned(number: int) -> None:
            fd = os.open(f"clone{number}", os.O_RDWR | os.O_CREAT)
            kept.append(fd)
            fcntl.ioctl(fd, 0x40049409, kept[0])
            os.pwrite(fd, os.urandom(1 << 19), 0)

        for act in (deleted, plain, promised, cloned):
            until_refused(act)
            os.sync()
        print("holding", len(kept), flush=True)
        signal.pause()

    name = await capped.supervisor.start(words(attack))
    await capped.supervisor.shows(name, "holding", timeout=60)
    assert CAP - SLACK <= capped.held() <= CAP


async def test_names_without_content(capped: Capped) -> None:
    """Fill the disk with names, attributes and links, which hold no byte of content."""

    def attack() -> int:
        import os

        made = 0
        try:
            for number in range(200_000):
                name = f"{number:0200}"
                os.close(os.open(name, os.O_WRONLY | os.O_CREAT))
                os.setxattr(name, "user.note", b"x" * 1000)
                made += 1
        except OSError:
            pass
        return made

    assert 1000 < int(await capped.attack(attack)) < 20_000
    assert CAP - SLACK <= capped.held() <= CAP + SLACK
