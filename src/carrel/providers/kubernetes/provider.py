"""Sandboxes as pods. carrel runs no controller of its own: agent-sandbox makes the pods where it is installed.

A sandbox is found by names and labels that are made from the data directory, the host's name and the sandbox's id, also
by a server that did not start it. Its workspace is a directory of a volume that this server and all nodes share.
"""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import os
import socket
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from carrel.errors import CarrelError, PlatformError, ProviderUnavailable
from carrel.isolation import seccomp
from carrel.isolation.rootfs import SANDBOX_UID
from carrel.models import Network
from carrel.primitives import tasks
from carrel.primitives.spiffe import SpiffeId
from carrel.providers.base import NETWORK_CAPABILITY, Capability, Handle, Launch, Provider
from carrel.providers.control_directory import facts_of
from carrel.providers.gvisor.options import LIMITS
from carrel.providers.kubernetes import manifests, pods
from carrel.providers.kubernetes.access import ClusterAccess, find_access
from carrel.providers.kubernetes.api import KubernetesApi, Resource, put
from carrel.providers.kubernetes.manifests import PodRequest
from carrel.providers.kubernetes.options import KubernetesOptions
from carrel.providers.kubernetes.pods import StartedPod
from carrel.providers.kubernetes.slot_directories import SlotDirectories, is_small
from carrel.providers.kubernetes.volume_growth import GI, VolumeGrowth
from carrel.providers.kubernetes.warm_pools import WarmPools, claimed_pod
from carrel.providers.links import RemoteAddress, RemoteLink, SupervisorLink
from carrel.providers.remote import give_facts
from carrel.providers.ways_out import WaysOut
from carrel.spiffe.sandboxes import SLOT_LIFETIME_S, SandboxIdentities

START_S, REMOVAL_S = 120.0, 60.0
PROBED_FOR_S, PROBE_S = 10.0, 2.0
"""How long the answer of an API server about itself is used, and how long it may take."""
SERVERS = {"app.kubernetes.io/name": "carrel", "app.kubernetes.io/component": "server"}
"""The labels of pods that sandboxes accept connections from."""
POLICY = "carrel-sandboxes"
_NO_IDS = "pods are reached by their SPIFFE IDs, and this server has none: set CARREL_SPIFFE_SOURCE"
_DIAL_S, _PAUSE_S = 1.0, 0.03
_WATCHED_AFTER_S = 0.5
_WAYS_OUT = "ways-out"
_RENEWED_BEFORE_S = SLOT_LIFETIME_S / 2


@dataclass(frozen=True)
class _Waiting:
    """A pod without an owner, and its directory among those of slots. The uid and node of `pod` may be unknown yet."""

    pod: StartedPod
    directory: str


