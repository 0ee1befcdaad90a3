"""A new sandbox of this process, without a server: for `carrel run` when no server is running.

It has a provider, limits, and a workspace that is removed afterwards. It has no store, no API and no policy, so
requests that need a policy, a template or the proxy are left to a server: see `local_sandbox`. Most of a start is
waiting for other processes, so these are started first and the rest is imported meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from carrel.errors import InvalidRequest, NotRunning, SandboxLost
from carrel.isolation import probe
from carrel.isolation.cgroups import host_memory_mb
from carrel.isolation.inside import ENVIRONMENTS
from carrel.isolation.tools import shared_tools
from carrel.primitives import tasks
from carrel.providers.zygotes import ZygoteClient

if TYPE_CHECKING:
    from carrel.config import Settings
    from carrel.control.sessions.placement import Resolved
    from carrel.control.supervisor.client import SupervisorClient
    from carrel.control.supervisor.frames import StreamChunk
    from carrel.models import CommandInfo, SandboxRequest
    from carrel.providers.base import Handle, Provider

_LONGEST_BASE = 45
_DISK_EVERY_S = 1.0
_MB = 1024 * 1024
_PROVIDERS = frozenset({"auto", "namespace"})


def short_temporary_directory() -> str:
    """Return the directory for temporary files: paths of sockets in it must be shorter than 108 bytes."""
    base = tempfile.gettempdir()
    return "/tmp" if len(os.fsencode(base)) > _LONGEST_BASE else base


class LocalSandbox:
    """A sandbox with the part of the SDK's `AsyncSandbox` that is needed to run one command."""

    def __init__(self, provider: Provider, handle: Handle, resolved: Resolved, workspace: str):
        from carrel.control.supervisor.client import SupervisorClient

        self.id = str(handle["id"])
        self.provider = provider.name
        self.unsafe = provider.unsafe
        self.connection = SupervisorClient(provider.link(handle))
        self.commands = LocalCommands(self.connection, resolved.limits.timeout_s, provider, handle)
        self._disk_mb = resolved.limits.disk_mb
        self._lifetime_s = resolved.limits.lifetime_s
        self._workspace = workspace
        self._source, self._handle = provider, handle

    async def watch_disk(self) -> None:
        """End the sandbox when its workspace exceeds the limit."""
        limit = self._disk_mb
        while limit is not None:
            await asyncio.sleep(_DISK_EVERY_S)
            await asyncio.to_thread(import_module, "carrel.workspaces.usage")  # not earlier: most commands are short
            from carrel.workspaces.usage import max_entries, measure, verdict

            usage = await measure(self._workspace, stop_bytes=limit * _MB * 2, stop_entries=max_entries(limit) * 2)
            if (why := verdict(usage, limit)) is not None:
                self.commands.ended_for = f"{why}, so it was ended"
                await self._source.remove(self._handle)
                return

    async def watch_lifetime(self) -> None:
        """End the sandbox when its lifetime is over."""
        if self._lifetime_s is not None:
            await asyncio.sleep(self._lifetime_s)
            self.commands.ended_for = f"the lifetime of the sandbox ({self._lifetime_s:g} s) is over, so it was ended"
            self.commands.ended_hint = "give it a longer --lifetime, or change the setting sandbox.lifetime_s"
            await self._source.remove(self._handle)


