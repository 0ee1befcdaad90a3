"""Images: the root file systems of sandboxes."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import IO
from urllib.parse import quote

from carrel.client._async.bundles import open_local
from carrel.client._async.connection import AsyncConnection
from carrel.client._async.files import give, save_as
from carrel.client._io_async import Progress, Source, blocking, pieces
from carrel.errors import PlatformError, ServerUnreachable, from_problem
from carrel.models.images import ImageDetails, ImageInfo, ImageList, ImageProgress
from carrel.primitives.build_context import pack_context

OnImageProgress = Callable[[ImageProgress], object]
"""Called with the progress of each layer, again and again."""
OnLine = Callable[[str], object]
"""Called with each line of the log of a build."""


class AsyncImages:
    """`client.images`: OCI images that sandboxes run from."""

    def __init__(self, connection: AsyncConnection):
        self._connection = connection

    async def pull(
        self, image: str, *, only_if_missing: bool = False, progress: OnImageProgress | None = None
    ) -> ImageInfo:
        """Pull an image from its registry, or its newest version. A sandbox pulls its image by itself if it is missing.

        info = await client.images.pull("python:3.13-slim", progress=print)
        """
        body = {"image": image, "only_if_missing": only_if_missing}
        return await self._followed("/v1/images", body, progress)

    async def push(self, image: str, to: str | None = None, *, progress: OnImageProgress | None = None) -> ImageInfo:
        """Push an image to a registry, under its own reference or as `to`. For administrators.

        await client.images.push("service:1", "registry.example.com/team/service:1")
        """
        return await self._followed("/v1/images/push", {"image": image, "to": to}, progress)

    async def _followed(self, path: str, body: Mapping[str, object], progress: OnImageProgress | None) -> ImageInfo:
        if progress is None:
            return await self._connection.post(ImageInfo, path, body, deadline=None)
        return await self._last_line(self._connection.lines("POST", path, {"follow": "true"}, body), progress, None)

    async def _last_line(
        self, arriving: AsyncGenerator[bytes, None], progress: OnImageProgress | None, log: OnLine | None
    ) -> ImageInfo:
        """Read the lines of work that is followed; return the image of the last one, or raise its problem."""
        try:
            async with aclosing(arriving) as lines:
                async for line in lines:
                    event = json.loads(line)
                    if "image" in event:
                        return ImageInfo.model_validate(event["image"])
                    if "problem" in event:
                        raise from_problem(event["problem"])
                    if "line" in event and log is not None:
                        log(str(event["line"]))
                    if "progress" in event and progress is not None:
                        progress(ImageProgress.model_validate(event["progress"]))
        except ValueError:
            raise PlatformError("the server's answer is not a line of JSON") from None
        raise ServerUnreachable("the server stopped before the image was there", hint="try again")

    async def export(
        self, image: str, target: str | os.PathLike[str] | IO[bytes], *, progress: Progress | None = None
    ) -> None:
        """Write an image as an OCI layout in a tar file, to a local path or an open binary file. For administrators.

        `docker load`, `skopeo` and `import_archive` read it. `progress` is called with the number of bytes of each
        piece.
        """
        arriving = self._connection.pieces("/v1/images/export", method="POST", body={"image": image}, deadline=None)
        if isinstance(target, str | os.PathLike):
            await save_as(arriving, Path(target), 0o666, progress)
        else:
            await give(arriving, target, progress)

    async def import_archive(
        self, archive: str | os.PathLike[str] | Source, *, name: str | None = None, progress: Progress | None = None
    ) -> list[ImageInfo]:
        """Import the images of a `docker save` archive, or of an OCI layout in a tar file. For administrators.

        `archive` is a path, or the bytes themselves. `name` replaces the name in an archive of one image. `progress` is
        called with the number of bytes of each piece that was sent.
        """
        if isinstance(archive, str | os.PathLike):
            with await blocking(open_local, Path(archive), "archive") as file:
                return await self._import(file, name, progress)
        return await self._import(archive, name, progress)

    async def _import(self, source: Source, name: str | None, progress: Progress | None) -> list[ImageInfo]:
        query = {"image": name}
        return (
            await self._connection.upload(
                ImageList, "POST", "/v1/images/import", query=query, source=source, progress=progress, deadline=None
            )
        ).items

    async def build(
        self,
        directory: str | os.PathLike[str] = ".",
        *,
        name: str | None = None,
        dockerfile: str = "Dockerfile",
        target: str = "",
        build_args: Mapping[str, str] | None = None,
        no_cache: bool = False,
        log: OnLine | None = None,
    ) -> ImageInfo:
        """Build an image from a directory with a Dockerfile. `log` is called with each line. For administrators.

        info = await client.images.build("service", name="service:1", log=print)
        """
        options = {"image": name, "dockerfile": dockerfile, "target": target, "build_args": dict(build_args or {})}
        query = {"options": json.dumps({**options, "no_cache": no_cache})}
        with tempfile.TemporaryFile() as context:
            await blocking(pack_context, os.fspath(directory), dockerfile, context)
            context.seek(0)
            sent = pieces(context, None)
            return await self._last_line(self._connection.lines("POST", "/v1/images/build", query, sent), None, log)

    async def list(self) -> list[ImageInfo]:
        """List the images of the server, the last used first."""
        return (await self._connection.get(ImageList, "/v1/images")).items

    async def get(self, image: str) -> ImageDetails:
        """Get one image with its configuration, by its reference or its digest."""
        return await self._connection.get(ImageDetails, f"/v1/images/{quote(image, safe='')}")

    async def delete(self, image: str) -> None:
        """Remove an image, or one of its names. Raises `Conflict` while a session uses it. For administrators."""
        await self._connection.send("DELETE", f"/v1/images/{quote(image, safe='')}", deadline=None)
