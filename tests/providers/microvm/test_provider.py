"""What the provider of virtual machines refuses, and why."""

import os
from dataclasses import replace
from itertools import pairwise

import pytest
from tests.support import microvm

from carrel.errors import Unsupported
from carrel.isolation.masks import Masks
from carrel.models import Network
from carrel.providers.base import Launch, RootImage
from carrel.providers.microvm import commands, programs
from carrel.providers.microvm.commands import Machine
from carrel.providers.microvm.provider import MicrovmProvider


def provider(tmp_path, **changes):
    return MicrovmProvider(str(tmp_path), options=replace(microvm.options(), **changes), bundles=str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"qemu": "/none"}, "/none is not a program"),
        ({"virtiofsd": "/none"}, "there is no virtiofsd"),
        ({"kernel": "/none"}, "there is no kernel"),
        ({"modules": "/none"}, "there is no kernel"),
    ],
)
def test_missing_things_are_named_with_their_cure(tmp_path, changes, reason):
    if programs.qemu("") is None or os.geteuid() != 0:
        pytest.skip("there is no QEMU, or the tests do not run as root")
    missing = provider(tmp_path, **changes).missing()
    assert missing is not None and reason in missing and "install" in missing


def test_without_kvm_only_the_operator_allows_emulation(tmp_path):
    microvm.usable(str(tmp_path), str(tmp_path))
    refused = provider(tmp_path, allow_emulation=False).missing()
    if refused is None:
        pytest.skip("KVM works on this host")
    assert "KVM" in refused or "/dev/kvm" in refused
    assert "CARREL_MICROVM_ALLOW_EMULATION" in refused


@pytest.mark.parametrize(
    "changes",
    [
        {"masks": Masks(hidden=("/proc/version",))},
        {"masks": Masks(hidden=("/home/agent/.cache",))},
        {"image": RootImage("/image", (1, 2), writable=True)},
    ],
)
async def test_what_a_machine_cannot_do_is_refused(tmp_path, changes):
    opened = provider(tmp_path)
    with pytest.raises(Unsupported):
        await opened.start(Launch("id", str(tmp_path), Network.NONE, **changes))
    assert await opened.running() == []
    await opened.close()


def test_a_machine_has_only_the_devices_that_it_needs():
    machine = Machine("tcg", cpus=1, memory_mb=256, processes=64, default_mb=1024, egress=True)
    command = commands.qemu("/usr/bin/qemu-system-x86_64", machine)
    devices = [word.split(",")[0] for before, word in pairwise(command) if before == "-device"]
    assert devices == list(commands.DEVICES)
    assert "-nodefaults" in command and "-no-user-config" in command
    assert command[command.index("-sandbox") + 1].startswith("on,")
    assert not any("netdev" in word or word in {"-nic", "-net"} for word in command)


def test_the_walls_are_higher_than_the_limits():
    machine = Machine("kvm", cpus=1, memory_mb=4096, processes=None, default_mb=1024, egress=False)
    assert machine.sandbox_mb == 4096 < machine.own_mb < machine.host_mb
    assert replace(machine, memory_mb=None).sandbox_mb == 1024
