"""The request that creates a container: whatever is missing in it would be missing in every sandbox."""

from __future__ import annotations

import asyncio
import io
import tarfile

from carrel.models import Network
from carrel.providers.base import Launch
from carrel.providers.docker import roots
from carrel.providers.docker.containers import ContainerRequest, body


def made(**terms):
    launch = Launch(id="sbx-1", workspace="/data/w", network=Network.NONE, **terms)
    return body(ContainerRequest(launch, "instance", "carrel-root:x", "/b", "/run/c", {"/usr": "/usr"}))


def test_container_has_no_network_no_power_and_a_read_only_root():
    request = made()
    host = request["HostConfig"]
    assert (host["NetworkMode"], host["ReadonlyRootfs"], host["Privileged"]) == ("none", True, False)
    assert host["CapDrop"] == ["ALL"]
    assert host["CapAdd"] == ["SETUID", "SETGID", "SETPCAP"]
    assert host["SecurityOpt"] == ["no-new-privileges"]  # and no other: the daemon's seccomp profile holds
    assert request["Labels"] == {"carrel.instance": "instance", "carrel.sandbox": "sbx-1"}
    assert request["Env"] == []  # variables may hold secrets, and `docker inspect` shows these


def test_nothing_of_an_owner_is_in_it_and_only_the_control_directory_is_writable():
    mounts = made(env={"A": "secret"})["HostConfig"]["Mounts"]
    assert {mount["Target"] for mount in mounts if not mount["ReadOnly"]} == {"/run/carrel"}
    assert "secret" not in repr(made(env={"A": "secret"})) and "/data/w" not in repr(mounts)


def test_limits_are_passed_on_and_none_is_made_up():
    assert not {"Memory", "MemorySwap", "NanoCpus", "PidsLimit"} & made()["HostConfig"].keys()
    limited = made(memory_mb=64, cpus=0.5, processes=10)["HostConfig"]
    assert (limited["Memory"], limited["MemorySwap"]) == (64 << 20, 64 << 20)
    assert (limited["NanoCpus"], limited["PidsLimit"]) == (500_000_000, 11)


async def test_an_archive_that_nobody_wants_any_more_ends_its_thread(tmp_path):
    (tmp_path / "large").write_bytes(bytes(8 << 20))  # more than a pipe holds
    archive = roots._tree(str(tmp_path))
    assert await anext(archive)
    await archive.aclose()
    async with asyncio.timeout(20):
        await asyncio.get_running_loop().shutdown_default_executor()


async def test_an_archive_has_places_for_mounts_whatever_the_image_has_there(tmp_path):
    (tmp_path / "etc").mkdir()
    (tmp_path / "workspace").symlink_to("etc")
    (tmp_path / "run").write_text("a file")
    (tmp_path / "home").mkdir()
    data = b"".join([chunk async for chunk in roots._tree(str(tmp_path))])
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        kinds = {entry.name: entry.type for entry in archive}
        assert len(kinds) == len(archive.getnames())  # the daemon refuses a name that is there twice
    assert {kinds[name] for name in ("workspace", "run", "run/secrets", "home", "home/agent", "tmp")} == {
        tarfile.DIRTYPE
    }
    assert kinds["etc/passwd"] == tarfile.REGTYPE
