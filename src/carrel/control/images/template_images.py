"""Images of templates that have a Dockerfile (`build` in `template.toml`): each is built once, before the first sandbox
that needs it starts, and again when its folder has changed.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING

from carrel.control.images.images import Images
from carrel.control.operations.caller import Caller
from carrel.control.sessions.templates import DOCKERFILE, BuildFolder, Templates
from carrel.errors import CarrelError, InvalidRequest
from carrel.models import SandboxRequest, State
from carrel.models.images import ImageBuild
from carrel.primitives.build_context import pack_context
from carrel.primitives.keyed_lock import KeyedLocks
from carrel.store import SessionStore

if TYPE_CHECKING:
    from carrel.control.images.building import ImageBuilds

log = logging.getLogger("carrel.images")


class TemplateImages:
    """Builds them. `builds` returns the builder, which takes long to import."""

    def __init__(self, templates: Templates, builds: Callable[[], ImageBuilds], images: Images, store: SessionStore):
        self._templates = templates
        self._builds = builds
        self._images = images
        self._store = store
        self._locks = KeyedLocks()

    async def provide(self, caller: Caller, request: SandboxRequest) -> None:
        """Build the image that a new sandbox gets from its template, if it is not here. A session keeps its image."""
        previous = None if request.context_id is None else await self._store.newest_of_context(request.context_id)
        if previous is not None and previous.state is not State.TERMINATED:
            return
        filled = await self._templates.fill(caller, request, previous)
        template = None if filled.template is None else await self._templates.get(filled.template)
        if template is None or template.build is None or template.build.image != filled.image:
            return
        async with self._locks.of(template.build.image):
            if not await self._images.is_here(self._images.parse(template.build.image)):
                await self._build(caller, template.name, template.build)

    async def _build(self, caller: Caller, name: str, folder: BuildFolder) -> None:
        def say(line: str) -> None:
            log.info("image of the template %s: %s", name, line)

        with tempfile.NamedTemporaryFile(prefix="carrel-build-") as packed:
            try:
                await asyncio.to_thread(pack_context, folder.path, DOCKERFILE, packed)
                packed.flush()
                await self._builds().build(caller, ImageBuild(image=folder.image), packed.name, say)
            except OSError as error:
                raise InvalidRequest(
                    f"the build folder of the template '{name}' cannot be read: {error.strerror}",
                    field="template",
                    hint="let the operator look at the files of the template",
                ) from None
            except CarrelError as error:
                error.detail = f"the image of the template '{name}' cannot be built: {error.detail}"
                raise
