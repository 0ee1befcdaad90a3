"""The image that a sandbox runs from: chosen when its session is made, and kept for the life of the session."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import replace

from carrel.control.images.images import Images
from carrel.control.sessions.attachments import Attachment, Fork, LaunchPlan
from carrel.control.sessions.live import LiveSandbox
from carrel.control.sessions.owners import builds_image, discovers, is_agent
from carrel.errors import CarrelError, Conflict, InvalidRequest
from carrel.images.storage import RootHold, StoredImage
from carrel.models.images import HOST_IMAGE
from carrel.providers.base import Capability, RootImage
from carrel.store import SessionRecord, SessionStore

log = logging.getLogger("carrel.images")


class SandboxImage(Attachment):
    """Gives each sandbox its image. `default` is for requests that name none."""

    def __init__(self, images: Images, store: SessionStore, *, default: str | None):
        self._images = images
        self._store = store
        self._default = default
        self._held: dict[str, RootHold] = {}
        """Keeps the images of running sandboxes on the disk, by the id of the session."""
        self._origins: dict[str, SessionRecord] = {}
        """The sessions whose forks are being made, by the new context."""

    async def open(self, boxes: Iterable[LiveSandbox]) -> None:
        """Hold the images of sandboxes that the previous process started."""
        for box in boxes:
            if box.record.image_digest is not None:
                try:
                    await self._hold(box.record)
                except CarrelError as error:
                    log.warning("the image of the running sandbox %s may be removed: %s", box.record.id, error)

    async def plan(self, plan: LaunchPlan) -> LaunchPlan:
        """Choose the image of a new session; it is pulled if it is missing. An existing session keeps its own."""
        record, request = plan.record, plan.request
        if plan.previous is not None and plan.previous.id == record.id:
            asked = request.image
            if asked is not None and asked != (record.image or HOST_IMAGE):
                raise Conflict(
                    f"the sandbox of this context runs from {record.image or 'the root of the host'}",
                    field="image",
                    hint="leave the field out, or terminate the sandbox first (`carrel rm`): its files stay",
                )
        elif (origin := await self._origin(record)) is not None:
            record = replace(
                record, image=origin.image, image_digest=origin.image_digest, image_workdir=origin.image_workdir
            )
        else:
            name = request.image or (self._default if is_agent(record) else None)
            if name is not None and name != HOST_IMAGE:
                plan.provider.require(Capability.IMAGES)
                found = await self._images.ensure(plan.caller, self._images.parse(name))
                record = replace(record, image=name, image_digest=found.digest)
        if record.image is not None:
            plan.provider.require(Capability.IMAGES)
        return replace(plan, record=_starting_in(record, request.start_in))

    async def _origin(self, record: SessionRecord) -> SessionRecord | None:
        """Return the session whose image a new session gets: that of its origin, or of the context it works for."""
        if discovers(record):
            return await self._store.of_context(record.acts_for or "")
        return self._origins.get(record.context_id or "")

    async def prepare(self, plan: LaunchPlan, workspace: str) -> LaunchPlan:
        """Hold the image until the sandbox ends."""
        record = plan.record
        if record.image_digest is None:
            return plan
        plan.undo.callback(self._release, record.id)
        image = await self._hold(record)
        return replace(plan, image=_root(image, record))

    async def _hold(self, record: SessionRecord) -> StoredImage:
        assert record.image is not None and record.image_digest is not None
        image, hold = await self._images.hold(self._images.parse(record.image), record.image_digest)
        self._release(record.id)
        self._held[record.id] = hold
        return image

    def _release(self, session_id: str) -> None:
        if (hold := self._held.pop(session_id, None)) is not None:
            hold.release()

    def detach(self, box: LiveSandbox) -> None:
        """Allow the removal of the image."""
        self._release(box.record.id)

    async def fork(self, fork: Fork) -> None:
        """Give a fork exactly the image of its origin."""
        origin = await self._store.newest_of_context(fork.origin)
        if origin is not None:
            self._origins[fork.context_id] = origin
            fork.finished.callback(self._origins.pop, fork.context_id, None)

    def close(self) -> None:
        """Release all images."""
        for session_id in list(self._held):
            self._release(session_id)


def _starting_in(record: SessionRecord, asked: str | None) -> SessionRecord:
    if asked == "image" and record.image is None:
        raise InvalidRequest(
            "this sandbox has no image whose working directory it could start in",
            field="start_in",
            hint="name an image, or leave the field out",
        )
    return record if asked is None else replace(record, image_workdir=asked == "image")


def _root(image: StoredImage, record: SessionRecord) -> RootImage:
    facts = os.stat(image.root)
    return RootImage(
        directory=image.root,
        identity=(facts.st_dev, facts.st_ino),
        environment=image.config.environment,
        working_directory=image.config.working_directory if record.image_workdir else "",
        user=image.config.user,
        writable=builds_image(record),
    )
