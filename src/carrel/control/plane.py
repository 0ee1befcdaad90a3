"""The control plane: builds its parts, opens them in order, runs the upkeep, and closes them in reverse order."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import cached_property
from typing import TYPE_CHECKING

from carrel import __version__
from carrel.audit import AuditLog, SigningKey
from carrel.config import ApprovalSettings, Settings
from carrel.control.egress.connection_events import MINUTE_S, ConnectionEvents
from carrel.control.egress.plans import Plans, read_upstreams
from carrel.control.egress.service import EgressService
from carrel.control.governance.approval_recovery import recover_approvals
from carrel.control.governance.approvals import Approvals
from carrel.control.governance.decisions import ApprovalDecisions
from carrel.control.governance.log_records import LogIntake
from carrel.control.governance.open_requests import OpenRequests
from carrel.control.governance.policies import Policies
from carrel.control.governance.policy_attachments import PolicyLimits, PolicyMasks
from carrel.control.governance.policy_changes import PolicyChanges
from carrel.control.governance.webhooks import Webhook
from carrel.control.host import HostParts
from carrel.control.images.images import Images
from carrel.control.images.sandbox_image import SandboxImage
from carrel.control.images.template_images import TemplateImages
from carrel.control.jobs.executor import SandboxExecutor
from carrel.control.jobs.jobs import Jobs
from carrel.control.mcp.catalogue import McpDiscovery
from carrel.control.mcp.declarations import McpDeclarations, McpInstaller
from carrel.control.mcp.links import McpLinks
from carrel.control.mcp.platform import PlatformServers, read_platform
from carrel.control.mcp.servers import McpServers
from carrel.control.nodes.passes import Passes
from carrel.control.nodes.peers import Peers
from carrel.control.nodes.registry import Nodes, beat_every
from carrel.control.nodes.routing import Routing
from carrel.control.nodes.workers import OtherWorkers, SharedChange, Worker
from carrel.control.operations.admission import Admission
from carrel.control.operations.command_ends import CommandEnds
from carrel.control.operations.happened import events_of
from carrel.control.operations.operations import Operations, OwnOperations
from carrel.control.ports.ports import Ports
from carrel.control.python.calls import PythonOperations
from carrel.control.python.code_contexts import CodeContextOperations
from carrel.control.python.environment_builds import Builder
from carrel.control.python.environment_holds import EnvironmentHolds
from carrel.control.python.environment_use import EnvironmentUse
from carrel.control.python.environments import Environments
from carrel.control.python.stateless_pool import StatelessPool
from carrel.control.python.template_packages import TemplatePackages
from carrel.control.python.tools import Tools
from carrel.control.secrets.files import SecretFiles
from carrel.control.secrets.service import SecretService
from carrel.control.secrets.values import FRESH_S as SECRETS_FRESH_S
from carrel.control.secrets.values import SecretValues
from carrel.control.sessions.attachments import Attachments
from carrel.control.sessions.capacity import Capacity
from carrel.control.sessions.context_deletion import ContextDeletion
from carrel.control.sessions.deletion_limits import DeletionLimits
from carrel.control.sessions.folders import Folders
from carrel.control.sessions.home_limits import LOOK_EVERY_S, HomeLimits
from carrel.control.sessions.leases import Leases, LeaseUpkeep
from carrel.control.sessions.live import LiveSandboxes, SessionNotes
from carrel.control.sessions.network_mode import NetworkMode, opens_hosts
from carrel.control.sessions.owners import WorkspaceOwner
from carrel.control.sessions.pools import Pools
from carrel.control.sessions.protected_folders import ProtectedFolders
from carrel.control.sessions.recovery import Recovered, recover
from carrel.control.sessions.resources import Resources
from carrel.control.sessions.retention import WorkspaceRetention
from carrel.control.sessions.sessions import Sessions
from carrel.control.sessions.slot_sizes import PoolSizes
from carrel.control.sessions.slots import CHECK_EVERY_S, Slots
from carrel.control.sessions.starting import Starting
from carrel.control.sessions.svid_renewal import SvidRenewal, look_every
from carrel.control.sessions.templates import Templates
from carrel.control.sessions.upkeep import EXPIRE_EVERY, Upkeep
from carrel.control.workspaces.bundles import Bundles
from carrel.control.workspaces.checkpoints import CheckpointOperations, RunCheckpoints
from carrel.control.workspaces.disk import Disk
from carrel.control.workspaces.filespace_bases import FilespaceBases
from carrel.control.workspaces.filespace_files import FilespaceFiles
from carrel.control.workspaces.filespaces import Filespaces
from carrel.control.workspaces.snapshots import Snapshots
from carrel.control.workspaces.workspaces import MB, Workspaces
from carrel.egress.plan import Upstream
from carrel.errors import CarrelError, ProviderUnavailable
from carrel.events import EventLog
from carrel.events.log import DAY_S
from carrel.identity import CACHE_S, Tokens
from carrel.metrics import Metrics
from carrel.models import HostReport
from carrel.policy.rules.layers import Layer
from carrel.primitives import tasks
from carrel.primitives.keyed_lock import KeyedLocks
from carrel.primitives.process_locks import LocksOf, ProcessLocks
from carrel.providers.base import Provider
from carrel.secrets import Vault
from carrel.store import Database, FilespaceStore, SecretStore, SessionStore
from carrel.store.approvals import ApprovalStore
from carrel.store.audit import AuditStore
from carrel.store.batch_writer import BatchesThere
from carrel.store.batches import BatchesHere
from carrel.store.code_contexts import CodeContextStore
from carrel.store.database import Workers
from carrel.store.environments import EnvironmentStore
from carrel.store.events import EventStore
from carrel.store.jobs import JobStore
from carrel.store.leases import LeaseStore
from carrel.store.mcp_servers import McpServerStore
from carrel.store.nodes import NodeStore
from carrel.store.policies import PolicyStore
from carrel.store.ports import PublicPortStore
from carrel.store.snapshots import SnapshotStore
from carrel.store.tokens import TokenStore
from carrel.tracing import Tracing
from carrel.workspaces.archive import Archive
from carrel.workspaces.checkpoints import CheckpointStore
from carrel.workspaces.folder_rules import IGNORED
from carrel.workspaces.layout import Layout
from carrel.workspaces.remote import Remote
from carrel.workspaces.volumes.doctor import disk_quota, retention

if TYPE_CHECKING:
    from carrel.control.images.building import ImageBuilds
    from carrel.events.nats_bus import NatsBus

log = logging.getLogger("carrel.control")

FORGET_EVERY_S = 600.0
EVICT_EVERY_S = 60.0
COUNT_EVERY_S = 10.0
SWEEP_JOBS_EVERY_S = 10.0


class ControlPlane:
    """Everything of a server behind its API. `open` one, `close` it when done.

    The constructor shows how the parts are connected: every part gets what it needs when it is made.
    """

    def __init__(
        self,
        settings: Settings,
        host: HostParts,
        worker: Worker,
        locks: ProcessLocks | None,
        database: Database,
        batches: BatchesHere | BatchesThere,
        key: SigningKey,
        vault: Vault,
        checkpoints: CheckpointStore,
        *,
        policy: Layer | None,
        upstreams: Sequence[Upstream],
        platform: PlatformServers,
        token: str | None,
    ):
        # foundations
        self.settings = settings
        self._host = host
        self.layout = layout = host.layout
        self.providers = providers = host.providers
        self.recovered = Recovered()
        self.driver = driver = host.driver
        self.worker = worker
        self._locks = locks
        self.server = server = worker.server
        self.node = node = worker.name
        lock_of: LocksOf = KeyedLocks().of if locks is None else locks.of
        self.metrics = metrics = Metrics()
        self.tracing = tracing = _tracing(settings, node)
        self._database = database
        self._batches = batches
        self.store = store = SessionStore(database)
        self.live = live = LiveSandboxes()
        notes = SessionNotes(live, store)
        leases = Leases(LeaseStore(database), worker, settings.lease_s, shared=settings.database is not None)
        audits = AuditStore(database, batches)
        self.audit = audit = AuditLog(audits, key, node, events_of, strict=settings.audit.strict)
        event_store = EventStore(database)
        self.events = events = EventLog(
            event_store,
            node,
            keep_days=settings.events.keep_days,
            keep_bytes=settings.events.keep_mb * MB,
        )
        self._bus = _bus(settings, events, event_store, node)
        self._command_ends = ends = CommandEnds(events, audit, metrics)
        self._connection_events = connection_events = ConnectionEvents(events)
        self.requests = OpenRequests()
        self.tokens = Tokens(TokenStore(database), token, self.requests.revoked)
        remote = Remote.open(settings.archive_url)
        node_store = NodeStore(database)
        self.nodes = nodes = Nodes(
            node_store,
            live,
            providers,
            worker=worker,
            key_id=vault.key_id,
            capacity=worker.share(settings.max_sandboxes),
            lease_s=settings.lease_s,
            shared=settings.database is not None or worker.count > 1,
            identity=None if host.identities is None else host.identities.node,
        )
        self.identities = host.identities
        self.peers = Peers(nodes, None if host.identities is None else host.identities.node)
        self.e2b_key = vault.derived("e2b access")
        self.passes = Passes(vault.derived("forwarding"), node, nodes.me.boot, nodes.now)

        # admission
        templates_dir = settings.templates_dir or os.path.join(layout.data_dir, "templates")
        self.templates = templates = Templates(
            templates_dir, settings.sandbox.template, store, live, search_url=settings.search_url
        )
        self.policies = policies = Policies(PolicyStore(database), policy, templates)
        self.secret_values = values = SecretValues(vault, SecretStore(database), live, templates)
        self._webhook = _webhook(settings.approvals)
        self.resources = Resources(live, metrics, most=settings.metrics.sandboxes)
        self._approval_store = ApprovalStore(database)
        self.approvals = approvals = Approvals(
            self._approval_store,
            policies,
            values.clean,
            on_created=None if self._webhook is None else self._webhook.send,
            ttl_s=settings.approvals.ttl_s,
            keep_days=settings.approvals.keep_days,
            node=node,
        )
        self._admission = admission = Admission(policies, approvals, audit, metrics, values, live)

        self.log_records = LogIntake(events, values)

        # attachments: they turn a bare sandbox into a workspace
        snapshot_store, filespace_store = SnapshotStore(database), FilespaceStore(database)
        self.routing = Routing(nodes, self.peers, node_store, snapshot_store, live)
        mcp_store, environment_store = McpServerStore(database), EnvironmentStore(database, server)
        filespaces_dir = os.path.join(layout.data_dir, "filespaces")
        bases = FilespaceBases(os.path.join(filespaces_dir, "bases"), alone=worker.alone)
        archive = Archive(remote, os.path.join(layout.cache, "archive"))
        self.workspaces = workspaces = Workspaces(
            layout,
            driver,
            snapshot_store,
            archive,
            bases,
            server,
            metrics,
            lock_of,
            locks,
            ttl_days=settings.workspace_ttl_days,
        )
        plans = Plans(layout.run, upstreams, policies.of_record, values.values_of)
        self.egress = egress = EgressService(
            layout.run,
            _egress_arguments(settings, layout),
            plans,
            admission,
            audit,
            metrics,
            events=connection_events,
            tracing=tracing,
            redact=values.clean,
            store=store,
            locks=lock_of,
            last=worker.first,
            ask_wait_s=settings.egress.ask_wait_s,
        )
        self._mcp_links = links = McpLinks(settings.mcp.start_timeout_s)
        spool = os.path.join(filespaces_dir, "spool")
        files = FilespaceFiles(workspaces, filespace_store, remote, bases, spool, notes, values, alone=worker.alone)
        masks = PolicyMasks(policies)
        folders = Folders(settings.sandbox.folder_root_paths, layout.data_dir, home_mb=settings.sandbox.home_mb)
        self._protected_folders = ProtectedFolders(os.path.join(layout.data_dir, "protected"), audit, notes)
        self._deletions = DeletionLimits(
            os.path.join(layout.data_dir, "deletions"),
            admission,
            notes,
            policies.delete_limit,
            ignored=(*IGNORED, *settings.checkpoints.ignored_names),
            wait_s=settings.approvals.ttl_s,
        )
        self._secret_files = secret_files = SecretFiles(values, plans, admission, live)
        holds = EnvironmentHolds(environment_store, lock_of)
        runs = RunCheckpoints(
            checkpoints,
            audit,
            enabled=settings.checkpoints.enabled,
            keep_runs=settings.checkpoints.keep_runs,
            max_bytes=settings.checkpoints.max_mb * MB,
        )
        self.mcp_declarations = declarations = McpDeclarations(mcp_store, links)
        most = settings.max_sandboxes
        capacity = Capacity(most, live, worker)
        sizes = PoolSizes(settings.pool, templates, worker.share)
        self._slots = slots = Slots(
            settings.pool, providers, sizes, capacity, metrics, events, host.images, host.still_means, worker
        )
        self.pools = Pools(settings.pool, slots, sizes, templates, providers, admission)
        self.images = images = Images(
            settings.images,
            host.images,
            store,
            admission,
            metrics,
            slots,
            node=server,
        )
        self._sandbox_image = SandboxImage(images, store, default=settings.sandbox.image)
        self.attachments = attachments = Attachments(
            templates=templates,
            owner=WorkspaceOwner(),
            limits=PolicyLimits(policies),
            network=NetworkMode(policies, settings.egress, settings.sandbox),
            folders=folders,
            image=self._sandbox_image,
            filespace=files,
            masks=masks,
            protected_folders=self._protected_folders,
            deletions=self._deletions,
            approvals=approvals,
            secrets=secret_files,
            egress=egress,
            checkpoints=runs,
            environments=holds,
            mcp=declarations,
        )

        # sessions, and the operations in their sandboxes
        starting = Starting(
            settings, store, workspaces, leases, live, providers, templates, attachments, audit, capacity, slots
        )
        self.sessions = sessions = Sessions(starting, store, workspaces, leases, live, providers, attachments, lock_of)
        # Packages are made by commands of carrel's own, and the commands of callers may wait for packages.
        self.own_operations = own = OwnOperations(sessions, admission, values, policies.longest, ends)
        envs = settings.envs
        builder = Builder(sessions, own, host.storage, largest_mb=envs.largest_mb, timeout_s=envs.build_timeout_s)
        self.environments = environments = Environments(
            envs,
            environment_store,
            holds,
            host.storage,
            builder,
            vault.derived("environments"),
            policies.of_asker,
            values.clean_text,
        )
        self.packages = packages = TemplatePackages(templates, environments, own)
        template_images = TemplateImages(templates, lambda: self.image_builds, images, store)
        self.operations = operations = Operations(
            sessions, admission, values, policies.longest, ends, packages, template_images
        )
        self.policy_changes = changes = PolicyChanges(policies, live, attachments, sessions)
        self.decisions = ApprovalDecisions(approvals, admission, changes, values.clean)
        self.secrets = SecretService(values, live, attachments)
        self.snapshots = snapshots = Snapshots(sessions, operations, snapshot_store, workspaces, attachments, notes)
        self.filespaces = Filespaces(
            sessions, operations, filespace_store, files, masks, default_cap=settings.sandbox.disk_mb * MB
        )
        self.bundles = Bundles(operations)
        self.ports = Ports(
            settings.ports, PublicPortStore(database), sessions, operations, self.tokens, vault.derived("ports")
        )
        self.checkpoints = CheckpointOperations(sessions, operations, checkpoints)

        # Python, MCP servers, calls without a context
        self.envs = EnvironmentUse(environments, packages, sessions, operations, own)
        self.python = python = PythonOperations(operations, values.redactor, self.envs, packages)
        self.code_contexts = CodeContextOperations(
            operations, values.redactor, python.environment, CodeContextStore(database), ends
        )
        self.tools = Tools(operations, python)
        mcp = settings.mcp
        self._mcp_discovery = McpDiscovery(
            mcp_store,
            sessions,
            workspaces,
            metrics,
            values.redactor,
            start_s=mcp.start_timeout_s,
            timeout_s=mcp.discovery_timeout_s,
        )
        self.mcp = McpServers(
            mcp_store,
            declarations,
            sessions,
            operations,
            McpInstaller(environments, own, providers, mcp.install_timeout_s),
            self._mcp_discovery,
            links,
            platform,
            values.redactor,
            metrics,
        )
        self.router = StatelessPool(settings.router, sessions, operations, own, python, packages, metrics)

        # jobs
        executor = SandboxExecutor(sessions, operations, own, snapshots, self.mcp, values)
        self.jobs = jobs = Jobs(
            settings.jobs,
            JobStore(database),
            executor,
            operations,
            values,
            self.tokens,
            self.requests,
            metrics,
            worker,
            settings.lease_s,
        )
        self.context_deletion = ContextDeletion(
            sessions, operations, workspaces, store, policies, changes, self.secrets, files, events, jobs
        )

        # upkeep
        self.disk = Disk(layout, driver, settings.archive_url)
        self.retention = WorkspaceRetention(sessions, workspaces, store, audit, ttl_days=settings.workspace_ttl_days)
        self.leasing = LeaseUpkeep(live, store, leases, attachments)
        svids = SvidRenewal(live, nodes, host.identities)
        self.upkeep = Upkeep(
            sessions, self.leasing, own, snapshots, workspaces, self.retention, store, audit, settings, notes,
            files,
            more=(
                (self.end_revoked, CACHE_S),
                (self.keep_nodes, beat_every(settings.lease_s)),
                (svids.renew, look_every(settings.spiffe.lifetime_s)),
                (values.forget_former, FORGET_EVERY_S),
                (secret_files.catch_up, SECRETS_FRESH_S),
                (slots.check, CHECK_EVERY_S),
                (connection_events.flush, MINUTE_S),
                (self.count_events, COUNT_EVERY_S),
                (HomeLimits(sessions, folders).enforce, LOOK_EVERY_S),
            ),
            of_server=(
                (environments.evict, EVICT_EVERY_S),
                (images.collect, FORGET_EVERY_S),
                (approvals.prune, EXPIRE_EVERY),
                (runs.shrink, FORGET_EVERY_S),
                (self.sweep_events, FORGET_EVERY_S),
                (jobs.sweep, SWEEP_JOBS_EVERY_S),
                (jobs.count, COUNT_EVERY_S),
            ),
            first=worker.first,
        )  # fmt: skip
        self.others = self._others_of(worker)
        self._following: asyncio.Task[None] | None = None
        self._refreshing: asyncio.Task[None] | None = None
        self._behind = False
        """Whether sandboxes may not have what another worker changed."""
        self._upkeep_task: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls,
        settings: Settings,
        *,
        host: HostParts | None = None,
        providers: Mapping[str, Provider] | None = None,
        worker: Worker | None = None,
        token: str | None = None,
    ) -> ControlPlane:
        """Open the data directory, take over running sandboxes, start the upkeep. `host` is what was opened already;
        `token` is the token of the administrator, None when the API asks for none; `worker` is None for a server that
        is one process.
        """
        async with AsyncExitStack() as stack:
            host = host or await HostParts.open(settings, providers)
            stack.push_async_callback(host.close)
            worker = worker or Worker(settings.node or host.layout.node())
            locks: ProcessLocks | None = None
            others: Workers | None = None
            if worker.count > 1:
                locks = ProcessLocks(worker.locks)
                stack.callback(locks.close)
                others = Workers(worker.turns, worker.count, worker.wrote)
            database = await Database.open(settings.database_url, others)
            stack.push_async_callback(database.close)
            batches = BatchesThere(database, worker.writer) if worker.writer else BatchesHere(database)
            checkpoints = CheckpointStore(
                os.path.join(host.layout.data_dir, "checkpoints"),
                most_bytes=settings.checkpoints.max_mb * MB,
                ignored=settings.checkpoints.ignored_names,
            )
            await asyncio.to_thread(checkpoints.open)
            files = settings.policy
            policy = await asyncio.to_thread(Policies.server_layer, files.settings_file, files.sources_file)
            upstreams = await asyncio.to_thread(read_upstreams, settings.egress.upstreams_file)
            platform = await asyncio.to_thread(read_platform, settings.mcp.platform_file)
            key = await asyncio.to_thread(SigningKey.load, host.layout.data_dir)
            vault = await asyncio.to_thread(Vault.open, host.layout.data_dir, settings.secret_key)
            plane = cls(
                settings,
                host,
                worker,
                locks,
                database,
                batches,
                key,
                vault,
                checkpoints,
                policy=policy,
                upstreams=upstreams,
                platform=platform,
                token=token,
            )
            stack.pop_all()
        try:
            await plane._begin()
        except BaseException:
            await plane.close()
            raise
        return plane

    async def _begin(self) -> None:
        """Take over what the previous process left, and start the background work."""
        await self.events.open()
        worker = self.worker
        former = worker.former if worker.alone else ()
        for left in await self.audit.open(former):
            log.warning("the server ended before this did: %s", left)
        await self._host.ready()
        self.recovered = await recover(
            self.sessions, self.store, self.workspaces, self.providers, self.layout.run, worker
        )
        for box in self.sessions.live():
            await self._command_ends.adopt(box)
        await self._protected_folders.open(self.sessions.live())
        await self._deletions.open(self.sessions.live())
        await self._sandbox_image.open(self.sessions.live())
        await recover_approvals(self._approval_store, self.sessions.live(), self.audit, self.node, former)
        if worker.alone:
            await self._mcp_discovery.open()
        await self.environments.open(alone=worker.alone)
        await self.router.open()
        networks = (self.settings.sandbox.network, self.settings.sandbox.low_trust_network)
        proxied = any(each is not None and each.proxied for each in networks)
        warm = proxied or opens_hosts(await self.policies.of(None))
        await self.egress.open(self.sessions.live(), warm=warm)
        if self._webhook is not None:
            self._webhook.start()
        if self._bus is not None:
            self._bus.start()
        await self.jobs.open()
        self._upkeep_task = asyncio.get_running_loop().create_task(self.upkeep.run())
        if self.others is not None:
            self._following = asyncio.get_running_loop().create_task(self.others.run())

    def _others_of(self, worker: Worker) -> OtherWorkers | None:
        """Return what follows the changes of the other workers; None if there are none."""
        if worker.table is None:
            return None

        async def tokens() -> None:
            self.tokens.forget_known()
            await self.end_revoked()

        def refresh() -> None:
            # Sandboxes and the proxy follow soon after: nobody has to wait until all have been looked at.
            self._behind = True
            if self._refreshing is None or self._refreshing.done():
                self._refreshing = asyncio.get_running_loop().create_task(self._refresh_sandboxes())

        async def policies() -> None:
            self.policies.forget_known()
            refresh()

        async def secrets() -> None:
            self.secret_values.stale(None)
            refresh()

        async def approvals() -> None:
            self.approvals.wake()

        async def mcp_servers() -> None:
            self.mcp_declarations.forget_known()

        return OtherWorkers(
            worker,
            {
                SharedChange.TOKENS: tokens,
                SharedChange.POLICIES: policies,
                SharedChange.SECRETS: secrets,
                SharedChange.ENVIRONMENTS: self.environments.read_again,
                SharedChange.APPROVALS: approvals,
                SharedChange.MCP_SERVERS: mcp_servers,
                SharedChange.NODES: self.nodes.beat,
            },
        )

    async def _refresh_sandboxes(self) -> None:
        while self._behind:
            self._behind = False
            try:
                await self._secret_files.catch_up()
            except CarrelError as error:  # it is tried again in seconds
                log.warning("sandboxes may not have their current secrets: %s", error)
            for box in self.live.all():
                await self.egress.refresh(box)

    @cached_property
    def image_builds(self) -> ImageBuilds:
        """Builds images. Made when it is first used: its modules take long to import."""
        from carrel.control.images.building import ImageBuilds

        limits = self.settings.images
        return ImageBuilds(
            self.images,
            self._host.images,
            self.sessions,
            self.own_operations,
            self._admission,
            largest_mb=limits.layer_max_mb,
            timeout_s=limits.build_timeout_s,
        )

    async def end_revoked(self) -> None:
        """End open requests whose token another server revoked."""
        for token_id in await self.tokens.revoked(self.requests.tokens()):
            self.requests.revoked(token_id)

    async def keep_nodes(self) -> None:
        """Give a sign of life to the other servers, and give up those that give none."""
        await self.nodes.beat()
        await self.peers.close_silent()
        if self.identities is not None:
            self.metrics.svid(self.identities.node.svid.expires_at)

    async def count_events(self) -> None:
        """Set the metrics of the event log."""
        behind = 0 if self._bus is None else self._bus.behind
        self.metrics.events(await self.events.last(), self.events.readers, behind)

    async def sweep_events(self) -> None:
        """Remove old events."""
        await self.events.sweep(None if self._bus is None else await self._bus.delivered())

    async def host_report(self) -> HostReport:
        from carrel.providers.doctor import host_report

        report = await asyncio.to_thread(host_report, self.providers, self.settings.sandbox.third_party_names)
        quota = await asyncio.to_thread(disk_quota, self.driver)
        kept = retention(self.settings.workspace_ttl_days)
        return report.model_copy(update={"checks": [*report.checks, quota, kept]})

    async def ready(self) -> None:
        """Raise unless the store answers and at least one provider is usable."""
        await self.store.get("-")
        if all(provider.missing() is not None for provider in self.providers.values()):
            raise ProviderUnavailable(
                "no provider can be used on this host", hint="`carrel doctor` says what is missing"
            )

    async def close(self) -> None:
        """End every sandbox in which no job runs, unless sandboxes survive a stop, and release everything."""
        self.approvals.close()
        await tasks.cancel([self._upkeep_task, self._following, self._refreshing])
        with_jobs = await self.jobs.close()
        await self.nodes.leave()
        if self._webhook is not None:
            await self._webhook.close()
        try:
            await self.router.close()
            await self._mcp_discovery.close()
            await self._mcp_links.close()
            await self.environments.close()
            await self.upkeep.flush()
            await self.sessions.shutdown(leave=with_jobs, survive=self.settings.sandbox.survive_stop)
        finally:
            await self._slots.close()
            self.peers.close()
            self._sandbox_image.close()
            await self.images.close()
            await self._protected_folders.close()
            await self._deletions.close()
            try:
                await self.egress.close()
            except (CarrelError, OSError):
                log.exception("the egress process could not be ended")
            await self._connection_events.flush()
            await self._command_ends.close()
            await self.audit.close()
            if self._bus is not None:
                await self._bus.close()
            await self.events.close()
            if self.tracing is not None:
                await self.tracing.close()
            await self._host.close()
            self._batches.close()
            await self._database.close()
            if self._locks is not None:
                self._locks.close()


def _bus(settings: Settings, events: EventLog, deliveries: EventStore, node: str) -> NatsBus | None:
    if settings.bus is None:
        return None
    from carrel.events.nats_bus import NatsBus

    url, keep_s = settings.bus.get_secret_value(), settings.events.keep_days * DAY_S
    return NatsBus(url, events, deliveries, node, keep_s=keep_s)


def _tracing(settings: Settings, node: str) -> Tracing | None:
    if not settings.tracing.enabled:
        return None
    from carrel.tracing.otel import OpenTelemetry

    return OpenTelemetry(node, __version__, commands=settings.tracing.commands)


def _webhook(settings: ApprovalSettings) -> Webhook | None:
    if settings.webhook is None:
        return None
    secret = settings.webhook_secret
    key = b"" if secret is None else secret.get_secret_value().encode()
    return Webhook(settings.webhook.get_secret_value(), key)


def _egress_arguments(settings: Settings, layout: Layout) -> list[str]:
    given = settings.egress
    arguments = ["--cache", os.path.join(layout.cache, "packages"), "--cache-mb", str(given.cache_mb)]
    for each in filter(None, given.nameservers.split(",")):
        arguments += ["--nameserver", each]
    if given.roots_file is not None:
        arguments += ["--roots", given.roots_file]
    return arguments
