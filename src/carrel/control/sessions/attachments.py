"""Attachments: the parts that turn a bare sandbox into a workspace, such as policy, network, files, secrets, packages.

Start, stop, fork and delete walk one list of them. The control plane builds that list; a part cannot be left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field, fields

from carrel.control.operations.caller import Caller, OwnWork
from carrel.control.sessions.live import LiveSandbox
from carrel.models import SandboxRequest
from carrel.providers import Masks
from carrel.providers.base import FolderMounts, Provider, RootImage
from carrel.store import SessionRecord


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """A sandbox that is about to start, as far as it is planned."""

    caller: Caller | OwnWork
    request: SandboxRequest
    """The request, with the template's values filled in."""
    record: SessionRecord
    previous: SessionRecord | None
    """The last session of the context, if it had one."""
    provider: Provider
    masks: Masks | None = None
    """The programs and files that the sandbox must not reach."""
    trusts_proxy: bool = False
    """Whether the sandbox trusts the certificates of the proxy."""
    notice: str | None = None
    """A message for the caller about something that could not be done."""
    folder: FolderMounts | None = None
    """The mounts of a sandbox that works on a folder of the host."""
    image: RootImage | None = None
    """The image that the sandbox runs from; None for the host's own root."""
    undo: ExitStack = field(default_factory=ExitStack)
    """Called in reverse order when the start fails after `prepare` was called."""


@dataclass(frozen=True, slots=True)
class Fork:
    """A fork that is being made."""

    caller: Caller
    origin: str
    context_id: str
    with_secrets: bool
    undo: AsyncExitStack = field(default_factory=AsyncExitStack)
    """Called in reverse order when the fork cannot be made."""
    finished: AsyncExitStack = field(default_factory=AsyncExitStack)
    """Called when the fork is made, or has failed."""


class Attachment:
    """One part of a session. It overrides the steps that it takes part in.

    Attachments are called in the order of `Attachments`; `detach` and `forget` are called in the reverse order.
    """

    async def plan(self, plan: LaunchPlan) -> LaunchPlan:
        """Plan the start before anything is made. Raise to refuse it. Change nothing but the plan."""
        return plan

    async def prepare(self, plan: LaunchPlan, workspace: str) -> LaunchPlan:
        """Prepare the start: the workspace is at that path and the sandbox does not run yet. Raise to end the start."""
        return plan

    async def attach(self, box: LiveSandbox) -> None:
        """Attach to a sandbox that runs and that nobody uses yet. Raise to end the start."""

    async def refresh(self, box: LiveSandbox) -> None:
        """Follow a change of the policy or the secrets of a running sandbox."""

    async def is_outdated(self, box: LiveSandbox) -> bool:
        """Whether only a restart brings a change of the policy into the running sandbox."""
        return False

    def detach(self, box: LiveSandbox) -> None:
        """Detach from a sandbox that is about to end, or whose start failed, even if it was never attached."""

    async def save(self, record: SessionRecord, workspace: str) -> None:
        """Save data of a sandbox that has ended, before its files are archived."""

    async def fork(self, fork: Fork) -> None:
        """Give a new context what its origin has."""

    async def forget(self, caller: Caller | OwnWork, context_id: str) -> None:
        """Delete everything of a context that is deleted for good."""


@dataclass(frozen=True, slots=True)
class Attachments:
    """Every attachment of a server, in the order in which they are called. None can be left out."""

    templates: Attachment
    owner: Attachment
    limits: Attachment
    network: Attachment
    folders: Attachment
    image: Attachment
    filespace: Attachment
    masks: Attachment
    protected_folders: Attachment
    deletions: Attachment
    approvals: Attachment
    secrets: Attachment
    egress: Attachment
    checkpoints: Attachment
    environments: Attachment
    mcp: Attachment

    def __post_init__(self) -> None:
        for name, each in self._named():
            if not isinstance(each, Attachment):
                raise TypeError(f"'{name}' is not an attachment: {type(each).__name__}")

    def _named(self) -> list[tuple[str, Attachment]]:
        return [(each.name, getattr(self, each.name)) for each in fields(self)]

    def __iter__(self) -> Iterator[Attachment]:
        return iter([each for _, each in self._named()])

    async def plan(self, plan: LaunchPlan) -> LaunchPlan:
        for each in self:
            plan = await each.plan(plan)
        return plan

    async def prepare(self, plan: LaunchPlan, workspace: str) -> LaunchPlan:
        for each in self:
            plan = await each.prepare(plan, workspace)
        return plan

    async def attach(self, box: LiveSandbox) -> None:
        for each in self:
            await each.attach(box)

    async def refresh(self, boxes: Iterable[LiveSandbox]) -> None:
        """Apply changes of policies and secrets to running sandboxes. Tries all of them, then
        raises the first failure.
        """
        failures = await asyncio.gather(*map(self._refresh, boxes), return_exceptions=True)
        for failure in failures:
            if failure is not None:
                raise failure

    async def _refresh(self, box: LiveSandbox) -> None:
        failure: Exception | None = None
        for each in self:
            try:
                await each.refresh(box)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    async def are_outdated(self, box: LiveSandbox) -> bool:
        """Whether a running sandbox needs a restart to follow its policy."""
        return any([await each.is_outdated(box) for each in self])

    def detach(self, box: LiveSandbox) -> None:
        for each in reversed(list(self)):
            each.detach(box)

    async def save(self, record: SessionRecord, workspace: str) -> None:
        for each in self:
            await each.save(record, workspace)

    async def fork(self, fork: Fork) -> None:
        """Give a new context what its origin has. A failure leaves nothing behind."""
        try:
            for each in self:
                await each.fork(fork)
        except BaseException:
            await fork.undo.aclose()
            raise

    async def forget(self, caller: Caller | OwnWork, context_id: str) -> None:
        for each in reversed(list(self)):
            await each.forget(caller, context_id)
