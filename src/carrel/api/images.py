"""Images: pull, import, list, get, remove."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import Annotated, Any

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from carrel.api.guard import GuardedRouter
from carrel.api.parameters import Path, Query
from carrel.api.parts import NDJSON, ClosingStream, Plane, Who, as_json, streamed_body
from carrel.api.problems import UNEXPECTED
from carrel.errors import CarrelError, InvalidRequest
from carrel.models import operations as op
from carrel.models.images import (
    ImageBuild,
    ImageDetails,
    ImageEvent,
    ImageInfo,
    ImageList,
    ImageName,
    ImageProgress,
    ImagePull,
)

router = GuardedRouter(tags=["images"])

Name = Annotated[ImageName, Path(alias="image", description="a reference, or a digest or its first 8 digits or more")]
Follow = Annotated[bool, Query(description="stream the progress, a JSON object per line; the last has the image")]
_ANSWER: dict[str, Any] = {
    "model": ImageInfo,
    "content": {NDJSON: {"schema": ImageEvent.model_json_schema(ref_template="#/components/schemas/{model}")}},
}
_ANSWER["content"][NDJSON]["schema"].pop("$defs", None)
_TAR = {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}}
_MOST_LINES = 1000
"""Lines of progress that wait for a slow reader; later ones are dropped: a newer one tells the same."""


@router.operation(op.LIST_IMAGES, "The images of the server", ImageList)
async def list_images(plane: Plane, caller: Who) -> Response:
    """The last used first. `used_by` has only sandboxes within the reach of the token."""
    return as_json(await plane.images.list(caller))


@router.operation(op.PULL_IMAGE, "Pull an image", _ANSWER, 404, 409, 413, 422, 429, 502)
async def pull_image(body: ImagePull, plane: Plane, caller: Who, follow: Follow = False) -> Response:
    """From its registry, also if an older one of that name is here. Layers that are here are not pulled again."""
    if not follow:
        return as_json(await plane.images.pull(caller, body))
    lines = _lines(lambda say: plane.images.pull(caller, body, say))
    return ClosingStream(lines, media_type=NDJSON, headers={"cache-control": "no-store"})


@router.operation(
    op.IMPORT_IMAGE,
    "Import an image",
    ImageList,
    409,
    413,
    422,
    openapi_extra={"requestBody": {"required": True, "content": _TAR}},
)
async def import_image(
    plane: Plane,
    caller: Who,
    request: Request,
    image: Annotated[ImageName | None, Query(description="its reference; by default that in the archive")] = None,
) -> Response:
    """The body is an archive of `docker save`, or a tar file of an OCI layout, of any size."""
    return as_json(await plane.images.import_archive(caller, streamed_body(request), image))


@router.operation(
    op.BUILD_IMAGE,
    "Build an image",
    _ANSWER,
    404,
    409,
    413,
    422,
    openapi_extra={"requestBody": {"required": True, "content": _TAR}},
)
async def build_image(
    plane: Plane,
    caller: Who,
    request: Request,
    options: Annotated[str, Query(max_length=100_000, description="the fields of `ImageBuild`, as JSON")] = "{}",
) -> Response:
    """The body is a tar file of the build context. The answer is the log, a JSON object per line; the last has the
    image.
    """
    try:
        wanted = ImageBuild.model_validate_json(options)
    except ValidationError as error:
        raise InvalidRequest(
            f"the options of the build are not valid: {error.errors()[0]['msg']}", field="options"
        ) from None
    stack = AsyncExitStack()  # the whole body is taken before the answer begins, which would read from it too
    path, _ = await stack.enter_async_context(plane.images.spooled(streamed_body(request)))

    async def lines() -> AsyncIterator[bytes]:
        async with stack:
            async for line in _lines(lambda say: plane.image_builds.build(caller, wanted, path, say)):
                yield line

    return ClosingStream(lines(), media_type=NDJSON, headers={"cache-control": "no-store"})


@router.operation(op.GET_IMAGE, "One image", ImageDetails, 404)
async def get_image(image: Name, plane: Plane, caller: Who) -> Response:
    """By its reference, or by its digest or the beginning of it."""
    return as_json(await plane.images.inspect(caller, image))


@router.operation(op.DELETE_IMAGE, "Remove an image", None, 404, 409)
async def delete_image(image: Name, plane: Plane, caller: Who) -> Response:
    """An image with several names loses only this one. Fails with 409 while a session uses it."""
    await plane.images.remove(caller, image)
    return Response(status_code=204)


async def _lines(work: Callable[[Callable[[ImageProgress | str], None]], Awaitable[ImageInfo]]) -> AsyncIterator[bytes]:
    """Yield progress and log as they come. A caller that disconnects does not wait for the end any more."""
    said: asyncio.Queue[ImageEvent | None] = asyncio.Queue()

    def say(each: ImageProgress | str) -> None:
        if said.qsize() < _MOST_LINES:
            said.put_nowait(ImageEvent(line=each) if isinstance(each, str) else ImageEvent(progress=each))

    async def run() -> None:
        try:
            said.put_nowait(ImageEvent(image=await work(say)))
        except CarrelError as error:
            said.put_nowait(ImageEvent(problem=error.problem()))
        except Exception:
            said.put_nowait(ImageEvent(problem=UNEXPECTED.problem()))
            raise
        finally:
            said.put_nowait(None)

    task = asyncio.get_running_loop().create_task(run())
    try:
        while (event := await said.get()) is not None:
            yield event.model_dump_json(exclude_none=True).encode() + b"\n"
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, CarrelError):
            await task
