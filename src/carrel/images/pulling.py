"""Pulling an image from a registry into the storage, and pushing one back."""

from __future__ import annotations

import asyncio
import os
from contextlib import ExitStack

from carrel.errors import ImageRefused, LimitExceeded
from carrel.images.documents import BlobDescriptor, ImageIndex, ImagePlatform, digest_of, parse_config, parse_manifest
from carrel.images.reference import ImageReference
from carrel.images.registry import RegistryClient
from carrel.images.storage import ImageStorage, LayerProgress, Progress, StoredImage, first_error
from carrel.threads import run_to_end


async def pull_image(
    client: RegistryClient,
    storage: ImageStorage,
    reference: ImageReference,
    platform: ImagePlatform,
    progress: Progress,
) -> StoredImage:
    """Bring an image here, also if an older one of that name is here already. Only missing layers are downloaded."""
    try:
        return await _pull(client, storage, reference, platform, progress)
    except (ImageRefused, LimitExceeded):
        await run_to_end(storage.forget_refused)
        raise


async def _pull(
    client: RegistryClient,
    storage: ImageStorage,
    reference: ImageReference,
    platform: ImagePlatform,
    progress: Progress,
) -> StoredImage:
    raw, kind = await client.manifest(reference)
    document = parse_manifest(raw, kind)
    if isinstance(document, ImageIndex):
        chosen = document.choose(platform)
        raw, kind = await client.manifest(reference, chosen.digest)
        document = parse_manifest(raw, kind)
        if isinstance(document, ImageIndex):
            raise ImageRefused("the index of the image leads to another index", field="image")
    digest = digest_of(raw)
    with storage.adding():
        config_data = await client.document(reference, document.config)
        config = parse_config(config_data)
        if config.architecture and (config.os, config.architecture) != (platform.os, platform.architecture):
            raise ImageRefused(
                f"the image is for {config.platform}, and this host is {platform}",
                field="image",
                hint="choose an image for this platform, or set images.platform",
            )
        if len(config.diff_ids) != len(document.layers):
            raise ImageRefused("the image's manifest and configuration list different layers", field="image")
        _check_space(storage, [each for each in document.layers if not storage.has_blob(each.digest)])
        layers = {each.digest: (each, diff_id) for each, diff_id in zip(document.layers, config.diff_ids, strict=True)}
        try:
            async with asyncio.TaskGroup() as group:
                for layer, diff_id in layers.values():
                    group.create_task(_pull_layer(client, storage, reference, layer, diff_id, progress))
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        storage.add_blob(config_data)
        storage.add_blob(raw)
        return await storage.add_image(digest, [reference], progress)


async def _pull_layer(
    client: RegistryClient,
    storage: ImageStorage,
    reference: ImageReference,
    layer: BlobDescriptor,
    diff_id: str,
    progress: Progress,
) -> None:
    async with storage.blob_lock(layer.digest):
        if not storage.has_blob(layer.digest):
            with ExitStack() as stack:
                place = await run_to_end(lambda: stack.enter_context(storage.temporary()))
                path = await client.download(
                    reference,
                    layer,
                    storage.partial_path(layer.digest),
                    os.path.join(place, "blob"),
                    lambda done: progress(LayerProgress(layer.digest, "download", done, layer.size)),
                )
                await run_to_end(lambda: storage.place_blob(path, layer.digest))
    await storage.unpack_layer(layer.digest, diff_id, progress)
    progress(LayerProgress(layer.digest, "done", layer.size, layer.size))


def _check_space(storage: ImageStorage, layers: list[BlobDescriptor]) -> None:
    largest = storage.limits.max_bytes
    for layer in layers:
        if layer.size > largest:
            raise ImageRefused(
                f"the layer {layer.digest[:19]} has {layer.size} bytes; one layer may have {largest}",
                field="image",
                hint="raise images.layer_max_mb if you trust this image",
            )
    facts = os.statvfs(storage.directory)
    needed, free = sum(layer.size for layer in layers), facts.f_bavail * facts.f_frsize
    if needed > free:
        raise LimitExceeded(
            f"the image needs {needed >> 20} MiB, and the disk of {storage.directory} has {free >> 20} MiB left",
            field="image",
            hint="remove images that are not needed, or free disk space",
        )


async def push_image(
    client: RegistryClient, storage: ImageStorage, image: StoredImage, reference: ImageReference, progress: Progress
) -> str:
    """Send an image to a registry under a tag, and return its digest. Layers that it has already are not sent."""
    raw = storage.read_blob(image.digest)
    blobs = {each.digest: each for each in (image.manifest.config, *image.manifest.layers)}
    try:
        async with asyncio.TaskGroup() as group:
            for blob in blobs.values():
                group.create_task(_push_blob(client, storage, reference, blob, progress))
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None
    await client.put_manifest(reference, raw, image.manifest.media_type)
    return image.digest


async def _push_blob(
    client: RegistryClient,
    storage: ImageStorage,
    reference: ImageReference,
    blob: BlobDescriptor,
    progress: Progress,
) -> None:
    if not await client.has_blob(reference, blob.digest):
        await client.upload(
            reference,
            blob.digest,
            storage.blob_path(blob.digest),
            lambda done: progress(LayerProgress(blob.digest, "upload", done, blob.size)),
        )
    progress(LayerProgress(blob.digest, "done", blob.size, blob.size))