class LocalCommands:
    """`box.commands` of a local sandbox."""

    def __init__(
        self, supervisor: SupervisorClient, timeout_s: float | None, provider: Provider, handle: Handle
    ) -> None:
        self.supervisor = supervisor
        self._timeout_s = timeout_s
        self._provider = provider
        self._handle = handle
        self.ended_for: str | None = None
        """Why carrel itself ended the sandbox."""
        self.ended_hint = "`carrel serve` has the setting sandbox.disk_mb"

    async def start(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | Literal["default"] | None = "default",
        output_limit: int | None = None,
        interactive: bool = False,
        terminal: tuple[int, int] | None = None,
    ) -> LocalCommand:
        """Start a command; see `AsyncCommands.start`."""
        from pydantic import ValidationError

        from carrel.control.operations.checks import command_body, require_id
        from carrel.models import CommandRequest

        words = command if isinstance(command, str) else [*command]
        size = None if terminal is None else {"rows": terminal[0], "cols": terminal[1]}
        deadline = 0 if timeout is None else timeout
        given = {"cwd": cwd, "timeout": deadline, "output_limit": output_limit, "terminal": size}
        asked = {name: value for name, value in given.items() if value is not None} | {"env": dict(env or {})}
        try:
            request = CommandRequest.model_validate({"command": words, "interactive": interactive, **asked})
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise InvalidRequest(f"the command cannot be run: {first['msg']}", field=str(first["loc"][0])) from None
        body, _ = command_body(request, self._timeout_s)
        info = await self.supervisor.start_command(body)
        require_id(info.id)
        return LocalCommand(self, info.id)

    async def output(self, command_id: str) -> AsyncIterator[StreamChunk]:
        """Yield the output of a command until it ends, then an `end` chunk with its info as JSON."""
        from carrel.control.governance.redaction import clean_output
        from carrel.redaction.redact import Redactor

        redactor = Redactor()

        async def current() -> Redactor:
            return redactor

        try:
            download = await self.supervisor.command_output(command_id, 0, follow=True)
            try:
                async for chunk in clean_output(aiter(download), current, 0):
                    yield chunk
            finally:
                download.close()
        except SandboxLost as error:
            if self.ended_for is not None:
                raise SandboxLost(self.ended_for, hint=self.ended_hint) from None
            error.hint = None  # there is no server that could start it again
            raise

    async def check_end(self, end: bytes) -> CommandInfo:
        """Validate the info of a command that has ended, and ask the provider whether memory ran out."""
        from carrel.control.operations.checks import check, json_object
        from carrel.models import CommandInfo

        info = check(CommandInfo, json_object(end))
        killed = (info.signal in {"SIGKILL", "KILL"} or info.exit_code == 137) and not info.timed_out
        info.oom_killed = killed and await self._provider.out_of_memory_kills(self._handle) > 0
        return info


class LocalCommand:
    """A running command of a local sandbox; see `AsyncCommand`."""

    def __init__(self, commands: LocalCommands, id: str):
        self.id = id
        self._commands = commands

    def stream(self) -> LocalStream:
        """Return the output until the command ends."""
        return LocalStream(self._commands, self.id)

    async def signal(self, signal: str = "TERM", *, tree: bool = False) -> None:
        """Send a signal to the command's process group, or to every process it started."""
        await self._commands.supervisor.signal_command(self.id, {"signal": signal, "tree": tree})

    async def resize(self, rows: int, cols: int) -> None:
        """Give the command's terminal another size."""
        await self._commands.supervisor.resize_terminal(self.id, {"rows": rows, "cols": cols})

    async def kill(self) -> None:
        """Kill every process of the command."""
        with suppress(NotRunning):
            await self.signal("KILL", tree=True)

    async def send_input(self, data: bytes) -> None:
        """Write to the standard input of the command."""
        await self._commands.supervisor.send_input(self.id, data, close=False)

    async def close_input(self) -> None:
        """Close standard input: the command reads the end of file."""
        await self._commands.supervisor.send_input(self.id, b"", close=True)


class LocalStream:
    """The output of a running command; afterwards `info` has its end."""

    def __init__(self, commands: LocalCommands, command_id: str):
        self._commands = commands
        self._command_id = command_id
        self.info: CommandInfo | None = None

    async def __aiter__(self) -> AsyncIterator[StreamChunk]:
        async for chunk in self._commands.output(self._command_id):
            if chunk.stream == "end":
                self.info = await self._commands.check_end(chunk.data)
            else:
                yield chunk


def needs_server(settings: Settings) -> bool:
    """Whether the settings need a server: for a policy, a template, an image, a network or another provider."""
    policy = settings.policy.settings_file or settings.policy.sources_file
    sandbox = settings.sandbox
    return (
        bool(policy or sandbox.template or sandbox.image)
        or sandbox.network != "none"
        or sandbox.low_trust_network not in {None, "none"}
        or sandbox.provider not in _PROVIDERS
    )


