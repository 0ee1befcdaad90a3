"""Attacks that try to regain privileges, or to reach a part of the kernel that gives some."""

import pytest
from tests.support.places import volumes


def test_capabilities(attacker):
    """Find a capability left over, in any set."""

    def attack():
        sets = [line.split() for line in open("/proc/self/status") if line.startswith("Cap")]
        return [name for name, value in sets if int(value, 16)] or None

    attacker.attempt(attack)


def test_new_privileges(attacker):
    """Gain privileges by executing a program."""

    def attack():
        status = dict(line.split(":", 1) for line in open("/proc/self/status"))
        return (
            None if status["NoNewPrivs"].strip() == "1" and status["Seccomp"].strip() == "2" else status["NoNewPrivs"]
        )

    attacker.attempt(attack)


def test_is_root(attacker):
    """Be root, or become it."""

    def attack():
        import os

        from inside import first_that_works

        def done(act, *arguments):
            act(*arguments)
            return True

        return (
            0 in os.getresuid() + os.getresgid()
            or 0 in os.getgroups()
            or first_that_works(
                lambda: done(os.setuid, 0),
                lambda: done(os.setgid, 0),
                lambda: done(os.setresuid, 0, 0, 0),
                lambda: done(os.setgroups, [0]),
                lambda: done(os.setreuid, 0, 0),
            )
        )

    attacker.attempt(attack)


@pytest.mark.parametrize(
    "program", ["/usr/bin/su", "/usr/bin/sudo", "/usr/bin/mount", "/usr/bin/passwd", "/usr/bin/newgrp", "/usr/bin/chsh"]
)
def test_setuid_programs(attacker, program):
    """Become root by a setuid program of the host."""

    def attack(program):
        import os
        import subprocess

        if not os.path.exists(program):
            return None
        # A setuid program that was honoured shows another effective user in /proc while it runs.
        with subprocess.Popen(
            [program], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as child:
            try:
                uids = next(line for line in open(f"/proc/{child.pid}/status") if line.startswith("Uid:")).split()[1:]
            finally:
                child.kill()
        return "0" in uids and uids

    attacker.attempt(attack, program=program)


def test_own_setuid_program(attacker):
    """Make a setuid program for the next user."""

    def attack():
        import os
        import shutil
        import subprocess

        for place in ("/workspace", "/tmp", "/home/agent"):
            shutil.copy("/usr/bin/id", f"{place}/id")
            os.chmod(f"{place}/id", 0o6755)
            shown = subprocess.run([f"{place}/id", "-u"], capture_output=True, text=True).stdout.strip()
            if shown == "0":
                return place
        return None

    attacker.attempt(attack)


def test_setuid_file_on_the_host(attacker):
    """Leave a setuid file of root's on the host's disk."""
    attacker.box.commands.run("cp /usr/bin/id id || exit 1; chmod 6755 id; exit 0", check=True)  # or it cannot be made
    workspace = volumes(attacker.server.data_dir) / f"eph-{attacker.box.id}"
    assert (workspace / "id").stat().st_uid != 0
    # Nobody but the server's own user can reach it there, so the bit serves nobody.
    assert volumes(attacker.server.data_dir).stat().st_mode & 0o077 == 0


def test_file_capabilities(attacker):
    """Give a program capabilities of its own."""

    def attack():
        import os
        import shutil

        shutil.copy("/usr/bin/id", "id")
        os.setxattr("id", "security.capability", bytes.fromhex("0100000200000000ffffffff000000000000000000000000")[:20])
        return True

    attacker.attempt(attack)


@pytest.mark.parametrize(
    "flag", [0x10000000, 0x00020000, 0x20000000, 0x40000000, 0x08000000, 0x04000000, 0x02000000, 0x00000080]
)
def test_new_namespaces(attacker, flag):
    """Be root in a namespace of one's own, the way to most holes of the kernel."""

    def attack(flag):
        from inside import call

        return call("unshare", flag) == 0

    attacker.attempt(attack, flag=flag)


def test_new_namespaces_by_clone(attacker):
    """Make a user namespace by clone, in either form."""

    def attack():
        import ctypes
        import os
        import struct

        from inside import call, first_that_works

        def clone():
            child = call("clone", 0x10000000 | 17, 0, 0, 0, 0)
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)
            return True

        def clone3():
            arguments = ctypes.create_string_buffer(struct.pack("8Q", 0x10000000, 0, 0, 0, 17, 0, 0, 0))
            child = call("clone3", arguments, 64)
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)
            return True

        return first_that_works(clone, clone3)

    attacker.attempt(attack)


def test_unshare_program(attacker):
    """Be root by the `unshare` program."""
    result = attacker.box.commands.run("unshare -Ur id -u")
    assert result.exit_code != 0
    assert result.stdout.strip() != "0"


def test_keyrings(attacker):
    """Read or leave keys in the kernel's keyrings, which no namespace divides."""

    def attack():
        from inside import call, first_that_works

        return first_that_works(
            lambda: call("keyctl", 0, -3, 0) != 0,
            lambda: call("keyctl", 1, b"carrel") != 0,
            lambda: call("add_key", b"user", b"carrel", b"x", 1, -3) != 0,
            lambda: call("request_key", b"user", b"carrel", 0, 0) != 0,
        )

    attacker.attempt(attack)


