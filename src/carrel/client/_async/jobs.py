"""Jobs: work that the server keeps, and brings to an end whether or not anybody waits for it."""

from __future__ import annotations

import time
import uuid
from base64 import b64encode
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from urllib.parse import quote

from carrel.client._async.commands import AsyncOutputStream
from carrel.client._async.connection import AsyncConnection
from carrel.client._async.events import follow_events
from carrel.client._io_async import pause
from carrel.client.output import Chunk, Output
from carrel.client.requests import limits_body
from carrel.errors import CarrelError, CommandFailed
from carrel.models import EventInfo, JobArtifacts, JobInfo, JobPage, JobState, Limits, Network, Trust
from carrel.primitives.backoff import Backoff

_WAIT_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0


class AsyncJob:
    """A job. The handle holds only the id and what was seen last, so `jobs.get(id)` makes another one."""

    def __init__(self, connection: AsyncConnection, info: JobInfo):
        self.id = info.id
        self.seen = info
        self._connection = connection
        self._path = f"/v1/jobs/{quote(info.id, safe='')}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.seen.state}>"

    @property
    def state(self) -> JobState:
        """The state when the job was seen last. `info()` asks the server."""
        return self.seen.state

    async def info(self) -> JobInfo:
        """Get the job as it is now."""
        self.seen = await self._connection.get(JobInfo, self._path)
        return self.seen

    async def wait(self, timeout: float | None = None, *, check: bool = False) -> JobInfo:
        """Wait until the job has ended, at most `timeout` seconds; then it comes as it is by then. Goes on when the
        server is restarted meanwhile. With `check` a job that did not succeed raises `CommandFailed`.
        """
        until = None if timeout is None else time.monotonic() + timeout
        backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            left = _WAIT_S if until is None else max(0.0, min(_WAIT_S, until - time.monotonic()))
            try:
                query = {"timeout": f"{left:.3f}"}
                self.seen = await self._connection.get(JobInfo, f"{self._path}/wait", query, deadline=left + _WAIT_S)
                backoff.reset()
            except CarrelError as error:
                if error.status < 500 or (until is not None and time.monotonic() >= until):
                    raise
                await pause(backoff.next_pause())
                continue
            if self.seen.state.terminal or (until is not None and time.monotonic() >= until):
                break
        if check and self.seen.state is not JobState.SUCCEEDED:
            raise CommandFailed(f"job {self.id} is {self.seen.state}: {self.seen.reason or 'no reason is known'}")
        return self.seen

    async def cancel(self) -> JobInfo:
        """End the job: TERM to all its processes, a grace, KILL. `wait()` returns when nothing of it runs any more."""
        self.seen = await self._connection.post(JobInfo, f"{self._path}/cancel", {})
        return self.seen

    async def retry(self) -> AsyncJob:
        """Submit the job again, which must have ended, and return the new job."""
        return AsyncJob(self._connection, await self._connection.post(JobInfo, f"{self._path}/retry", {}))

    async def output(self, *, attempt: int | None = None) -> Output:
        """Get the output up to now: of the newest attempt, unless another one is named."""
        stream = self._stream(0, attempt, follow=False)
        chunks = [chunk async for chunk in stream]
        return Output.of(chunks, 0, stream.info)

    async def logs(self, *, follow: bool = True, offset: int = 0) -> AsyncIterator[Chunk]:
        """Yield the output of the newest attempt from an offset on. With `follow` it goes on until the job has ended,
        through later attempts, and after broken connections.
        """
        number = max(1, (await self.info()).attempt)
        backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            try:
                async for chunk in self._stream(offset, number, follow=follow):
                    offset = chunk.offset
                    backoff.reset()
                    yield chunk
                if not follow or (self.seen.attempt <= number and self.seen.state.terminal):
                    return
                info = await self.info()
            except CarrelError as error:
                if not follow or error.status < 500:
                    raise
                await pause(backoff.next_pause())
                continue
            if info.attempt > number:
                number, offset = number + 1, 0
            elif not info.state.terminal:
                await pause(backoff.next_pause())

    def events(self, *, after: int = 0, follow: bool = True) -> AsyncIterator[EventInfo]:
        """Yield what happens to the job, from the beginning. It does not end by itself when the job has ended."""
        return follow_events(self._connection, None, None, after, follow=follow, job=self.id)

    async def artifacts(self) -> JobArtifacts:
        """List the files that the job produced. Read them with `client.sandbox(job.seen.context_id).files`."""
        return await self._connection.get(JobArtifacts, f"{self._path}/artifacts")

    def _stream(self, offset: int, attempt: int | None, *, follow: bool) -> AsyncOutputStream:
        query: dict[str, str | int] = {"offset": offset, "follow": "true" if follow else "false"}
        if attempt is not None:
            query["attempt"] = attempt
        return AsyncOutputStream(self._connection, "GET", f"{self._path}/logs", query=query)


