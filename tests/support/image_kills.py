"""Images for a server that is killed: what is published, the work on them, and what may be on the disk afterwards.

The trees that images must have are read from their layers with `tarfile`, and not by carrel.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import stat
import tarfile
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path
from random import Random

from tests.support.images import debian
from tests.support.registry import RegistryServer, store_blobs, tar_entry, tar_of
from tests.support.stored_images import docker_archive, layer

from carrel.client import AsyncClient
from carrel.errors import CarrelError, NotFound
from carrel.images.layer_reading import LayerLimits
from carrel.images.pulling import push_image
from carrel.images.reference import ImageReference
from carrel.images.registry import RegistryAccess, RegistryClient
from carrel.images.storage import ImageStorage

PATH = {"environment": {"PATH": "/usr/bin:/bin"}}
LIMITS = LayerLimits(1 << 30, 100_000, 200)
DOCKERFILE = """\
FROM {base}
COPY files /copied
RUN cat /copied/0 > /made && rm /copied/1 && echo {word} >> /made
"""
CLEANED = ("layers", "roots", "images", "names", "temporary")
"""Folders of the storage where a new server leaves only what images need."""
FOLDERS = (*CLEANED, "blobs", "partial")
"""In the last two, downloads are kept for a day."""

Node = tuple[str, int, int, int, str]
"""The kind of a path, its mode, owner and group, and its content as a digest."""


def many_files(random: Random, folder: str, count: int, *more: tuple[tarfile.TarInfo, bytes]) -> bytes:
    """A layer of small files, so that its unpacking takes a while."""
    files = [
        tar_entry(f"{folder}/{number % 20}/{number}", random.randbytes(random.randrange(3000)), mode=0o640, uid=number)
        for number in range(count)
    ]
    return tar_of([*files, *more])


class Published:
    """Images in a registry, an archive of another one and a build context."""

    def __init__(self, registry: RegistryServer, place: Path):
        self._registry = registry
        self.names = {each: f"{registry.host}/killed/{each}:1" for each in ("first", "second", "third")}
        self.archive = place / "archive.tar"
        self.context = place / "context"

    async def fill(self, place: Path) -> None:
        """Make everything."""
        random = Random(17)
        base = layer(lambda root: debian(root, python=False, programs=("sh", "cat", "rm")))
        shared = many_files(random, "opt/shared", 700)
        above = many_files(
            random, "opt/above", 500, tar_entry("opt/shared/.wh.3"), tar_entry("opt/shared/4/.wh..wh..opq")
        )
        large = tar_of([tar_entry("opt/large", random.randbytes(12 << 20))])
        storage = ImageStorage(str(place / "made"), LIMITS)
        storage.prepare()
        client = RegistryClient(RegistryAccess(plain_http=frozenset({self._registry.host})))
        for name, tars in {
            "first": [base, shared],
            "second": [base, shared, above],
            "third": [base, large, above],
        }.items():
            reference = ImageReference.parse(self.names[name])
            with storage.adding():
                digest = store_blobs(storage, [(_squeezed(each), each) for each in tars], **PATH)
                image = await storage.add_image(digest, [reference], lambda _each: None)
            await push_image(client, storage, image, reference, lambda _each: None)
        await client.close()
        self.archive.write_bytes(docker_archive("imported:1", base, **PATH))
        (self.context / "files").mkdir(parents=True)
        for number in range(200):
            (self.context / "files" / str(number)).write_bytes(random.randbytes(500))


def _squeezed(tar: bytes) -> bytes:
    import gzip

    return gzip.compress(tar, 1, mtime=0)


class Work:
    """Everything that is done with images."""

    def __init__(self, published: Published, client: AsyncClient, word: str):
        self._published = published
        self._images = client.images
        self._word = word

    async def run(self, random: Random) -> None:
        """Do everything at once; what fails is left out: the server may be killed at any moment."""
        parts = {**self._parts(), "removed": self._remove}
        order = random.sample(sorted(parts), len(parts))
        await asyncio.gather(*(_try(parts[name]) for name in order))

    async def clear(self) -> None:
        """Remove everything that no sandbox uses."""
        for name in (*self._published.names.values(), "built:1"):
            with suppress(NotFound):
                await self._images.delete(name)

    async def repeat(self) -> None:
        """Do everything again; nothing may fail."""
        for part in self._parts().values():
            await part()

    def _parts(self) -> dict[str, Callable[[], Awaitable[object]]]:
        names = self._published.names
        pulls: dict[str, Callable[[], Awaitable[object]]] = {
            name: lambda image=image: self._images.pull(image) for name, image in names.items()
        }
        return {**pulls, "imported": lambda: self._images.import_archive(self._published.archive), "built": self._build}

    async def _build(self) -> None:
        context = self._published.context
        dockerfile = context / "Dockerfile"
        dockerfile.write_text(DOCKERFILE.format(base=self._published.names["first"], word=self._word))
        await self._images.build(context, name="built:1")

    async def _remove(self) -> None:
        for name in (self._published.names["second"], "imported:1", "built:1"):
            with suppress(CarrelError):
                await self._images.delete(name)


async def _try(part: Callable[[], Awaitable[object]]) -> None:
    with suppress(CarrelError):
        await part()


class OnDisk:
    """The images of a server, as they lie on its disk."""

    def __init__(self, directory: Path):
        self._directory = directory

    def listed(self, folder: str) -> set[str]:
        """What a folder of the storage has."""
        return set(os.listdir(self._directory / folder))

    def named(self) -> dict[str, str]:
        """The digests that names mean."""
        records = [json.loads((self._directory / "names" / each).read_bytes()) for each in self.listed("names")]
        return {record["name"]: record["digest"].removeprefix("sha256:") for record in records}

    def check_whole(self) -> None:
        """Every image has exactly what its layers say, and every name means an image."""
        images = self.listed("images")
        assert set(self.named().values()) <= images
        checked = set()
        for image in images:
            manifest, config = self._documents(image)
            root = self._directory / "roots" / _chain(config["rootfs"].get("diff_ids", []))
            if root not in checked:
                layers = [each["digest"].removeprefix("sha256:") for each in manifest["layers"]]
                wanted = _merged((self._directory / "blobs" / each).read_bytes() for each in layers)
                found = _tree(root)
                assert found == wanted, (
                    image,
                    {key for key in found.keys() | wanted.keys() if found.get(key) != wanted.get(key)},
                )
                checked.add(root)

    def surplus(self, folders: Iterable[str]) -> list[str]:
        """What these folders have and no image needs."""
        needed: dict[str, set[str]] = {folder: set() for folder in FOLDERS}
        needed["images"] = self.listed("images")
        needed["names"] = self.listed("names")
        for image in needed["images"]:
            manifest, config = self._documents(image)
            diff_ids = config["rootfs"].get("diff_ids", [])
            needed["layers"] |= {each.removeprefix("sha256:") for each in diff_ids}
            needed["roots"].add(_chain(diff_ids))
            blobs = [manifest["config"], *manifest["layers"]]
            needed["blobs"] |= {image, *(each["digest"].removeprefix("sha256:") for each in blobs)}
        return sorted(f"{folder}/{name}" for folder in folders for name in self.listed(folder) - needed[folder])

    def make_old(self) -> None:
        """Let more than a day pass."""
        for folder in ("blobs", "partial"):
            for name in self.listed(folder):
                os.utime(self._directory / folder / name, (1, 1))

    def _documents(self, image: str) -> tuple[dict, dict]:  # type: ignore[type-arg]
        manifest = json.loads((self._directory / "blobs" / image).read_bytes())
        config = manifest["config"]["digest"].removeprefix("sha256:")
        return manifest, json.loads((self._directory / "blobs" / config).read_bytes())


def _chain(diff_ids: list[str]) -> str:
    chain = diff_ids[0] if diff_ids else f"sha256:{hashlib.sha256().hexdigest()}"
    for each in diff_ids[1:]:
        chain = f"sha256:{hashlib.sha256(f'{chain} {each}'.encode()).hexdigest()}"
    return chain.removeprefix("sha256:")


def _merged(layers: Iterable[bytes]) -> dict[str, Node]:
    tree: dict[str, Node] = {}
    for blob in layers:
        own: dict[str, Node] = {}
        with tarfile.open(fileobj=io.BytesIO(blob)) as tar:
            for member in tar:
                name = os.path.normpath(member.name)
                above, _, base = name.rpartition("/")
                if base == ".wh..wh..opq":
                    _drop(tree, above, own=False)
                elif base.startswith(".wh."):
                    _drop(tree, f"{above}/{base[4:]}".lstrip("/"))
                elif name != ".":
                    own[name] = _node(tar, member)
                    while above and above not in own:
                        own[above] = tree.get(above, ("dir", 0o755, 0, 0, ""))
                        above = above.rpartition("/")[0]
        for name, node in own.items():
            if node[0] != "dir" and tree.get(name, node)[0] == "dir":
                _drop(tree, name)
            tree[name] = node
    return tree


def _drop(tree: dict[str, Node], path: str, *, own: bool = True) -> None:
    for each in [each for each in tree if each.startswith(f"{path}/") or (own and each == path)]:
        del tree[each]


def _node(tar: tarfile.TarFile, member: tarfile.TarInfo) -> Node:
    owner = (member.uid, member.gid)
    if member.isdir():
        return "dir", member.mode, *owner, ""
    if member.issym():
        return "link", 0o777, *owner, member.linkname
    content = tar.extractfile(member)
    assert content is not None, member
    return "file", member.mode, *owner, hashlib.sha256(content.read()).hexdigest()


def _tree(root: Path) -> dict[str, Node]:
    found: dict[str, Node] = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            info = os.lstat(path)
            owner, mode = (info.st_uid, info.st_gid), stat.S_IMODE(info.st_mode)
            relative = os.path.relpath(path, root)
            if stat.S_ISDIR(info.st_mode):
                found[relative] = "dir", mode, *owner, ""
            elif stat.S_ISLNK(info.st_mode):
                found[relative] = "link", 0o777, *owner, os.readlink(path)
            else:
                found[relative] = "file", mode, *owner, hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return found
