"""The images of a server on its disk.

    blobs/HEX        manifests, configurations and layers as they came, by digest
    partial/HEX      layers whose download was interrupted, and may go on within a day
    layers/HEX       unpacked layers, each once, by the digest of its tar (`diff_id`)
    roots/HEX        root file systems, by chain: directories of their own, files are hard links into `layers`
    images/HEX       one empty file for each complete image, by the digest of its manifest; its time is the last use
    names/HEX        references and the image that each means
    temporary/       everything while it is made or removed

Everything is made in `temporary` and published by one rename, and an image exists when its file in `images` does: that
is written last, after everything else is on the disk. So a process that is killed leaves nothing half-made in use; what
it left in `temporary` is removed later, when nobody holds the lock on it. Several processes may use one directory.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from carrel.errors import ImageRefused, NotFound, PlatformError, from_problem
from carrel.images.assembly import LAYER_RECORD
from carrel.images.documents import ImageConfig, ImageManifest, digest_of, parse_config, parse_manifest
from carrel.images.layer_reading import LayerLimits
from carrel.images.reference import ImageReference
from carrel.images.unpack import disk_problem
from carrel.primitives import libc
from carrel.primitives.atomic import sync_directory, write_file
from carrel.primitives.cache import Cache
from carrel.primitives.keyed_lock import KeyedLocks
from carrel.primitives.trees import DIRECTORY, remove_tree
from carrel.threads import run_to_end

_FOLDERS = ("blobs", "partial", "layers", "roots", "images", "names", "temporary")
_REMEMBERED = 256
_RETRY_S = 86_400.0
"""Seconds until the downloads of a pull that did not succeed are removed."""


@dataclass(frozen=True)
class LayerProgress:
    """How far one layer is. `step` is `download`, `unpack`, `upload` or `done`; `digest` is that of its blob."""

    digest: str
    step: str
    done: int
    total: int


Progress = Callable[[LayerProgress], None]
"""Called on the event loop, at most a few times a second for each layer."""


@dataclass(frozen=True)
class StoredImage:
    """A complete image on this disk."""

    digest: str
    """The digest of its manifest."""
    root: str
    """The absolute path of its root file system. Shared by all sandboxes: nobody may write there."""
    config: ImageConfig
    manifest: ImageManifest
    size: int
    """Bytes of its blobs, as they came from the registry."""
    unpacked: int
    """Bytes of its unpacked layers. Layers that images share are counted in each."""
    used: float
    """When it was last used, in seconds since 1970."""
    names: tuple[str, ...]
    """The references that mean this image."""

    @property
    def layers(self) -> tuple[str, ...]:
        """The digests of its unpacked layers (`diff_ids`), the lowest first."""
        return self.config.diff_ids


@dataclass(frozen=True)
class CollectedImages:
    """What a collection removed."""

    images: tuple[str, ...]
    freed: int


class RootHold:
    """Keeps the root of an image from being removed, also by other processes, until it is released or this process
    ends.
    """

    def __init__(self, descriptor: int):
        self._descriptor = descriptor

    def release(self) -> None:
        """Allow the removal. May be called twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> RootHold:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.release()


