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
from dataclasses import replace

from carrel.errors import PlatformError
from carrel.providers.kubernetes import manifests
from carrel.providers.kubernetes.api import KubernetesApi, Resource, put
from carrel.providers.kubernetes.manifests import PodRequest


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
        self._making = asyncio.Lock()

    @property
    def claims(self) -> str:
        """The path of claims in the API."""
        return f"{self._path}/sandboxclaims"

    async def open(self) -> None:
        """Remove the pools of a server that was killed. Raises `PlatformError` where there are no pools."""
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

    async def claim(self, name: str, id: str, request: PodRequest) -> None:
        """Claim a pod of the pool for this request, which is made if it is not there."""
        labels = dict(request.labels)
        request = replace(request, labels=self._labels, annotations={})
        text = json.dumps(manifests.template("", request, self._version), sort_keys=True)
        pool = f"carrel-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        async with self._making:
            if pool not in self._made:
                template = manifests.template(pool, request, self._version)
                await put(self._api, f"{self._path}/sandboxtemplates", template)
                made = manifests.warm_pool(pool, self._labels, self._size, self._version)
                await put(self._api, f"{self._path}/sandboxwarmpools", made)
                self._made.add(pool)
        await self._api.create(self.claims, manifests.claim(name, pool, labels, {manifests.ID: id}, self._version))

    async def pod_of(self, name: str) -> str:
        """Wait until a claim has a pod; return its name. Does not return for one that gets none."""
        query = {"fieldSelector": f"metadata.name={name}"}
        while True:
            listed = await self._api.get(self.claims, **query) or {}
            for each in listed.get("items", ()):
                if found := claimed_pod(each):
                    return found
            since = str(listed["metadata"]["resourceVersion"])
            async with aclosing(self._api.watch(self.claims, since, **query)) as events:
                async for _, each in events:
                    if found := claimed_pod(each):
                        return found

    async def close(self) -> None:
        """Remove the pools. Pods that were claimed stay."""
        for pool in self._made:
            for kind in ("sandboxwarmpools", "sandboxtemplates"):
                await self._api.delete(f"{self._path}/{kind}/{pool}")


def claimed_pod(claim: Resource) -> str:
    """Return the name of the pod of a claim, which is that of its Sandbox; empty while it has none."""
    status = claim.get("status") or {}
    sandbox = status.get("sandbox") or {}
    return str(sandbox.get("name") or sandbox.get("Name") or "")
