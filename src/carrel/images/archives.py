"""Import of `docker save` archives and OCI layouts, and export as an OCI layout."""

from __future__ import annotations

from collections.abc import Sequence

from carrel.images.documents import ImagePlatform
from carrel.images.reference import ImageReference
from carrel.images.storage import ImageStorage, Progress, StoredImage


async def import_archive(
    storage: ImageStorage,
    path: str,
    platform: ImagePlatform,
    progress: Progress,
    *,
    name: ImageReference | None = None,
) -> list[StoredImage]:
    """Store the images of a `docker save` archive or an OCI layout: a directory, or a tar file that may be compressed.

    The images get the names in the archive; `name` replaces them if the archive has one image.
    """
    raise NotImplementedError


async def export_layout(storage: ImageStorage, images: Sequence[StoredImage], path: str) -> None:
    """Write images as an OCI layout: a new directory, or a tar file if `path` ends with `.tar`."""
    raise NotImplementedError
