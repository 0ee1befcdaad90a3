"""The root file systems of containers, as images of the Docker daemon.

Docker runs a container only from an image of its own. A root of carrel is imported once, as one layer, under a name
made from what it is; mounting the directories of the root over an empty image would be quicker once, but then nothing
could be mounted inside them without writing to a root that other sandboxes share. For a sandbox with the host's own
programs the image is a skeleton of a few megabytes: directories, links and public configuration. `/usr` is mounted.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import stat
import tarfile
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager

from carrel.errors import PlatformError, Unsupported
from carrel.isolation import image_root, image_user, inside, rootfs
from carrel.isolation.image_user import ImageUser
from carrel.primitives.trees import remove_tree
from carrel.providers.base import RootImage
from carrel.providers.docker.engine import Engine, EngineRefusal

REPOSITORY = "localhost/carrel-root"
"""With a host, so that no daemon looks for it in a registry."""
FORMAT = 2
"""Changes when the same root would be imported in another way."""
DIRECTORY = "carrel.directory"
"""A label: the directory of the image in carrel's own storage."""
_MOST_SKELETON = 256 << 20
_CHUNK = 1 << 20
_MOUNTED = (rootfs.Bind, rootfs.Device)
_PLACES = tuple(
    path[1:]
    for path in ("/dev", "/proc", "/run", inside.SECRETS, "/sys", "/tmp", "/home", inside.HOME, inside.WORKSPACE)
)
"""Directories that every root has for mounts. Those of an image are left out: they could be links or files, which would
lead a mount elsewhere.
"""


class DockerRoots:
    """Finds the image of a root in the daemon, and imports it if it is not there."""

    def __init__(self, engine: Engine, temporary: str):
        self._engine = engine
        self._temporary = temporary
        self._host = ""
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def resting(self) -> AsyncIterator[None]:
        """Build no root meanwhile: what is in the directory for temporary files is left from an earlier process."""
        async with self._lock:
            yield

    async def of_host(self) -> str:
        """Return the image of the skeleton for the host's own programs."""
        async with self._lock:
            if not self._host or not await self._is_there(self._host):
                try:
                    archive = await asyncio.to_thread(_skeleton, self._temporary)
                except OSError as error:
                    raise PlatformError(f"the root of a container cannot be made: {error}") from error
                name = f"{REPOSITORY}:host-{hashlib.sha256(archive).hexdigest()[:32]}"
                if not await self._is_there(name):
                    await self._engine.import_image(_in_chunks(archive), name, {DIRECTORY: "/"})
                self._host = name
            return self._host

    async def of_image(self, image: RootImage) -> str:
        """Return the image of a root in carrel's storage. The first use imports it, which takes a while."""
        key = hashlib.sha256(repr((FORMAT, image.directory, image.identity)).encode()).hexdigest()[:32]
        name = f"{REPOSITORY}:image-{key}"
        async with self._lock:
            if not await self._is_there(name):
                found = await asyncio.to_thread(os.stat, image.directory)
                if (found.st_dev, found.st_ino) != tuple(image.identity):
                    raise PlatformError("the root of the image was replaced meanwhile")
                await self._remove_outdated()
                await self._engine.import_image(_tree(image.directory), name, {DIRECTORY: image.directory})
        return name

    async def _is_there(self, name: str) -> bool:
        return await self._engine.get(f"/images/{name}/json") is not None

    async def _remove_outdated(self) -> None:
        """Remove imported roots whose directory carrel has removed. One that a container still uses stays."""
        for found in await self._engine.get("/images/json", filters=f'{{"label": ["{DIRECTORY}"]}}') or ():
            directory = (found.get("Labels") or {}).get(DIRECTORY, "")
            if directory and not await asyncio.to_thread(os.path.isdir, directory):
                try:
                    await self._engine.delete(f"/images/{found['Id']}")
                except EngineRefusal:
                    continue


def user_of(image: RootImage) -> ImageUser:
    """Return the agent's user in an image. Raises `Unsupported` for a user whom a container cannot be. Blocking.

    The files of workspaces belong to one user on the disk, and Docker translates no owners. So an agent always has this
    user's number; root, the user of most images, becomes this user too.
    """
    found = image_user.find(image.directory, image.user)
    if found.uid not in {0, rootfs.SANDBOX_UID}:
        raise Unsupported(
            f"the image wants user {found.uid}, and provider 'docker' runs every agent as {rootfs.SANDBOX_UID}",
            field="image",
            hint=f"use the provider 'namespace', or set USER {rootfs.SANDBOX_UID} in the image",
        )
    return found


def host_directories() -> list[str]:
    """Return the directories of the host that a sandbox with its programs has mounted."""
    plan = rootfs.base_plan(rootfs.host_links())
    return [step.target for step in plan if isinstance(step, rootfs.Bind)]


def _skeleton(temporary: str) -> bytes:
    """Return an archive of the root that every sandbox with the host's programs has, without what is mounted."""
    plan = rootfs.base_plan(rootfs.host_links())
    folder = tempfile.mkdtemp(prefix="root-", dir=temporary)
    try:
        rootfs.apply_plan([step for step in plan if not isinstance(step, _MOUNTED)], folder)
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for path in _walk(folder):
                archive.add(path, os.path.relpath(path, folder), recursive=False, filter=_anonymous)
                if buffer.tell() > _MOST_SKELETON:
                    raise PlatformError("the public configuration of this host is too large for a container")
        return buffer.getvalue()
    finally:
        remove_tree(folder)


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mtime = 0
    return entry


def _walk(folder: str) -> Iterator[str]:
    """Yield every path below a folder, a directory before its content, in an order that does not change."""
    for place, names, files in os.walk(folder, onerror=_fail):
        names.sort()
        yield from (os.path.join(place, name) for name in sorted((*names, *files)))


def _fail(error: OSError) -> None:
    """A root from which something is missing must not become an image."""
    raise error


async def _in_chunks(data: bytes) -> AsyncGenerator[bytes]:
    for start in range(0, len(data), _CHUNK):
        yield data[start : start + _CHUNK]


async def _tree(directory: str) -> AsyncGenerator[bytes]:
    """Yield the archive of a root, with the owners that its files have in the image, while a thread makes it.

    The thread writes to a pipe: whoever does not want the rest closes it, and so ends the thread.
    """
    reading, writing = os.pipe()
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    pipe, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(reading, "rb", 0))
    work = asyncio.ensure_future(asyncio.to_thread(_write_tree, directory, writing))
    try:
        while chunk := await reader.read(_CHUNK):
            yield chunk
        await work
    except OSError as error:
        raise PlatformError(f"the root of an image cannot be read: {error}") from error
    finally:
        pipe.close()
        await asyncio.gather(work, return_exceptions=True)


def _write_tree(directory: str, descriptor: int) -> None:
    """Write the archive to a descriptor, and close it."""
    with (
        open(descriptor, "wb", buffering=_CHUNK) as file,
        tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT) as archive,
    ):
        present = set()
        for name in _PLACES:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        for path in _walk(directory):
            name, kind = os.path.relpath(path, directory), os.lstat(path).st_mode
            if name in _PLACES:
                continue
            if stat.S_ISREG(kind) or stat.S_ISDIR(kind) or stat.S_ISLNK(kind):  # a container has its own devices
                present.add(name)
                archive.add(path, name, recursive=False)
        for path, text in image_root.FALLBACKS.items():
            if path.lstrip("/") not in present:
                entry = tarfile.TarInfo(path.lstrip("/"))
                entry.size, entry.mode = len(text), 0o644
                archive.addfile(entry, io.BytesIO(text.encode()))
