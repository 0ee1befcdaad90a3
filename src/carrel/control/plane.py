"""The control plane as one thing: opens its parts in order, runs the upkeep, closes them in reverse."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from carrel.config import Settings
from carrel.control.door import Decide, Record, allow_all, log_operation
from carrel.control.janitor import Janitor
from carrel.control.operations import Operations
from carrel.control.recovery import Recovered, recover
from carrel.control.sessions import Sessions
from carrel.control.snapshots import Snapshots
from carrel.errors import ProviderUnavailable
from carrel.models import HostReport
from carrel.providers import open_providers
from carrel.providers.base import Provider
from carrel.store import Database, SessionStore
from carrel.store.snapshots import SnapshotStore
from carrel.workspaces.layout import Layout
from carrel.workspaces.volumes import DirectoryDriver

log = logging.getLogger("carrel.control")


class ControlPlane:
    """Sessions, operations and what they stand on. `open` one, `close` it when done."""

    def __init__(
        self,
        settings: Settings,
        layout: Layout,
        database: Database,
        providers: Mapping[str, Provider],
        *,
        decide: Decide,
        record: Record,
    ):
        self.settings = settings
        self.layout = layout
        self.providers = dict(providers)
        self.recovered = Recovered()
        self._database = database
        self.store = SessionStore(database)
        self.sessions = Sessions(settings, self.store, layout, providers)
        self.operations = Operations(self.sessions, decide, record)
        self.snapshots = Snapshots(
            self.sessions, self.operations, SnapshotStore(database), layout, DirectoryDriver(layout.storage)
        )
        self.sessions.on_deleted = self.snapshots.forget
        self.janitor = Janitor(self.sessions, self.operations, self.store, settings.sandbox)
        self._upkeep: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls,
        settings: Settings,
        *,
        providers: Mapping[str, Provider] | None = None,
        decide: Decide = allow_all,
        record: Record = log_operation,
    ) -> ControlPlane:
        """Open the data directory, take over what runs, start the upkeep."""
        layout = Layout(settings.data_dir)
        await asyncio.to_thread(layout.prepare)
        database = await Database.open(settings.database_url)
        plane: ControlPlane | None = None
        try:
            if providers is None:
                providers = open_providers(layout.run, layout.workspaces, allow_process=settings.sandbox.allow_process)
            plane = cls(settings, layout, database, providers, decide=decide, record=record)
            await asyncio.gather(*(provider.warm() for provider in plane.providers.values()))
            await plane.snapshots.recover()
            plane.recovered = await recover(plane.sessions, plane.store, layout)
        except BaseException:
            if plane is not None:
                await plane.close()
            else:
                await database.close()
            raise
        plane._upkeep = asyncio.get_running_loop().create_task(plane.janitor.run())
        return plane

    async def host_report(self) -> HostReport:
        """What this host can do."""
        from carrel.providers.doctor import host_report

        return await asyncio.to_thread(host_report, self.providers)

    async def ready(self) -> None:
        """Raise unless the store answers and some provider can be used."""
        await self.store.get("-")
        if all(provider.missing() is not None for provider in self.providers.values()):
            raise ProviderUnavailable(
                "no provider can be used on this host", hint="`carrel doctor` says what is missing"
            )

    async def close(self) -> None:
        """End every sandbox and release everything."""
        if self._upkeep is not None:
            self._upkeep.cancel()
            await asyncio.gather(self._upkeep, return_exceptions=True)
        try:
            await self.janitor.flush()
            await self.sessions.shutdown()
        finally:
            for provider in self.providers.values():
                try:
                    await provider.close()
                except Exception:
                    log.exception("provider %s could not be closed", provider.name)
            await self._database.close()
