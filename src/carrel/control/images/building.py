"""Builds images from Dockerfiles. Each RUN runs in a sandbox of its own, whose root can be changed.

After every step there is a whole image in the storage, so that the next step can run from it, and so that a build that
is repeated finds it again: it has a name that is made of everything the step depends on. If the build context changed,
COPY reads its files again, and makes the same layer as before if these did not change.
"""

from __future__ import annotations

import asyncio
import bz2
import gzip
import hashlib
import json
import logging
import lzma
import os
import secrets
import shutil
import zlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import BinaryIO, cast

from carrel.control.images.images import CACHE_REPOSITORY, Images, nothing
from carrel.control.operations.admission import Admission
from carrel.control.operations.call import Call
from carrel.control.operations.caller import OWN_WORK, Caller
from carrel.control.operations.operations import OwnOperations
from carrel.control.python.environment_builds import LineSplitter
from carrel.control.sessions.owners import BUILDS_IMAGE, LABEL
from carrel.control.sessions.sessions import Sessions
from carrel.errors import CarrelError, InvalidRequest, LimitExceeded, NotFound, PlatformError
from carrel.images import build_layers
from carrel.images.build_layers import Owner, WrittenLayer
from carrel.images.build_steps import BuildArguments, BuildStep, CopyStep, DirectoryStep, RunStep, StageEvaluation
from carrel.images.dockerfile import SCRATCH, Dockerfile, parse, refused
from carrel.images.documents import OCI_CONFIG, OCI_LAYER, BlobDescriptor, ImageConfig, ImageManifest, ImagePlatform
from carrel.images.reference import ImageReference
from carrel.images.storage import ImageStorage, StoredImage
from carrel.isolation import ids, image_user
from carrel.isolation.image_root import COMMON, UPPER
from carrel.models import CommandRequest, Network, SandboxRequest
from carrel.models import operations as op
from carrel.models.images import ImageBuild, ImageInfo
from carrel.primitives import libc
from carrel.threads import run_to_end

log = logging.getLogger("carrel.images")

SayLine = Callable[[str], None]
"""Gets the log of a build, line by line."""

_MOST_WORDS = 4000
_ALL_USERS = "see the log of the build"
_ONE_USER = (
    "see the log of the build; this server runs as an ordinary user, so a RUN line has one user id: it cannot give "
    "files to other users (chown) or become one (su); build such images on a server that runs as root"
)
_COMPRESSIONS: dict[bytes, Callable[[BinaryIO], BinaryIO]] = {
    b"\x1f\x8b": lambda file: cast(BinaryIO, gzip.open(file)),  # noqa: SIM115
    b"BZh": lambda file: cast(BinaryIO, bz2.open(file)),  # noqa: SIM115
    b"\xfd7zXZ": lambda file: cast(BinaryIO, lzma.open(file)),  # noqa: SIM115
}


class _Runs:
    """Runs the RUN lines of builds."""

    def __init__(self, sessions: Sessions, operations: OwnOperations, largest: int, timeout_s: float):
        self._sessions = sessions
        self._operations = operations
        self.largest = largest
        self._timeout_s = timeout_s

    async def run(self, step: RunStep, image: StoredImage, owner: Owner, path: str, say: SayLine) -> WrittenLayer:
        """Run a command from an image, and write what it changed as a layer to `path`."""
        taken: list[WrittenLayer | CarrelError] = []

        async def harvest(volume: str) -> None:
            upper = os.path.join(volume, UPPER)
            try:
                taken.append(
                    await run_to_end(
                        lambda: build_layers.changes_layer(upper, _owners(owner), path, self.largest, COMMON)
                    )
                )
            except CarrelError as error:
                taken.append(error)
            except OSError as error:
                taken.append(PlatformError(f"the changes of a RUN cannot be read: {error}"))

        request = SandboxRequest(
            network=Network.ALLOWLIST,
            labels={LABEL: BUILDS_IMAGE},
            image=str(ImageReference("localhost", "image", digest=image.digest)),
            start_in="image",
        )
        async with asyncio.timeout(self._timeout_s + 120):
            box = await self._sessions.start_own(request, "")
            whole: Callable[[str], Awaitable[None]] | None = None
            try:
                await self._run_command(box.id, step, say)
                whole = harvest
            finally:
                await asyncio.shield(self._sessions.end_own(box.id, whole))
        if not taken:
            raise PlatformError("the changes of a RUN were lost", hint="build again")
        if isinstance(taken[0], CarrelError):
            raise taken[0]
        return taken[0]

    async def _run_command(self, box: str, step: RunStep, say: SayLine) -> None:
        operations, timeout = self._operations, self._timeout_s
        request = CommandRequest(command=list(step.command), env=dict(step.environment), timeout=timeout)
        started = await operations.start_command(OWN_WORK, box, request)
        lines = LineSplitter(lambda line: say(f"  {line}"))
        async for chunk in operations.command_output(OWN_WORK, box, started.id):
            if chunk.stream in {"stdout", "stderr"}:
                lines.feed(chunk.data)
        lines.flush()
        result = await operations.command_result(OWN_WORK, box, started.id)
        if result.timed_out:
            raise LimitExceeded(
                f"Dockerfile, line {step.line}: RUN took more than {timeout:g} seconds", hint="do less in one RUN line"
            )
        if result.exit_code != 0:
            words = (result.stderr or result.stdout).strip()[-_MOST_WORDS:]
            why = "there is not enough memory" if result.oom_killed else words
            ended = f"it ended with {result.exit_code if result.exit_code is not None else result.signal}"
            raise refused(step.line, f"RUN failed: {ended}: {why}", _ALL_USERS if os.geteuid() == 0 else _ONE_USER)