class KubernetesProvider(Provider):
    """Pods that keep to the Pod Security Standard `restricted`. For one event loop."""

    slot_lifetime_s = SLOT_LIFETIME_S / 3
    """Its credentials may be half as old as they can be when it starts; then its owner needs them once."""

    def __init__(
        self,
        run_dir: str,
        options: KubernetesOptions,
        identities: SandboxIdentities | None,
        *,
        gvisor: bool = False,
    ):
        """Without `identities`, nothing can be started: `carrel doctor` looks at the cluster. With `gvisor`, pods have
        the runtime class of gVisor.
        """
        self.name = "kubernetes-gvisor" if gvisor else "kubernetes"
        self.isolation_level = 2 if gvisor else 1
        self._options = options
        self._runtime_class = options.gvisor_class if gvisor else ""
        self._given = identities
        whose = f"{socket.gethostname()}\0{os.path.realpath(run_dir)}\0{self.name}"
        self._instance = hashlib.sha256(whose.encode()).hexdigest()[:16]
        self._access: ClusterAccess | None = None
        self._api: KubernetesApi | None = None
        self._version: str | None = None
        self._server = ""
        self._credentials_until = 0.0
        self._preparing = asyncio.Lock()
        self._slots = SlotDirectories(options.volume_directory, self._instance, SANDBOX_UID)
        self._ways_out = WaysOut(os.path.join(run_dir, _WAYS_OUT))
        self._waiting: dict[str, _Waiting] = {}
        self._claimed: dict[str, str] = {}
        self._pools: WarmPools | None = None
        self._growing: asyncio.Task[None] | None = None
        self._probed: tuple[float, str | None] = (-PROBED_FOR_S, None)

    # what the cluster can do

    def missing(self) -> str | None:
        at, missing = self._probed
        if time.monotonic() - at >= PROBED_FOR_S:
            missing = self._look()
            self._probed = (time.monotonic(), missing)
        return missing

    @property
    def _identities(self) -> SandboxIdentities:
        if self._given is None:
            raise ProviderUnavailable(f"provider '{self.name}' cannot be used here: {_NO_IDS}")
        return self._given

    def _look(self) -> str | None:
        if not self._options.identified:
            return _NO_IDS
        if not os.path.isdir(self._options.volume_directory):
            return f"the shared volume is not mounted at {self._options.volume_directory}"
        try:
            access = self._find_access()
            place = urlsplit(access.server)
            connection = http.client.HTTPSConnection(
                str(place.hostname), place.port or 443, timeout=PROBE_S, context=access.tls
            )
            try:
                connection.request("GET", f"{place.path}/version", headers=access.headers())
                status = connection.getresponse().status
            finally:
                connection.close()
        except CarrelError as error:
            return error.detail
        except (OSError, http.client.HTTPException) as error:
            return f"the Kubernetes API cannot be reached: {error}"
        return None if status == 200 else f"the Kubernetes API answers {status} to the credentials of this server"

    def _find_access(self) -> ClusterAccess:
        if self._access is None:
            self._access = find_access(self._options.kubeconfig)
        return self._access

    def capabilities(self) -> frozenset[Capability]:
        return frozenset(
            {
                Capability.FILE_ISOLATION,
                Capability.PROCESS_ISOLATION,
                Capability.LIMIT_CPUS,
                Capability.LIMIT_MEMORY,
                Capability.LIMIT_DISK,
                Capability.NETWORK_NONE,
                Capability.NETWORK_ALLOWLIST,
                Capability.SECRETS,
                Capability.TERMINAL,
                Capability.SURVIVES_RESTART,
            }
        )

    async def warm(self) -> None:
        # Both providers of a server have one volume: one of them looks after it.
        looks = self._options.volume_max_gb and not self._runtime_class and self._growing is None
        if looks and await asyncio.to_thread(self.missing) is None:
            self._growing = asyncio.ensure_future(self.volume_growth().run())

    def volume_growth(self) -> VolumeGrowth:
        """Return what lets the claim of the shared volume grow."""
        options = self._options
        path = f"/api/v1/namespaces/{options.namespace}/persistentvolumeclaims/{options.volume_claim}"
        return VolumeGrowth(self._open(), path, options.volume_directory, options.volume_max_gb * GI)

    # sandboxes

    async def start(self, launch: Launch) -> Handle:
        self._refuse(launch)
        place = await asyncio.to_thread(self._place_of, launch.workspace)
        if self._options.warm_pool and await asyncio.to_thread(is_small, launch.workspace):
            return await self._own(launch.id, await self._start_empty(launch), launch)
        try:
            pod = await self._run(launch, place)
            return await self._give(pod, launch.id, launch)
        except BaseException:
            await asyncio.shield(self._discard(launch.id))
            raise

    def slot_for(self, launch: Launch) -> Launch | None:
        """See `Provider.slot_for`: a pod has its limits from the start. A workspace with many files starts cold."""
        if launch.folder is not None or launch.image is not None or not is_small(launch.workspace):
            return None
        return Launch("", "", Network.NONE, cpus=launch.cpus, memory_mb=launch.memory_mb)

    async def start_slot(self, launch: Launch) -> Handle:
        waiting = self._waiting[launch.id] = await self._start_empty(launch)
        pod = await self._complete(waiting.pod)
        return self._handle(launch.id, pod, RemoteAddress(pod.address, manifests.PORT, self._slot_identity))

    async def _start_empty(self, launch: Launch) -> _Waiting:
        """Return a pod with an empty directory: a claimed one where there are warm pools, else a new one.

        Its supervisor listens, so the directory is mounted: only then may it get another name.
        """
        try:
            await self._prepare()
            if self._pools is not None:
                pod = await self._claim_pod(self._pools, launch)
                directory = pod.name
            else:
                directory = _key(launch.id)
                pod = await self._run(launch, await asyncio.to_thread(self._slots.make, directory))
            await self._until_it_listens(launch.id, pod)
            return _Waiting(pod, directory)
        except OSError as error:
            await asyncio.shield(self._discard(launch.id))
            raise PlatformError(f"the directory of a slot cannot be made: {error}") from error
        except BaseException:
            await asyncio.shield(self._discard(launch.id))
            raise

    async def claim(self, slot: Handle, launch: Launch) -> Handle:
        id = str(slot["id"])
        waiting = self._waiting.pop(id, None)
        try:
            self._refuse(launch)
            await asyncio.to_thread(self._place_of, launch.workspace)
            if waiting is None:
                raise PlatformError(f"slot {id} cannot become sandbox {launch.id}")
        except BaseException:
            await asyncio.shield(self._discard(id))
            raise
        return await self._own(id, waiting, launch)

    async def _own(self, id: str, waiting: _Waiting, launch: Launch) -> Handle:
        """Let a pod with an empty directory become a sandbox."""
        looking = asyncio.ensure_future(self._complete(waiting.pod))
        try:
            await asyncio.to_thread(self._slots.give, waiting.directory, launch.workspace)
            handle = await self._give(waiting.pod, id, launch)
            pod = await looking
            return {**handle, "uid": pod.uid, "node": pod.node}
        except OSError as error:
            await asyncio.shield(self._discard(id))
            raise PlatformError(f"slot {id} cannot have the workspace of {launch.id}: {error}") from error
        except BaseException:
            await asyncio.shield(self._discard(id))
            raise
        finally:
            await tasks.cancel((looking,))

    async def _complete(self, pod: StartedPod) -> StartedPod:
        """Return a pod with all that is known of it."""
        if pod.uid:
            return pod
        state = await self._open().get(f"{self._pods}/{pod.name}")
        found = None if state is None else pods.started(state)
        if found is None:
            raise PlatformError(f"the pod {pod.name} has ended")
        return found

    async def _claim_pod(self, pools: WarmPools, launch: Launch) -> StartedPod:
        """Claim a pod of a warm pool; return it once it has an address."""
        name = self._name(launch.id)
        folder = await asyncio.to_thread(self._slots.open)
        try:
            async with asyncio.timeout(START_S):
                claimed = await pools.claim(name, launch.id, self._request(launch, "", folder))
        except TimeoutError:
            raise PlatformError(f"sandbox {launch.id} got no pod of a warm pool in {START_S:.0f} s") from None
        self._claimed[launch.id] = claimed.name
        if claimed.address:  # it has been ready: nothing else has to be asked for now
            return StartedPod(claimed.name, "", "", claimed.address)
        return await self._addressed(launch.id)

    def _request(self, launch: Launch, place: str, slots: str = "") -> PodRequest:
        return PodRequest(
            image=self._options.image,
            bundle_image=self._options.bundle_image,
            claim=self._options.volume_claim,
            workspace=place,
            secret=self._secret,
            slots=slots,
            cpus=launch.cpus,
            memory_mb=launch.memory_mb,
            runtime_class=self._runtime_class,
            pull_policy=self._options.pull_policy,
            user_namespaces=self._options.user_namespaces,
            probe=self._server,
            labels=self._labels(launch.id),
            annotations={manifests.ID: launch.id},
        )

    async def _run(self, launch: Launch, place: str) -> StartedPod:
        """Have the cluster make a pod with a directory of the volume; return it once it has an address."""
        api = await self._prepare()
        name, request = self._name(launch.id), self._request(launch, place)
        if self._version is None:
            await api.create(self._pods, manifests.pod(name, request))
        else:
            await api.create(self._sandboxes, manifests.sandbox(name, request, self._version))
        return await self._addressed(launch.id)

    async def _addressed(self, id: str) -> StartedPod:
        """Wait until the pod of a sandbox has an address."""
        addressed: asyncio.Future[StartedPod] = asyncio.get_running_loop().create_future()
        watching = asyncio.ensure_future(self._watch(id, addressed))
        try:
            await asyncio.wait((watching, addressed), timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
            if addressed.done():
                return addressed.result()
            why = watching.result() if watching.done() else await self._obstacle(id)
            raise PlatformError(f"sandbox {id} could not be started: {why}")
        finally:
            await tasks.cancel((watching,))

    async def _give(self, pod: StartedPod, id: str, launch: Launch) -> Handle:
        """Give a sandbox to its owner: its supervisor becomes the agent, as soon as it listens."""
        slot = RemoteAddress(pod.address, manifests.PORT, self._slot_identity)
        ended = self._end_of(id)
        address = await give_facts(slot, self._identities, launch.id, self._facts(launch), ended)
        return {**self._handle(id, pod, address), "egress": launch.network.proxied}

    async def _until_it_listens(self, id: str, pod: StartedPod) -> None:
        """Wait for the supervisor of a slot."""

        async def listening() -> None:
            while True:
                if await _accepts(pod.address):
                    return
                await asyncio.sleep(_PAUSE_S)

        waiting = asyncio.ensure_future(listening())
        watching = asyncio.ensure_future(self._end_of(id))
        try:
            await asyncio.wait((waiting, watching), timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                why = watching.result() if watching.done() else f"it did not listen in {START_S:.0f} s"
                raise PlatformError(f"slot {id} could not be started: {why}")
        finally:
            await tasks.cancel((waiting, watching))

    def _handle(self, id: str, pod: StartedPod, address: RemoteAddress) -> Handle:
        return {
            "provider": self.name,
            "id": id,
            "socket": str(address),
            "pod": pod.name,
            "uid": pod.uid,
            "node": pod.node,
        }

    @property
    def _slot_identity(self) -> SpiffeId:
        return self._identities.id_of_slot(self._instance)

    def _refuse(self, launch: Launch) -> None:
        """Refuse what was not promised and would otherwise be dropped."""
        self.require(NETWORK_CAPABILITY[launch.network])
        if launch.folder is not None:
            self.require(Capability.FOLDERS)
        if launch.image is not None:
            self.require(Capability.IMAGES)
        if launch.masks is not None:
            self.require(Capability.MASKS)
        if launch.processes is not None:
            self.require(Capability.LIMIT_PROCESSES)

    def _place_of(self, workspace: str) -> str:
        """Return the path of a workspace in the shared volume. Blocking."""
        root, path = os.path.realpath(self._options.volume_directory), os.path.realpath(workspace)
        if not os.path.isdir(path):
            raise PlatformError(f"the workspace {workspace} is not there")
        if os.path.commonpath((root, path)) != root or path == root:
            raise PlatformError(
                f"the workspace {workspace} is not in the shared volume",
                hint=f"let CARREL_DATA_DIR be in the volume that is mounted at {self._options.volume_directory}",
            )
        return os.path.relpath(path, root)

    async def _watch(self, id: str, addressed: asyncio.Future[StartedPod] | None) -> str:
        """Look at the pod of a sandbox until it fails; return why. `addressed` gets it as soon as it has an address.

        This is sooner than the cluster knows that its containers run.
        """
        api, query = self._open(), self._selects(id)
        while True:
            listed = await api.get(self._pods, **query) or {}
            since = str(listed["metadata"]["resourceVersion"])
            async with aclosing(_after(listed.get("items", ()), api.watch(self._pods, since, **query))) as states:
                async for pod in states:
                    if why := pods.failure(pod):
                        return why
                    found = pods.started(pod)
                    if found is not None and addressed is not None and not addressed.done():
                        addressed.set_result(found)

    async def _end_of(self, id: str) -> str:
        """Return why the pod of a sandbox has failed, once it has. What ends sooner asks the cluster for nothing."""
        await asyncio.sleep(_WATCHED_AFTER_S)
        return await self._watch(id, None)

    def _selects(self, id: str) -> dict[str, str]:
        """Return the query for the pod of a sandbox. One of a warm pool has no labels of its owner."""
        if (claimed := self._claimed.get(id)) is not None:
            return {"fieldSelector": f"metadata.name={claimed}"}
        return {"labelSelector": f"{manifests.SANDBOX}={_key(id)},{manifests.INSTANCE}={self._instance}"}

    async def _obstacle(self, id: str) -> str:
        """Return why the pod of a sandbox has not started in time."""
        query = self._selects(id)
        found = (await self._open().get(self._pods, **query) or {}).get("items", ())
        said = pods.obstacle(found[0]) if found else "nothing has made its pod"
        return f"it was not ready in {START_S:.0f} s. {said}".strip()

    def _facts(self, launch: Launch) -> dict[str, Any]:
        """Return the facts for a supervisor that starts as the agent's user."""
        gvisor = self._runtime_class != ""  # it has a filter of its own
        calls = b"" if gvisor else seccomp.build()
        facts = facts_of(launch, uid=SANDBOX_UID, gid=SANDBOX_UID, secrets=True, seccomp=calls)
        facts |= {"socket": "", "egress": "", "secrets": manifests.LENT_SECRETS}
        if gvisor:
            facts["limits"] = {name: value for name, value in facts["limits"].items() if name in LIMITS}
            facts["watch_memory"] = True
        return facts

    def link(self, handle: Handle) -> SupervisorLink:
        return RemoteLink(RemoteAddress.parse(str(handle["socket"])), self._identities.client_context)

    async def way_out(self, handle: Handle) -> int | None:
        if not handle.get("egress"):
            return None
        return await self._ways_out.open(str(handle["id"]), self.link(handle))

    async def alive(self, handle: Handle) -> bool:
        try:
            pod = await self._open().get(f"{self._pods}/{handle['pod']}")
        except ProviderUnavailable:
            # The API server says nothing about the sandbox: ask that itself.
            address = RemoteAddress.parse(str(handle["socket"]))
            if await _accepts(address.host):
                return True
            raise
        if pod is None or pods.failure(pod):
            return False
        metadata = pod["metadata"]
        labels = metadata.get("labels") or {}
        if manifests.SANDBOX in labels:
            own = labels[manifests.SANDBOX] == _key(str(handle["id"]))
        else:
            await self._prepare()
            own = await self._find_claimed(str(handle["id"])) == handle["pod"]
        return bool(own and metadata["uid"] == handle["uid"])  # a pod that was made anew has another

    async def running(self) -> list[str]:
        if await asyncio.to_thread(self.missing) is not None:
            return []
        await asyncio.to_thread(self._slots.recover)
        api = await self._prepare()
        query = {"labelSelector": f"{manifests.INSTANCE}={self._instance},{manifests.SANDBOX}"}
        paths = [self._pods]
        if self._version is not None:
            paths.append(self._sandboxes)
        if self._pools is not None:
            paths.append(self._pools.claims)
        found: dict[str, None] = {}
        for path in paths:
            for each in (await api.get(path, **query) or {}).get("items", ()):
                found[str(each["metadata"].get("annotations", {}).get(manifests.ID, ""))] = None
        return [id for id in found if id]

    async def remove(self, handle: Handle) -> None:
        await self._discard(str(handle["id"]))

    async def _discard(self, id: str) -> None:
        """Remove whatever there is of a sandbox; return when its pod is gone, and so every process of it."""
        self._waiting.pop(id, None)
        await self._ways_out.close(id)
        api = await self._prepare()
        claimed = await self._find_claimed(id)
        if claimed:
            self._claimed[id] = claimed
        query = self._selects(id)
        try:
            async with asyncio.timeout(REMOVAL_S):
                if self._pools is not None:
                    await api.delete(f"{self._pools.claims}/{self._name(id)}", propagationPolicy="Background")
                if self._version is not None:
                    name = claimed or self._name(id)
                    await api.delete(f"{self._sandboxes}/{name}", propagationPolicy="Background")
                while True:
                    listed = await api.get(self._pods, **query) or {}
                    left = [each["metadata"] for each in listed.get("items", ())]
                    if not left:
                        break
                    for each in left:
                        if "deletionTimestamp" not in each:
                            await api.delete(f"{self._pods}/{each['name']}")
                    since = str(listed["metadata"]["resourceVersion"])
                    async with aclosing(api.watch(self._pods, since, **query)) as events:
                        async for kind, _ in events:
                            if kind == "DELETED":
                                break
        except TimeoutError:
            raise PlatformError(
                f"the pod of sandbox {id} has not ended in {REMOVAL_S:.0f} s",
                hint="its node may be lost: see `kubectl get pods`, and remove the node from the cluster if it is",
            ) from None
        self._claimed.pop(id, None)
        await asyncio.to_thread(self._slots.remove, claimed or _key(id))

    async def _find_claimed(self, id: str) -> str:
        """Return the name of the pod that a sandbox was claimed with; empty if it was made for it, or is gone."""
        if id in self._claimed:
            return self._claimed[id]
        if self._pools is None:
            return ""
        found = claimed_pod(await self._open().get(f"{self._pools.claims}/{self._name(id)}") or {})
        return "" if found is None else found.name

    async def close(self) -> None:
        for id in list(self._waiting):  # nobody can claim them any more
            await self._discard(id)
        if self._pools is not None:
            await self._pools.close()
        await tasks.cancel((self._growing,))
        await self._ways_out.close_all()
        await asyncio.to_thread(self._slots.close)
        if self._api is not None:
            await self._api.close()
            self._api = None

    # the cluster

    def _open(self) -> KubernetesApi:
        if self._api is None:
            self._api = KubernetesApi(self._find_access())
        return self._api

    async def _prepare(self) -> KubernetesApi:
        """Return the API, once the namespace has what every sandbox needs: the policy and the credentials of slots."""
        api = self._open()
        async with self._preparing:
            if time.time() < self._credentials_until:
                return api
            self._version = await self._find_agent_sandbox(api) if self._options.agent_sandbox else None
            self._server = await self._address_of_server(api)
            policies = f"/apis/networking.k8s.io/v1/namespaces/{self._options.namespace}/networkpolicies"
            await put(api, policies, manifests.network_policy(POLICY, SERVERS))
            waiting = await asyncio.to_thread(self._identities.for_slot, self._instance)
            secret = manifests.secret(self._secret, {manifests.INSTANCE: self._instance}, waiting.to_json())
            await put(api, f"/api/v1/namespaces/{self._options.namespace}/secrets", secret)
            if self._options.warm_pool:
                await self._open_pools(api, str(int(waiting.expires_at)))
            self._credentials_until = waiting.expires_at - _RENEWED_BEFORE_S
        return api

    async def _open_pools(self, api: KubernetesApi, credentials: str) -> None:
        """Begin with no pool. The pods of those that are there have credentials that end, or are of a killed server."""
        if self._version is None:
            raise ProviderUnavailable(
                "warm pools need agent-sandbox, which is not installed or not used",
                hint="install it, or set CARREL_KUBERNETES_WARM_POOL=0",
            )
        if self._pools is None:
            labels = {manifests.INSTANCE: self._instance}
            self._pools = WarmPools(api, self._options.namespace, self._version, labels, self._options.warm_pool)
        await self._pools.open(credentials)

    async def _find_agent_sandbox(self, api: KubernetesApi) -> str | None:
        """Return the version of agent-sandbox's resources that is used; None if it is not installed."""
        group = await api.get(f"/apis/{manifests.CORE}")
        if group is None:
            return None
        served = {str(each.get("version")) for each in group.get("versions", ())}
        for version in manifests.VERSIONS:
            if version in served:
                return version
        raise ProviderUnavailable(
            f"agent-sandbox serves only {', '.join(sorted(served))[:200]}, which this version of carrel does not know",
            hint="update carrel, or set CARREL_KUBERNETES_AGENT_SANDBOX=false to use plain pods",
        )

    async def _address_of_server(self, api: KubernetesApi) -> str:
        """Return the address of the API server inside the cluster, which no sandbox may reach."""
        service = await api.get("/api/v1/namespaces/default/services/kubernetes")
        if service is None:
            raise ProviderUnavailable("the cluster has no service `kubernetes` in the namespace `default`")
        address, port = service["spec"]["clusterIP"], service["spec"]["ports"][0]["port"]
        return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"

    @property
    def _pods(self) -> str:
        return f"/api/v1/namespaces/{self._options.namespace}/pods"

    @property
    def _sandboxes(self) -> str:
        return f"/apis/{manifests.CORE}/{self._version}/namespaces/{self._options.namespace}/sandboxes"

    # names

    @property
    def _secret(self) -> str:
        return f"carrel-{self._instance}-slot"

    def _name(self, id: str) -> str:
        return f"carrel-{self._instance}-{_key(id)}"

    def _labels(self, id: str) -> dict[str, str]:
        return {manifests.INSTANCE: self._instance, manifests.SANDBOX: _key(id)}


def _key(id: str) -> str:
    return hashlib.sha256(id.encode()).hexdigest()[:16]


async def _after(first: Iterable[Resource], events: AsyncGenerator[tuple[str, Resource]]) -> AsyncGenerator[Resource]:
    """Yield objects of a list, and then what becomes of them. An object that is gone ends it."""
    for each in first:
        yield each
    async with aclosing(events):
        async for kind, each in events:
            yield each
            if kind == "DELETED":
                return


async def _accepts(address: str) -> bool:
    """Return whether something listens at the port of a supervisor."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        connection.setblocking(False)
        try:
            async with asyncio.timeout(_DIAL_S):
                await asyncio.get_running_loop().sock_connect(connection, (address, manifests.PORT))
        except (OSError, TimeoutError):
            return False
        return True
