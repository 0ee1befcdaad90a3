"""What providers do with a launch whose root is built by `carrel.isolation.staging`."""

from __future__ import annotations

import os

from carrel.errors import PlatformError
from carrel.isolation import masks
from carrel.isolation.masks import Masks
from carrel.primitives.atomic import write_file
from carrel.providers.base import RootImage


def check_image(image: RootImage, images: str) -> None:
    """Check that the image is the directory that was meant, and that an overlay can name it."""
    found = os.lstat(image.directory)
    if (found.st_dev, found.st_ino) != tuple(image.identity):
        raise PlatformError(f"the image {image.directory} was replaced")
    if os.path.relpath(image.directory, images).startswith("..") or set(":,\\") & set(image.directory):
        raise PlatformError(f"the image {image.directory} is not below {images}")


def write_masks(wanted: Masks | None, path: str) -> str:
    """Write masks for a `StageOrder`; return the path, or nothing without masks. Blocking."""
    if wanted is None:
        return ""
    packed = masks.pack(wanted)
    try:
        write_file(path, masks.content(packed))
    finally:
        os.close(packed)
    return path