class AsyncJobs:
    """The jobs of a server."""

    def __init__(self, connection: AsyncConnection):
        self._connection = connection

    async def submit(
        self,
        command: str | Sequence[str] | None = None,
        *,
        python: str | None = None,
        args: Sequence[str] = (),
        mcp: tuple[str, str, Mapping[str, object]] | None = None,
        context: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        secret_variables: Mapping[str, str] | None = None,
        stdin: str | None = None,
        files: Mapping[str, bytes | str] | None = None,
        artifacts: Iterable[str] | None = None,
        output_limit: int | None = None,
        template: str | None = None,
        image: str | None = None,
        provider: str | None = None,
        trust: Trust | str | None = None,
        network: Network | str | None = None,
        limits: Limits | Mapping[str, float | None] | None = None,
        timeouts: Mapping[str, float] | None = None,
        retries: int | None = None,
        backoff_s: float | None = None,
        priority: int | None = None,
        labels: Mapping[str, str] | None = None,
        snapshot: bool | None = None,
        workspace: str | None = None,
        ttl_s: float | None = None,
        webhook: str | None = None,
        idempotency_key: str | None = None,
    ) -> AsyncJob:
        """Submit a job. When this returns, the server has stored it, and it will reach an end.

        job = await client.jobs.submit("make report", context="conversation-42", artifacts=["output/*"])
        print((await job.wait()).state, (await job.output()).text)

        It runs a `command`, or `python` code with `args`, or a call of a tool (`mcp=(server, tool, arguments)`), in the
        workspace of a `context`, or in a new one of its own. `files` are written before it starts. `secret_variables`
        are variables with secrets of the context or template: `{"API_KEY": "name-of-the-secret"}`. `timeouts` has
        `queue_s`, `run_s`, `heartbeat_s` and `whole_s`. It runs once, unless `retries` allow more. Calls with the same
        `idempotency_key` submit one job; by default each call has a key of its own, so that it can be sent again.
        """
        body = {
            "command": command,
            "python": None if python is None else {"code": python, "args": list(args)},
            "mcp": None if mcp is None else {"server": mcp[0], "tool": mcp[1], "arguments": dict(mcp[2])},
            "context_id": context,
            "cwd": cwd,
            "env": env,
            "secret_variables": secret_variables,
            "stdin": stdin,
            "files": None if files is None else {path: _base64(content) for path, content in files.items()},
            "artifacts": None if artifacts is None else list(artifacts),
            "output_limit": output_limit,
            "template": template,
            "image": image,
            "provider": provider,
            "trust": trust,
            "network": network,
            "limits": None if limits is None else limits_body(limits),
            "timeouts": timeouts,
            "retries": retries,
            "backoff_s": backoff_s,
            "priority": priority,
            "labels": labels,
            "snapshot": snapshot,
            "workspace": workspace,
            "ttl_s": ttl_s,
            "webhook": webhook,
        }
        headers = {"idempotency-key": idempotency_key or uuid.uuid4().hex}
        return AsyncJob(self._connection, await self._connection.post(JobInfo, "/v1/jobs", body, headers=headers))

    async def get(self, id: str) -> AsyncJob:
        """Get a job by its id; `NotFound`."""
        return AsyncJob(self._connection, await self._connection.get(JobInfo, f"/v1/jobs/{quote(id, safe='')}"))

    def list(self, *, state: JobState | str | None = None, context: str | None = None) -> AsyncIterator[JobInfo]:
        """List jobs, newest first."""
        query = {"state": None if state is None else str(state), "context_id": context}
        return self._connection.pages(JobPage, "/v1/jobs", query)


def _base64(content: bytes | str) -> str:
    return b64encode(content.encode() if isinstance(content, str) else content).decode()
