"""A server whose sandboxes are containers: policy, outbound network and secrets; and killed with a container running."""

from __future__ import annotations

import os
import signal

from tests.support.dockerd import DockerDaemon
from tests.support.egress_ground import ground, outbound, run, until


def test_a_killed_server_finds_its_container_again(docker: DockerDaemon) -> None:
    settings = {"CARREL_SANDBOX_PROVIDER": "docker", "CARREL_DOCKER_SOCKET": docker.socket}
    with ground(**settings) as (outside, carrel):
        site = outside.site(lambda *_: b"served")
        fetch = ["curl", "-sS", "-m", "30", f"http://files.test:{site.port}/"]
        box = carrel.context("c", *outbound("files.test", port=site.port))
        assert box.info().provider == "docker"
        assert run(box, fetch) == "served"
        assert "403" in run(box, ["curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", "http://other.test/"])
        command = box.commands.start("echo before; until test -e go; do sleep 0.05; done; echo after", timeout=300)
        proxy = carrel.proxy
        carrel.kill()
        carrel.start()
        box = carrel.client.sandbox("c")
        assert carrel.proxy == proxy  # it went on without the server, and has the new socket of the sandbox now
        assert run(box, fetch) == "served"
        box.files.write("go", b"")
        assert box.commands.get(command.id).wait().stdout == "before\nafter\n"
        carrel.kill()
        os.kill(proxy, signal.SIGKILL)
        carrel.start()
        assert run(carrel.client.sandbox("c"), fetch) == "served"
        assert {record.result for record in carrel.records("c")} <= {"ok", "denied_by_policy", "unknown"}
        carrel.stop()
        until(lambda: not carrel.left(), f"nothing to be left of {carrel.left()}")
        assert docker.objects() == []