@asynccontextmanager
async def local_sandbox(
    flags: Mapping[str, object],
    *,
    provider: str | None = None,
    trust: str | None = None,
    network: str | None = None,
    template: str | None = None,
    image: str | None = None,
    start_in: str | None = None,
    limits: Mapping[str, float | None] | None = None,
) -> AsyncIterator[LocalSandbox | None]:
    """Yield a new sandbox that is removed afterwards, or None when the request needs a server.

    `flags` are settings that override those of `carrel.toml` and the environment.
    """
    if (
        (template or image or start_in) is not None
        or network not in {None, "none"}
        or (provider or "auto") not in _PROVIDERS
    ):
        yield None
        return
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="carrel-", dir=short_temporary_directory(), ignore_cleanup_errors=True)
        )
        run, workspaces, environments = (os.path.join(directory, name) for name in ("run", "workspaces", "envs"))
        for path in (run, workspaces, environments):
            os.mkdir(path, 0o700)
        loop = asyncio.get_running_loop()
        probing = loop.run_in_executor(None, probe.host)
        shared = {ENVIRONMENTS: environments, **shared_tools()}
        zygote = ZygoteClient(run, workspaces, plain=False, shared=shared)
        warming = asyncio.ensure_future(zygote.request("describe"))
        stack.push_async_callback(_close, zygote, warming)
        settings = await asyncio.to_thread(_settings, flags)
        request = None if needs_server(settings) else _request(trust, limits or {})
        if request is None:
            yield None
            return
        from carrel.control.sessions.placement import resolve
        from carrel.models import Network
        from carrel.providers import open_providers

        await probing
        resolved = resolve(
            settings,
            open_providers(run, workspaces, allow_process=False, shared=shared, zygote=zygote),
            provider=provider or "auto",
            trust=request.trust,
            network=Network.NONE,
            limits=request.limits.model_dump(exclude_none=True),
            host_memory_mb=host_memory_mb(),
        )
        async with _started(resolved, workspaces) as box:
            yield box


def _settings(flags: Mapping[str, object]) -> Settings:
    """Read the settings, and import modules while the caller waits for other processes."""
    import carrel.control.governance.redaction
    import carrel.control.sessions.placement
    import carrel.control.supervisor.client
    import carrel.providers.choosing  # noqa: F401
    from carrel.config import load

    return load(flags)


def _request(trust: str | None, limits: Mapping[str, float | None]) -> SandboxRequest | None:
    """Return the validated request, or None when it is invalid: then the server reports the error."""
    from pydantic import ValidationError

    from carrel.models import SandboxRequest

    try:
        return SandboxRequest.model_validate({"limits": dict(limits), **({} if trust is None else {"trust": trust})})
    except ValidationError:
        return None


@asynccontextmanager
async def _started(resolved: Resolved, workspaces: str) -> AsyncIterator[LocalSandbox]:
    from carrel.primitives.trees import remove_tree
    from carrel.providers.base import Capability, Launch
    from carrel.workspaces.layout import CANONICAL_UID, Layout, WorkspaceFacts

    provider, limits = resolved.provider, resolved.limits
    name = f"eph-{secrets.token_hex(8)}"
    workspace = os.path.join(workspaces, name)
    os.mkdir(workspace, 0o700)
    if os.geteuid() == 0:
        os.chown(workspace, CANONICAL_UID, CANONICAL_UID)
    Layout(os.path.dirname(workspaces)).prepare_workspace(workspace, WorkspaceFacts(None, ttl_days=0), new=True)
    disk_mb = limits.disk_mb if Capability.LIMIT_DISK in provider.capabilities() else None
    launch = Launch(
        id=name,
        workspace=workspace,
        network=resolved.network,
        cpus=limits.cpus,
        memory_mb=limits.memory_mb,
        disk_mb=disk_mb,
        processes=limits.processes,
    )
    handle = await provider.start(launch)
    box: LocalSandbox | None = None
    try:
        box = LocalSandbox(provider, handle, resolved, workspace)
        watching = [asyncio.ensure_future(box.watch_disk()), asyncio.ensure_future(box.watch_lifetime())]
        try:
            yield box
        finally:
            await tasks.cancel(watching)
    finally:
        if box is not None:
            box.connection.close()
        await provider.remove(handle)
        await asyncio.to_thread(remove_tree, workspace)


async def _close(zygote: ZygoteClient, warming: asyncio.Future[dict[str, Any]]) -> None:
    """Wait for a zygote that is still starting, then end it."""
    await asyncio.gather(warming, return_exceptions=True)
    await zygote.close()
