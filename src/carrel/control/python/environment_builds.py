"""Resolves requirements and builds environments, each in an ephemeral sandbox of its own, under the policy of the
requester. Its only network is the package index of the proxy.

Two sandboxes, because source packages run code while they are resolved: that code must not touch the build. The output
of both is hostile input.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import logging
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from carrel.control.governance.policies import INDEX_LABEL
from carrel.control.operations.caller import OWN_WORK
from carrel.control.operations.operations import OwnOperations
from carrel.control.python.environment_checks import Lock, Requester, ResolvableRequest, lock_of
from carrel.control.sessions.sessions import Sessions
from carrel.errors import CarrelError, InvalidRequest, LimitExceeded, PlatformError, Unsupported
from carrel.isolation.inside import UV, WORKSPACE
from carrel.isolation.launchers import SHARED_PIP_PLACE
from carrel.isolation.tools import find_uv
from carrel.models import CommandRequest, Network, SandboxInfo, SandboxRequest
from carrel.models.images import HOST_IMAGE
from carrel.workspaces.environments import MANIFEST, EnvironmentDraft, EnvironmentStorage

log = logging.getLogger("carrel.environments")

Say = Callable[[str], None]
"""Gets the progress, line by line."""

MOST_WORDS = 4000
MOST_RECORD = 8 * 1024 * 1024
MOST_IMPORTS = 32
_MOST_LINE = 500
_PLACE = "env"
_PROJECT = re.compile(r"[a-z0-9]([a-z0-9-]{0,126}[a-z0-9])?")
_MODULE = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_VERSION = re.compile(r"^version_info\s*=\s*(3(?:\.\d{1,4}){1,2})", re.MULTILINE)
_SUFFIX = re.compile(r"\.(py|cpython-[\w-]+\.so|abi3\.so|so)$")
_NO_MODULES = frozenset({"tests", "test", "docs", "doc", "examples", "example", "benchmarks", "scripts", "setup"})
_ENVIRONMENT = {
    "UV_CACHE_DIR": f"{WORKSPACE}/cache",
    "UV_NO_CONFIG": "1",
    "UV_PYTHON_DOWNLOADS": "never",
    "UV_NO_PROGRESS": "1",
    "TMPDIR": WORKSPACE,
    "PIP_CONFIG_FILE": os.devnull,
    "SOURCE_DATE_EPOCH": "315532800",
}


@dataclass(frozen=True, slots=True)
class Built:
    """An environment that was built."""

    draft: EnvironmentDraft
    python: str
    packages: list[dict[str, str]] = field(default_factory=list)
    imports: list[str] = field(default_factory=list)


class Builder:
    """Makes locks and environments."""

    def __init__(
        self,
        sessions: Sessions,
        operations: OwnOperations,
        storage: EnvironmentStorage,
        *,
        largest_mb: int,
        timeout_s: float,
    ):
        self._sessions = sessions
        self._operations = operations
        self._storage = storage
        self._largest_mb = largest_mb
        self._timeout_s = timeout_s

    async def resolve(self, wanted: ResolvableRequest, asker: Requester, say: Say) -> Lock:
        """Resolve a request; `InvalidRequest` with the message of the resolver when that fails."""
        command = [
            UV,
            "pip",
            "compile",
            "-",
            "--generate-hashes",
            "--no-header",
            "--no-annotate",
            "--no-emit-index-url",
        ]
        command += ["--python", wanted.interpreter]
        async with asyncio.timeout(self._timeout_s + 60):
            box = await self._start(wanted, asker)
            try:
                text = "\n".join(wanted.requirements) + "\n"
                said = await self._run(box, command, say, stdin=text, what="the requirements cannot be resolved")
            finally:
                await asyncio.shield(self._end(box))
        return lock_of(said)

    async def build(self, wanted: ResolvableRequest, lock: Lock, asker: Requester, say: Say) -> Built:
        """Build the environment of a lock, as a checked draft with its description."""
        python = f"{WORKSPACE}/{_PLACE}/bin/python"
        install = [UV, "pip", "install", "--require-hashes", "--no-deps", "--compile-bytecode", "--python", python]
        install += ["-r", f"{WORKSPACE}/lock.txt"]
        make = [UV, "venv", "--relocatable", "--no-project", "--python", wanted.interpreter, f"{WORKSPACE}/{_PLACE}"]
        taken: list[Built | CarrelError] = []

        async def harvest(workspace: str) -> None:
            try:
                taken.append(await asyncio.to_thread(self._take, workspace, wanted))
            except CarrelError as error:
                taken.append(error)

        async with asyncio.timeout(2 * self._timeout_s + 120):
            box = await self._start(wanted, asker)
            whole: Callable[[str], Awaitable[None]] | None = None
            try:
                await self._operations.write_file(OWN_WORK, box.id, "lock.txt", lock.text.encode())
                await self._run(box, make, None, what="no virtual environment could be made")
                await self._run(box, install, say, what="the packages cannot be installed")
                whole = harvest
            finally:
                await asyncio.shield(self._end(box, whole))
        if not taken:
            raise PlatformError("the environment was lost before it was put in place", hint="ask again")
        if isinstance(taken[0], CarrelError):
            raise taken[0]
        return taken[0]

    def _take(self, workspace: str, wanted: ResolvableRequest) -> Built:
        source = os.path.join(workspace, _PLACE)
        draft = self._storage.take(source, wanted.interpreter, most_bytes=self._largest_mb << 20)
        try:
            built = described(draft, wanted)
            manifest = {
                "python": built.python,
                "interpreter": wanted.interpreter,
                "requirements": list(wanted.requirements),
                "packages": built.packages,
                "imports": built.imports,
            }
            draft.write(MANIFEST, json.dumps(manifest, indent=1).encode() + b"\n")
            site = f"lib/python{wanted.version}/site-packages"
            draft.write(f"{site}/_carrel_pip.pth", f"{SHARED_PIP_PLACE}\n".encode())
        except BaseException:
            self._storage.discard(draft)
            raise
        return built

    async def _start(self, wanted: ResolvableRequest, asker: Requester) -> SandboxInfo:
        if await asyncio.to_thread(find_uv) is None:
            raise Unsupported(
                "this server has no uv to build environments with",
                hint="let the operator install carrel's extra `server`",
            )
        labels = {"carrel": "environment", **({} if wanted.index is None else {INDEX_LABEL: wanted.index})}
        request = SandboxRequest(
            template=asker.template,
            provider=asker.provider,
            trust=asker.trust,
            network=Network.ALLOWLIST,
            limits=asker.limits.model_copy(update={"disk_mb": 2 * self._largest_mb}),
            labels=labels,
            image=HOST_IMAGE,  # the packages are for the interpreters of the host
        )
        return await self._sessions.start_own(request, asker.context_id or "")

    async def _end(self, box: SandboxInfo, harvest: Callable[[str], Awaitable[None]] | None = None) -> None:
        try:
            await self._sessions.end_own(box.id, harvest)
        except CarrelError as error:
            log.warning("sandbox %s, which built an environment, could not be ended: %s", box.id, error)

    async def _run(
        self, box: SandboxInfo, command: list[str], say: Say | None, *, what: str, stdin: str | None = None
    ) -> str:
        """Run a command and return its standard output; pass its standard error on as progress."""
        request = CommandRequest(command=command, env=_ENVIRONMENT, timeout=self._timeout_s, stdin=stdin)
        started = await self._operations.start_command(OWN_WORK, box.id, request)
        lines = LineSplitter(say)
        async for chunk in self._operations.command_output(OWN_WORK, box.id, started.id):
            if chunk.stream == "stderr":
                lines.feed(chunk.data)
        lines.flush()
        result = await self._operations.command_result(OWN_WORK, box.id, started.id)
        if result.timed_out:
            raise LimitExceeded(f"{what} within {self._timeout_s:g} seconds", hint="ask for less, or try again")
        if result.exit_code != 0:
            words = (result.stderr or result.stdout).strip()[-MOST_WORDS:]
            if result.oom_killed:
                words = "there is not enough memory"
            raise InvalidRequest(
                f"{what}: {words or f'it ended with {result.exit_code or result.signal}'}",
                field="requirements",
                hint="change the requirements, or what the policy allows to be installed",
            )
        return result.stdout


class LineSplitter:
    """Splits output into lines and passes them on."""

    def __init__(self, say: Say | None):
        self._say = say
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def feed(self, data: bytes) -> None:
        self._held += self._decoder.decode(data)
        *lines, self._held = self._held.split("\n")
        self._held = self._held[-_MOST_LINE:]
        for line in lines:
            self._tell(line)

    def flush(self) -> None:
        self._tell(self._held)
        self._held = ""

    def _tell(self, line: str) -> None:
        text = line.strip()[:_MOST_LINE]
        if text and self._say is not None:
            self._say(text)


def described(draft: EnvironmentDraft, wanted: ResolvableRequest) -> Built:
    """Describe a draft by its own files. They are hostile input: only entries of the right form are taken. Blocking."""
    configuration = _read(os.path.join(draft.path, "pyvenv.cfg"), 64 * 1024)
    version = _VERSION.search(configuration)
    from packaging.utils import canonicalize_name  # not at the top: it takes long

    packages = os.path.join(draft.path, "lib", f"python{wanted.version}", "site-packages")
    try:
        names = sorted(os.listdir(packages))
    except OSError:
        raise InvalidRequest("the environment has no packages", field="requirements") from None
    asked = {re.split(r"[^a-z0-9-]", text, maxsplit=1)[0] for text in wanted.requirements}
    found: dict[str, str] = {}
    imports: dict[str, None] = {}
    for entry in names:
        if not entry.endswith(".dist-info"):
            continue
        name, _, release = entry.removesuffix(".dist-info").partition("-")
        project = canonicalize_name(name)
        if not _PROJECT.fullmatch(project):
            continue
        found[project] = release[:64]
        if project in asked:
            imports.update(dict.fromkeys(modules(_read(os.path.join(packages, entry, "RECORD"), MOST_RECORD), project)))
    return Built(
        draft,
        version[1] if version else wanted.version,
        [{"name": name, "version": release} for name, release in sorted(found.items())],
        list(imports)[:MOST_IMPORTS],
    )


def modules(record: str, project: str) -> list[str]:
    """Return the modules of a package by its list of files: the one with its name, else all public ones."""
    from packaging.utils import canonicalize_name

    found: Mapping[str, None] = dict.fromkeys(
        top
        for line in record.splitlines()
        for top in [_top(line.split(",", 1)[0].strip('"'))]
        if _MODULE.fullmatch(top) and top.lower() not in _NO_MODULES
    )
    named = [each for each in found if canonicalize_name(each) == project]
    return named or sorted(found)


def _top(path: str) -> str:
    first, slash, rest = path.partition("/")
    if slash:
        return first if rest.endswith((".py", ".so")) else ""
    return _SUFFIX.sub("", first) if _SUFFIX.search(first) else ""


def _read(path: str, most: int) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            return file.read(most).decode("utf-8", "replace")
    except OSError:
        return ""