class ImageBuilds:
    """Builds images, one step after the other."""

    def __init__(
        self,
        images: Images,
        storage: ImageStorage,
        sessions: Sessions,
        operations: OwnOperations,
        admission: Admission,
        *,
        largest_mb: int,
        timeout_s: float,
    ):
        self._images = images
        self._storage = storage
        self._admission = admission
        self._runs = _Runs(sessions, operations, largest_mb << 20, timeout_s)

    async def build(self, caller: Caller, request: ImageBuild, context: str, say: SayLine) -> ImageInfo:
        """Build an image from a tar file of the build context, and name it. Raises `InvalidRequest` with the line."""
        name = None if request.image is None else self._images.parse(request.image)
        arguments = {"image": request.image or "", "dockerfile": request.dockerfile}
        async with (
            self._admission.admit(Call(op.BUILD_IMAGE, arguments, caller)) as traffic,
            AsyncExitStack() as held,
        ):
            traffic.count_in(os.stat(context).st_size)
            held.enter_context(self._storage.adding())
            place = await run_to_end(lambda: held.enter_context(self._storage.temporary()))
            build = _Build(self._images, self._storage, self._runs, caller, request, say, held, place)
            image = await build.run(context)
            if name is not None:
                await asyncio.to_thread(self._storage.name, name, image.digest)
                image = await asyncio.to_thread(self._storage.open, name)
            return await self._images.describe(caller, image)


