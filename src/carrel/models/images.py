"""Models of images: the root file systems of sandboxes."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from carrel.models.base import Answer, Request

HOST_IMAGE = "host"
"""Asks for the host's own root, where an image is the default."""

ImageName = Annotated[str, StringConstraints(pattern=r"^[!-~]+$", min_length=1, max_length=512)]
"""The reference of an image, such as `python:3.13-slim` or `ghcr.io/team/tool@sha256:…`."""


class ImagePull(Request):
    """The body of a request to pull an image."""

    image: ImageName = Field(description="its reference, such as `python:3.13-slim`")
    only_if_missing: bool = Field(
        default=False, description="do nothing if an image of that name is here, even if the registry has a newer one"
    )


class ImagePush(Request):
    """The body of a request to push an image."""

    image: ImageName = Field(description="a reference, or a digest or its first 8 digits or more")
    to: ImageName | None = Field(
        default=None, description="where: a registry, a repository and a tag; by default its reference"
    )


class ImageExport(Request):
    """The body of a request to export an image."""

    image: ImageName = Field(description="a reference, or a digest or its first 8 digits or more")


class ImageBuild(Request):
    """How an image is built. The build context is the body of the request."""

    image: ImageName | None = Field(default=None, description="the name of the new image")
    dockerfile: str = Field(
        default="Dockerfile", min_length=1, max_length=1000, description="its path in the build context"
    )
    target: str = Field(default="", max_length=200, description="the stage to build; by default the last one")
    build_args: dict[str, str] = Field(default_factory=dict, description="values of ARG lines", max_length=100)
    no_cache: bool = Field(default=False, description="run every RUN line again")


class ImageInfo(Answer):
    """An image of the server."""

    digest: str = Field(description="the digest of its manifest")
    names: list[str] = Field(description="the references that mean this image here")
    platform: str = Field(description="the machine that it is for, such as `linux/amd64`")
    size: int = Field(description="bytes of its layers as they came from the registry")
    unpacked: int = Field(description="bytes of its unpacked layers; layers that images share are counted in each")
    layers: int = Field(description="number of its layers")
    created: str = Field(default="", description="when it was made, as the image says")
    last_used_at: datetime
    used_by: list[str] = Field(
        default_factory=list, description="contexts and sandboxes within the caller's reach whose root it is"
    )
    in_use: bool = Field(default=False, description="whether a session uses it; then it is not removed")


class ImageDetails(ImageInfo):
    """An image with its configuration."""

    environment: dict[str, str]
    working_directory: str
    user: str = Field(description="as the image writes it; in a sandbox it has no power outside")
    entry_point: list[str]
    command: list[str]
    labels: dict[str, str]
    exposed_ports: list[str]
    layer_digests: list[str] = Field(description="of the unpacked layers, the lowest first")


class ImageList(Answer):
    """Images, the most recently used first."""

    items: list[ImageInfo]


class ImageProgress(Answer):
    """How far one layer is, in bytes."""

    layer: str = Field(description="the digest of the layer")
    step: Literal["download", "unpack", "upload", "done"]
    done: int
    total: int


class ImageEvent(Answer):
    """One line of the progress of a pull, a push or a build. The last line has the image or the problem."""

    progress: ImageProgress | None = None
    line: str | None = Field(default=None, description="a line of the log of a build")
    image: ImageInfo | None = None
    problem: dict[str, object] | None = None

    @staticmethod
    def said(progress: ImageProgress | str) -> "ImageEvent":
        """Return the line for progress, or for a line of a log."""
        return ImageEvent(line=progress) if isinstance(progress, str) else ImageEvent(progress=progress)

    @staticmethod
    def done(result: ImageInfo) -> "ImageEvent":
        """Return the last line."""
        return ImageEvent(image=result)

    @staticmethod
    def failed(problem: dict[str, object]) -> "ImageEvent":
        """Return the last line of work that failed."""
        return ImageEvent(problem=problem)
