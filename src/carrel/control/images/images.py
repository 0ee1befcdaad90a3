"""The images of a server: pulls them when they are missing, imports, pushes, exports, lists, removes and collects them.

Decides who may pull from where. The formats, the registry and the disk belong to `carrel.images`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from datetime import UTC, datetime

from carrel.config import ImageSettings
from carrel.control.images.shared_pulls import SharedPulls
from carrel.control.operations.admission import Admission
from carrel.control.operations.call import Call
from carrel.control.operations.caller import Caller, OwnWork
from carrel.control.sessions.slots import Slots
from carrel.errors import Conflict, ImageRefused, InvalidRequest, NotFound, RegistryFailed, TooLarge
from carrel.images.archives import LayoutExport, import_archive
from carrel.images.documents import ImagePlatform
from carrel.images.pulling import pull_image, push_image
from carrel.images.reference import DEFAULT_REGISTRY, ImageReference
from carrel.images.registry import RegistryAccess, RegistryClient
from carrel.images.storage import CollectedImages, ImageStorage, LayerProgress, Progress, RootHold, StoredImage
from carrel.images.unpack import disk_problem
from carrel.metrics import OK, Metrics, outcome_of
from carrel.models import operations as op
from carrel.models.images import (
    ImageDetails,
    ImageExport,
    ImageInfo,
    ImageList,
    ImageProgress,
    ImagePull,
    ImagePush,
)
from carrel.primitives.atomic import write_all
from carrel.store import ImageSession, SessionStore
from carrel.threads import run_to_end

log = logging.getLogger("carrel.images")

_MB = 1 << 20
_DAY_S = 86_400.0
_DIGEST = re.compile(r"(?:sha256:)?([0-9a-f]{8,64})")
CACHE_REPOSITORY = "carrel-build"
"""The repository of the names under which results of RUN lines are found again. They are not shown."""
_CACHED = f"localhost/{CACHE_REPOSITORY}:"
_MOST_NAMED = 5
"""How many users of an image an error names."""

Say = Callable[[ImageProgress], None]
Users = Mapping[str, Sequence[ImageSession]]
"""The sessions of each image, by its digest."""


def nothing(_progress: LayerProgress) -> None:
    """Take the progress of a pull that nobody watches."""


class Images:
    """The images of one server. `storage` is prepared."""

    def __init__(
        self,
        settings: ImageSettings,
        storage: ImageStorage,
        store: SessionStore,
        admission: Admission,
        metrics: Metrics,
        slots: Slots,
        *,
        node: str,
    ):
        self._settings = settings
        self._storage = storage
        self._store = store
        self._admission = admission
        self._metrics = metrics
        self._slots = slots
        self._node = node
        self._pulls = SharedPulls()
        self._platform = ImagePlatform.parse(settings.platform) if settings.platform else ImagePlatform.of_host()
        self._client = RegistryClient(
            RegistryAccess(
                allowed=settings.registry_names,
                plain_http=settings.plain_http_names,
                unverified=settings.unverified_names,
                ca_file=settings.ca_file,
                docker_config=settings.docker_config,
                timeout_s=settings.timeout_s,
                downloads=settings.downloads,
            )
        )

    async def close(self) -> None:
        """End the pulls and close the connections."""
        await self._pulls.close()
        await self._client.close()

    def parse(self, name: str) -> ImageReference:
        """Read a reference; `InvalidRequest`. A name without a registry belongs to that of the settings."""
        return ImageReference.parse(name, self._settings.registry)

    # pulling

    async def pull(self, caller: Caller, request: ImagePull, say: Say | None = None) -> ImageInfo:
        """Bring an image here, or its newest version. `say` is called with the progress of each layer."""

        reference = self.parse(request.image)
        image = await self._find(reference) if request.only_if_missing else None
        if image is None:
            image = await self._pull(caller, reference, _shown_to(say))
        return self._info(caller, image, await self._users())

    async def ensure(self, caller: Caller | OwnWork, reference: ImageReference) -> StoredImage:
        """Return an image for a sandbox; it is pulled if it is missing."""
        return await self._find(reference) or await self._pull(caller, reference, nothing)

    async def is_here(self, reference: ImageReference) -> bool:
        """Whether the storage has an image."""
        return await self._find(reference) is not None

    async def hold(self, reference: ImageReference, digest: str) -> tuple[StoredImage, RootHold]:
        """Keep the image of a session from being removed until the hold is released. A missing one is pulled again, by
        its digest: nobody has to be asked again for it.
        """
        pinned = reference.pinned(digest)
        held = await asyncio.to_thread(self._hold, pinned)
        if held is None:
            try:
                image = await self._fetch_once(pinned, nothing)
            except (NotFound, RegistryFailed) as error:
                raise NotFound(
                    f"the image {pinned} of this session is gone from this server, and cannot be pulled again: "
                    f"{error.detail}",
                    field="image",
                    hint="import or build the same image again, or terminate the sandbox and make a new one: its "
                    "files stay",
                ) from None
            held = image, await asyncio.to_thread(self._storage.hold, image.digest)
        return held

    def _hold(self, reference: ImageReference) -> tuple[StoredImage, RootHold] | None:
        """Hold an image that is here, in one step: each start waits for it. Blocking."""
        image = self._storage.find(reference)
        return None if image is None else (image, self._storage.hold(image.digest))

    async def _find(self, reference: ImageReference) -> StoredImage | None:
        return await asyncio.to_thread(self._storage.find, reference)

    async def _pull(self, caller: Caller | OwnWork, reference: ImageReference, progress: Progress) -> StoredImage:
        self._check_registry(caller, reference)
        async with self._admission.admit(Call(op.PULL_IMAGE, {"image": str(reference)}, caller)) as traffic:
            image = await self._fetch_once(reference, progress)
            traffic.count_in(image.size)
            return image

    def _check_registry(self, caller: Caller | OwnWork, reference: ImageReference) -> None:
        """Agents must not make this server connect to any address: without a list of registries they have only the
        usual one. An administrator may use all, as far as there is no list.
        """
        allowed = self._settings.registry_names
        if not allowed and not (isinstance(caller, OwnWork) or caller.administers):
            allowed = frozenset({self.parse("x").registry})
        if allowed and reference.registry not in allowed:
            raise InvalidRequest(
                f"images may not come from the registry {reference.registry} here",
                field="image",
                hint=f"the registries are: {', '.join(sorted(allowed))}; the operator adds one to "
                "CARREL_IMAGES_REGISTRIES, or an administrator pulls this image once with `carrel image pull`",
            )

    async def _fetch_once(self, reference: ImageReference, progress: Progress) -> StoredImage:
        return await self._pulls.join(str(reference), lambda say: self._fetch(reference, say), progress)

    async def _fetch(self, reference: ImageReference, progress: Progress) -> StoredImage:
        began, outcome = time.monotonic(), OK
        try:
            image = await pull_image(self._client, self._storage, reference, self._platform, progress)
            await self._check_size(image)
            return image
        except BaseException as error:
            outcome = outcome_of(error)
            raise
        finally:
            self._metrics.image_pulled(outcome, time.monotonic() - began)

    async def _check_size(self, image: StoredImage) -> None:
        """Remove an image that is too large: only its unpacked layers tell."""
        if image.unpacked <= self._settings.largest_mb * _MB:
            return
        users = await self._users()
        if image.digest not in users:
            await run_to_end(lambda: self._remove(image, users))
        raise ImageRefused(
            f"the image has {image.unpacked // _MB} MiB, and at most {self._settings.largest_mb} MiB are allowed here",
            field="image",
            hint="take a smaller image, or let the operator raise CARREL_IMAGES_LARGEST_MB",
        )

    async def import_archive(self, caller: Caller, content: AsyncIterator[bytes], name: str | None) -> ImageList:
        """Store the images of a `docker save` archive or of an OCI layout in a tar file."""
        reference = None if name is None else self.parse(name)
        arguments = {} if name is None else {"image": str(reference)}
        async with (
            self._admission.admit(Call(op.IMPORT_IMAGE, arguments, caller)) as traffic,
            self.spooled(content) as (path, size),
        ):
            traffic.count_in(size)
            found = await import_archive(self._storage, path, self._platform, nothing, name=reference)
            for image in found:
                await self._check_size(image)
        users = await self._users()
        return ImageList(items=[self._info(caller, image, users) for image in found])

    @asynccontextmanager
    async def spooled(self, content: AsyncIterator[bytes]) -> AsyncIterator[tuple[str, int]]:
        """Write an upload to a file for the length of the block."""
        most, size = self._settings.max_mb * _MB, 0
        with ExitStack() as stack:
            place = await run_to_end(lambda: stack.enter_context(self._storage.temporary()))
            path = os.path.join(place, "upload.tar")
            file = await run_to_end(lambda: stack.enter_context(open(path, "xb", buffering=0)))
            async for piece in content:
                size += len(piece)
                if size > most:
                    raise TooLarge(
                        f"the archive has more than {self._settings.max_mb} MiB",
                        field="body",
                        hint="let the operator raise CARREL_IMAGES_MAX_MB",
                    )
                try:
                    await run_to_end(lambda piece=piece: write_all(file.fileno(), piece))  # type: ignore[misc]
                except OSError as error:
                    raise disk_problem(error) from error
            yield path, size

    # sending

    async def push(self, caller: Caller, request: ImagePush, say: Say | None = None) -> ImageInfo:
        """Send an image to a registry. `say` is called with the progress of each layer."""
        image, name = await asyncio.to_thread(self._resolve, request.image)
        target = self.parse(request.to) if request.to is not None else name
        if target is None or target.digest is not None:
            raise InvalidRequest(
                "an image is pushed under a tag, and none is named",
                field="to",
                hint="say where: `carrel image push IMAGE registry.example.com/team/service:1`",
            )
        arguments = {"image": request.image, "to": str(target)}
        async with self._admission.admit(Call(op.PUSH_IMAGE, arguments, caller)) as traffic:
            with await asyncio.to_thread(self._storage.hold, image.digest):
                await push_image(self._client, self._storage, image, target, _shown_to(say))
            traffic.count_out(image.size)
        return await self.describe(caller, image)

    async def export(self, caller: Caller, request: ImageExport) -> tuple[int, AsyncIterator[bytes]]:
        """Return the size and the bytes of a tar file with an image. The first piece is read at once, so that an image
        that is missing is an error and not a broken stream.
        """
        image, name = await asyncio.to_thread(self._resolve, request.image)
        if name is None or name.digest is not None:
            names = [ImageReference.parse(each) for each in image.names if not each.startswith(_CACHED)]
            name = next((each for each in names if each.tag), None)
        layout = await asyncio.to_thread(LayoutExport, self._storage, image, name)
        pieces = self._exported(caller, request, image, layout)
        await anext(pieces)
        return layout.size, pieces

    async def _exported(
        self, caller: Caller, request: ImageExport, image: StoredImage, layout: LayoutExport
    ) -> AsyncIterator[bytes]:
        """Yield an empty piece as soon as the image is held, then all pieces."""
        async with self._admission.admit(Call(op.EXPORT_IMAGE, {"image": request.image}, caller)) as traffic:
            with await asyncio.to_thread(self._storage.hold, image.digest):
                yield b""
                pieces = layout.pieces()
                while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                    traffic.count_out(len(piece))
                    yield piece

    # showing

    async def list(self, caller: Caller) -> ImageList:
        """List the images, the most recently used first."""
        found, users = await asyncio.to_thread(self._storage.list), await self._users()
        shown = [  # not what builds keep for later ones
            image
            for image in found
            if image.digest in users or any(not name.startswith(_CACHED) for name in image.names)
        ]
        return ImageList(items=[self._info(caller, image, users) for image in shown])

    async def describe(self, caller: Caller, image: StoredImage) -> ImageInfo:
        """Return what is shown of an image."""
        return self._info(caller, image, await self._users())

    async def inspect(self, caller: Caller, name: str) -> ImageDetails:
        """Return an image by a name, or by its digest or the beginning of it."""
        image = (await asyncio.to_thread(self._resolve, name))[0]
        config = image.config
        return ImageDetails(
            **self._info(caller, image, await self._users()).model_dump(),
            environment=dict(config.environment),
            working_directory=config.working_directory,
            user=config.user,
            entry_point=list(config.entry_point),
            command=list(config.command),
            labels=dict(config.labels),
            exposed_ports=list(config.exposed_ports),
            layer_digests=list(image.layers),
        )

    def _info(self, caller: Caller, image: StoredImage, users: Users) -> ImageInfo:
        using = users.get(image.digest, ())
        return ImageInfo(
            digest=image.digest,
            names=[self._shown(ImageReference.parse(name)) for name in image.names if not name.startswith(_CACHED)],
            platform=str(image.config.platform),
            size=image.size,
            unpacked=image.unpacked,
            layers=len(image.layers),
            created=image.config.created,
            last_used_at=datetime.fromtimestamp(image.used, UTC),
            used_by=[each.name for each in using if caller.identity.reaches(each.context_id)],
            in_use=bool(using),
        )

    def _shown(self, reference: ImageReference) -> str:
        """Return a reference as people write it here."""
        return reference.familiar if self._settings.registry == DEFAULT_REGISTRY else str(reference)

    def _resolve(self, name: str) -> tuple[StoredImage, ImageReference | None]:
        """Return an image, and the reference that named it; None for a digest. Blocking."""
        reference: ImageReference | None = None
        digest = _DIGEST.fullmatch(name)
        if not name.startswith("sha256:"):
            reference = self.parse(name)
            if (image := self._storage.find(reference)) is not None:
                return image, reference
        images = self._storage.list()
        found = [each for each in images if digest and each.digest.startswith(f"sha256:{digest[1]}")]
        if len(found) == 1:
            return found[0], None
        raise NotFound(
            f"there is no image {name[:100]} here" if not found else f"{len(found)} images begin with {name[:100]}",
            field="image",
            hint="`carrel image ls` shows the images of this server",
        )

    # removing

    async def remove(self, caller: Caller, name: str) -> None:
        """Remove a name of an image, and the image with its last name; `Conflict` while a session uses it."""
        async with self._admission.admit(Call(op.DELETE_IMAGE, {"image": name}, caller)):
            image, reference = await asyncio.to_thread(self._resolve, name)
            if reference is not None and reference.digest is None and len(image.names) > 1:
                await asyncio.to_thread(self._storage.remove_name, reference)
                return
            users = await self._users()
            if using := users.get(image.digest):
                raise _used(image, [each.name for each in using])
            await self._slots.leave_image(image.digest)
            await run_to_end(lambda: self._remove(image, users))

    def _remove(self, image: StoredImage, users: Users) -> None:
        names = [ImageReference.parse(name) for name in image.names]
        for each in names:
            self._storage.remove_name(each)
        # Only what has no name: this is not the time to make room.
        removed = self._storage.collect(users.keys(), max_bytes=1 << 62, unused_s=float("inf"))
        if image.digest not in removed.images and self._storage.find(_by_digest(image)) is not None:
            for each in names:
                self._storage.name(each, image.digest)
            raise _used(image, ["a sandbox of another process on this host"])

    async def collect(self) -> CollectedImages:
        """Remove images that nobody used for long, and those beyond the disk space for images."""
        users, settings = await self._users(), self._settings
        most, unused_s = settings.max_mb * _MB, settings.ttl_days * _DAY_S
        collected = await run_to_end(lambda: self._storage.collect(users.keys(), max_bytes=most, unused_s=unused_s))
        if collected.images:
            log.info("%d unused images were removed: %s", len(collected.images), ", ".join(collected.images))
        self._metrics.images(len(await asyncio.to_thread(self._storage.list)))
        return collected

    async def _users(self) -> Users:
        """Return the sessions of this server that are not terminated, by the digest of their image."""
        return await self._store.image_users(self._node)


def _shown_to(say: Say | None) -> Progress:
    """Return the function that shows the progress of layers to whoever asked, if anybody did."""

    def show(each: LayerProgress) -> None:
        if say is not None:
            say(ImageProgress.model_validate(vars(each) | {"layer": each.digest}))

    return show


def _used(image: StoredImage, using: Sequence[str]) -> Conflict:
    more = f" and {len(using) - _MOST_NAMED} more" if len(using) > _MOST_NAMED else ""
    return Conflict(
        f"the image {image.digest[:19]} is the root of {', '.join(using[:_MOST_NAMED])}{more}",
        field="image",
        hint="terminate these sandboxes first (`carrel rm`): their files stay",
    )


def _by_digest(image: StoredImage) -> ImageReference:
    return ImageReference("localhost", "image", digest=image.digest)
