"""A carrel context as a sandbox of E2B: its id, what E2B knows of it in a label, and requests about it."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from typing import Any

from carrel.api.e2b.answers import Failure, SandboxGone
from carrel.api.e2b.inner import Inner, InnerReply, InnerStream, Json, Refused
from carrel.identity import Identity
from carrel.models.sandboxes import UNTIL_LABEL

ENVD_VERSION = "0.6.4"
"""What the sandboxes can do, in terms of E2B: newer calls of the SDKs ask for it."""
CLIENT_ID = "carrel"
LABEL = "e2b"
WORKSPACE, HOME = "/workspace", "/home/user"
"""The workspace, by the name that E2B's programs use."""
DEFAULT_TIMEOUT_S = 300
MOST_METADATA = 28
_OWN = frozenset({LABEL, UNTIL_LABEL})
_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"
_RUNNING = frozenset({"creating", "running", "idle_stopping"})


def new_id() -> str:
    return "i" + "".join(secrets.choice(_ALPHABET) for _ in range(20))


def context_of(identity: Identity, sandbox: str) -> str:
    """Return the context of a sandbox: the id itself, in the namespace of a token that has one."""
    if not 0 < len(sandbox) <= 128 or "/" in sandbox:
        raise SandboxGone(sandbox[:128])
    return sandbox if identity.namespace is None or ":" in sandbox else f"{identity.namespace}:{sandbox}"


def sandbox_of(identity: Identity, context: str) -> str:
    prefix = f"{identity.namespace}:"
    return context.removeprefix(prefix) if identity.namespace is not None else context


@dataclass(frozen=True, slots=True)
class Kept:
    """What a label keeps of a sandbox. `on_timeout` is `keep`, unless the client chose `pause` or `kill`."""

    template: str = "base"
    by: str = ""
    timeout: float = DEFAULT_TIMEOUT_S
    end: float = 0.0
    on_timeout: str = "keep"
    resumes: bool = True
    """Whether traffic starts it again."""
    metadata: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, info: Json) -> Kept:
        """Return what the labels of a sandbox say; the defaults for a sandbox that was not made through E2B's wire."""
        labels: dict[str, str] = info.get("labels", {})
        try:
            found = json.loads(labels.get(LABEL, "{}"))
        except ValueError:
            found = {}
        known = {each.name for each in fields(cls)}
        kept = cls(**{name: value for name, value in found.items() if name in known})
        return replace(kept, metadata={name: value for name, value in labels.items() if name not in _OWN})

    def labels(self) -> dict[str, str]:
        own = asdict(self)
        found = {**own.pop("metadata"), LABEL: json.dumps(own)}
        if self.on_timeout != "keep" and self.end:
            found[UNTIL_LABEL] = f"{self.end:.3f} {'terminate' if self.on_timeout == 'kill' else 'stop'}"
        return found

    def extended(self, timeout: float) -> Kept:
        return replace(self, timeout=timeout, end=time.time() + timeout)


def checked_timeout(value: object, default: float) -> float:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 366 * 86_400:
        raise Failure(400, "the timeout is a number of seconds, at most a year")
    return float(value)


def checked_metadata(value: object) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(each, str) for pair in value.items() for each in pair):
        raise Failure(400, "metadata is an object whose values are texts")
    if len(value) > MOST_METADATA or _OWN & value.keys():
        raise Failure(400, f"metadata has at most {MOST_METADATA} keys, and none of them is one of {sorted(_OWN)}")
    return value


class Box:
    """One sandbox, and requests about it. One that was stopped because nobody used it is started again."""

    def __init__(self, inner: Inner, sandbox: str):
        self.inner = inner
        self.id = sandbox
        self.context = context_of(inner.identity, sandbox)
        self.path = f"/v1/sandboxes/{self.context}"

    async def info(self) -> Json:
        """Return what carrel knows of it; `SandboxGone` if it does not exist."""
        try:
            found: Json = (await self.inner.ask("GET", self.path)).json()
        except Refused as error:
            raise self._gone(error) from None
        if found["state"] == "terminated":
            raise SandboxGone(self.id)
        return found

    async def ask(self, method: str, path: str = "", body: object = None, **given: Any) -> InnerReply:
        """Make a request about the sandbox. The body must not be a stream."""
        try:
            return await self.inner.ask(method, self.path + path, body, **given)
        except Refused as error:
            if not await self._resumed(error):
                raise self._gone(error) from None
        return await self.inner.ask(method, self.path + path, body, **given)

    @asynccontextmanager
    async def stream(
        self, method: str, path: str, body: object = None, *, query: Mapping[str, object] | None = None
    ) -> AsyncIterator[InnerStream]:
        """Make a request whose answer is a stream."""

        def open_stream() -> AbstractAsyncContextManager[InnerStream]:
            return self.inner.stream(method, self.path + path, body, query=query)

        opening = open_stream()
        try:
            found = await opening.__aenter__()
        except Refused as error:
            if not await self._resumed(error):
                raise self._gone(error) from None
            opening = open_stream()
            found = await opening.__aenter__()
        try:
            yield found
        finally:
            await opening.__aexit__(None, None, None)

    async def running(self) -> None:
        """Start the sandbox if it is stopped and may be started; for requests whose body is a stream."""
        try:
            await self.inner.ask("GET", f"{self.path}/files/stat", query={"path": "."})
        except Refused as error:
            if not await self._resumed(error):
                raise self._gone(error) from None

    def _gone(self, error: Refused) -> Exception:
        ended = error.code == "not_running" and "sandbox '" in str(error.problem.get("detail"))
        missing = error.code == "not_found" and error.problem.get("field") == "id" and "no sandbox" in error.text
        return SandboxGone(self.id) if ended or missing else error

    async def _resumed(self, error: Refused) -> bool:
        """Whether the sandbox did not run, and now does."""
        if error.code != "not_running" or "sandbox '" not in str(error.problem.get("detail")):
            return False
        info = await self.info()
        kept = Kept.of(info)
        if not kept.resumes:
            return False
        await self.deploy(kept.extended(kept.timeout))
        return True

    async def deploy(self, kept: Kept, **given: object) -> tuple[Json, bool]:
        """Get or start the sandbox with these labels; return it and whether it was started."""
        wanted = {"context_id": self.context, "labels": kept.labels(), **given}
        reply = await self.inner.ask("POST", "/v1/sandboxes", wanted)
        return reply.json(), reply.status == 201


def moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def described(identity: Identity, info: Json) -> Json:
    """Return a sandbox as a list shows it."""
    kept, limits = Kept.of(info), info["limits"]
    started = datetime.fromisoformat(info["created_at"]).timestamp()
    return {
        "templateID": kept.template,
        "alias": kept.template,
        "sandboxID": sandbox_of(identity, info["context_id"]),
        "clientID": CLIENT_ID,
        "startedAt": moment(started),
        "endAt": moment(kept.end or started + kept.timeout),
        "cpuCount": max(1, round(limits.get("cpus") or os.cpu_count() or 1)),
        "memoryMB": limits.get("memory_mb") or _memory_mb(),
        "diskSizeMB": limits.get("disk_mb") or 0,
        "state": "running" if info["state"] in _RUNNING else "paused",
        "envdVersion": ENVD_VERSION,
        "metadata": kept.metadata,
        "volumeMounts": [],
    }


def _memory_mb() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (1024 * 1024)
