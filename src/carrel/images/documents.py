"""Manifests, indexes and configurations of images as values. They come from registries and archives: hostile input.

A document is at most 4 MiB of JSON, and everything in it is bounded and checked before anything uses it. Pure: no I/O.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictInt, ValidationError, model_validator

from carrel.errors import ImageRefused
from carrel.images.reference import is_digest

LARGEST_DOCUMENT = 4 << 20
MOST_LAYERS = 500
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
OCI_LAYER = "application/vnd.oci.image.layer.v1.tar"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_CONFIG = "application/vnd.docker.container.image.v1+json"
MANIFESTS = (OCI_MANIFEST, DOCKER_MANIFEST)
INDEXES = (OCI_INDEX, DOCKER_INDEX)
_CONFIGS = (OCI_CONFIG, DOCKER_CONFIG)
_LAYER = re.compile(
    r"application/vnd\.(?:oci\.image\.layer\.(?:nondistributable\.)?v1\.tar(?:\+gzip|\+zstd)?"
    r"|docker\.image\.rootfs\.(?:foreign\.)?diff\.tar(?:\.gzip|\.zstd)?)"
)
_MACHINES = {"x86_64": ("amd64", ""), "aarch64": ("arm64", "v8"), "armv7l": ("arm", "v7"), "i686": ("386", "")}

T = TypeVar("T", bound="_Document")


def digest_of(data: bytes) -> str:
    """Return the digest of bytes as OCI writes it."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _digest(value: str) -> str:
    if not is_digest(value):
        raise ValueError("it is not a SHA-256 digest")
    return value


def _plain(value: str) -> str:
    if "\0" in value:
        raise ValueError("it contains a NUL character")
    value.encode()  # raises ValueError for half of a surrogate pair, which JSON can hold and no system call can
    return value


Digest = Annotated[str, AfterValidator(_digest)]
Text = Annotated[str, AfterValidator(_plain)]


class _Document(BaseModel):
    """A part of a document. Unknown fields are ignored, and `null` is the same as an absent field."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", populate_by_name=True, hide_input_in_errors=True, defer_build=True
    )

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return {key: each for key, each in value.items() if each is not None} if isinstance(value, dict) else value


class ImagePlatform(_Document):
    """The machine that an image is for, in Go's words."""

    architecture: Text
    os: Text = "linux"
    variant: Text = ""

    @classmethod
    def of_host(cls) -> ImagePlatform:
        """Return the platform of this host."""
        machine = os.uname().machine
        architecture, variant = _MACHINES.get(machine, (machine, ""))
        return cls(architecture=architecture, variant=variant)

    @classmethod
    def parse(cls, text: str) -> ImagePlatform:
        """Read `linux/arm64` or `linux/arm/v7`."""
        system, _, rest = text.partition("/")
        architecture, _, variant = rest.partition("/")
        return cls(architecture=architecture, os=system, variant=variant)

    def __str__(self) -> str:
        return "/".join(filter(None, (self.os, self.architecture, self.variant)))


class BlobDescriptor(_Document):
    """Names content by digest and size."""

    media_type: Text = Field(default="", alias="mediaType")
    digest: Digest
    size: StrictInt = Field(ge=0, le=1 << 50)
    platform: ImagePlatform | None = None
    annotations: dict[Text, Text] = Field(default_factory=dict)


class ImageManifest(_Document):
    """One image for one platform: its configuration and its layers, the lowest first."""

    media_type: Text = Field(default="", alias="mediaType")
    config: BlobDescriptor
    layers: tuple[BlobDescriptor, ...] = Field(max_length=MOST_LAYERS)

    @classmethod
    def of(cls, config: BlobDescriptor, layers: Sequence[BlobDescriptor]) -> bytes:
        """Return the bytes of a new manifest."""
        return encode(
            {
                "schemaVersion": 2,
                "mediaType": OCI_MANIFEST,
                "config": _plainly(config),
                "layers": [_plainly(layer) for layer in layers],
            }
        )


