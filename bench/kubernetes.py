"""Sandboxes as pods of a real Kubernetes, to the end of the first command: from nothing beside a bare Sandbox of
agent-sandbox becoming Ready, by a claim from a warm pool beside a bare SandboxClaim becoming Ready, and from a slot; a
command in a running one beside an exec through the Kubernetes API.

Runs below `scripts/cluster run`, which starts the cluster. The peers' pods have the same image and no supervisor. An
exec is one request of `kubectl exec`, without the time that the program `kubectl` itself takes to start.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.cluster.ground import IMAGE, Cluster, Ground, add_images
from websockets.asyncio.client import connect

from bench.measure import BenchFailed, Contender, Figures, Progress, Report, Table, median, percentile, rounds
from carrel.providers.base import Handle
from carrel.providers.kubernetes import manifests
from carrel.providers.kubernetes.access import find_access
from carrel.providers.kubernetes.api import KubernetesApi
from carrel.testing import Harness, Running, workspaces_in

START_ROUNDS, COMMAND_ROUNDS = 6, 100
POOL = 3
_BARE = "bare"
_EXEC = "v5.channel.k8s.io"
_ERROR_CHANNEL = 3


async def run(progress: Progress) -> Report:
    """Measure."""
    if "CARREL_CLUSTER" not in os.environ:
        raise BenchFailed("there is no cluster: run `scripts/cluster run .venv/bin/python -m bench kubernetes`")
    cluster, api = Cluster(), KubernetesApi(find_access())
    place = Path(tempfile.mkdtemp(prefix="k"))
    grounds: list[Ground] = []
    harnesses: list[Harness] = []
    try:
        await asyncio.to_thread(add_images, cluster, place)
        for pool in (0, POOL):
            own = Path(tempfile.mkdtemp(prefix="k"))
            own.chmod(0o755)
            grounds.append(await asyncio.to_thread(lambda own=own, pool=pool: Ground(cluster, own, warm_pool=pool)))
            harnesses.append(Harness(grounds[-1].provider, workspaces_in(str(grounds[-1].volume))))
        return await _measure(*harnesses, grounds[0], api, progress)
    finally:
        for harness in harnesses:
            await harness.close()
        await api.close()
        for ground in grounds:
            await asyncio.to_thread(ground.remove)
        await asyncio.to_thread(shutil.rmtree, place)


async def _measure(harness: Harness, pooled: Harness, ground: Ground, api: KubernetesApi, progress: Progress) -> Report:
    await _make_bare_pool(api, ground)
    starts: dict[str, Contender] = {
        "a bare Sandbox, Ready": _bare(api, ground, "sandboxes", _sandbox),
        "a bare SandboxClaim, Ready": _bare(api, ground, "sandboxclaims", _claim),
        "carrel, cold": _cold(harness),
        "carrel, by a claim": _cold(pooled),
        "carrel, from a slot": _from_slot(harness),
    }
    taken = await rounds(starts, START_ROUNDS, warm_up=1, progress=progress)
    async with harness.sandbox() as box, _terminal(ground, box.handle) as asked:
        contenders: dict[str, Contender] = {"exec through the API": asked, "carrel": _command(box)}
        commands = await rounds(contenders, COMMAND_ROUNDS, warm_up=5, progress=progress)
    table = Table(f"{START_ROUNDS} starts, {COMMAND_ROUNDS} commands", ("", "median ms", "p95 ms"))
    for title, samples in (("start", taken), ("command", commands)):
        for name, values in samples.items():
            table.add(f"{title}: {name}", median(values) * 1e3, percentile(values, 95) * 1e3)
    claimed = median(taken["carrel, by a claim"]) - median(taken["a bare SandboxClaim, Ready"])
    figures: Figures = {
        "k8s_cold_first_command_ms": median(taken["carrel, cold"]) * 1e3,
        "k8s_bare_sandbox_ms": median(taken["a bare Sandbox, Ready"]) * 1e3,
        "k8s_claim_added_ms": claimed * 1e3,
        "k8s_slot_first_command_ms": median(taken["carrel, from a slot"]) * 1e3,
        "k8s_exec_ms": median(commands["carrel"]) * 1e3,
        "k8s_api_exec_ms": median(commands["exec through the API"]) * 1e3,
    }
    return Report(figures, [table])


def _cold(harness: Harness) -> Contender:
    async def turn() -> float:
        launch = harness.launch()
        began = time.perf_counter()
        handle = await harness.provider.start(launch)
        return await _first_command(harness, handle, launch.workspace, began)

    return turn


def _from_slot(harness: Harness) -> Contender:
    async def turn() -> float:
        launch = harness.launch()
        kind = harness.provider.slot_for(launch)
        assert kind is not None
        slot = await harness.provider.start_slot(replace(kind, id=f"slot-{secrets.token_hex(4)}"))
        began = time.perf_counter()
        handle = await harness.provider.claim(slot, launch)
        return await _first_command(harness, handle, launch.workspace, began)

    return turn


async def _first_command(harness: Harness, handle: Handle, workspace: str, began: float) -> float:
    box = Running(handle, workspace, harness.provider.link(handle))
    try:
        assert (await box.run("true")).exit_code == 0
        return time.perf_counter() - began
    finally:
        box.connection.close()
        await harness.provider.remove(handle)


def _command(box: Running) -> Contender:
    async def turn() -> float:
        began = time.perf_counter()
        assert (await box.run(["true"])).exit_code == 0
        return time.perf_counter() - began

    return turn


def _bare_pod() -> dict[str, Any]:
    """A pod with one container and nothing else."""
    restricted = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    container = {"name": "sandbox", "image": IMAGE, "imagePullPolicy": "Never", "command": ["sleep", "1000000"]}
    return {
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
        "terminationGracePeriodSeconds": 1,
        "containers": [container | {"securityContext": restricted}],
    }


def _sandbox(name: str) -> dict[str, Any]:
    body = {"apiVersion": f"{manifests.CORE}/v1beta1", "kind": "Sandbox", "metadata": {"name": name}}
    return body | {"spec": {"podTemplate": {"spec": _bare_pod()}}}


def _claim(name: str) -> dict[str, Any]:
    return manifests.claim(name, _BARE, {}, {})


async def _make_bare_pool(api: KubernetesApi, ground: Ground) -> None:
    path = f"/apis/{manifests.EXTENSIONS}/v1beta1/namespaces/{ground.name}"
    template = {"apiVersion": f"{manifests.EXTENSIONS}/v1beta1", "kind": "SandboxTemplate", "metadata": {"name": _BARE}}
    spec = {"podTemplate": {"spec": _bare_pod()}, "networkPolicyManagement": "Unmanaged"}
    await api.create(f"{path}/sandboxtemplates", template | {"spec": spec})
    await api.create(f"{path}/sandboxwarmpools", manifests.warm_pool(_BARE, {}, POOL))


def _bare(api: KubernetesApi, ground: Ground, kind: str, body: Callable[[str], dict[str, Any]]) -> Contender:
    """A resource of agent-sandbox, until it is Ready."""
    group = manifests.CORE if kind == "sandboxes" else manifests.EXTENSIONS
    path = f"/apis/{group}/v1beta1/namespaces/{ground.name}/{kind}"

    async def turn() -> float:
        name = f"bare-{secrets.token_hex(4)}"
        began = time.perf_counter()
        made = await api.create(path, body(name))
        since, query = made["metadata"]["resourceVersion"], {"fieldSelector": f"metadata.name={name}"}
        try:
            async with asyncio.timeout(60), aclosing(api.watch(path, since, **query)) as events:
                async for _, found in events:
                    if _is_ready(found):
                        return time.perf_counter() - began
            raise BenchFailed("the watch of a resource ended")
        finally:
            await api.delete(f"{path}/{name}", propagationPolicy="Foreground")
            while await api.get(f"{path}/{name}") is not None:
                await asyncio.sleep(0.05)

    return turn


def _is_ready(found: dict[str, Any]) -> bool:
    conditions = (found.get("status") or {}).get("conditions", ())
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


@asynccontextmanager
async def _terminal(ground: Ground, handle: Handle) -> AsyncIterator[Contender]:
    """Commands through the Kubernetes API, as `kubectl exec` asks for them: one WebSocket each."""
    access = find_access()
    url = access.server.replace("https://", "wss://", 1)
    path = f"/api/v1/namespaces/{ground.name}/pods/{handle['pod']}/exec"

    async def turn() -> float:
        began = time.perf_counter()
        async with connect(
            f"{url}{path}?container=sandbox&command=true&stdout=true&stderr=true",
            ssl=access.tls,
            subprotocols=[_EXEC],  # type: ignore[list-item]
            additional_headers=access.headers(),
            proxy=None,
        ) as stream:
            async for message in stream:
                assert isinstance(message, bytes)
                if message and message[0] == _ERROR_CHANNEL:
                    assert json.loads(message[1:])["status"] == "Success", message
        return time.perf_counter() - began

    yield turn
