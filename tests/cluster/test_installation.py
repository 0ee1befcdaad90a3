"""What the chart installs: two servers, used through their service, in a cluster where policies are enforced."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest
from tests.cluster.installation import NAME
from tests.cluster.load import patiently, under_load, until

from carrel.client import AsyncClient
from carrel.errors import ApprovalNeeded, CarrelError, Denied

if TYPE_CHECKING:
    from tests.cluster.installation import Installation

READY_S = 90
SERVER = "app.kubernetes.io/component=server"


@pytest.fixture
async def carrel(installation: Installation) -> AsyncIterator[AsyncClient]:
    async with installation.client() as client:
        yield client


def test_the_servers_were_ready_in_time(installation: Installation) -> None:
    assert installation.took_s <= READY_S


def test_the_first_command_of_the_page(installation: Installation) -> None:
    forwarding = "kubectl -n carrel port-forward service/carrel 7070 &\n"
    variables = "export CARREL_URL=http://127.0.0.1:7070 CARREL_TOKEN=…\n"
    # The test is in the network of the cluster, and has the token.
    assert installation.run_page(4, {forwarding: "", variables: ""}) == "Linux\n"


async def test_both_servers_answer_and_know_each_other(carrel, installation) -> None:
    async def both() -> bool:
        nodes = await carrel.nodes()
        return [(node.name, node.state) for node in nodes] == [("carrel-0", "running"), ("carrel-1", "running")]

    await until(both, "the servers do not reach each other")
    assert {node.url.partition("://")[0] for node in await carrel.nodes()} == {"https+spiffe"}


async def test_contexts_do_not_see_each_other(carrel, installation) -> None:
    one, two = await asyncio.gather(carrel.sandbox("one"), carrel.sandbox("two"))
    await one.files.write("secret", b"of one")
    await one.commands.start("sleep 1234", timeout=600)
    assert (await one.files.read("secret")) == b"of one"
    seen = "test -e /workspace/secret || cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'sleep [1]234'"
    assert (await two.commands.run(seen)).stdout == "0\n"
    for place in ("/var/lib/carrel", "/workspace/..", "/proc/1/root"):
        seen = (await two.commands.run(f"find {place} -xdev -name secret 2>/dev/null")).stdout
        assert seen == "", place
    agent = await carrel.tokens.create("agent-of-two", kind="agent", scopes=["operate"], contexts=["two"])
    async with AsyncClient(installation.url, agent.token) as limited:
        assert (await (await limited.sandbox("two")).commands.run("echo mine")).stdout == "mine\n"
        with pytest.raises(CarrelError):
            await limited.sandbox("one")
    assert len(installation.pods()) >= 2


async def test_outbound_connections_are_refused(carrel, installation) -> None:
    box = await carrel.sandbox("two")
    server = json.loads(installation.cluster.kubectl("get", "endpoints", NAME, "-n", installation.name, "-o", "json"))
    api = server["subsets"][0]["addresses"][0]["ip"]
    for host, port in (("10.96.0.1", 443), (api, 7070), ("169.254.169.254", 80), ("10.99.0.1", 10250)):
        dial = f"timeout 3 bash -c 'exec 3<>/dev/tcp/{host}/{port}' && echo reached"
        assert (await box.commands.run(dial)).stdout == "", (host, port)


async def test_what_needs_an_approval_waits_for_a_person(carrel, installation) -> None:
    await carrel.policy("governed").put(settings={"permissions": {"allow": ["shell(echo:*)"]}})
    await carrel.sandbox("governed")
    token = await carrel.tokens.create("asks", kind="agent", scopes=["operate"], contexts=["governed"])
    async with AsyncClient(installation.url, token.token) as agent:
        box = await agent.sandbox("governed")
        with pytest.raises(ApprovalNeeded) as refusal:
            await box.commands.run("uname -s")
        await carrel.approvals.approve(refusal.value.approval)
        assert (await box.with_approval(refusal.value.approval).commands.run("uname -s")).stdout == "Linux\n"
        await carrel.policy("governed").put(settings={"permissions": {"deny": ["shell(uname:*)"]}})
        with pytest.raises(Denied):
            await box.commands.run("uname -s")


async def test_a_sandbox_outlives_its_killed_server(carrel, installation) -> None:
    box = await carrel.sandbox("outlives")
    command = await box.commands.start("until test -e go; do sleep 0.1; done; echo went on", timeout=300)
    before = installation.pods()
    owner = (await box.info()).node
    killed = ("delete", "pod", owner, "-n", installation.name, "--grace-period=0", "--force")
    installation.cluster.kubectl(*killed)

    async def write() -> str:
        await box.files.write("go", b"")
        return ""

    await patiently(write)

    async def result() -> str:
        return (await box.commands.get(command.id).wait()).stdout

    assert await patiently(result) == "went on\n"
    assert before.items() & installation.pods().items()  # slots end with their server


async def test_an_upgrade_under_load_loses_no_operation(carrel, installation) -> None:
    """Both servers are replaced while clients append to files, each line once."""
    before = installation.pods(SERVER)
    async with under_load(carrel, "load-1", "load-2", "load-3") as load:
        sandboxes = installation.pods()
        await asyncio.to_thread(installation.upgrade, "--set", "podAnnotations.changed=yes")
        await load.goes_on("the load does not go on")
        assert set(load.said) <= {"node_unreachable", "server_unreachable", "platform_error", "not_running"}
        assert sandboxes.items() & installation.pods().items(), "no sandbox outlived its server"
    assert not before.items() & installation.pods(SERVER).items(), "a server was not replaced"


def test_doctor_explains_the_cluster_to_a_server(installation) -> None:
    words = ("exec", f"{NAME}-0", "-n", installation.name, "--", "carrel", "doctor", "--kubernetes", "--json")
    found = {each["name"]: each for each in json.loads(installation.cluster.kubectl(*words))["checks"]}
    assert (found["Kubernetes"]["status"], found["rights"]["status"]) == ("ok", "ok")
    # Servers may not read these, and are told so.
    assert {found[name]["found"] for name in ("volume", "runtime classes", "storage classes")} == {"not known"}


def test_a_server_used_no_right_that_it_does_not_have(installation) -> None:
    user = f"system:serviceaccount:{installation.name}:{NAME}"
    events = [each for each in installation.cluster.audited() if each["user"]["username"] == user]
    refused = [
        f"{each['verb']} {each['requestURI']}"
        for each in events
        if each["responseStatus"]["code"] == 403 and "selfsubject" not in each["requestURI"]
    ]
    asked_by_doctor = (
        "persistentvolumeclaims",
        "runtimeclasses",
        "storageclasses",
        "daemonsets",
        "/namespaces/",
        "nodes",
    )
    assert events
    assert [each for each in refused if not any(word in each for word in asked_by_doctor)] == []


def test_uninstall_leaves_what_the_values_say(installation) -> None:
    installation.run_helm("uninstall", NAME, "--wait")
    installation.cluster.kubectl(
        "wait", "--for=delete", "pods", "-l", SERVER, "-n", installation.name, "--timeout=110s"
    )
    left = installation.cluster.get("all,pvc,roles,rolebindings,networkpolicies,pdb", "-n", installation.name)["items"]
    assert [each["metadata"]["name"] for each in left if each["kind"] == "PersistentVolumeClaim"] == [
        "carrel-workspaces"
    ]
    kinds = {
        (each["kind"], each["metadata"]["name"])
        for each in left
        if "helm.sh/chart" in each["metadata"].get("labels", {})
    }
    assert kinds == {("PersistentVolumeClaim", "carrel-workspaces")}
    assert (
        installation.cluster.kubectl(
            "get", "role,rolebinding", f"{installation.name}-{NAME}", "-n", "default", fails=True
        )
        == ""
    )
