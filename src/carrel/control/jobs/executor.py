"""Where the work of a job runs: in the sandbox of its context, as a command in the background or a call of a tool.

Every step passes admission with the identity of the submitter. Knows nothing of the queue, the store and retries.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

from pydantic import Field

from carrel.control.governance.redaction import clean_info
from carrel.control.mcp.servers import McpServers
from carrel.control.operations.call import Traffic
from carrel.control.operations.caller import OWN_WORK, Caller
from carrel.control.operations.operations import Operations, OwnOperations
from carrel.control.secrets.values import SecretValues
from carrel.control.sessions.live import LiveSandbox
from carrel.control.sessions.sessions import Sessions
from carrel.control.supervisor.connection import SupervisorDownload
from carrel.control.supervisor.connection import run as current_run
from carrel.control.supervisor.frames import StreamChunk
from carrel.control.supervisor.streaming import stream_output
from carrel.control.workspaces.snapshots import Snapshots
from carrel.errors import AlreadyExists, ApprovalNeeded, CarrelError, InvalidRequest, NotFound, NotRunning, SandboxLost
from carrel.identity import Identity
from carrel.models import (
    CommandInfo,
    CommandRequest,
    FileInfo,
    JobRequest,
    McpRequest,
    SandboxRequest,
    SignalRequest,
    TerminateRequest,
)
from carrel.models import operations as op
from carrel.models.files import MOST_LISTED, FileKind, ListRequest
from carrel.models.jobs import MAX_JOB_FILES, MAX_PROGRESS, MOST_ARTIFACTS
from carrel.store.jobs import JobRecord

P = ParamSpec("P")
T = TypeVar("T")

TREE_GONE_S = 10.0
"""How long processes may take to end after KILL."""
_OF_SANDBOX = ("template", "image", "provider", "trust", "network", "limits")


@dataclass(slots=True)
class Work:
    """One attempt of a job."""

    record: JobRecord
    request: JobRequest
    identity: Identity
    box: LiveSandbox | None = None
    begun: bool = False
    """Whether the work may have begun in the sandbox."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the sandbox said that the work has ended."""
    last: asyncio.Future[CommandInfo] | None = None
    """The end of its command, for the event that tells it."""
    stream: SupervisorDownload | None = None
    """The output of the command that was just started, until somebody reads it."""

    def close(self) -> None:
        """Drop what nobody will read."""
        if self.stream is not None:
            self.stream.close()

    def end(self) -> Awaitable[CommandInfo]:
        """Return the end of its command, when it is known."""
        self.last = self.last or asyncio.get_running_loop().create_future()
        return asyncio.shield(self.last)

    def know_end(self, info: CommandInfo | SandboxLost) -> None:
        """Tell those who wait for the end."""
        if self.last is not None and not self.last.done():
            if isinstance(info, SandboxLost):
                self.last.set_exception(info)
                self.last.exception()  # maybe nobody waits
            else:
                self.last.set_result(info)

    @property
    def name(self) -> str:
        """The name of this attempt where it runs: it runs at most once under this name."""
        return f"k{self.record.id.removeprefix('job-')}-{self.record.attempt}"

    @property
    def run(self) -> str:
        """The name of this claim of the attempt. A server that takes over may forbid one, and make another."""
        return f"{self.name}-{self.record.facts.claim}"

    @property
    def context_id(self) -> str:
        return self.record.context_id


class PersonNeeded(Exception):
    """A person has to decide about a step before the work goes on."""

    def __init__(self, approval: str, operation: str, step: int):
        super().__init__(approval)
        self.approval = approval
        self.operation = operation
        self.step = step


@dataclass(frozen=True, slots=True)
class End:
    """How the work ended."""

    exit_code: int | None
    signal: str | None
    timed_out: bool
    oom_killed: bool
    duration_ms: float
    dropped: int


class Heartbeat(NamedTuple):
    """What a job said about its progress. `beat` changes each time."""

    text: str
    beat: int