class ImageStorage:
    """The images below `directory`. Methods that are not `async` take milliseconds, `prepare` and `collect` may take
    long: call these in a thread. `children` is how many layers are unpacked at once.
    """

    def __init__(self, directory: str, limits: LayerLimits, children: int = 2):
        self.directory = os.path.abspath(directory)
        self.limits = limits
        self._locks = KeyedLocks()
        self._children = asyncio.Semaphore(children)
        self._parsed: Cache[str, tuple[ImageManifest, ImageConfig, int]] = Cache(_REMEMBERED)

    def prepare(self) -> None:
        """Create the directories and remove what killed processes left. Blocking."""
        try:
            os.makedirs(self.directory, exist_ok=True)
            # Only we may enter: an image can hold programs with the setuid bit, which nobody else here may run.
            os.chmod(self.directory, 0o700)
            for folder in _FOLDERS:
                with suppress(FileExistsError):
                    os.mkdir(self._path(folder), 0o700)
        except OSError as error:
            raise PlatformError(f"cannot make {self.directory}: {error.strerror}", field="data_dir") from None
        with self._locked():
            self._retire_unused(())
        self._sweep()

    def forget_refused(self) -> None:
        """Remove at once what no image refers to: an image was refused, and nothing of it stays. Blocking."""
        with self._locked():
            self._retire_unused({self._path("blobs", name) for name in os.listdir(self._path("blobs"))})
        self._sweep()

    # Reading

    def find(self, reference: ImageReference) -> StoredImage | None:
        """Return the image that a reference means here, or None. A registry may have another one by now."""
        digest = self._digest_of(reference)
        return None if digest is None else self._load(digest)

    def open(self, reference: ImageReference) -> StoredImage:
        """Return the image that a reference means here. Raises `NotFound`."""
        found = self.find(reference)
        if found is None:
            raise NotFound(
                f"there is no image {reference.familiar} here", field="image", hint="pull, import or build it first"
            )
        return found

    def list(self) -> list[StoredImage]:
        """Return all images, the most recently used first."""
        found = (self._load(f"sha256:{name}") for name in os.listdir(self._path("images")))
        return sorted((each for each in found if each is not None), key=lambda each: each.used, reverse=True)

    def hold(self, digest: str) -> RootHold:
        """Keep an image from being collected while a sandbox uses its root. Counts as use. Raises `NotFound`."""
        while (image := self._load(digest)) is not None:
            with suppress(FileNotFoundError):
                descriptor = os.open(image.root, DIRECTORY)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_SH)
                    # The lock is worth nothing on a root that was moved away before it was taken.
                    if os.path.samestat(os.fstat(descriptor), os.stat(image.root)):
                        os.utime(self._path("images", digest))
                        return RootHold(descriptor)
                except BaseException:
                    os.close(descriptor)
                    raise
                os.close(descriptor)
        raise NotFound(f"there is no image {digest[:19]} here", field="image", hint="pull, import or build it first")

    # Naming

    def name(self, reference: ImageReference, digest: str) -> None:
        """Let a reference mean an image that is here."""
        with self._locked():
            if not os.path.exists(self._path("images", digest)):
                raise NotFound(f"there is no image {digest[:19]} here", field="image")
            self._write_name(reference, digest)

    def remove_name(self, reference: ImageReference) -> str | None:
        """Let a reference mean nothing here, and return the digest that it meant. An image without a name that nothing
        uses is removed by the next collection.
        """
        with self._locked():
            digest = self._digest_of(reference)
            if digest is None:
                return None
            wanted = None if reference.digest is not None else str(reference)
            for path, name, meant in self._names():
                if meant == digest and wanted in {None, name}:
                    os.unlink(path)
            return digest

    # Adding

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Keep blobs and layers that no image refers to yet from being collected, for the length of the block.

        An `OSError` in it becomes the error for users: the disk may be full.
        """
        descriptor = os.open(self._path("adding"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            yield
        except (TimeoutError, ConnectionError):  # these are of no disk
            raise
        except OSError as error:
            raise disk_problem(error) from error
        finally:
            os.close(descriptor)

    def has_blob(self, digest: str) -> bool:
        """Return whether a blob is here, whole and verified."""
        return os.path.exists(self._path("blobs", digest))

    def blob_path(self, digest: str) -> str:
        """Return the path of a blob, to read it. It may not exist."""
        return self._path("blobs", digest)

    def blob_lock(self, digest: str) -> asyncio.Lock:
        """Return the lock of those in this process who bring a blob here."""
        return self._locks.of(("blob", digest))

    def partial_path(self, digest: str) -> str:
        """Return the path for a download of a blob that may be resumed. Other files belong into `temporary`."""
        return self._path("partial", digest)

    def read_blob(self, digest: str) -> bytes:
        """Return a document. Raises `NotFound`."""
        try:
            with open(self._path("blobs", digest), "rb") as file:
                return file.read()
        except FileNotFoundError:
            raise NotFound(f"the blob {digest[:19]} is not here", field="image", hint="pull the image again") from None

    def add_blob(self, data: bytes) -> str:
        """Store a document and return its digest."""
        digest = digest_of(data)
        with self._locked():
            write_file(self._path("blobs", digest), data, temporary=self._path("temporary"))
        return digest

    def place_blob(self, path: str, digest: str) -> None:
        """Move a file on this file system to where the blob `digest` belongs. Its content was verified. Blocking."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(path, self._path("blobs", digest))
        sync_directory(self._path("blobs"))

    def has_layer(self, diff_id: str) -> bool:
        """Return whether a layer is unpacked here."""
        return os.path.exists(self._path("layers", diff_id))

    async def unpack_layer(
        self, blob: str, diff_id: str, progress: Progress, *, path: str | None = None, total: int = 0
    ) -> None:
        """Unpack the layer in the blob `blob` (or at `path`), unless it is here already. Call it within `adding`.

        Raises `ImageRefused` for a hostile or damaged layer; then nothing of it stays.
        """
        async with self._locks.of(diff_id):
            if self.has_layer(diff_id):
                return
            source = path or self.blob_path(blob)
            total = total or os.stat(source).st_size
            checked = "" if blob == diff_id else diff_id  # a blob that is not compressed was checked when it came
            words = ["unpack", source, checked, *self.limits.words()]
            async with self._children:
                await self._make(
                    words,
                    self._path("layers", diff_id),
                    lambda done: progress(LayerProgress(blob, "unpack", done, total)),
                )

    async def add_image(self, manifest: str, references: Sequence[ImageReference], progress: Progress) -> StoredImage:
        """Complete the image whose manifest, configuration and layers are blobs here, and name it.

        Unpacks the layers that are not unpacked yet, and makes the root. Call it within `adding`.
        """
        document = parse_manifest(self.read_blob(manifest))
        if not isinstance(document, ImageManifest):
            raise ImageRefused("this is an index of images, not an image", field="image")
        config = parse_config(self.read_blob(document.config.digest))
        if len(config.diff_ids) != len(document.layers):
            raise ImageRefused(
                f"the image has {len(document.layers)} layers, and its configuration lists {len(config.diff_ids)}",
                field="image",
            )
        try:
            async with asyncio.TaskGroup() as group:
                for layer, diff_id in zip(document.layers, config.diff_ids, strict=True):
                    group.create_task(self.unpack_layer(layer.digest, diff_id, progress))
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        root = self._path("roots", config.chain_id)
        async with self._locks.of(config.chain_id):
            if not os.path.exists(root):
                layers = [self._path("layers", each) for each in config.diff_ids]
                await self._make(["assemble", *layers], root, lambda _done: None)
        if not os.path.exists(self._path("images", manifest)):
            await run_to_end(self._sync)
        with self._locked():
            missing = [
                path
                for path in (
                    root,
                    *(self._path("layers", each) for each in config.diff_ids),
                    *(self._path("blobs", each.digest) for each in (document.config, *document.layers)),
                )
                if not os.path.exists(path)
            ]
            if missing:
                raise PlatformError(f"{missing[0]} disappeared", hint="try again; nobody but carrel may write there")
            os.close(os.open(self._path("images", manifest), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
            os.utime(self._path("images", manifest))
            sync_directory(self._path("images"))
            for reference in references:
                self._write_name(reference, manifest)
        found = self._load(manifest)
        assert found is not None
        return found

    # Removing

    def collect(self, in_use: Collection[str], *, max_bytes: int, unused_s: float) -> CollectedImages:
        """Remove images that have no name, were not used for `unused_s` seconds, or are too much for `max_bytes`, the
        least recently used first. Images in `in_use` (digests) and held ones stay. Blocking.
        """
        removed: list[str] = []
        with self._locked():
            every = self.list()
            kept = every.copy()
            before = total = self._footprint(kept)
            for image in reversed(every):
                old = time.time() - image.used > unused_s
                unwanted = image.digest not in in_use and (old or not image.names or total > max_bytes)
                if unwanted and self._retire_image(image):
                    removed.append(image.digest)
                    kept.remove(image)
                    total = self._footprint(kept)
            self._retire_unused({path for image in every for path in self._blobs_of(image)})
        self._sweep()
        return CollectedImages(tuple(removed), before - total)

    def _retire_image(self, image: StoredImage) -> bool:
        descriptor = os.open(image.root, DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._make_old(self._blobs_of(image))  # if we are killed now, the next process removes them at once
            os.unlink(self._path("images", image.digest))
            for path, _name, meant in self._names():
                if meant == image.digest:
                    os.unlink(path)
        except BlockingIOError:  # a sandbox has it as its root
            return False
        finally:
            os.close(descriptor)
        return True

    def _blobs_of(self, image: StoredImage) -> Sequence[str]:
        found = (image.digest, image.manifest.config.digest, *(each.digest for each in image.manifest.layers))
        return [self._path("blobs", each) for each in found]

    def _retire_unused(self, blobs: Collection[str]) -> None:
        """Move what no image refers to into `temporary`, and forget names of images that are gone.

        Blobs that are not in `blobs` stay for a day: whoever pulled them may try again.
        """
        needed: set[str] = set()
        images = self.list()
        for image in images:
            needed.add(self._path("roots", image.config.chain_id))
            needed.update(self._path("layers", each) for each in image.layers)
            needed.update(self._blobs_of(image))
        for path, _name, meant in self._names():
            if all(image.digest != meant for image in images):
                os.unlink(path)
        adding = os.open(self._path("adding"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(adding, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for folder in ("roots", "layers", "blobs"):
                for name in os.listdir(self._path(folder)):
                    path = self._path(folder, name)
                    if path not in needed and (folder != "blobs" or path in blobs or _is_old(path)):
                        self._retire(path)
            for name in os.listdir(self._path("images")):  # its blobs are gone: nobody can use it
                if all(image.digest != f"sha256:{name}" for image in images):
                    os.unlink(self._path("images", name))
        except BlockingIOError:  # an image is being added: the next collection removes what nobody needs
            self._make_old(set(blobs) - needed)
        finally:
            os.close(adding)

    def _make_old(self, blobs: Collection[str]) -> None:
        """Let a later collection remove blobs that no image refers to, without waiting for another attempt."""
        for path in blobs:
            with suppress(FileNotFoundError):
                os.utime(path, (0, 0))

    def _retire(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(path, self._path("temporary", secrets.token_hex(12)))
        except BlockingIOError:
            pass  # a root of a removed image that a sandbox still has
        finally:
            os.close(descriptor)

    def _sweep(self) -> None:
        """Remove what nobody makes any more. A process that makes something holds the lock on its directory."""
        with self._locked():  # so no directory is seen between its creation and its lock
            left = [self._path("temporary", name) for name in os.listdir(self._path("temporary"))]
            for path in left:
                with suppress(IsADirectoryError, FileNotFoundError):
                    os.unlink(path)
            for name in os.listdir(self._path("partial")):
                path = self._path("partial", name)
                with suppress(FileNotFoundError):
                    if _is_old(path):
                        os.unlink(path)
        for path in left:
            with suppress(FileNotFoundError, NotADirectoryError, BlockingIOError):
                descriptor = os.open(path, DIRECTORY)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove_tree(path)
                finally:
                    os.close(descriptor)

    # Details

    def _path(self, folder: str, name: str = "") -> str:
        """Return a path in this storage; a digest is named by its hexadecimal digits."""
        return os.path.join(self.directory, folder, name.removeprefix("sha256:")).rstrip("/")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the whole storage: for renames and short writes."""
        descriptor = os.open(self._path("lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _sync(self) -> None:
        descriptor = os.open(self.directory, DIRECTORY)
        try:
            libc.sync(descriptor)
        finally:
            os.close(descriptor)

    def _names(self) -> Iterator[tuple[str, str, str]]:
        """Yield the file, the reference and the digest of each name."""
        for entry in os.listdir(self._path("names")):
            path = self._path("names", entry)
            with suppress(FileNotFoundError):
                record = _read_record(path)
                yield path, record["name"], record["digest"]

    def _digest_of(self, reference: ImageReference) -> str | None:
        if reference.digest is not None and os.path.exists(self._path("images", reference.digest)):
            return reference.digest
        with suppress(FileNotFoundError):
            return str(_read_record(self._name_path(reference))["digest"])
        return None

    def _name_path(self, reference: ImageReference) -> str:
        key = reference if reference.digest is None else reference.pinned(reference.digest)
        return self._path("names", hashlib.sha256(str(key).encode()).hexdigest())

    def _write_name(self, reference: ImageReference, digest: str) -> None:
        if reference.digest is not None:
            reference = reference.pinned(reference.digest)
        record = json.dumps({"name": str(reference), "digest": digest}).encode()
        write_file(self._name_path(reference), record, durable=True, temporary=self._path("temporary"))

    def _load(self, digest: str) -> StoredImage | None:
        try:
            used = os.stat(self._path("images", digest)).st_mtime
            known = self._parsed.get(digest)
            if known is None:
                known = self._parse(digest)
                self._parsed.put(digest, known)
        except (FileNotFoundError, NotFound):
            return None
        manifest, config, unpacked = known
        return StoredImage(
            digest=digest,
            root=self._path("roots", config.chain_id),
            config=config,
            manifest=manifest,
            size=sum(each.size for each in (manifest.config, *manifest.layers)),
            unpacked=unpacked,
            used=used,
            names=tuple(sorted(name for _path, name, meant in self._names() if meant == digest)),
        )

    def _parse(self, digest: str) -> tuple[ImageManifest, ImageConfig, int]:
        manifest = parse_manifest(self.read_blob(digest))
        assert isinstance(manifest, ImageManifest)  # or it would not have been added
        config = parse_config(self.read_blob(manifest.config.digest))
        return manifest, config, sum(self._layer_bytes(each) for each in set(config.diff_ids))

    def _layer_bytes(self, diff_id: str) -> int:
        return int(_read_record(os.path.join(self._path("layers", diff_id), LAYER_RECORD))["bytes"])

    def _footprint(self, images: Sequence[StoredImage]) -> int:
        """Return the bytes of images on the disk; what they share counts once."""
        blobs = {each.digest: each.size for image in images for each in (image.manifest.config, *image.manifest.layers)}
        layers = {each for image in images for each in image.layers}
        return sum(blobs.values()) + sum(self._layer_bytes(each) for each in layers)

    @contextmanager
    def temporary(self) -> Iterator[str]:
        """Yield a new directory on the file system of the images, and remove it if it is still there afterwards.

        What a killed process leaves there is removed by the next one. Blocking.
        """
        path = self._path("temporary", secrets.token_hex(12))
        with self._locked():
            os.mkdir(path, 0o700)
            descriptor = os.open(path, DIRECTORY)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            yield path
        finally:
            os.close(descriptor)
            remove_tree(path)

    async def _make(self, words: Sequence[str], target: str, report: Callable[[int], None]) -> None:
        """Make a directory in a child process, and publish it as `target`."""
        loop = asyncio.get_running_loop()
        child: list[subprocess.Popen[bytes]] = []

        def tell(done: int) -> None:
            loop.call_soon_threadsafe(report, done)

        def work() -> None:
            with self.temporary() as path:
                _run_child([*words[:1], path, *words[1:]], child, tell)
                try:
                    os.rename(path, target)
                except OSError as error:  # another process was faster
                    if error.errno not in {errno.EEXIST, errno.ENOTEMPTY}:
                        raise PlatformError(f"cannot write {target}: {error.strerror}") from None

        def stop() -> None:
            for process in child:
                process.kill()

        await run_to_end(work, stop=stop)


def first_error(errors: BaseException) -> BaseException:
    """Return one of the errors of several layers: the others have the same cause, or follow from it."""
    while isinstance(errors, BaseExceptionGroup):
        errors = errors.exceptions[0]
    return errors


def _is_old(path: str) -> bool:
    return time.time() - os.stat(path).st_mtime > _RETRY_S


def _read_record(path: str) -> dict[str, Any]:
    with open(path, "rb") as file:
        record: dict[str, Any] = json.load(file)
    return record


def _run_child(words: Sequence[str], started: list[subprocess.Popen[bytes]], report: Callable[[int], None]) -> None:
    """Run `carrel.images.unpack` and wait for it. Its last line is its result or its problem."""
    with subprocess.Popen(
        [sys.executable, "-m", "carrel.images.unpack", str(os.getpid()), *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd="/",
    ) as process:
        started.append(process)
        assert process.stdout is not None and process.stderr is not None
        answer: dict[str, Any] = {}
        for line in process.stdout:
            answer = json.loads(line)
            if "bytes" in answer:
                report(answer["bytes"])
        said = process.stderr.read().decode(errors="replace").strip()
    if "problem" in answer:
        raise from_problem(answer["problem"])
    if process.returncode != 0:
        raise PlatformError(
            f"the process that unpacks images ended with {process.returncode}: {said[-300:] or 'it said nothing'}",
            hint="see whether the host has memory and disk space left, then try again",
        )
