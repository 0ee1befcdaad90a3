"""The process provider: no isolation at all. Unsafe; only for code that you would run by hand, in development."""

from __future__ import annotations

from carrel.providers.base import Capability, Handle
from carrel.providers.zygote_provider import ZygoteProvider, number


class ProcessProvider(ZygoteProvider):
    """Runs the supervisor and its commands as plain processes of the user who runs carrel."""

    name = "process"
    isolation_level = 0
    unsafe = True
    plain = True

    def missing(self) -> str | None:
        """See `Provider.missing`: every Linux can start processes."""
        return None

    def capabilities(self) -> frozenset[Capability]:
        """See `Provider.capabilities`: commands and terminals work, nothing is restricted."""
        return frozenset({Capability.NETWORK_HOST, Capability.TERMINAL, Capability.SURVIVES_RESTART})

    async def _kill(self, handle: Handle) -> None:
        """End the descendants first, through another zygote: without a PID namespace they outlive the supervisor."""
        await self._zygote.request("end", pid=number(handle, "pid"), start_time=number(handle, "start_time"))
        await super()._kill(handle)
