"""The commands of a virtual machine's programs. Pure: values in, values out."""

from __future__ import annotations

from dataclasses import dataclass

from carrel.isolation.machine import confined, guest
from carrel.providers import bundle
from carrel.providers.control_directory import REPORT

KERNEL, INITRAMFS = "/kernel", "/initramfs"
"""Paths of the machine's files in the root of QEMU."""
RESERVE_MB = 96
"""What the kernel of a machine, the bundle and PID 1 use besides the memory of the sandbox."""
OVERHEAD_MB = {"kvm": 192, "tcg": 384}
"""What QEMU, the file server and the keeper use besides the memory of the machine. An emulator translates code."""
_TRANSLATED_MB = 128
DEVICES = ("vhost-user-fs-pci", "virtio-serial-pci", "virtserialport")
_MACHINE = "q35,hpet=on,smbus=off,sata=off,usb=off,vmport=off,i8042=off,graphics=off,dump-guest-core=off,mem-merge=off"
"""A machine with as few devices as it can have. The type `microvm` of QEMU has fewer, but under emulation no clock that
its kernel could trust: on a busy host it does not start.
"""
_PLAIN = ("-nodefaults", "-no-user-config", "-display", "none", "-monitor", "none", "-no-reboot")
_SECCOMP = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
_QUIET = "console=ttyS0 quiet loglevel=3 panic=-1 oops=panic reboot=t no_timer_check"
"""Without the last word a kernel that is emulated on a busy host may find that its timer does not work."""
_CACHED = "auto"


@dataclass(frozen=True)
class Machine:
    """What a machine is like. `memory_mb` and `processes` are limits of the sandbox in it; None is no limit."""

    accelerator: str
    cpus: int
    memory_mb: int | None
    processes: int | None
    default_mb: int
    egress: bool

    @property
    def sandbox_mb(self) -> int:
        return self.default_mb if self.memory_mb is None else self.memory_mb

    @property
    def own_mb(self) -> int:
        """Its whole memory. The kernel needs a part of it for its lists of pages."""
        return self.sandbox_mb + RESERVE_MB + self.sandbox_mb // 50

    @property
    def host_mb(self) -> int:
        """The most memory that it may use on the host."""
        return self.own_mb + OVERHEAD_MB[self.accelerator]


def qemu(program: str, machine: Machine) -> list[str]:
    """Return the command of a machine. Descriptor 3 is its connection to the file server, 4 its line to the host."""
    size = f"{machine.own_mb}M"
    return [
        *(program, *_PLAIN, "-sandbox", _SECCOMP),
        *("-machine", f"{_MACHINE},memory-backend=memory", "-accel", _accelerator(machine.accelerator)),
        *("-cpu", "host" if machine.accelerator == "kvm" else "max", "-smp", str(machine.cpus), "-m", size),
        *("-object", f"memory-backend-memfd,id=memory,size={size},share=on"),
        *("-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console"),
        *("-chardev", "socket,id=files,fd=3"),
        *("-device", f"vhost-user-fs-pci,queue-size=1024,chardev=files,tag={guest.TAG}"),
        *("-chardev", "socket,id=line,fd=4", "-device", "virtio-serial-pci,max_ports=2"),
        *("-device", f"virtserialport,nr=1,chardev=line,name={guest.PORT}"),
        *("-kernel", KERNEL, "-initrd", INITRAMFS, "-append", _append(machine)),
    ]


def _accelerator(name: str) -> str:
    return name if name == "kvm" else f"tcg,thread=multi,tb-size={_TRANSLATED_MB}"


def _append(machine: Machine) -> str:
    scratch = max(16, min(512, machine.sandbox_mb // 4))
    words = (
        *(str(machine.memory_mb or 0), str(machine.processes or 0), str(scratch)),
        *("egress" if machine.egress else "none", *bundle.command(REPORT)),
    )
    first, *rest = bundle.machine_command(words)
    return " ".join((_QUIET, f"rdinit={first}", "--", *rest))


def probe(program: str, kernel: str) -> list[str]:
    """Return the command that starts a kernel with KVM and ends at once, because there is no file system for it."""
    return [
        *(program, *_PLAIN, "-sandbox", _SECCOMP, "-machine", _MACHINE, "-accel", "kvm", "-cpu", "host", "-m", "128M"),
        *("-serial", "stdio", "-kernel", kernel, "-append", "console=ttyS0 panic=-1 reboot=t"),
    ]


def file_server(program: str, *, of_qemu: bool) -> list[str]:
    """Return the command of the file server, which listens at descriptor 3."""
    if of_qemu:
        without = "modcaps=-chown:-dac_override:-fowner:-fsetid:-setgid:-setuid:-mknod:-setfcap"
        options = (f"source={confined.EXPORT}", "sandbox=chroot", f"cache={_CACHED}", "announce_submounts", without)
        return [program, "-f", "--fd=3", "--rlimit-nofile=0", *(word for each in options for word in ("-o", each))]
    return [
        *(program, "--fd=3", f"--shared-dir={confined.EXPORT}", "--sandbox=none", f"--cache={_CACHED}"),
        *("--announce-submounts", "--inode-file-handles=never", "--log-level=error"),
    ]
