"""The way out of pods: the proxy of the server, with its policy, credentials and log, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.cluster.ground import Ground, variables
from tests.cluster.test_pods import reached_directly
from tests.support.egress_ground import Carrel, Outside, outbound, run, until

from carrel.models import Network
from carrel.testing import Harness, workspaces_in

KEY = "a-key-that-stays-outside"


@pytest.fixture
def outside() -> Iterator[Outside]:
    made = Outside()
    yield made
    made.close()


@pytest.fixture
def carrel(ground: Ground, outside: Outside) -> Iterator[Carrel]:
    """A server whose sandboxes are pods."""
    settings = variables(ground.settings | {"data_dir": str(ground.volume / "e")})
    made = Carrel(outside, **settings)
    made.data = ground.volume / "e"
    made.start()
    try:
        yield made
    finally:
        print(made.log.read_text())
        made.close()
    assert ground.left() == []


def test_policy_credentials_and_log_are_as_on_one_machine(carrel, outside, ground):
    plain = outside.site(lambda _method, path, _headers, _body: b"plain " + path.encode())
    safe = outside.site(lambda _method, _path, headers, _body: headers.get("x-key", "none").encode(), tls=True)
    credential = {"host": "api.test", "secret": "key", "header": "x-key", "format": "{secret}"}
    rules = [*outbound("files.test", port=plain.port), *outbound("api.test", port=safe.port)]
    box = carrel.context("way-out", *rules, sources={"web_access": {"credentials": [credential]}})
    carrel.client.secrets("way-out").put("key", KEY)

    assert run(box, f"curl -sS http://files.test:{plain.port}/x") == "plain /x"
    assert run(box, f"curl -sS https://api.test:{safe.port}/y") == "carrel-placeholder-key"
    assert safe.requests[-1][2]["x-key"] == KEY
    assert KEY not in run(box, "env; cat /run/secrets/*", ok=False)
    refused = run(box, f"curl -sS -w '%{{http_code}}' http://other.test:{plain.port}/", ok=False)
    assert refused.endswith("403")
    assert [path for _, path, _ in plain.requests] == ["/x"], "what was refused has arrived"
    expected = {("files.test", "allow"), ("api.test", "allow"), ("other.test", "deny")}

    def logged() -> bool:
        return {(each.arguments["host"], each.decision) for each in carrel.records("way-out")} == expected

    until(logged, "the log of the connections")

    # The server is killed: its sandbox has no way out until the next one has found it.
    before = (box.info().id, set(ground.left()))
    carrel.kill()
    carrel.start()
    again = carrel.client.sandbox("way-out")
    assert run(again, f"curl -sS http://files.test:{plain.port}/again") == "plain /again"
    assert again.info().id == before[0] and before[1] & set(ground.left())


async def test_with_a_way_out_nothing_of_the_cluster_is_reached_directly(ground, cluster):
    harness = Harness(ground.provider, workspaces_in(str(ground.volume)))
    try:
        async with (
            harness.sandbox(network=Network.ALLOWLIST) as box,
            harness.sandbox(network=Network.ALLOWLIST) as other,
        ):
            assert await reached_directly(cluster, box, other) == []
            lookup = "timeout 5 getent hosts kubernetes.default.svc.cluster.local files.test"
            assert (await box.run(lookup)).exit_code != 0
    finally:
        await harness.close()