class _Build:
    """One build. `held` keeps its images on the disk until it is over; `place` is a directory for its files."""

    def __init__(
        self,
        images: Images,
        storage: ImageStorage,
        runs: _Runs,
        caller: Caller,
        request: ImageBuild,
        say: SayLine,
        held: AsyncExitStack,
        place: str,
    ):
        self._images = images
        self._storage = storage
        self._runs = runs
        self._caller = caller
        self._request = request
        self._say = say
        self._held = held
        self._place = place
        self._platform = ImagePlatform.of_host()
        self._stages: dict[int, StoredImage] = {}
        self._context: StoredImage | None = None

    async def run(self, context: str) -> StoredImage:
        """Build the wanted stage, and before it those that it needs."""
        self._context = await self._context_image(context)
        text = await asyncio.to_thread(_read, self._context.root, self._request.dockerfile)
        file = parse(text)
        arguments = BuildArguments(file, self._request.build_args, self._platform)
        return await self._stage(file, arguments, file.last_of(self._request.target))

    async def _stage(self, file: Dockerfile, arguments: BuildArguments, number: int) -> StoredImage:
        if number in self._stages:
            return self._stages[number]
        stage = file.stages[number]
        base, platform = arguments.base_of(stage, file.escape)
        if platform and platform not in {str(self._platform), f"{self._platform.os}/{self._platform.architecture}"}:
            raise refused(
                stage.line, f"this server builds for {self._platform}, not for {platform}", "leave --platform out"
            )
        self._say(f"[{number + 1}/{len(file.stages)}] FROM {base}")
        image = await self._origin(file, arguments, base, number)
        walk = StageEvaluation(stage, image.config, arguments, file.escape)
        for step in walk.steps():
            self._say(f"[{number + 1}/{len(file.stages)}] {step.text}")
            image = await self._step(file, arguments, number, step, image, walk.config)
        image = await self._commit(image, walk.config)
        self._stages[number] = image
        return image

    async def _origin(self, file: Dockerfile, arguments: BuildArguments, name: str, before: int) -> StoredImage:
        """Return the image that a FROM or a `COPY --from` names: an earlier stage, nothing, or an image."""
        found = file.find(name, before)
        if found is not None:
            return await self._stage(file, arguments, found)
        if name == SCRATCH:
            platform = self._platform
            empty = ImageConfig(architecture=platform.architecture, os=platform.os, variant=platform.variant)
            return await self._image(empty, [])
        image = await self._images.ensure(self._caller, self._images.parse(name))
        await self._hold(image)
        return image

    async def _step(
        self,
        file: Dockerfile,
        arguments: BuildArguments,
        number: int,
        step: BuildStep,
        image: StoredImage,
        config: ImageConfig,
    ) -> StoredImage:
        image = await self._commit(image, config)
        if isinstance(step, RunStep):
            return await self._run(step, image)
        if isinstance(step, DirectoryStep):
            owner = await self._owner(step.line, image, step.user)
            return await self._layered(
                image, lambda path: build_layers.directory_layer(step.path, image.root, owner, path)
            )
        assert self._context is not None
        source = await self._origin(file, arguments, step.origin, number) if step.origin else self._context
        for each in step.sources if step.unpack else ():
            one = replace(step, sources=(each,))
            said = ["add", image.digest, source.digest, each, step.target, step.owner, step.mode]
            image = await self._once(said, partial(self._added, one, source, image))
        return image if step.unpack else await self._copied(step, source, image)

    async def _copied(self, step: CopyStep, source: StoredImage, image: StoredImage) -> StoredImage:
        owner: Owner | None = None  # as in the archive, whose owners an ordinary user cannot keep
        if step.owner or not step.unpack or source is self._context or os.geteuid() != 0:
            owner = await self._owner(step.line, image, step.owner)
        most = self._runs.largest
        said = ["copy", image.digest, source.digest, step.sources, step.texts, step.target, owner, step.mode]

        async def make() -> StoredImage:
            return await self._layered(
                image, lambda path: build_layers.copy_layer(step, source.root, image.root, owner, path, most)
            )

        return await self._once(said, make)

    async def _added(self, step: CopyStep, source: StoredImage, image: StoredImage) -> StoredImage:
        """Copy a source of ADD; what is in it, if it is an archive."""
        path = self._new_file()
        try:
            most = self._runs.largest
            if await run_to_end(lambda: unpacked_archive(source.root, step.sources[0], path, most)):
                if step.target == "/" and not step.owner and step.mode is None:  # it is a layer
                    digest, size = await run_to_end(lambda: _digest(path))
                    return await self._add(image, WrittenLayer(digest, size, 1), path)
                inside = await self._context_image(path)
                step = replace(step, sources=(".",), target=step.target.rstrip("/") + "/")
                return await self._copied(step, inside, image)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(path)
        return await self._copied(step, source, image)

    async def _layered(self, image: StoredImage, write: Callable[[str], WrittenLayer | None]) -> StoredImage:
        """Return the image with the layer that `write` writes to a file, if there is anything in it."""
        path = self._new_file()
        try:
            layer = await run_to_end(lambda: write(path))
            return image if layer is None or not layer.entries else await self._add(image, layer, path)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(path)

    async def _owner(self, line: int, image: StoredImage, user: str) -> Owner:
        if not user:
            return 0, 0
        try:
            found = await asyncio.to_thread(image_user.find, image.root, user)
        except CarrelError as error:
            raise refused(line, error.detail, error.hint or "use numbers") from None
        return found.uid, found.gid

    async def _run(self, step: RunStep, image: StoredImage) -> StoredImage:
        owner = await self._owner(step.line, image, step.user)
        variables = sorted(step.environment.items())
        said = ["run", image.digest, step.command, variables, step.working_directory, step.user]

        async def make() -> StoredImage:
            path = self._new_file()
            try:
                layer = await self._runs.run(step, image, owner, path, self._say)
                return await self._add(image, layer, path) if layer.entries else image
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(path)

        return await self._once(said, make)

    async def _once(self, said: Sequence[object], make: Callable[[], Awaitable[StoredImage]]) -> StoredImage:
        """Return the image that a step made in an earlier build, or make it now. `said` is all that it depends on."""
        key = hashlib.sha256(json.dumps(said).encode()).hexdigest()
        reference = ImageReference("localhost", CACHE_REPOSITORY, tag=key)
        known = None if self._request.no_cache else await asyncio.to_thread(self._storage.find, reference)
        if known is not None:
            self._say("  as in an earlier build")
            await self._hold(known)
            return known
        made = await make()
        await asyncio.to_thread(self._storage.name, reference, made.digest)
        return made

    # images

    async def _commit(self, image: StoredImage, config: ImageConfig) -> StoredImage:
        """Return the image with another configuration and the same layers."""
        config = replace(config, diff_ids=image.config.diff_ids, created="")
        if config == replace(image.config, created=""):
            return image
        return await self._image(config, list(image.manifest.layers))

    async def _add(self, image: StoredImage, layer: WrittenLayer, path: str) -> StoredImage:
        """Return the image with one more layer."""
        await run_to_end(lambda: self._storage.place_blob(path, layer.digest))
        descriptor = BlobDescriptor(mediaType=OCI_LAYER, digest=layer.digest, size=layer.size)
        config = replace(image.config, diff_ids=(*image.config.diff_ids, layer.digest), created="")
        return await self._image(config, [*image.manifest.layers, descriptor])

    async def _image(self, config: ImageConfig, layers: list[BlobDescriptor]) -> StoredImage:
        encoded = config.encode()
        digest = await asyncio.to_thread(self._storage.add_blob, encoded)
        descriptor = BlobDescriptor(mediaType=OCI_CONFIG, digest=digest, size=len(encoded))
        manifest = await asyncio.to_thread(self._storage.add_blob, ImageManifest.of(descriptor, layers))
        image = await self._storage.add_image(manifest, [], nothing)
        await self._hold(image)
        return image

    async def _hold(self, image: StoredImage) -> None:
        self._held.enter_context(await asyncio.to_thread(self._storage.hold, image.digest))

    async def _context_image(self, path: str) -> StoredImage:
        """Unpack the build context as if it were the layer of an image: as safely, and once for the same content."""
        digest, size = await run_to_end(lambda: _digest(path))
        if not self._storage.has_blob(digest):
            copy = self._new_file()
            await run_to_end(lambda: shutil.copyfile(path, copy))
            await run_to_end(lambda: self._storage.place_blob(copy, digest))
        layer = BlobDescriptor(mediaType=OCI_LAYER, digest=digest, size=size)
        return await self._image(ImageConfig(architecture=self._platform.architecture, diff_ids=(digest,)), [layer])

    def _new_file(self) -> str:
        """Return a path for a layer."""
        return os.path.join(self._place, secrets.token_hex(8))