class ImageIndex(_Document):
    """The same image for several platforms."""

    media_type: Text = Field(default="", alias="mediaType")
    manifests: tuple[BlobDescriptor, ...] = Field(max_length=1000)

    def choose(self, platform: ImagePlatform) -> BlobDescriptor:
        """Return the manifest for a platform. An entry without a platform fits when it is the only one."""
        fitting = [
            each
            for each in self.manifests
            if each.platform is not None
            and (each.platform.os, each.platform.architecture) == (platform.os, platform.architecture)
        ]
        exact = [each for each in fitting if each.platform is not None and each.platform.variant == platform.variant]
        plain = [each for each in fitting if each.platform is not None and not each.platform.variant]
        alone = [each for each in self.manifests if each.platform is None and len(self.manifests) == 1]
        for chosen in (*exact, *plain, *alone):
            return chosen
        shown = sorted({str(each.platform) for each in self.manifests[:20] if each.platform is not None})
        raise ImageRefused(
            f"the image has no version for {platform}",
            field="image",
            hint=f"it has {', '.join(shown)[:300]}" if shown else "its index lists no platform",
        )


class _RunConfig(_Document):
    user: Text = Field(default="", alias="User", max_length=256)
    env: tuple[Text, ...] = Field(default=(), alias="Env", max_length=4096)
    entry_point: tuple[Text, ...] = Field(default=(), alias="Entrypoint", max_length=4096)
    command: tuple[Text, ...] = Field(default=(), alias="Cmd", max_length=4096)
    working_directory: Text = Field(default="", alias="WorkingDir", max_length=4096)
    labels: dict[Text, Text] = Field(default_factory=dict, alias="Labels", max_length=4096)
    shell: tuple[Text, ...] = Field(default=(), alias="Shell", max_length=64)
    stop_signal: Text = Field(default="", alias="StopSignal", max_length=64)
    exposed_ports: dict[Text, Any] = Field(default_factory=dict, alias="ExposedPorts", max_length=4096)
    volumes: dict[Text, Any] = Field(default_factory=dict, alias="Volumes", max_length=4096)


class _RootFs(_Document):
    diff_ids: tuple[Digest, ...] = Field(default=(), max_length=MOST_LAYERS)


class _ConfigDocument(_Document):
    architecture: Text = Field(default="", max_length=64)
    os: Text = Field(default="linux", max_length=64)
    variant: Text = Field(default="", max_length=64)
    created: Text = Field(default="", max_length=64)
    config: _RunConfig = Field(default_factory=_RunConfig)
    rootfs: _RootFs = Field(default_factory=_RootFs)


@dataclass(frozen=True)
class ImageConfig:
    """How an image wants to be run, and the digests of its unpacked layers (`diff_ids`), the lowest first."""

    architecture: str
    os: str = "linux"
    variant: str = ""
    created: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    working_directory: str = "/"
    user: str = ""
    entry_point: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    shell: tuple[str, ...] = ()
    stop_signal: str = ""
    exposed_ports: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()
    diff_ids: tuple[str, ...] = ()

    @property
    def platform(self) -> ImagePlatform:
        """The machine that the image is for."""
        return ImagePlatform(architecture=self.architecture, os=self.os, variant=self.variant)

    @property
    def chain_id(self) -> str:
        """The digest that names the root file system: of the layers and their order."""
        chain = self.diff_ids[0] if self.diff_ids else digest_of(b"")
        for each in self.diff_ids[1:]:
            chain = digest_of(f"{chain} {each}".encode())
        return chain

    def encode(self) -> bytes:
        """Return the document that `parse_config` reads back as this value."""
        run: dict[str, object] = {
            "User": self.user,
            "Env": [f"{key}={value}" for key, value in self.environment.items()],
            "Entrypoint": list(self.entry_point),
            "Cmd": list(self.command),
            "WorkingDir": self.working_directory,
            "Labels": dict(self.labels),
            "Shell": list(self.shell),
            "StopSignal": self.stop_signal,
            "ExposedPorts": {port: {} for port in self.exposed_ports},
            "Volumes": {path: {} for path in self.volumes},
        }
        head = {"architecture": self.architecture, "os": self.os, "variant": self.variant, "created": self.created}
        return encode(
            {
                **{key: value for key, value in head.items() if value},
                "config": {key: value for key, value in run.items() if value},
                "rootfs": {"type": "layers", "diff_ids": list(self.diff_ids)},
            }
        )


