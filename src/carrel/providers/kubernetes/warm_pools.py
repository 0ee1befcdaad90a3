"""Pools of pods that agent-sandbox keeps ready for one server, and claims of them. For one event loop.

A pool has a template, which has what a pod gets from its start. The name of both is made from the template, so a change
makes another pool. Pools end with their server; those that a killed one has left are removed by `open`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace

from carrel.errors import PlatformError
from carrel.providers.kubernetes import manifests
from carrel.providers.kubernetes.api import KubernetesApi, Resource, put
from carrel.providers.kubernetes.manifests import PodRequest


@dataclass(frozen=True)
class ClaimedPod:
    """A pod that was claimed. Its address is empty if it is not known yet."""

    name: str
    address: str


class WarmPools:
    """The pools of one server in one namespace."""

    def __init__(self, api: KubernetesApi, namespace: str, version: str, labels: Mapping[str, str], size: int):
        """`labels` say whose the pools are. Each has `size` pods that wait."""
        self._api = api
        self._path = f"/apis/{manifests.EXTENSIONS}/{version}/namespaces/{namespace}"
        self._version = version
        self._labels = dict(labels)
        self._size = size
        self._made: set[str] = set()
        self._credentials = ""
        self._making = asyncio.Lock()

    @property
    def claims(self) -> str:
        """The path of claims in the API."""
        return f"{self._path}/sandboxclaims"

    async def open(self, credentials: str) -> None:
        """Begin with no pool, for pods with these credentials: remove those of this server, also of one that was
        killed. Pods that were claimed stay. Raises `PlatformError` where there are no pools.
        """
        self._credentials = credentials
        self._made.clear()
        query = {"labelSelector": ",".join(f"{key}={value}" for key, value in self._labels.items())}
        for kind in ("sandboxwarmpools", "sandboxtemplates"):
            listed = await self._api.get(f"{self._path}/{kind}", **query)
            if listed is None:
                raise PlatformError(
                    "agent-sandbox is installed without its extensions, so there are no warm pools",
                    hint="install its extensions, or set CARREL_KUBERNETES_WARM_POOL=0",
                )
            for each in listed.get("items", ()):
                await self._api.delete(f"{self._path}/{kind}/{each['metadata']['name']}")

    async def claim(self, name: str, id: str, request: PodRequest) -> ClaimedPod:
        """Claim a pod of the pool for this request, which is made if it is not there; return the pod once the claim has
        one. Does not return for a claim that gets none.
        """
        labels = dict(request.labels)
        request = replace(request, labels=self._labels, annotations={manifests.CREDENTIALS: self._credentials})
        text = json.dumps(manifests.template("", request, self._version), sort_keys=True)
        pool = f"carrel-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        async with self._making:
            if pool not in self._made:
                template = manifests.template(pool, request, self._version)
                await put(self._api, f"{self._path}/sandboxtemplates", template)
                made = manifests.warm_pool(pool, self._labels, self._size, self._version)
                await put(self._api, f"{self._path}/sandboxwarmpools", made)
                self._made.add(pool)
        claim = manifests.claim(name, pool, labels, {manifests.ID: id}, self._version)
        made = await self._api.create(self.claims, claim)
        since, query = str(made["metadata"]["resourceVersion"]), {"fieldSelector": f"metadata.name={name}"}
        while True:
            async with aclosing(self._api.watch(self.claims, since, **query)) as events:
                async for _, each in events:
                    if (found := claimed_pod(each)) is not None:
                        return found
            listed = await self._api.get(self.claims, **query) or {}
            for each in listed.get("items", ()):
                if (found := claimed_pod(each)) is not None:
                    return found
            since = str(listed["metadata"]["resourceVersion"])

    async def close(self) -> None:
        """Remove the pools. Pods that were claimed stay."""
        for pool in self._made:
            for kind in ("sandboxwarmpools", "sandboxtemplates"):
                await self._api.delete(f"{self._path}/{kind}/{pool}")


def claimed_pod(claim: Resource) -> ClaimedPod | None:
    """Return the pod of a claim, whose name is that of its Sandbox; None while it has none."""
    sandbox = (claim.get("status") or {}).get("sandbox") or {}
    name = sandbox.get("name") or sandbox.get("Name")
    addresses = sandbox.get("podIPs") or ()
    return ClaimedPod(str(name), str(addresses[0]) if addresses else "") if name else None
