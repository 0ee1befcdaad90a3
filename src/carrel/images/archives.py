"""Import of `docker save` archives and OCI layouts, and export as both in one.

An archive is hostile. Its content is read by exact names, each bounded, and never unpacked as a whole. Blobs get the
digest that their bytes have; what an archive claims about them is compared, never believed.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from typing import IO, Any, Protocol

from carrel.errors import CarrelError, ImageRefused, InvalidRequest, LimitExceeded
from carrel.images.documents import (
    LARGEST_DOCUMENT,
    OCI_CONFIG,
    OCI_INDEX,
    OCI_LAYER,
    OCI_MANIFEST,
    BlobDescriptor,
    ImageIndex,
    ImageManifest,
    ImagePlatform,
    digest_of,
    encode,
    parse_config,
    parse_manifest,
    read_json,
)
from carrel.images.layer_reading import FILE, HARD_LINK, SYMLINK, Entry, LayerLimits, LayerReader
from carrel.images.reference import ImageReference
from carrel.images.storage import ImageStorage, LayerProgress, Progress, StoredImage
from carrel.primitives.atomic import write_all
from carrel.threads import run_to_end

_PIECE = 1 << 20
_MOST_MEMBERS = 20_000
_MOST_IMAGES = 100
_NAMED = "org.opencontainers.image.ref.name"
_CONTAINERD_NAME = "io.containerd.image.name"
_LAYOUT = b'{"imageLayoutVersion":"1.0.0"}'


class _Source(Protocol):
    """The files of an archive."""

    def open(self, name: str) -> IO[bytes] | None: ...

    def close(self) -> None: ...


class _LayoutFolder:
    def __init__(self, path: str):
        self._root = os.path.realpath(path)

    def open(self, name: str) -> IO[bytes] | None:
        path = os.path.realpath(os.path.join(self._root, name))
        if not path.startswith(self._root + "/") or not os.path.isfile(path):
            return None
        return open(path, "rb")

    def close(self) -> None:
        pass


class _Section(io.RawIOBase):
    """A part of an open file."""

    def __init__(self, descriptor: int, start: int, size: int):
        self._descriptor, self._at, self._end = descriptor, start, start + size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = os.preadv(self._descriptor, [memoryview(buffer)[: self._end - self._at]], self._at)
        self._at += count
        return count


class _Tar:
    """A tar file. It is read like a layer, as hostile input. `docker save` of old versions links equal layers to one
    another.
    """

    def __init__(self, path: str):
        self._file = open(path, "rb")  # noqa: SIM115 - closed by `close`
        self._members: dict[str, tuple[Entry, int]] = {}
        limits = LayerLimits(os.fstat(self._file.fileno()).st_size, _MOST_MEMBERS, 1)
        reader = LayerReader(path, limits, "")
        try:
            for entry in reader:
                self._members[os.path.normpath(os.fsdecode(entry.name))] = entry, reader.offset
        except ImageRefused as error:
            self._file.close()
            raise ImageRefused(f"{path} is not a tar file of images: {error.detail}", field="path") from None
        finally:
            reader.close()

    def open(self, name: str) -> IO[bytes] | None:
        found = self._members.get(os.path.normpath(name))
        for _ in range(2):
            if found is not None and found[0].kind in {SYMLINK, HARD_LINK}:
                link = found[0]
                near = os.path.dirname(os.fsdecode(link.name)) if link.kind == SYMLINK else ""
                found = self._members.get(os.path.normpath(os.path.join(near, os.fsdecode(link.target))))
        if found is None or found[0].kind != FILE:
            return None
        return io.BufferedReader(_Section(self._file.fileno(), found[1], found[0].size))

    def close(self) -> None:
        self._file.close()


async def import_archive(
    storage: ImageStorage,
    path: str,
    platform: ImagePlatform,
    progress: Progress,
    *,
    name: ImageReference | None = None,
) -> list[StoredImage]:
    """Store the images of a `docker save` archive or an OCI layout: a directory, or a tar file, plain or gzip.

    The images get the names in the archive; `name` replaces them if the archive has one image.
    """
    try:
        return await _import(storage, path, platform, progress, name)
    except (ImageRefused, LimitExceeded):
        await run_to_end(storage.forget_refused)
        raise


async def _import(
    storage: ImageStorage, path: str, platform: ImagePlatform, progress: Progress, name: ImageReference | None
) -> list[StoredImage]:
    with storage.adding():
        found = await run_to_end(lambda: _Import(storage, path, platform).run())
        if not found:
            raise ImageRefused(f"{path} has no image for {platform}", field="path")
        if name is not None and len(found) > 1:
            raise InvalidRequest(
                f"{path} has {len(found)} images, and one name was given", field="name", hint="import it without a name"
            )
        stored = []
        for digest, names in found:
            image = await storage.add_image(digest, [name] if name is not None else names, progress)
            for layer in image.manifest.layers:
                progress(LayerProgress(layer.digest, "done", layer.size, layer.size))
            stored.append(image)
        return stored


class _Import:
    """One archive on its way into the storage. Blocking."""

    def __init__(self, storage: ImageStorage, path: str, platform: ImagePlatform):
        self._storage = storage
        self._path = path
        self._platform = platform
        self._source: _Source
        self._place: str

    def run(self) -> list[tuple[str, list[ImageReference]]]:
        """Store all blobs, and return the digest of each manifest with its names."""
        with self._storage.temporary() as self._place:
            return self._run()

    def _run(self) -> list[tuple[str, list[ImageReference]]]:
        try:
            if os.path.isdir(self._path):
                self._source = _LayoutFolder(self._path)
            elif _is_gzip(self._path):
                plain = os.path.join(self._place, "plain")
                self._gunzip(plain)
                self._source = _Tar(plain)
            else:
                self._source = _Tar(self._path)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise InvalidRequest(f"cannot read {self._path}: {error}", field="path") from None
        try:
            # Newer versions of `docker save` write both; the layout keeps the digests of the registry.
            index = self._document("index.json")
            if index is not None and self._document("oci-layout") is not None:
                return self._layout(index)
            manifests = self._document("manifest.json")
            if manifests is not None:
                return self._docker(manifests)
        finally:
            self._source.close()
        raise ImageRefused(
            f"{self._path} is no image: it has neither index.json nor manifest.json",
            field="path",
            hint="make it with `docker save`, or as an OCI layout",
        )

    def _gunzip(self, target: str) -> None:
        """Decompress the archive: its files are not read in their order."""
        most, done = self._storage.limits.max_bytes, 0
        with gzip.open(self._path) as source, open(target, "xb", buffering=0) as plain:
            while piece := source.read(_PIECE):
                done += len(piece)
                if done > most:
                    raise ImageRefused(
                        f"{self._path} unpacks to more than {most >> 20} MiB",
                        field="path",
                        hint="raise images.layer_max_mb if you trust this archive",
                    )
                write_all(plain.fileno(), piece)

    def _document(self, name: str) -> bytes | None:
        file = self._source.open(name)
        if file is None:
            return None
        with file:
            data = file.read(LARGEST_DOCUMENT + 1)
        if len(data) > LARGEST_DOCUMENT:
            raise ImageRefused(f"{name} in {self._path} is too large", field="path")
        return data

    # OCI layouts

    def _layout(self, data: bytes) -> list[tuple[str, list[ImageReference]]]:
        found: dict[str, list[ImageReference]] = {}
        index = parse_manifest(data, OCI_INDEX)
        if not isinstance(index, ImageIndex):
            raise ImageRefused(f"index.json in {self._path} is not an index", field="path")
        for entry in index.manifests[:_MOST_IMAGES]:
            if entry.platform is not None and entry.platform.architecture != self._platform.architecture:
                continue
            raw = self._blob(entry)
            document = parse_manifest(raw, entry.media_type)
            if isinstance(document, ImageIndex):
                raw = self._blob(document.choose(self._platform))
                document = parse_manifest(raw)
            if isinstance(document, ImageIndex):
                raise ImageRefused("an index of the archive leads to another index", field="path")
            for blob in (document.config, *document.layers):
                if not self._storage.has_blob(blob.digest):
                    self._copy(_blob_name(blob.digest), blob.digest, blob.size)
            self._storage.add_blob(raw)
            text = entry.annotations.get(_CONTAINERD_NAME) or entry.annotations.get(_NAMED)
            found.setdefault(digest_of(raw), []).extend(_references([text] if text else []))
        return list(found.items())

    def _blob(self, descriptor: BlobDescriptor) -> bytes:
        data = self._document(_blob_name(descriptor.digest))
        if data is None or digest_of(data) != descriptor.digest:
            raise ImageRefused(f"{descriptor.digest[:19]} in {self._path} is missing or damaged", field="path")
        return data

    # `docker save`

    def _docker(self, data: bytes) -> list[tuple[str, list[ImageReference]]]:
        found = []
        for entry in _list(read_json(b'{"images":' + data + b"}", "manifest.json").get("images"))[:_MOST_IMAGES]:
            config_name, layer_names = _get(entry, "Config"), _list(_get(entry, "Layers"))
            config_data = self._document(config_name) if isinstance(config_name, str) else None
            if config_data is None or not all(isinstance(each, str) for each in layer_names):
                raise ImageRefused(f"manifest.json in {self._path} is not valid", field="path")
            config = parse_config(config_data)
            if len(config.diff_ids) != len(layer_names):
                raise ImageRefused("the image's manifest and configuration list different layers", field="path")
            layers = []
            for layer_name, diff_id in zip(layer_names, config.diff_ids, strict=True):
                if not self._storage.has_blob(diff_id):
                    digest, size = self._copy(layer_name)
                else:
                    digest, size = diff_id, os.stat(self._storage.blob_path(diff_id)).st_size
                layers.append(BlobDescriptor(mediaType=OCI_LAYER, digest=digest, size=size))
            self._storage.add_blob(config_data)
            config_blob = BlobDescriptor(mediaType=OCI_CONFIG, digest=digest_of(config_data), size=len(config_data))
            manifest = self._storage.add_blob(ImageManifest.of(config_blob, layers))
            tags = [tag for tag in _list(_get(entry, "RepoTags")) if isinstance(tag, str)]
            found.append((manifest, _references(tags)))
        return found

    def _copy(self, name: str, digest: str | None = None, size: int | None = None) -> tuple[str, int]:
        """Store a file of the archive as a blob, which must have this digest and size. Returns what it has."""
        file = self._source.open(name)
        if file is None:
            raise ImageRefused(f"{name[:200]} is missing in {self._path}", field="path")
        most = self._storage.limits.max_bytes
        partial = os.path.join(self._place, "blob")
        hashed, done = hashlib.sha256(), 0
        with file, open(partial, "wb", buffering=0) as target:
            while piece := file.read(_PIECE):
                hashed.update(piece)
                done += len(piece)
                if done > (most if size is None else size):
                    break
                write_all(target.fileno(), piece)
        actual = f"sha256:{hashed.hexdigest()}"
        if done > most or actual != (digest or actual) or done != (done if size is None else size):
            raise ImageRefused(
                f"{name[:200]} in {self._path} is too large, or not what its digest and size promise", field="path"
            )
        self._storage.place_blob(partial, actual)
        return actual, done


def _is_gzip(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == b"\x1f\x8b"


def _blob_name(digest: str) -> str:
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _references(texts: Sequence[str]) -> list[ImageReference]:
    """Return the names that are references. In a layout a name may be a tag alone, which says nothing here."""
    found = []
    for text in texts[:_MOST_IMAGES]:
        if not re.search(r"[/:]", text):
            continue
        try:
            found.append(ImageReference.parse(text))
        except CarrelError:
            continue
    return found


class LayoutExport:
    """An image as an OCI layout in a tar file, of `size` bytes. The image must be held until the last piece is read."""

    def __init__(self, storage: ImageStorage, image: StoredImage, name: ImageReference | None):
        blobs = dict.fromkeys((image.digest, *(b.digest for b in (image.manifest.config, *image.manifest.layers))))
        self._members = [(_tar_header(each, data), data) for each, data in _documents(storage, image, name).items()]
        self._blobs = [
            (_tar_header(_blob_name(digest), os.stat(path).st_size), path)
            for digest, path in ((each, storage.blob_path(each)) for each in blobs)
        ]
        self.size = sum(map(len, self.pieces(content=False))) + sum(
            _padded(os.stat(path).st_size) for _header, path in self._blobs
        )

    def pieces(self, *, content: bool = True) -> Iterator[bytes]:
        """Yield the bytes of the file; those of the blobs only with `content`. Blocking."""
        for header, data in self._members:
            yield header + data + bytes(-len(data) % tarfile.BLOCKSIZE)
        for header, path in self._blobs:
            yield header
            if content:
                with open(path, "rb") as file:
                    while piece := file.read(_PIECE):
                        yield piece
                    yield bytes(-file.tell() % tarfile.BLOCKSIZE)
        yield bytes(2 * tarfile.BLOCKSIZE)


def _documents(storage: ImageStorage, image: StoredImage, name: ImageReference | None) -> dict[str, bytes]:
    """Return the documents of a layout, and that of `docker save`, which older versions of Docker need."""
    size = os.stat(storage.blob_path(image.digest)).st_size
    entry: dict[str, object] = {"mediaType": image.manifest.media_type or OCI_MANIFEST, "digest": image.digest}
    notes = {} if name is None else {_CONTAINERD_NAME: str(name), _NAMED: name.tag or ""}
    index = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [{**entry, "size": size, "annotations": notes}]}
    saved = {
        "Config": _blob_name(image.manifest.config.digest),
        "RepoTags": [] if name is None else [name.familiar],
        "Layers": [_blob_name(each.digest) for each in image.manifest.layers],
    }
    return {"oci-layout": _LAYOUT, "index.json": encode(index), "manifest.json": b"[" + encode(saved) + b"]"}


def _tar_header(name: str, content: bytes | int) -> bytes:
    """Return the header of a file in a tar archive, for its content or size."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = content if isinstance(content, int) else len(content), 0o644
    return info.tobuf(tarfile.GNU_FORMAT)


def _padded(size: int) -> int:
    return size + -size % tarfile.BLOCKSIZE
