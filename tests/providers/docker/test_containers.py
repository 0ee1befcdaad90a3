"""The request that creates a container: whatever is missing in it would be missing in every sandbox."""

from __future__ import annotations

from carrel.models import Network
from carrel.providers.base import Launch
from carrel.providers.docker.containers import ContainerRequest, body


def made(**terms):
    launch = Launch(id="sbx-1", workspace="/data/w", network=Network.NONE, **terms)
    return body(ContainerRequest(launch, "instance", "carrel-root:x", "/b", "/run/c", "volume", {"/usr": "/usr"}))


def test_container_has_no_network_no_power_and_a_read_only_root():
    request = made()
    host = request["HostConfig"]
    assert (host["NetworkMode"], host["ReadonlyRootfs"], host["Privileged"]) == ("none", True, False)
    assert host["CapDrop"] == ["ALL"]
    assert host["CapAdd"] == ["SETUID", "SETGID", "SETPCAP"]
    assert host["SecurityOpt"] == ["no-new-privileges"]  # and no other: the daemon's seccomp profile holds
    assert request["Labels"] == {"carrel.instance": "instance", "carrel.sandbox": "sbx-1"}
    assert request["Env"] == []  # variables may hold secrets, and `docker inspect` shows these


def test_only_the_workspace_the_control_directory_and_the_supervisors_secrets_are_writable():
    mounts = made()["HostConfig"]["Mounts"]
    writable = {mount["Target"] for mount in mounts if not mount["ReadOnly"]}
    assert writable == {"/workspace", "/run/carrel", "/run/carrel/private/secrets"}
    assert {mount["Source"] for mount in mounts if mount["Type"] == "volume"} == {"volume"}


def test_limits_are_passed_on_and_none_is_made_up():
    assert not {"Memory", "MemorySwap", "NanoCpus", "PidsLimit"} & made()["HostConfig"].keys()
    limited = made(memory_mb=64, cpus=0.5, processes=10)["HostConfig"]
    assert (limited["Memory"], limited["MemorySwap"]) == (64 << 20, 64 << 20)
    assert (limited["NanoCpus"], limited["PidsLimit"]) == (500_000_000, 11)
