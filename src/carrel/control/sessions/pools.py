"""The pools of slots as operations: list them, and change their sizes."""

from __future__ import annotations

from collections.abc import Mapping

from carrel.config import PoolSettings
from carrel.control.operations.admission import Admission
from carrel.control.operations.call import Call
from carrel.control.operations.caller import Caller
from carrel.control.sessions.slot_sizes import PoolSizes
from carrel.control.sessions.slot_table import SlotPool
from carrel.control.sessions.slots import Slots, has_slots
from carrel.control.sessions.templates import Templates
from carrel.errors import InvalidRequest, NotFound, Unsupported
from carrel.models.operations import RESIZE_POOL
from carrel.models.pools import PoolInfo, PoolList, PoolResize
from carrel.providers.base import Provider


class Pools:
    """The pools of one server."""

    def __init__(
        self,
        settings: PoolSettings,
        slots: Slots,
        sizes: PoolSizes,
        templates: Templates,
        providers: Mapping[str, Provider],
        admission: Admission,
    ):
        self._most = settings.max
        self._slots = slots
        self._sizes = sizes
        self._templates = templates
        self._providers = dict(providers)
        self._admission = admission

    def list(self) -> PoolList:
        """List the pools, sorted by provider and template."""
        pools = sorted(self._slots.pools, key=lambda pool: (pool.kind.provider, pool.kind.template or ""))
        return PoolList(items=[_info(pool) for pool in pools])

    async def resize(self, caller: Caller, name: str, request: PoolResize) -> PoolList:
        """Change the size of the pools of a provider or a template, until the server ends; return these pools. A name
        that both have means the provider.
        """
        provider = self._providers.get(name)
        if provider is None:
            await self._require_template(name)
        elif not has_slots(provider):
            raise Unsupported(
                f"provider '{name}' has no pool: its sandboxes start in milliseconds",
                field="pool",
                hint="name a provider with slots, such as docker or gvisor, or a template",
            )
        if request.size > self._most:
            raise InvalidRequest(
                f"this server has at most {self._most} slots in all pools together",
                field="size",
                hint="ask for less, or let the operator raise CARREL_POOL_MAX",
            )
        async with self._admission.admit(Call(RESIZE_POOL, {"pool": name, "size": request.size}, caller)):
            if provider is None:
                self._sizes.resize_template(name, request.size)
            else:
                self._sizes.resize_provider(name, request.size)
            await self._slots.resized()
        attribute = "template" if provider is None else "provider"
        return PoolList(items=[each for each in self.list().items if getattr(each, attribute) == name])

    async def _require_template(self, name: str) -> None:
        try:
            await self._templates.get(name)
        except InvalidRequest as error:
            if error.field != "template":
                raise
            raise NotFound(
                f"there is no provider and no template '{name[:64]}'",
                field="pool",
                hint=f"the providers are: {', '.join(self._providers)}; `carrel templates` lists the templates",
            ) from None


def _info(pool: SlotPool) -> PoolInfo:
    kind = pool.kind
    return PoolInfo(
        provider=kind.provider,
        template=kind.template,
        image=kind.image,
        memory_mb=kind.launch.memory_mb,
        ready=len(pool.in_state("ready")),
        starting=len(pool.in_state("starting")),
        wanted=pool.target,
        size=pool.counts.size,
        max=pool.counts.most,
        claimed=pool.claimed,
        cold_starts=pool.cold_starts,
        last_failure=pool.last_failure,
    )