def _owners(agent: Owner) -> Callable[[os.stat_result], Owner]:
    """Return the owner in the image of a file of the sandbox's volume.

    As root, each has an id of its own. An ordinary user has only one id.
    """
    if os.geteuid() != 0:
        return lambda _info: agent
    return lambda info: (ids.in_image(info.st_uid, agent[0]), ids.in_image(info.st_gid, agent[1]))


def _digest(path: str) -> tuple[str, int]:
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256")
        return f"sha256:{found.hexdigest()}", file.tell()


def _read(root: str, name: str) -> str:
    directory = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        descriptor = libc.open_in_root(directory, os.fsencode(name), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        raise NotFound(
            f"the build context has no {name[:200]}", field="dockerfile", hint="name the Dockerfile with --file"
        ) from None
    finally:
        os.close(directory)
    with open(descriptor, "rb") as file:
        try:
            return file.read((1 << 20) + 1).decode()
        except (UnicodeDecodeError, OSError):
            raise InvalidRequest(f"{name[:200]} is not a text file in UTF-8", field="dockerfile") from None


def unpacked_archive(root: str, name: str, path: str, most: int) -> bool:
    """Write a local archive without its compression to `path`; return False if the file is no archive. Blocking."""
    directory = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        source = libc.open_in_root(directory, os.fsencode(name.lstrip("/")), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return False
    finally:
        os.close(directory)
    with open(source, "rb") as file:
        try:
            head = file.read(512)
        except IsADirectoryError:
            return False
        file.seek(0)
        opener = next((each for magic, each in _COMPRESSIONS.items() if head.startswith(magic)), None)
        if opener is None and head[257:262] != b"ustar":
            return False
        with opener(file) if opener else file as plain, open(path, "xb") as target:
            try:
                first = plain.read(512)
                if first[257:262] != b"ustar":
                    return False  # a compressed file, not an archive
                while first:
                    most -= target.write(first)
                    if most < 0:
                        raise LimitExceeded(f"the archive {name[:200]} is too large unpacked", field="dockerfile")
                    first = plain.read(1 << 20)
            except (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error) as error:
                raise InvalidRequest(f"the archive {name[:200]} is damaged: {error}", field="dockerfile") from None
    return True