class JobExecutor(Protocol):
    """Runs the work of a job. A Kubernetes Job could be another one."""

    def ready(self, record: JobRecord, request: JobRequest) -> bool:
        """Whether the work of a job can begin at once, without a sandbox that has to start first."""

    async def prepare(self, work: Work) -> None:
        """Make everything ready; nothing of the work runs yet. Raises `PersonNeeded` where a person has to decide."""

    async def begin(self, work: Work) -> None:
        """Start the work. May be repeated: it runs once under its name. Sets `begun` before it can have begun."""

    async def find(self, work: Work) -> bool | None:
        """Look for the work that a dead server may have begun; False if it has not begun, and never will. None: nobody
        knows.
        """

    def output(self, work: Work, offset: int) -> AsyncGenerator[StreamChunk, None]:
        """Yield the output from an offset on while the work runs, and last an `end` with an `End` as JSON."""

    async def heartbeat(self, work: Work) -> Heartbeat | None:
        """Return what the work said last about its progress."""

    async def stop(self, work: Work, grace_s: float) -> None:
        """End the work with all its processes: TERM, the grace, KILL. Returns when it has ended."""

    async def artifacts(self, work: Work) -> tuple[list[FileInfo], bool]:
        """List the files that are the result, and whether there are more."""

    async def snapshot(self, work: Work) -> str:
        """Take a snapshot of the workspace and return its id."""

    async def used(self, work: Work) -> tuple[float | None, int | None]:
        """Return the processor seconds and the peak of memory of the job; None where that is not known."""

    async def dismiss(self, work: Work, *, remove: bool) -> None:
        """End the sandbox that was made for the job, and remove its files if wished."""

    async def forget(self, context_id: str) -> None:
        """Remove the workspace that was made for a job, whatever is left of it."""


def checked_files(request: JobRequest) -> None:
    """Refuse files that are not base64 or too large."""
    total = 0
    for name, text in request.files.items():
        try:
            total += len(base64.b64decode(text, validate=True))
        except (ValueError, binascii.Error):
            raise InvalidRequest(f"the file '{name[:200]}' is not base64", field="files") from None
    if total > MAX_JOB_FILES:
        raise InvalidRequest(
            f"the files have {total} bytes, and a job may bring {MAX_JOB_FILES}",
            field="files",
            hint="write larger files to the workspace of the context first",
        )


