"""The control plane as one thing: opens its parts in order, runs the upkeep, closes them in reverse."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack

from carrel.audit import AuditLog, SigningKey, chain_of
from carrel.config import Settings
from carrel.control.egress.plans import Plans, inspects, read_upstreams
from carrel.control.egress.service import Egress
from carrel.control.governance.approval_recovery import settle_runs
from carrel.control.governance.approvals import Approvals
from carrel.control.governance.open_requests import OpenRequests
from carrel.control.governance.policies import Policies
from carrel.control.governance.webhooks import Webhook
from carrel.control.mcp.discovery import McpDiscovery
from carrel.control.mcp.installing import Installing
from carrel.control.mcp.links import McpLinks
from carrel.control.mcp.platform import PlatformServers, read_platform
from carrel.control.mcp.request_checks import discovers, whose
from carrel.control.mcp.servers import McpServers
from carrel.control.operations.admission import Governor
from carrel.control.operations.door import Door
from carrel.control.operations.operations import Operations
from carrel.control.python.environment_builds import Builder, shared
from carrel.control.python.environment_use import EnvironmentUse
from carrel.control.python.environments import Environments
from carrel.control.python.stateless_pool import Router
from carrel.control.python.template_packages import TemplatePackages
from carrel.control.secrets.service import FRESH_S as SECRETS_FRESH_S
from carrel.control.secrets.service import Secrets
from carrel.control.sessions.forgetting import Forgetting
from carrel.control.sessions.lease_upkeep import Leasing
from carrel.control.sessions.leases import Ownership
from carrel.control.sessions.live import LiveSandbox, LiveSandboxes
from carrel.control.sessions.masks import masks_of
from carrel.control.sessions.network_mode import fit_network, opens_hosts
from carrel.control.sessions.recovery import Recovered, recover
from carrel.control.sessions.retention import Retention
from carrel.control.sessions.sessions import Sessions
from carrel.control.sessions.templates import Templates
from carrel.control.sessions.upkeep import EXPIRE_EVERY, Janitor
from carrel.control.workspaces.bundles import Bundles
from carrel.control.workspaces.disk import Disk
from carrel.control.workspaces.filespaces import Filespaces
from carrel.control.workspaces.snapshots import Snapshots, Undo
from carrel.control.workspaces.workspaces import MB, Workspaces
from carrel.egress.plan import Upstream
from carrel.errors import CarrelError, ProviderUnavailable
from carrel.identity import CACHE_S, Tokens
from carrel.metrics import Metrics
from carrel.models import HostReport, Network, PolicyDocuments, PolicyInfo, SandboxRequest, SecretName
from carrel.policy.rules.layers import Layer, Policy
from carrel.providers import Masks, open_providers
from carrel.providers.base import Provider
from carrel.secrets import Vault
from carrel.store import Database, FilespaceStore, SecretStore, SessionRecord, SessionStore
from carrel.store.approvals import ApprovalStore
from carrel.store.audit import AuditStore
from carrel.store.code_contexts import CodeContextStore
from carrel.store.environments import EnvironmentStore
from carrel.store.leases import LeaseStore
from carrel.store.mcp_servers import McpServerStore
from carrel.store.policies import PolicyStore
from carrel.store.snapshots import SnapshotStore
from carrel.store.tokens import TokenStore
from carrel.workspaces.archive import Archive
from carrel.workspaces.environments import Shelf
from carrel.workspaces.layout import Layout
from carrel.workspaces.remote import Remote
from carrel.workspaces.volumes import VolumeDriver, open_driver
from carrel.workspaces.volumes.doctor import disk_quota, retention

log = logging.getLogger("carrel.control")

FORGET_EVERY_S = 600.0
EVICT_EVERY_S = 60.0


class ControlPlane:
    """Sessions, operations and what they stand on. `open` one, `close` it when done."""

    def __init__(
        self,
        settings: Settings,
        layout: Layout,
        driver: VolumeDriver,
        database: Database,
        providers: Mapping[str, Provider],
        key: SigningKey,
        vault: Vault,
        shelf: Shelf,
        *,
        policy: Layer | None,
        upstreams: Sequence[Upstream],
        platform: PlatformServers,
        door: Door | None,
    ):
        self.settings = settings
        self.layout = layout
        self.providers = dict(providers)
        self.recovered = Recovered()
        self.driver = driver
        self.node = settings.node or layout.node()
        self.metrics = Metrics()
        self._database = database
        self.requests = OpenRequests()
        self.tokens = self.open_tokens(None)
        self.store = SessionStore(database)
        snapshots = SnapshotStore(database)
        remote = Remote.open(settings.archive_url)
        self.workspaces = Workspaces(
            layout,
            driver,
            snapshots,
            Archive(remote, os.path.join(layout.cache, "archive")),
            self.node,
            ttl_days=settings.workspace_ttl_days,
            metrics=self.metrics,
        )
        ownership = Ownership(LeaseStore(database), self.node, settings.lease_s)
        live = LiveSandboxes()
        self.sessions = Sessions(settings, self.store, self.workspaces, ownership, live, providers)
        self.leasing = Leasing(live, self.store, ownership)
        self.secrets = Secrets(vault, SecretStore(database), live)
        self.sessions.on_started(self._started)
        self.policies = Policies(PolicyStore(database), policy)
        self.templates = Templates(
            settings.templates_dir or os.path.join(layout.data_dir, "templates"),
            settings.sandbox.template,
            self.store,
            live,
        )
        self.policies.template_of = self.secrets.template_of = self.templates.of
        self.policies.template_for, self.policies.layer_of = self.templates.meant, self.templates.layer
        self.sessions.make_by(self.templates.prepare)
        self.sessions.govern_with(self.policies.fit, self._masks)
        self.sessions.network_with(self._network, self._trusting)
        approvals = settings.approvals
        self._asked = ApprovalStore(database)
        self.approvals = Approvals(self._asked, ttl_s=approvals.ttl_s, keep_days=approvals.keep_days, node=self.node)
        self.approvals.rules = self.policies
        self.approvals.redact = self.secrets.clean
        self._webhook: Webhook | None = None
        if approvals.webhook is not None:
            secret = approvals.webhook_secret
            key_bytes = b"" if secret is None else secret.get_secret_value().encode()
            self._webhook = Webhook(approvals.webhook.get_secret_value(), key_bytes)
            self.approvals.on_created = self._webhook.tell
        self.audit = AuditLog(AuditStore(database), key, self.node, strict=settings.audit.strict)
        governor = Governor(
            self.policies,
            self.approvals,
            self.audit,
            redact=self.secrets.clean,
            place=lambda sandbox_id: box.workspace if (box := live.get(sandbox_id)) is not None else None,
        )
        self.approvals.door = door or governor
        # Not its policy: whoever may delete a context may not loosen what holds for the next one of its name.
        self.sessions.on_deleted += [self.secrets.forget, self.approvals.forget, self.templates.forget]
        self.operations = Operations(
            self.sessions, door or governor, self.metrics, self.secrets.redactor, self.policies.longest
        )
        self.secrets.deliver = self.operations.deliver_secrets
        self.sessions.on_moved(self._adopt_chain)
        plans = Plans(layout.run, upstreams, self._policy_of, self.secrets.values_of)
        self.secrets.dress = plans.shown
        self.egress = Egress(
            layout.run,
            _egress_arguments(settings, layout),
            plans,
            self.approvals,
            self.audit,
            self.metrics,
            redact=self.secrets.clean,
            ask_wait_s=settings.egress.ask_wait_s,
        )
        live.on_end = self._ending
        self.policies.on_changed = self._policy_changed
        self.secrets.on_changed = self.egress.refresh
        self.snapshots = Snapshots(self.sessions, self.operations, snapshots, self.workspaces)
        self.snapshots.on_fork = self._forking
        envs, self._shelf = settings.envs, shelf
        self.environments = Environments(
            envs,
            EnvironmentStore(database, self.node),
            shelf,
            Builder(
                self.sessions,
                self.operations,
                shelf,
                largest_mb=envs.largest_mb,
                timeout_s=envs.build_timeout_s,
            ),
            vault.derived("environments"),
            self.policies.of_asker,
            self.secrets.clean_text,
        )
        self.snapshots.on_forked = self.environments.made
        self.packages = TemplatePackages(self.templates, self.environments, self.operations.give_packages)
        self.envs = EnvironmentUse(self.environments, self.packages, self.sessions, self.operations)
        self.operations.python.attach = self.envs.attach
        self.operations.python.ready = self.packages.ready
        kept = CodeContextStore(database)
        self.operations.code_contexts.recall = kept.environment
        self.operations.code_contexts.keep = kept.put
        self.operations.settled = self.packages.settled
        mcp_store = McpServerStore(database)
        self._mcp_links = McpLinks(settings.mcp.start_timeout_s)
        self._mcp_discovery = McpDiscovery(
            mcp_store,
            self.sessions,
            self.workspaces,
            self.metrics,
            self.secrets.redactor,
            start_s=settings.mcp.start_timeout_s,
            timeout_s=settings.mcp.discovery_timeout_s,
        )
        self.mcp = McpServers(
            mcp_store,
            self.sessions,
            self.operations,
            Installing(self.environments, self.operations, providers, settings.mcp.install_timeout_s),
            self._mcp_discovery,
            self._mcp_links,
            platform,
            self.secrets.redactor,
            self.metrics,
        )
        self.sessions.on_deleted.append(self.mcp.forget)
        self.router = Router(settings.router, self.sessions, self.operations, self.metrics)
        self.bundles = Bundles(self.operations)
        self.filespaces = Filespaces(
            self.sessions,
            self.operations,
            self.workspaces,
            FilespaceStore(database),
            remote,
            os.path.join(layout.data_dir, "filespaces"),
            default_cap=settings.sandbox.disk_mb * MB,
        )
        self.filespaces.masks = self._masks
        self.forgetting = Forgetting(
            self.sessions, self.operations, self.workspaces, self.store, self.policies, self.secrets, self.filespaces
        )
        self.sessions.pull_with(self.filespaces.pull)
        self.sessions.push = self.filespaces.push
        self.workspaces.keeping.base = self.filespaces.base
        self.disk = Disk(layout, driver, settings.archive_url)
        self.retention = Retention(
            self.sessions, self.workspaces, self.store, self.audit, ttl_days=settings.workspace_ttl_days
        )
        self.janitor = Janitor(
            self.sessions, self.leasing, self.operations, self.snapshots, self.filespaces, self.workspaces,
            self.retention, self.store, self.audit, settings,
        )  # fmt: skip
        self.janitor.also(self.end_revoked, CACHE_S)
        self.janitor.also(self.secrets.forget_former, FORGET_EVERY_S)
        self.janitor.also(self.secrets.catch_up, SECRETS_FRESH_S)
        self.janitor.also(self.environments.evict, EVICT_EVERY_S)
        self.janitor.also(self.approvals.prune, EXPIRE_EVERY)
        self._upkeep: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls,
        settings: Settings,
        *,
        providers: Mapping[str, Provider] | None = None,
        door: Door | None = None,
    ) -> ControlPlane:
        """Open the data directory, take over what runs, start the upkeep. `door` replaces the one with a policy."""
        layout = Layout(settings.data_dir)
        await asyncio.to_thread(layout.prepare)
        async with AsyncExitStack() as stack:
            database = await Database.open(settings.database_url)
            stack.push_async_callback(database.close)
            shelf = Shelf(os.path.join(layout.data_dir, "envs"))
            await asyncio.to_thread(shelf.prepare)
            driver = await asyncio.to_thread(open_driver, layout.storage, settings.volumes)
            stack.push_async_callback(asyncio.to_thread, driver.close)
            if providers is None:
                providers = open_providers(
                    layout.run,
                    driver.directory,
                    allow_process=settings.sandbox.allow_process,
                    shared=await asyncio.to_thread(shared, shelf),
                )
            files = settings.policy
            policy = await asyncio.to_thread(Policies.server_layer, files.settings_file, files.sources_file)
            upstreams = await asyncio.to_thread(read_upstreams, settings.egress.upstreams_file)
            platform = await asyncio.to_thread(read_platform, settings.mcp.platform_file)
            key = await asyncio.to_thread(SigningKey.load, layout.data_dir)
            vault = await asyncio.to_thread(Vault.open, layout.data_dir, settings.secret_key)
            plane = cls(
                settings,
                layout,
                driver,
                database,
                providers,
                key,
                vault,
                shelf,
                policy=policy,
                upstreams=upstreams,
                platform=platform,
                door=door,
            )
            stack.pop_all()
        try:
            for left in await plane.audit.open():
                log.warning("the server ended before this did: %s", left)
            await asyncio.gather(*(provider.warm() for provider in plane.providers.values()))
            plane.recovered = await recover(plane.sessions, plane.store, plane.workspaces, plane.providers, layout.run)
            await settle_runs(plane._asked, plane.sessions.live(), plane.audit, plane.node)
            await plane._mcp_discovery.open()
            await plane.environments.open()
            await plane.router.open()
            warm = settings.sandbox.network.proxied or opens_hosts(await plane.policies.of(None))
            await plane.egress.open(plane.sessions.live(), warm=warm)
        except BaseException:
            await plane.close()
            raise
        if plane._webhook is not None:
            plane._webhook.start()
        plane._upkeep = asyncio.get_running_loop().create_task(plane.janitor.run())
        return plane

    async def put_policy(self, context_id: str, given: PolicyDocuments, by: str) -> PolicyInfo:
        """Change the policy of a context. The door follows it at once; what a running sandbox has masked changes when
        it is restarted, which is done when asked for.
        """
        info = await self.policies.put(context_id, given, by)
        box = next((box for box in self.sessions.live() if box.record.context_id == context_id), None)
        if box is None or not await self._differs(box):
            return info
        if not given.restart:
            return info.model_copy(update={"restart_needed": True})
        await self.sessions.stop(box.record.id, "its policy was changed")
        await self.sessions.deploy_or_resume(SandboxRequest(context_id=context_id))
        return info

    async def _differs(self, box: LiveSandbox) -> bool:
        """Whether a sandbox started now would be another than this one, by its policy."""
        record = box.record
        policy = await self._policy_of(record)
        if masks_of(policy, record.context_id) != box.masks or (inspects(policy) and not box.trusting):
            return True
        return self._fit(record, None, policy, box.provider).network != record.network

    async def _policy_of(self, record: SessionRecord) -> Policy:
        return await self.policies.of_record(record)

    async def _network(self, record: SessionRecord, asked: Network | None, provider: Provider) -> SessionRecord:
        return self._fit(record, asked, await self._policy_of(record), provider)

    def _fit(self, record: SessionRecord, asked: Network | None, policy: Policy, provider: Provider) -> SessionRecord:
        settings = self.settings
        return fit_network(record, asked, policy, settings.egress, provider, default=settings.sandbox.network)

    async def _trusting(self, record: SessionRecord) -> bool:
        if not record.network.proxied or not _is_agent(record):
            return False
        return inspects(await self._policy_of(record))

    async def _started(self, box: LiveSandbox) -> None:
        if _is_agent(box.record):  # what carrel builds is no agent of the context, and has nothing of it
            await self.secrets.give(box)
        await self.egress.attach(box)

    def _ending(self, box: LiveSandbox) -> None:
        self.egress.detach(box)
        self.router.ended(box)
        self._mcp_links.ended(box)

    async def _policy_changed(self, context_id: str) -> None:
        """What follows a policy at once: the way out, and which secrets only the proxy has."""
        box = next((box for box in self.sessions.live() if box.record.context_id == context_id), None)
        if box is not None:
            await self.secrets.give(box)
            await self.egress.refresh(context_id)

    async def _masks(self, record: SessionRecord) -> Masks | None:
        if not _is_agent(record):  # there is nothing of the context to hide, and no program but the installer
            return None
        return masks_of(await self.policies.of_record(record), whose(record))

    async def _forking(self, origin: str, context_id: str, with_secrets: bool) -> Undo:
        undo_policy = await self.policies.copy(origin, context_id)
        given: list[SecretName] = []

        async def undo() -> None:
            await self.secrets.take_back(context_id, given)
            await self.mcp.forget(context_id)
            await self.environments.unforked(context_id)
            await undo_policy()

        try:
            await self.environments.forked(origin, context_id)
            await self.mcp.forked(origin, context_id)
            if with_secrets and (names := await self.secrets.missing(origin, context_id)):
                arguments = {"from": origin, "names": names}  # told in the log of the context that gets them
                async with self.operations.session_door("copy_secrets", arguments, "", "", context_id):
                    await self.secrets.copy(origin, context_id, names, given)
        except BaseException:
            await undo()
            raise
        return undo

    async def _adopt_chain(self, record: SessionRecord) -> None:
        """What the server before left open in the audit log of a context is closed, and told."""
        for left in await self.audit.adopt(chain_of(record.context_id, record.id)):
            log.warning("another server ended before this did: %s", left)

    def open_tokens(self, root: str | None) -> Tokens:
        """Know who asks: `root` is the administrator's token, None when none is asked for."""
        self.tokens = Tokens(TokenStore(self._database), root)
        self.tokens.on_revoked = self.requests.revoked
        return self.tokens

    async def end_revoked(self) -> None:
        """Break off what stays open with a token that another server revoked."""
        for token_id in await self.tokens.revoked(self.requests.tokens()):
            self.requests.revoked(token_id)

    async def host_report(self) -> HostReport:
        """What this host can do."""
        from carrel.providers.doctor import host_report

        report = await asyncio.to_thread(host_report, self.providers)
        quota = await asyncio.to_thread(disk_quota, self.driver)
        kept = retention(self.settings.workspace_ttl_days)
        return report.model_copy(update={"checks": [*report.checks, quota, kept]})

    async def ready(self) -> None:
        """Raise unless the store answers and some provider can be used."""
        await self.store.get("-")
        if all(provider.missing() is not None for provider in self.providers.values()):
            raise ProviderUnavailable(
                "no provider can be used on this host", hint="`carrel doctor` says what is missing"
            )

    async def close(self) -> None:
        """End every sandbox and release everything."""
        self.approvals.close()
        if self._upkeep is not None:
            self._upkeep.cancel()
            await asyncio.gather(self._upkeep, return_exceptions=True)
        if self._webhook is not None:
            await self._webhook.close()
        try:
            await self.router.close()
            await self._mcp_discovery.close()
            await self._mcp_links.close()
            await self.environments.close()
            await self.janitor.flush()
            await self.sessions.shutdown()
        finally:
            try:
                await self.egress.close()
            except (CarrelError, OSError):
                log.exception("the egress process could not be ended")
            await self.audit.close()
            for provider in self.providers.values():
                try:
                    await provider.close()
                except Exception:
                    log.exception("provider %s could not be closed", provider.name)
            self._shelf.close()
            try:
                await asyncio.to_thread(self.driver.close)
            except CarrelError:
                log.exception("the volumes could not be closed")
            await self._database.close()


def _is_agent(record: SessionRecord) -> bool:
    """Whether what runs in a sandbox is the agent's, and not what carrel builds for it."""
    return record.acts_for is None or discovers(record)


def _egress_arguments(settings: Settings, layout: Layout) -> list[str]:
    """How the egress process is started."""
    given = settings.egress
    arguments = ["--cache", os.path.join(layout.cache, "packages"), "--cache-mb", str(given.cache_mb)]
    for each in filter(None, given.nameservers.split(",")):
        arguments += ["--nameserver", each]
    if given.roots_file is not None:
        arguments += ["--roots", given.roots_file]
    return arguments
