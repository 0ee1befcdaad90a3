"""Images in the storage of a server, made from a root that a function fills."""

from __future__ import annotations

import io
import json
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.support.images import debian

from carrel.images.documents import (
    OCI_CONFIG,
    OCI_LAYER,
    BlobDescriptor,
    ImageConfig,
    ImageManifest,
    ImagePlatform,
    digest_of,
)
from carrel.images.reference import ImageReference
from carrel.images.storage import ImageStorage, StoredImage


def small(root: Path) -> None:
    """A root with a shell and a few programs."""
    debian(root, python=False, programs=("sh", "cat", "echo", "id", "ls", "pwd", "sleep", "env"))


def layer(fill: Callable[[Path], None]) -> bytes:
    """The tar of a root."""
    with tempfile.TemporaryDirectory() as place:
        root = Path(place, "root")
        fill(root)
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for entry in sorted(root.iterdir()):
                archive.add(entry, entry.name)
        return out.getvalue()


def documents(content: bytes, **config: object) -> tuple[bytes, bytes]:
    """The manifest and the configuration of an image with one layer."""
    architecture = ImagePlatform.of_host().architecture
    written = ImageConfig(architecture, diff_ids=(digest_of(content),), **config).encode()  # type: ignore[arg-type]
    head = BlobDescriptor(mediaType=OCI_CONFIG, digest=digest_of(written), size=len(written))  # type: ignore[call-arg]
    body = BlobDescriptor(mediaType=OCI_LAYER, digest=digest_of(content), size=len(content))  # type: ignore[call-arg]
    return ImageManifest.of(head, [body]), written


async def store(storage: ImageStorage, name: str, content: bytes, **config: object) -> StoredImage:
    """Put an image with one layer into a storage."""
    with storage.adding():
        manifest, written = documents(content, **config)
        for blob in (content, written, manifest):
            storage.add_blob(blob)
        return await storage.add_image(digest_of(manifest), [ImageReference.parse(name)], lambda _progress: None)


def docker_archive(name: str, content: bytes, **config: object) -> bytes:
    """An archive of `docker save` with one image."""
    _manifest, written = documents(content, **config)
    listed = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for path, data in (
            ("layer.tar", content),
            ("config.json", written),
            ("manifest.json", json.dumps(listed).encode()),
        ):
            info = tarfile.TarInfo(path)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()
