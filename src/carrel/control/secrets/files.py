"""Secrets as files in running sandboxes: delivered at the start, and again when they change."""

from __future__ import annotations

import asyncio
import logging

from carrel.control.egress.plans import Plans
from carrel.control.operations.admission import Admission
from carrel.control.operations.call import Call
from carrel.control.operations.caller import Caller, OwnWork
from carrel.control.secrets.values import SecretValues
from carrel.control.sessions.attachments import Attachment, Fork
from carrel.control.sessions.live import LiveSandbox, LiveSandboxes
from carrel.control.sessions.owners import is_agent
from carrel.errors import Unsupported
from carrel.models.operations import COPY_SECRETS
from carrel.providers.base import Capability
from carrel.store import SecretInfo
from carrel.store.secrets import Mark

log = logging.getLogger("carrel.secrets")


class SecretFiles(Attachment):
    """Delivers secrets to sandboxes."""

    def __init__(self, values: SecretValues, plans: Plans, admission: Admission, live: LiveSandboxes):
        self._values = values
        self._plans = plans
        self._admission = admission
        self._live = live
        self._mark: Mark | None = None

    async def attach(self, box: LiveSandbox) -> None:
        """Deliver the secrets of a new sandbox; one in which carrel builds something has none."""
        if is_agent(box.record):
            await self.refresh(box)

    async def refresh(self, box: LiveSandbox) -> None:
        """Deliver the current secrets of its context and its template to a running sandbox."""
        record = box.record
        owner = record.owner
        self._values.stale(owner)  # the redactor was made before the template was known
        async with box.secrets_lock:
            values = await self._plans.sandbox_secrets(record, await self._values.values_of(record))
            if values == box.delivered_secrets or (not values and not box.has_secrets):
                return
            if values:
                box.provider.require(Capability.SECRETS)
            elif Capability.SECRETS not in box.provider.capabilities():
                return
            box.has_secrets, box.delivered_secrets = True, None
            self._values.stale(owner)  # a redactor made meanwhile may not know secrets of another server
            await box.connection.put_secrets(values)
            box.delivered_secrets = values

    async def catch_up(self) -> None:
        """Deliver secrets that another server has changed."""
        mark = await self._values.mark()
        if mark == self._mark:
            return
        self._values.stale(None)
        boxes = [box for box in self._live.all() if box.record.acts_for is None]
        failures = await asyncio.gather(*map(self.refresh, boxes), return_exceptions=True)
        for box, failure in zip(boxes, failures, strict=True):
            if failure is not None:
                log.warning("sandbox %s does not have its current secrets: %s", box.record.id, failure)
        if all(failure is None or isinstance(failure, Unsupported) for failure in failures):  # else it is tried again
            self._mark = mark

    async def fork(self, fork: Fork) -> None:
        """Give a fork the secrets of its origin that it lacks. The audit log of the fork records it."""
        names = await self._values.missing(fork.origin, fork.context_id) if fork.with_secrets else []
        if not names:
            return
        given: list[SecretInfo] = []
        fork.undo.push_async_callback(self._values.take_back, fork.context_id, given)
        arguments = {"from": fork.origin, "names": names}
        async with self._admission.admit(Call(COPY_SECRETS, arguments, fork.caller, "", fork.context_id)):
            await self._values.copy(fork.origin, fork.context_id, names, given)

    async def forget(self, caller: Caller | OwnWork, context_id: str) -> None:
        """Forget all secrets of a context, and their former values."""
        await self._values.forget(context_id)
