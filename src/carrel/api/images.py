"""Images: pull, import, build, push, export, list, get, remove."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Annotated

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from carrel.api import following
from carrel.api.guard import GuardedRouter
from carrel.api.parameters import Path, Query
from carrel.api.parts import ClosingStream, Plane, Who, as_json, streamed_body
from carrel.errors import InvalidRequest
from carrel.models import operations as op
from carrel.models.images import (
    ImageBuild,
    ImageDetails,
    ImageEvent,
    ImageExport,
    ImageInfo,
    ImageList,
    ImageName,
    ImagePull,
    ImagePush,
)

router = GuardedRouter(tags=["images"])

Name = Annotated[ImageName, Path(alias="image", description="a reference, or a digest or its first 8 digits or more")]
Follow = Annotated[bool, Query(description="stream the progress, a JSON object per line; the last has the image")]
_ANSWER = following.followed_answer(ImageInfo, ImageEvent)
_TAR = {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}}


@router.operation(op.LIST_IMAGES, "The images of the server", ImageList)
async def list_images(plane: Plane, caller: Who) -> Response:
    """The last used first. `used_by` has only sandboxes within the reach of the token."""
    return as_json(await plane.images.list(caller))


@router.operation(op.PULL_IMAGE, "Pull an image", _ANSWER, 404, 409, 413, 422, 429, 502)
async def pull_image(body: ImagePull, plane: Plane, caller: Who, follow: Follow = False) -> Response:
    """From its registry, also if an older one of that name is here. Layers that are here are not pulled again."""
    if not follow:
        return as_json(await plane.images.pull(caller, body))
    return following.follow(lambda say: plane.images.pull(caller, body, say), ImageEvent)


@router.operation(op.PUSH_IMAGE, "Push an image", _ANSWER, 404, 409, 413, 422, 429, 502)
async def push_image(body: ImagePush, plane: Plane, caller: Who, follow: Follow = False) -> Response:
    """To a registry. Layers that it has already are not sent. Its credentials are those of the server."""
    if not follow:
        return as_json(await plane.images.push(caller, body))
    return following.follow(lambda say: plane.images.push(caller, body, say), ImageEvent)


@router.operation(op.EXPORT_IMAGE, "Export an image", {"content": _TAR}, 404, 413)
async def export_image(body: ImageExport, plane: Plane, caller: Who) -> Response:
    """An OCI layout in a tar file, which `docker load`, `skopeo` and an import here read."""
    size, pieces = await plane.images.export(caller, body)
    return ClosingStream(pieces, media_type="application/x-tar", headers={"content-length": str(size)})


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

    return following.follow(lambda say: plane.image_builds.build(caller, wanted, path, say), ImageEvent, stack)


@router.operation(op.GET_IMAGE, "One image", ImageDetails, 404)
async def get_image(image: Name, plane: Plane, caller: Who) -> Response:
    """By its reference, or by its digest or the beginning of it."""
    return as_json(await plane.images.inspect(caller, image))


@router.operation(op.DELETE_IMAGE, "Remove an image", None, 404, 409)
async def delete_image(image: Name, plane: Plane, caller: Who) -> Response:
    """An image with several names loses only this one. Fails with 409 while a session uses it."""
    await plane.images.remove(caller, image)
    return Response(status_code=204)