def encode(document: Mapping[str, object]) -> bytes:
    """Return a document as JSON bytes, the same for the same value."""
    return json.dumps(document, separators=(",", ":"), sort_keys=True).encode()


def read_json(data: bytes, what: str) -> dict[str, Any]:
    """Read a JSON object of a bounded size and depth. Raises `ImageRefused` with `what` in its words."""
    if len(data) > LARGEST_DOCUMENT:
        raise ImageRefused(f"{what} has more than {LARGEST_DOCUMENT >> 20} MiB", field="image")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise ImageRefused(f"{what} is not JSON", field="image", hint="the registry or archive is damaged") from None
    if not isinstance(value, dict):
        raise ImageRefused(f"{what} is not a JSON object", field="image")
    return value


def parse_manifest(data: bytes, media_type: str = "") -> ImageManifest | ImageIndex:
    """Read a manifest or an index; the document's own type counts, `media_type` is for documents without one."""
    value = read_json(data, "the image's manifest")
    kind = value.get("mediaType") or media_type.partition(";")[0].strip()
    if kind in INDEXES or (kind not in MANIFESTS and "manifests" in value and "layers" not in value):
        return _validate(ImageIndex, value, "index")
    if value.get("schemaVersion") == 1 or "fsLayers" in value:
        raise ImageRefused(
            "the image's manifest has the old form 'schema 1'",
            field="image",
            hint="push the image again with a newer tool, for example skopeo copy --format oci",
        )
    manifest = _validate(ImageManifest, value, "manifest")
    if manifest.config.media_type not in _CONFIGS:
        raise ImageRefused(
            f"this is no image but an artifact of type {manifest.config.media_type[:100]!r}",
            field="image",
            hint="name the repository of an image",
        )
    for layer in manifest.layers:
        if not _LAYER.fullmatch(layer.media_type):
            raise ImageRefused(
                f"the layer {layer.digest[:19]} has the unknown type {layer.media_type[:100]!r}",
                field="image",
                hint="carrel reads tar layers, plain or compressed with gzip or zstd, and no encrypted ones",
            )
    return manifest


def parse_config(data: bytes) -> ImageConfig:
    """Read the configuration of an image."""
    document = _validate(_ConfigDocument, read_json(data, "the image's configuration"), "configuration")
    run = document.config
    pairs = (entry.partition("=") for entry in run.env)
    return ImageConfig(
        architecture=document.architecture,
        os=document.os,
        variant=document.variant,
        created=document.created,
        environment={key: value for key, equals, value in pairs if key and equals},
        working_directory=os.path.normpath("/" + run.working_directory).replace("//", "/"),
        user=run.user,
        entry_point=run.entry_point,
        command=run.command,
        labels=run.labels,
        shell=run.shell,
        stop_signal=run.stop_signal,
        exposed_ports=tuple(run.exposed_ports),
        volumes=tuple(run.volumes),
        diff_ids=document.rootfs.diff_ids,
    )


def _plainly(descriptor: BlobDescriptor) -> dict[str, Any]:
    return descriptor.model_dump(by_alias=True, include={"media_type", "digest", "size"})


def _validate(kind: type[T], value: Mapping[str, Any], what: str) -> T:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part)[:40] for part in first["loc"][:6])
        raise ImageRefused(
            f"the image's {what} is invalid: {where}: {first['msg'][:200]}",
            field="image",
            hint="the registry or archive is damaged, or the image was made by a broken tool",
        ) from None