class SandboxExecutor:
    """Runs jobs in sandboxes: a command, or Python as a command of its own, or a call of a tool."""

    def __init__(
        self,
        sessions: Sessions,
        operations: Operations,
        own: OwnOperations,
        snapshots: Snapshots,
        mcp: McpServers,
        secrets: SecretValues,
    ):
        self._sessions = sessions
        self._operations = operations
        self._own = own
        self._snapshots = snapshots
        self._mcp = mcp
        self._redactor = secrets.redactor

    def ready(self, record: JobRecord, request: JobRequest) -> bool:
        """Whether the sandbox runs, and nothing has to be checked or written before."""
        live = self._sessions.find_live(record.context_id) is not None
        return live and not request.files and all(getattr(request, name) is None for name in _OF_SANDBOX)

    async def prepare(self, work: Work) -> None:
        """Start the sandbox unless it runs, and write the files."""
        request, step = work.request, 0
        if not self.ready(work.record, request):
            wanted = {name: getattr(request, name) for name in _OF_SANDBOX if getattr(request, name) is not None}
            sandbox = SandboxRequest(context_id=work.context_id, **wanted)
            await self._asked(work, op.DEPLOY_OR_RESUME, step, self._operations.deploy_or_resume, sandbox)
        for step, name in enumerate(sorted(request.files), 1):
            if step > work.record.facts.step:  # a person was asked for those before
                content = base64.b64decode(request.files[name])
                await self._asked(
                    work, op.WRITE_FILE, step, self._operations.write_file, work.context_id, name, content
                )
        work.box = await self._sessions.find(work.context_id)

    async def begin(self, work: Work) -> None:
        """Start the command. A call of a tool begins with its output."""
        if work.request.mcp is not None:
            work.begun = True
            work.box = await self._sessions.find(work.context_id)
            return
        token = current_run.set(work.run)  # the supervisor remembers it, see `find`
        try:
            for _ in range(2):
                work.box = await self._sessions.find(work.context_id)
                work.begun = True
                try:
                    work.stream = await self._asked(
                        work,
                        op.START_COMMAND,
                        len(work.request.files) + 1,
                        self._operations.follow_command,
                        work.box.record.id,
                        _command_of(work),
                        work.end,
                    )
                except NotRunning:  # it ended since: nothing was begun
                    work.begun = False
                    await self._asked(
                        work, op.DEPLOY_OR_RESUME, 0, self._operations.deploy_or_resume,
                        SandboxRequest(context_id=work.context_id),
                    )  # fmt: skip
                    continue
                except AlreadyExists:
                    return
                except SandboxLost as error:
                    work.begun = error.sent
                    raise
                except CarrelError:
                    work.begun = False  # it was refused before it began
                    raise
                return
            raise NotRunning(f"the sandbox of '{work.context_id}' ended while the job was about to begin")
        finally:
            current_run.reset(token)

    async def find(self, work: Work) -> bool | None:
        """Ask the sandbox, if it still runs."""
        box = self._sessions.find_live(work.context_id)
        if box is None or work.request.mcp is not None:
            return None
        work.box = box
        try:
            await box.connection.get_command(work.name)
            return True
        except NotFound:
            begun = await box.connection.void_run(work.run)
            return False if begun is False else None
        except SandboxLost:
            await self._sessions.lost(box)
            return None

    async def output(self, work: Work, offset: int) -> AsyncGenerator[StreamChunk, None]:
        """Follow the command, without the secrets of the context."""
        assert work.box is not None
        if work.request.mcp is not None:
            async for chunk in self._called(work):
                yield chunk
            work.ended.set()
            return
        box = work.box
        current = partial(self._redactor, box.record.owner)

        async def open_at(start: int) -> SupervisorDownload:
            stream, work.stream = work.stream, None
            if stream is not None and start == 0:
                return stream
            return await box.connection.command_output(work.name, start, follow=True)

        try:
            async with aclosing(stream_output(box, Traffic(), current, open_at, offset)) as chunks:
                async for chunk in chunks:
                    if chunk.stream == "end":
                        info = CommandInfo.model_validate_json(chunk.data)
                        named = ("exit_code", "signal", "timed_out", "oom_killed", "duration_ms")
                        end = {name: getattr(info, name) for name in named} | {"dropped": info.dropped_bytes}
                        work.ended.set()
                        work.know_end(info)
                        yield StreamChunk("end", json.dumps(end).encode())
                    elif chunk.stream in {"stdout", "stderr"}:
                        yield chunk
        except SandboxLost as error:
            work.know_end(error)
            await self._sessions.lost(box)
            raise

    async def heartbeat(self, work: Work) -> Heartbeat | None:
        """Ask the sandbox for what `carrel-heartbeat` was told, without secrets."""
        box = work.box
        if box is None or work.request.mcp is not None or work.ended.is_set():
            return None
        info = clean_info(await self._redactor(box.record.owner), await box.connection.get_command(work.name))
        if info.progress is None or info.beat is None:
            return None
        return Heartbeat(info.progress[:MAX_PROGRESS], info.beat)

    async def stop(self, work: Work, grace_s: float) -> None:
        """TERM to every process, the grace, then KILL to every process, also to those that the command left behind."""
        box = work.box
        if box is None or not work.begun or work.request.mcp is not None:
            return
        with suppress(CarrelError):  # the sandbox has ended, and everything in it
            if not work.ended.is_set():
                with suppress(NotRunning):
                    await box.connection.signal_command(work.name, SignalRequest(signal="TERM", tree=True).model_dump())
                with suppress(TimeoutError):
                    async with asyncio.timeout(grace_s):
                        await work.ended.wait()
            if not work.ended.is_set():
                with suppress(NotRunning):
                    await box.connection.signal_command(work.name, SignalRequest(signal="KILL", tree=True).model_dump())
                with suppress(TimeoutError):
                    async with asyncio.timeout(TREE_GONE_S):
                        await work.ended.wait()
            await box.connection.delete_command(work.name)

    async def artifacts(self, work: Work) -> tuple[list[FileInfo], bool]:
        """List the files that match one of the patterns."""
        found: dict[str, FileInfo] = {}
        more = False
        for root in sorted({_root_of(pattern) for pattern in work.request.artifacts}):
            try:
                query = ListRequest(path=root, recursive=True, limit=MOST_LISTED)
                listed = await self._own.forward(OWN_WORK, op.LIST_FILES, work.context_id, query)
            except NotFound:
                continue
            more = more or listed.truncated
            for info in listed.items:
                found[info.path] = info
        patterns = work.request.artifacts
        shown = await asyncio.to_thread(_chosen, found, patterns)
        return shown[:MOST_ARTIFACTS], more or len(shown) > MOST_ARTIFACTS

    async def snapshot(self, work: Work) -> str:
        """Take it with the identity of the submitter."""
        return (await self._snapshots.take(self._caller(work), work.context_id)).id

    async def used(self, work: Work) -> tuple[float | None, int | None]:
        """Read them from the sandbox, which must be the job's own: other work would be counted too."""
        box = self._sessions.find_live(work.context_id)
        if box is None:
            return None, None
        found = (await box.provider.resources([box.handle])).get(str(box.handle["id"]))
        return (None, None) if found is None else (found.cpu_s, found.memory_peak_bytes)

    async def dismiss(self, work: Work, *, remove: bool) -> None:
        """End the sandbox; its files stay unless they are removed."""
        with suppress(NotFound):
            if remove:
                await self.forget(work.context_id)
            else:
                await self._own.stop(OWN_WORK, work.context_id)

    async def forget(self, context_id: str) -> None:
        """End the session, and delete its files."""
        with suppress(NotFound):
            request = TerminateRequest(reason="its job is over", delete_files=True)
            await self._own.terminate(OWN_WORK, context_id, request)

    # inner

    def _caller(self, work: Work, approval: str | None = None) -> Caller:
        return Caller(work.identity, approval, request_id=work.record.id)

    async def _asked(
        self,
        work: Work,
        operation: op.Operation,
        step: int,
        function: Callable[Concatenate[Caller, P], Awaitable[T]],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> T:
        """Perform a step, with the approval that a person gave for it."""
        facts = work.record.facts
        mine = facts.operation == operation.name and facts.step == step
        caller = self._caller(work, work.record.approval if mine else None)
        try:
            return await function(caller, *arguments, **named)
        except ApprovalNeeded as error:
            work.begun = False
            raise PersonNeeded(str(error.extra.get("approval")), operation.name, step) from None

    async def _called(self, work: Work) -> AsyncGenerator[StreamChunk, None]:
        """Call the tool, and yield its result as one line of JSON."""
        call, timeouts = work.request.mcp, work.request.timeouts
        assert call is not None
        request = McpRequest(tool=call.tool, arguments=call.arguments, timeout=min(timeouts.run_s, 3600.0))
        try:
            result = await self._mcp.request(self._caller(work), work.context_id, call.server, request)
        except ApprovalNeeded as error:
            work.begun = False
            raise PersonNeeded(str(error.extra.get("approval")), op.MCP_REQUEST.name, 1) from None
        text = result.model_dump_json(exclude_none=True).encode() + b"\n"
        kept = text[: work.request.output_limit]
        failed = result.is_error or result.timed_out or result.error is not None
        yield StreamChunk("stdout", kept)
        end = End(int(failed), None, result.timed_out, False, result.duration_ms, len(text) - len(kept))
        yield StreamChunk("end", json.dumps({name: getattr(end, name) for name in End.__slots__}).encode())


class JobCommand(CommandRequest):
    """The command of a job, with the names of secrets that the supervisor puts into variables."""

    secret_variables: dict[str, str] = Field(default_factory=dict)


def _command_of(work: Work) -> CommandRequest:
    request = work.request
    command = request.command
    if request.python is not None:
        command = ["python3", "-c", request.python.code, *request.python.args]
    assert command is not None
    return JobCommand(
        command=command,
        cwd=request.cwd,
        env=request.env,
        secret_variables=request.secret_variables,
        stdin=request.stdin,
        output_limit=request.output_limit,
        # Left out, it is what the policy allows at most; the runner ends it after `run_s` in any case.
        timeout=request.timeouts.run_s if "run_s" in request.timeouts.model_fields_set else None,
        id=work.name,
    )


def _chosen(found: dict[str, FileInfo], patterns: list[str]) -> list[FileInfo]:
    """Return the files that match one of the patterns, by path."""
    return [
        found[path]
        for path in sorted(found)
        if found[path].kind is FileKind.FILE and any(_matches(path, each) for each in patterns)
    ]


_WILD = frozenset("*?[")


def _root_of(pattern: str) -> str:
    """Return the directory below which the files of a pattern are."""
    parts: list[str] = []
    for part in pattern.split("/")[:-1]:
        if _WILD & set(part):
            break
        parts.append(part)
    return "/".join(parts) or "."


def _matches(path: str, pattern: str) -> bool:
    """Whether a path matches a pattern: `*` stays within a directory, `**` does not."""
    return _parts_match(path.split("/"), [part for part in pattern.split("/") if part not in {"", "."}])


def _parts_match(parts: list[str], patterns: list[str]) -> bool:
    reached = {0}  # how many patterns can be used up by the parts so far
    for part in parts:
        following: set[int] = set()
        for index in _skipping(reached, patterns):
            if index < len(patterns):
                if patterns[index] == "**":
                    following.add(index)
                elif fnmatchcase(part, patterns[index]):
                    following.add(index + 1)
        reached = following
    return len(patterns) in _skipping(reached, patterns)


def _skipping(reached: set[int], patterns: list[str]) -> set[int]:
    """Return what is reached too because `**` may stand for nothing."""
    found = set(reached)
    for index in range(len(patterns)):
        if index in found and patterns[index] == "**":
            found.add(index + 1)
    return found