def test_bpf(attacker):
    """Load a program into the kernel."""

    def attack():
        import ctypes
        import struct

        from inside import call

        return call("bpf", 0, ctypes.create_string_buffer(struct.pack("5I", 2, 4, 4, 1, 0), 128), 128) >= 0

    attacker.attempt(attack)


def test_perf(attacker):
    """Watch the host's processor."""

    def attack():
        import ctypes
        import struct

        from inside import call

        attributes = ctypes.create_string_buffer(struct.pack("IIQ", 1, 128, 0) + bytes(112))
        return call("perf_event_open", attributes, 0, -1, -1, 0) >= 0

    attacker.attempt(attack)


def test_io_uring(attacker):
    """Pass system calls by the ring, which no filter sees."""

    def attack():
        import ctypes

        from inside import call

        return call("io_uring_setup", 4, ctypes.create_string_buffer(120)) >= 0

    attacker.attempt(attack)


def test_userfaultfd(attacker):
    """Hold the kernel up at a page fault, to win a race."""

    def attack():
        from inside import call, first_that_works

        return first_that_works(lambda: call("userfaultfd", 0) >= 0, lambda: call("userfaultfd", 1) >= 0)

    attacker.attempt(attack)


@pytest.mark.parametrize(
    "name", ["init_module", "finit_module", "kexec_load", "kexec_file_load", "swapon", "acct", "quotactl"]
)
def test_kernel_itself(attacker, name):
    """Load a module, another kernel or swap. Called with nothing that could work: only who refuses is looked at."""

    def attack(name):
        import errno

        from inside import call

        try:
            call(name, -1, 0, 0, 0, 0)
        except OSError as error:
            return None if error.errno in (errno.EPERM, errno.ENOSYS) else f"the kernel looked at it: {error}"
        return "accepted"

    attacker.attempt(attack, name=name)


def test_ports(attacker):
    """Talk to the hardware's ports."""

    def attack():
        from inside import NUMBERS, call, first_that_works

        tries = [lambda: call("iopl", 3) == 0, lambda: call("ioperm", 0x80, 1, 1) == 0]
        return first_that_works(*tries) if NUMBERS["iopl"] > 0 else None

    attacker.attempt(attack)


def test_segments(attacker):
    """Change the table of segments, a seldom tested part of the kernel."""

    def attack():
        import ctypes

        from inside import NUMBERS, call

        return NUMBERS["modify_ldt"] > 0 and call("modify_ldt", 0, ctypes.create_string_buffer(64), 64) >= 0

    attacker.attempt(attack)


def test_personality(attacker):
    """Switch address randomisation off, or read past what is mapped."""

    def attack():
        from inside import call, first_that_works

        return first_that_works(
            lambda: call("personality", 0x0040000) >= 0, lambda: call("personality", 0x0400000) >= 0
        )

    attacker.attempt(attack)


def test_clock(attacker):
    """Set the host's clock."""

    def attack():
        import time

        time.clock_settime(time.CLOCK_REALTIME, time.time())
        return True

    attacker.attempt(attack)


def test_type_into_a_terminal(attacker):
    """Type into the terminal of whoever looks at the sandbox."""

    def attack():
        import fcntl
        import os

        from inside import first_that_works

        _ours, theirs = os.openpty()
        return first_that_works(
            lambda: fcntl.ioctl(theirs, 0x5412, b"x") is not None,
            lambda: fcntl.ioctl(theirs, 0x541C, b"\x02") is not None,
            lambda: fcntl.ioctl(theirs, 0x541D) is not None,
        )

    attacker.attempt(attack)
    command = attacker.box.commands.start(attacker.words(attack), terminal=(24, 1000))
    attacker.expect(attacker.outcome(command.wait()))


def test_32_bit_calls(attacker):
    """Pass the filter by the calls of another architecture."""

    def attack():
        import ctypes
        import mmap
        import os

        if os.uname().machine != "x86_64":
            return None
        # mov eax, 20 (getpid of i386); int 0x80; ret
        code = bytes.fromhex("b814000000cd80c3")
        page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        page.write(code)
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        return ctypes.CFUNCTYPE(ctypes.c_int)(address)() == os.getpid()

    attacker.attempt(attack)


def test_x32_calls(attacker):
    """Pass the filter by the second numbering of x86-64."""

    def attack():
        import ctypes
        import os

        from inside import LIBC

        if os.uname().machine != "x86_64":
            return None
        return LIBC.syscall(ctypes.c_long(0x40000000 | 39)) == os.getpid()

    attacker.attempt(attack)


def test_filter_can_be_lifted(attacker):
    """Take the filter off, or put one before it that allows everything."""

    def attack():
        import ctypes
        import struct

        from inside import LIBC, call

        LIBC.prctl(22, 0, 0, 0, 0)
        allow = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0x7FFF0000))
        program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 1, ctypes.addressof(allow)))
        LIBC.prctl(22, 2, program, 0, 0)
        return call("unshare", 0x10000000) == 0

    attacker.attempt(attack)


def test_dumpable_supervisor(attacker):
    """Find the supervisor's files in `/proc` owned by the agent."""

    def attack():
        import os

        return os.stat("/proc/1/status").st_uid == os.getuid()

    attacker.attempt(attack)
