"""Pulling an image from a registry into the storage, and pushing one back."""

from __future__ import annotations

from carrel.images.documents import ImagePlatform
from carrel.images.reference import ImageReference
from carrel.images.registry import RegistryClient
from carrel.images.storage import ImageStorage, Progress, StoredImage


async def pull_image(
    client: RegistryClient,
    storage: ImageStorage,
    reference: ImageReference,
    platform: ImagePlatform,
    progress: Progress,
) -> StoredImage:
    """Bring an image here, also if an older one of that name is here already. Only missing layers are downloaded."""
    raise NotImplementedError


async def push_image(
    client: RegistryClient, storage: ImageStorage, image: StoredImage, reference: ImageReference, progress: Progress
) -> str:
    """Send an image to a registry under a tag, and return its digest. Layers that it has already are not sent."""
    raise NotImplementedError
