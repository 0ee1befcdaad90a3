"""Operations in running sandboxes: commands, files, sessions. Each is admitted, then handed to the supervisor.

There is no second path to a supervisor. `Operations` serves callers; `OwnOperations` is for work of carrel itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from functools import partial
from typing import Generic, Protocol, TypeVar

from carrel.control.governance.redaction import clean_info, clean_result, in_thread_if_large
from carrel.control.operations.admission import Admission
from carrel.control.operations.call import Call, Traffic
from carrel.control.operations.caller import Caller, OwnWork
from carrel.control.operations.checks import (
    Emptied,
    R,
    asked,
    brought,
    checked_path,
    command_body,
    deadline_of,
    on_terminal,
    require_id,
    size_of,
)
from carrel.control.operations.command_ends import CommandEnds
from carrel.control.operations.happened import told_of
from carrel.control.operations.traces import process_span, traced
from carrel.control.secrets.values import SecretValues
from carrel.control.sessions.live import LiveSandbox
from carrel.control.sessions.owners import STATELESS
from carrel.control.sessions.sessions import Sessions
from carrel.control.supervisor.connection import SupervisorDownload
from carrel.control.supervisor.frames import StreamChunk
from carrel.control.supervisor.memory import for_memory
from carrel.control.supervisor.streaming import stream_output
from carrel.errors import InvalidRequest, LimitExceeded, NotFound, SandboxLost
from carrel.models import (
    CommandInfo,
    CommandList,
    CommandRequest,
    CommandResult,
    ExecuteRequest,
    ExecuteResult,
    FileInfo,
    SandboxInfo,
    SandboxRequest,
    SignalRequest,
    SupervisorHealth,
    TerminalSize,
    TerminateRequest,
)
from carrel.models import operations as op
from carrel.models.operations import A, ForwardedOperation, Operation, Q
from carrel.store import SessionRecord

C = TypeVar("C", bound=Caller | OwnWork)
Longest = Callable[[SessionRecord], Awaitable[float | None]]
"""Returns the longest time that the policy allows a command of a session; None for no limit."""


class PackageBuilds(Protocol):
    """Knows the packages of templates."""

    async def wait_briefly(self, box: LiveSandbox) -> None:
        """Wait a short time for packages that are being built: the next command may need them."""


class TemplateImageBuilds(Protocol):
    """Builds the images of templates."""

    async def provide(self, caller: Caller, request: SandboxRequest) -> None:
        """Build the image that a new sandbox gets from its template, if it is missing."""


class SandboxOperations(ABC, Generic[C]):
    """The operations on running sandboxes, for one kind of caller."""

    def __init__(
        self, sessions: Sessions, admission: Admission, secrets: SecretValues, longest: Longest, ends: CommandEnds
    ):
        self._ends = ends
        self._sessions = sessions
        self._longest = longest
        self._redactor = secrets.redactor
        self._admission = admission

    @abstractmethod
    async def _wait_for_packages(self, box: LiveSandbox) -> None:
        """Wait for the packages of the sandbox's template, where its commands may need them."""

    @abstractmethod
    async def _provide_image(self, caller: C, request: SandboxRequest) -> None:
        """Build the image of the template, where a new sandbox needs it."""

    def admit(
        self,
        caller: C,
        operation: Operation,
        arguments: Mapping[str, object],
        sandbox_id: str = "",
        context_id: str | None = None,
    ) -> AbstractAsyncContextManager[Traffic]:
        """Admit an operation on a whole session, or one that needs no running sandbox."""
        return self._admission.admit(Call(operation, arguments, caller, sandbox_id, context_id))

    @asynccontextmanager
    async def enter(
        self, caller: C, name: str, operation: Operation, arguments: Mapping[str, object]
    ) -> AsyncIterator[tuple[LiveSandbox, Traffic]]:
        """Admit an operation on a running sandbox, which counts as in use meanwhile. A lost sandbox is ended."""
        box = await self._sessions.find(name)
        if isinstance(caller, Caller):
            require_open(caller, box)
        record = box.record
        call = Call(operation, arguments, caller, record.id, record.context_id, box.asks_as, box.instance)
        async with self._admission.admit(call) as traffic:
            box.in_flight += 1
            if isinstance(caller, Caller):  # carrel's own work is no activity of the agent
                box.touch()
            try:
                yield box, traffic
            except SandboxLost:
                await self._sessions.lost(box)
                raise
            finally:
                box.in_flight -= 1
                if isinstance(caller, Caller):
                    box.touch()

    # sessions

    async def deploy_or_resume(
        self, caller: C, request: SandboxRequest, idempotency_key: str | None = None
    ) -> tuple[SandboxInfo, bool]:
        """Return the running sandbox of a context, started if necessary, and whether it was started."""
        arguments = request.model_dump(mode="json", exclude={"env"}, exclude_defaults=True)
        if variables := await self._sessions.new_variables(request):
            arguments["env"] = variables
        async with self.admit(caller, op.DEPLOY_OR_RESUME, arguments, context_id=request.context_id):
            key = caller.own(idempotency_key) if isinstance(caller, Caller) else None
            await self._provide_image(caller, request)
            return await self._sessions.deploy_or_resume(caller, request, key)

    async def terminate(self, caller: C, name: str, request: TerminateRequest) -> SandboxInfo:
        record = await self._sessions.record(name)
        async with self.admit(caller, op.TERMINATE, request.model_dump(), record.id, record.context_id):
            return await self._sessions.terminate(
                caller, name, request.reason, snapshot=request.snapshot, delete_workspace=request.delete_files
            )

    async def stop(self, caller: C, name: str) -> SandboxInfo:
        """End the sandbox and keep its workspace; `deploy_or_resume` starts it again."""
        record = await self._sessions.record(name)
        async with self.admit(caller, op.STOP, {}, record.id, record.context_id):
            return await self._sessions.stop(name, "stopped on request")

    # commands

    async def run_command(self, caller: C, name: str, request: CommandRequest) -> CommandResult:
        """Run a command to its end. An interactive one has a terminal, in which nobody types more than `stdin`."""
        async with self.enter(caller, name, op.RUN_COMMAND, asked(request)) as (box, traffic):
            await self._wait_for_packages(box)
            asked_for = on_terminal(request) if request.interactive else request
            body, timeout = command_body(traced(caller, asked_for), box.record.limits.timeout_s)
            if request.stdin is not None:
                traffic.count_in(size_of(request.stdin))
            result = await box.connection.run_command(body, timeout, request.output_limit)
            return await self.conclude(box, traffic, result)

    async def start_command(
        self,
        caller: C,
        name: str,
        request: CommandRequest,
        *,
        attended: bool = False,
        attached: bool = False,
    ) -> CommandInfo:
        """Start a command in the background. `attended`: the caller reads the output until the end. Then a request
        without a deadline gets the deadline of the sandbox; otherwise only the one of the policy. `attached`: its
        output is passed on to one reader and not kept.
        """
        async with self.enter(caller, name, op.START_COMMAND, asked(request)) as (box, traffic):
            await self._wait_for_packages(box)
            default = box.record.limits.timeout_s
            if request.timeout is None and not attended:
                default = await self._longest(box.record)
            body, _ = command_body(traced(caller, request), default, attached=attached)
            if request.stdin is not None:
                traffic.count_in(size_of(request.stdin))
            info = await box.connection.start_command(body)
            self.started(caller, box, traffic, op.START_COMMAND, info.id)
            return await self._clean_info(box, info)

    async def follow_command(
        self, caller: C, name: str, request: CommandRequest, end: Callable[[], Awaitable[CommandInfo]]
    ) -> SupervisorDownload:
        """Start a command in the background under the id of the request, and open its output, in one request to the
        sandbox. The caller reads it, removes secrets from it, and lets `end` return how the command ended.
        """
        assert request.id is not None
        async with self.enter(caller, name, op.START_COMMAND, asked(request)) as (box, traffic):
            await self._wait_for_packages(box)
            default = None if request.timeout is not None else await self._longest(box.record)
            body, _ = command_body(traced(caller, request), default)
            if request.stdin is not None:
                traffic.count_in(size_of(request.stdin))
            stream = await box.connection.follow_command(body, request.id)
            self.started(caller, box, traffic, op.START_COMMAND, request.id, end)
            return stream

    async def list_commands(self, caller: C, name: str) -> CommandList:
        async with self.enter(caller, name, op.LIST_COMMANDS, {}) as (box, _):
            found = await box.connection.list_commands()
            redactor = await self._redactor(box.record.owner)
            for info in found.items:
                info.oom_killed = bool(box.starved.get(info.id))
            return CommandList(items=[clean_info(redactor, info) for info in found.items])

    async def get_command(self, caller: C, name: str, command_id: str) -> CommandInfo:
        require_id(command_id)
        async with self.enter(caller, name, op.GET_COMMAND, {"id": command_id}) as (box, _):
            return await self._clean_info(box, await box.connection.get_command(command_id))

    async def command_result(self, caller: C, name: str, command_id: str) -> CommandResult:
        require_id(command_id)
        async with self.enter(caller, name, op.COMMAND_RESULT, {"id": command_id}) as (box, traffic):
            return await self.conclude(box, traffic, await box.connection.command_result(command_id))

    async def command_output(
        self, caller: C, name: str, command_id: str, *, offset: int = 0, follow: bool = True
    ) -> AsyncIterator[StreamChunk]:
        """Yield the output from `offset` on: first an empty `open`, last an `end` with the checked info as JSON."""
        require_id(command_id)
        arguments = {"id": command_id, "offset": offset}
        async with self.enter(caller, name, op.COMMAND_OUTPUT, arguments) as (box, traffic):
            current = partial(self._redactor, box.record.owner)
            open_at = partial(box.connection.command_output, command_id, follow=follow)
            chunks = stream_output(box, traffic, current, open_at, offset)
            async with aclosing(chunks):
                async for chunk in chunks:
                    yield chunk

    async def send_input(self, caller: C, name: str, command_id: str, data: bytes, *, close: bool = False) -> None:
        require_id(command_id)
        arguments = {"id": command_id, "bytes": len(data)}
        async with self.enter(caller, name, op.SEND_INPUT, arguments) as (box, traffic):
            traffic.count_in(len(data))
            await box.connection.send_input(command_id, data, close=close)

    async def signal_command(self, caller: C, name: str, command_id: str, request: SignalRequest) -> None:
        require_id(command_id)
        arguments = {"id": command_id, "signal": request.signal}
        async with self.enter(caller, name, op.SIGNAL_COMMAND, arguments) as (box, _):
            await box.connection.signal_command(command_id, request.model_dump())

    async def resize_terminal(self, caller: C, name: str, command_id: str, size: TerminalSize) -> None:
        require_id(command_id)
        async with self.enter(caller, name, op.RESIZE_TERMINAL, {"id": command_id}) as (box, _):
            await box.connection.resize_terminal(command_id, size.model_dump())

    async def delete_command(self, caller: C, name: str, command_id: str) -> None:
        """Kill a command with its whole process tree, and forget it."""
        require_id(command_id)
        async with self.enter(caller, name, op.DELETE_COMMAND, {"id": command_id}) as (box, _):
            await box.connection.delete_command(command_id)

    async def execute(self, caller: C, name: str, request: ExecuteRequest) -> ExecuteResult:
        """Run shell text with files; the result has the names of the files that it produced."""
        if request.env_name is not None or request.requirements is not None:
            raise InvalidRequest("an environment is for Python", field="env_name", hint="use language 'python'")
        arguments: dict[str, object] = {"command": request.code} | brought(request.files)
        arguments |= request.model_dump(include={"timeout"}, exclude_defaults=True)
        async with self.enter(caller, name, op.EXECUTE, arguments) as (box, traffic):
            await self._wait_for_packages(box)
            if request.files:
                _room(box)
                traffic.count_in(sum(3 * len(text.rstrip("=")) // 4 for text in request.files.values()))
            body = request.model_dump()
            body["timeout"] = timeout = deadline_of(request.timeout, box.record.limits.timeout_s)
            result = await box.connection.execute(body, timeout)
            size = size_of(result.output) + size_of(result.stderr)
            traffic.count_out(size)
            traffic.told = told_of(result)
            clean = (await self._redactor(box.record.owner)).value
            changes = await in_thread_if_large(size, clean, {"output": result.output, "stderr": result.stderr})
            return result.model_copy(update=changes)

    # files

    async def read_file(
        self, caller: C, name: str, path: str, *, offset: int = 0, length: int | None = None
    ) -> AsyncIterator[int | bytes | None]:
        """Yield the number of bytes to come (None if unknown), then the bytes of the file."""
        checked_path(path)
        async with self.enter(caller, name, op.READ_FILE, {"path": path}) as (box, traffic):
            stream = await box.connection.read_file(path, offset or None, length)
            try:
                yield stream.length
                async for data in stream:
                    traffic.count_out(len(data))
                    yield data
            finally:
                stream.close()

    async def write_file(
        self,
        caller: C,
        name: str,
        path: str,
        content: AsyncIterator[bytes] | bytes,
        *,
        mode: str | None = None,
        parents: bool = True,
        exclusive: bool = False,
    ) -> FileInfo:
        """Write a file atomically, from bytes or from a stream of any length."""
        if mode is not None and not (0 < len(mode) <= 4 and set(mode) <= set("01234567")):
            raise InvalidRequest(
                "the mode is octal permissions such as 644", field="mode", hint="use 3 or 4 digits 0-7"
            )
        checked_path(path)
        arguments = {"path": path} | ({} if mode is None else {"mode": mode})
        async with self.enter(caller, name, op.WRITE_FILE, arguments) as (box, traffic):
            _room(box)
            if isinstance(content, bytes):
                traffic.count_in(len(content))
            else:
                content = _metered(box, content, traffic)
            return await box.connection.write_file(path, content, mode=mode, parents=parents, exclusive=exclusive)

    async def forward(self, caller: C, operation: ForwardedOperation[Q, A], name: str, request: Q) -> A:
        """Perform an operation that is one request to the supervisor, as its row in the table describes."""
        for field in operation.paths:
            checked_path(getattr(request, field), field)
        async with self.enter(caller, name, operation, operation.arguments(request)) as (box, traffic):
            if operation.fills_disk:
                _room(box)
            if operation.content is not None:
                traffic.count_in(size_of(getattr(request, operation.content)))
            result = await box.connection.forward(operation, request)
            if operation.doubt is not None and (why := operation.doubt(request, result)) is not None:
                raise SandboxLost(why)
            return result

    # tools and health

    async def health(self, caller: C, name: str) -> SupervisorHealth:
        async with self.enter(caller, name, op.HEALTH, {}) as (box, _):
            return await box.connection.health()

    # inner

    async def _clean_info(self, box: LiveSandbox, info: CommandInfo) -> CommandInfo:
        info.oom_killed = await for_memory(box, info)
        return clean_info(await self._redactor(box.record.owner), info)

    def started(
        self,
        caller: C,
        box: LiveSandbox,
        traffic: Traffic,
        operation: Operation,
        command_id: str,
        end: Callable[[], Awaitable[CommandInfo]] | None = None,
    ) -> None:
        """Let the event log know a command in the background, and later its end."""
        traffic.told = {"command_id": command_id}
        if isinstance(caller, Caller) and operation.event is not None:
            self._ends.watch_command(box, operation.event, command_id, traffic.record, end)

    async def conclude(self, box: LiveSandbox, traffic: Traffic, result: R) -> R:
        """Count the bytes of a result and remove secrets from it."""
        size = size_of(result.stdout, result.stdout_base64) + size_of(result.stderr, result.stderr_base64)
        traffic.count_out(size)
        result.oom_killed = await for_memory(box, result)
        traffic.told = told_of(result)
        process_span(result.duration_ms / 1000, traffic.told)
        return await in_thread_if_large(size, clean_result, await self._redactor(box.record.owner), result)


class Operations(SandboxOperations[Caller]):
    """The operations that callers ask for: decided, recorded, and counted as activity of the agent."""

    def __init__(
        self,
        sessions: Sessions,
        admission: Admission,
        secrets: SecretValues,
        longest: Longest,
        ends: CommandEnds,
        packages: PackageBuilds,
        images: TemplateImageBuilds,
    ):
        super().__init__(sessions, admission, secrets, longest, ends)
        self._packages = packages
        self._images = images

    async def _wait_for_packages(self, box: LiveSandbox) -> None:
        await self._packages.wait_briefly(box)

    async def _provide_image(self, caller: Caller, request: SandboxRequest) -> None:
        await self._images.provide(caller, request)


class OwnOperations(SandboxOperations[OwnWork]):
    """The operations of carrel itself: upkeep, builds, installs. Nobody decides or records them, and they need no
    packages and images of templates: those are made by them.
    """

    async def _wait_for_packages(self, box: LiveSandbox) -> None:
        return

    async def _provide_image(self, caller: OwnWork, request: SandboxRequest) -> None:
        return

    async def empty(self, caller: OwnWork, name: str) -> Emptied:
        """Bring a sandbox back to its first state; the first call records that state."""
        async with self.enter(caller, name, op.EMPTY, {}) as (box, _):
            found = await box.connection.empty()
            if found.clean:
                box.over_quota = None
            return found


def require_open(caller: Caller, box: LiveSandbox) -> None:
    """Refuse a sandbox that is not for this caller: one of carrel's own, or one for the calls of another."""
    record, hint = box.record, "make a sandbox of your own"
    if record.acts_for is not None:
        # It has the secrets of a context, or makes what others will use; admission would not know whose rules hold.
        raise NotFound(f"sandbox '{record.id}' is one in which carrel itself works", field="id", hint=hint)
    if STATELESS in record.labels and box.only_for != (caller.identity.subject, caller.identity.namespace):
        raise NotFound(f"sandbox '{record.id}' is for calls without a context only", field="id", hint=hint)


def _room(box: LiveSandbox) -> None:
    if box.over_quota is not None:
        raise LimitExceeded(box.over_quota, field="disk_mb", hint="delete files first, then write again")


async def _metered(box: LiveSandbox, content: AsyncIterator[bytes], traffic: Traffic) -> AsyncIterator[bytes]:
    async for chunk in content:
        _room(box)
        traffic.count_in(len(chunk))
        yield chunk
