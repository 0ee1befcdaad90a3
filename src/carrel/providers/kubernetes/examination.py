"""What a cluster offers for sandboxes, for `carrel doctor --kubernetes`. It reads and makes nothing.

The credentials of a server may not read all of it; then a check says so, and an administrator's see more.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from carrel.errors import CarrelError
from carrel.models import Check
from carrel.providers.kubernetes.api import ApiRefusal, KubernetesApi, Resource
from carrel.providers.kubernetes.manifests import CORE, EXTENSIONS, VERSIONS
from carrel.providers.kubernetes.options import KubernetesOptions
from carrel.providers.kubernetes.rights import RIGHTS

OLDEST = (1, 29)
_PAGE = "see docs/how-to/run-on-kubernetes.md"
_CONTROLLERS = ("antrea-agent", "aws-node", "calico-node", "cilium", "kube-network-policies", "kube-router", "ovnkube")
"""Daemon sets of controllers that enforce policies."""
_UNSEEN = "these credentials may not read it; run this with those of an administrator"


@dataclass(frozen=True)
class Examined:
    """What a check found: a status, words, and what to do."""

    status: str
    words: str
    remedy: str = ""


class Examination:
    """The checks of one cluster, as a server with these options would use it."""

    def __init__(self, api: KubernetesApi, options: KubernetesOptions):
        self._api = api
        self._options = options

    async def run(self) -> list[Check]:
        """Return every check. A cluster that cannot be reached is one check that says so."""
        first = await self._check("Kubernetes", "older versions lack what pods need", self._version)
        if first.status == "missing":
            return [first]
        rest: tuple[tuple[str, str, Callable[[], Awaitable[Examined]]], ...] = (
            ("agent-sandbox", "makes the pods of sandboxes, and keeps warm pools", self._agent_sandbox),
            ("rights", "the service account of a server needs these, and no more", self._rights),
            ("Pod Security", "the namespace refuses pods that are not restricted", self._pod_security),
            ("network policies", "nothing else keeps sandboxes from the network", self._policies),
            ("volume", "has the workspaces; servers and all nodes mount it", self._volume),
            ("storage classes", "ReadWriteMany for the workspaces; expansion lets them grow", self._classes),
            ("runtime classes", "gVisor isolates hostile code", self._runtimes),
            ("user namespaces", "root of a pod is nobody on the node", self._users),
        )
        return [first, *await asyncio.gather(*(self._check(*each) for each in rest))]

    async def _check(self, name: str, why: str, look: Callable[[], Awaitable[Examined]]) -> Check:
        try:
            found = await look()
        except ApiRefusal as refusal:
            found = Examined("degraded", "not known", _UNSEEN) if refusal.number == 403 else _broken(refusal)
        except CarrelError as error:
            found = _broken(error)
        return Check.model_validate(
            {
                "name": name,
                "status": found.status,
                "found": found.words[:500],
                "why": why,
                "remedy": found.remedy or None,
            }
        )

    async def _items(self, path: str) -> list[Resource]:
        return list((await self._api.get(path) or {}).get("items", ()))

    async def _version(self) -> Examined:
        version = str((await self._api.get("/version") or {}).get("gitVersion"))
        numbers = re.match(r"v(\d+)\.(\d+)", version)
        if numbers is None or (int(numbers[1]), int(numbers[2])) < OLDEST:
            return Examined("missing", version, f"update the cluster to {OLDEST[0]}.{OLDEST[1]} or newer")
        return Examined("ok", version)

    async def _agent_sandbox(self) -> Examined:
        core = _versions(await self._api.get(f"/apis/{CORE}"))
        if not core:
            return Examined("degraded", "not installed", "install agent-sandbox; without it sandboxes are plain pods")
        known = [version for version in VERSIONS if version in core]
        if not known:
            remedy = "update carrel, or set CARREL_KUBERNETES_AGENT_SANDBOX=false"
            return Examined("missing", f"serves {', '.join(core)} only", remedy)
        if not _versions(await self._api.get(f"/apis/{EXTENSIONS}")):
            needed = self._options.warm_pool > 0
            remedy = "install its extensions, or set CARREL_KUBERNETES_WARM_POOL=0"
            return Examined("missing" if needed else "degraded", f"{known[0]}, without warm pools", remedy)
        return Examined("ok", f"{known[0]}, with warm pools")

    async def _rights(self) -> Examined:
        needs = {"always"}
        if self._options.agent_sandbox and _versions(await self._api.get(f"/apis/{CORE}")):
            needs.add("agent-sandbox")
            if self._options.warm_pool:
                needs.add("warm pools")
        if self._options.volume_max_gb:
            needs.add("growing volume")
        asked = [
            {
                "namespace": "default" if right.name else self._options.namespace,
                "group": right.group,
                "resource": resource,
                "verb": verb,
                **({"name": right.name} if right.name else {}),
            }
            for right in RIGHTS
            if right.need in needs
            for resource in right.resources
            for verb in right.verbs
        ]
        allowed = await asyncio.gather(*map(self._may, asked))
        lacking = [f"{each['verb']} {each['resource']}" for each, may in zip(asked, allowed, strict=True) if not may]
        if lacking:
            remedy = f"give the service account a Role with these in {self._options.namespace}: {_PAGE}"
            return Examined("missing", f"lacks {', '.join(lacking)}", remedy)
        return Examined("ok", f"all {len(asked)}")

    async def _may(self, attributes: dict[str, str]) -> bool:
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        answer = await self._api.create("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
        return (answer.get("status") or {}).get("allowed") is True

    async def _pod_security(self) -> Examined:
        name = self._options.namespace
        space = await self._api.get(f"/api/v1/namespaces/{name}")
        if space is None:
            return Examined("missing", f"there is no namespace {name}", f"kubectl create namespace {name}")
        level = (space["metadata"].get("labels") or {}).get("pod-security.kubernetes.io/enforce", "")
        if level == "restricted":
            return Examined("ok", f"{name} enforces restricted")
        remedy = f"kubectl label namespace {name} pod-security.kubernetes.io/enforce=restricted"
        return Examined("degraded", f"{name} enforces {level or 'nothing'}", remedy)

    async def _policies(self) -> Examined:
        sets = [each["metadata"]["name"] for each in await self._items("/apis/apps/v1/daemonsets")]
        found = [name for name in sets if any(known in name for known in _CONTROLLERS)]
        if found:
            return Examined("ok", ", ".join(found))
        words = "no controller that is known here; each pod tries to get out first, and does not start if it can"
        return Examined(
            "degraded", words, "install a controller that enforces policies also for egress, if pods do not start"
        )

    async def _volume(self) -> Examined:
        place = f"/api/v1/namespaces/{self._options.namespace}/persistentvolumeclaims/{self._options.volume_claim}"
        claim = await self._api.get(place)
        if claim is None:
            return Examined("missing", f"there is no claim {self._options.volume_claim}", f"make it: {_PAGE}")
        phase, spec = (claim.get("status") or {}).get("phase"), claim["spec"]
        if "ReadWriteMany" not in spec.get("accessModes", ()):
            return Examined("missing", f"{', '.join(spec.get('accessModes', ()))}", "claim a volume with ReadWriteMany")
        if phase != "Bound":
            remedy = f"kubectl describe pvc {self._options.volume_claim} -n {self._options.namespace}"
            return Examined("missing", f"the claim is {phase}", remedy)
        size = ((claim.get("status") or {}).get("capacity") or {}).get("storage", "?")
        return Examined("ok", f"{self._options.volume_claim}, {size}, ReadWriteMany")

    async def _classes(self) -> Examined:
        classes = await self._items("/apis/storage.k8s.io/v1/storageclasses")
        if not classes:
            return Examined("degraded", "none", "claims need volumes that were made by hand")
        said = [
            f"{each['metadata']['name']} ({'grows' if each.get('allowVolumeExpansion') else 'does not grow'})"
            for each in classes
        ]
        grows = any(each.get("allowVolumeExpansion") for each in classes)
        return Examined(
            "ok" if grows else "degraded", ", ".join(said), "" if grows else "set allowVolumeExpansion: true"
        )

    async def _runtimes(self) -> Examined:
        classes = await self._items("/apis/node.k8s.io/v1/runtimeclasses")
        names = {each["metadata"]["name"]: str(each.get("handler")) for each in classes}
        said = ", ".join(f"{name} ({handler})" for name, handler in names.items()) or "none"
        wanted = self._options.gvisor_class
        if wanted and wanted not in names:
            return Examined("missing", said, f"make the RuntimeClass {wanted}, or unset CARREL_KUBERNETES_GVISOR_CLASS")
        gvisor = [name for name, handler in names.items() if "runsc" in handler or "gvisor" in handler]
        if gvisor and not wanted:
            return Examined("degraded", said, f"set CARREL_KUBERNETES_GVISOR_CLASS={gvisor[0]} for trust `low`")
        if not gvisor:
            return Examined("degraded", said, "install gVisor on the nodes and make its RuntimeClass, for trust `low`")
        return Examined("ok", said)

    async def _users(self) -> Examined:
        nodes = await self._items("/api/v1/nodes")
        able = [each["metadata"]["name"] for each in nodes if _has_users(each)]
        said = f"{len(able)} of {len(nodes)} nodes"
        if nodes and len(able) == len(nodes):
            return Examined(
                "ok", said, "" if self._options.user_namespaces else "set CARREL_KUBERNETES_USER_NAMESPACES=true"
            )
        remedy = "run containerd 2 or newer with Linux 6.3 or newer on the nodes"
        return Examined("missing" if self._options.user_namespaces else "degraded", said, remedy)


def _broken(error: CarrelError) -> Examined:
    return Examined("missing", error.detail, error.hint or _PAGE)


def _versions(group: Resource | None) -> list[str]:
    return [str(each.get("version")) for each in (group or {}).get("versions", ())]


def _has_users(node: dict[str, Any]) -> bool:
    """Whether the default runtime of a node can give pods users of their own, by its own word."""
    handlers = (node.get("status") or {}).get("runtimeHandlers") or ()
    return any(not each.get("name") and (each.get("features") or {}).get("userNamespaces") is True for each in handlers)
