"""Attacks by mounting, by leaving the root, and by device nodes."""


def test_bind_mount(attacker):
    """Bind a directory of the host over one of ours."""

    def attack():
        import os

        from inside import call

        os.mkdir("there")
        return call("mount", b"/", b"there", b"", 4096, 0) == 0

    attacker.attempt(attack)


def test_mount_in_a_new_namespace(attacker):
    """Gain mount rights in a mount namespace of one's own."""

    def attack():
        from inside import call

        return call("unshare", 0x00020000) == 0

    attacker.attempt(attack)


def test_mount_of_new_file_systems(attacker):
    """Mount a proc, sysfs, cgroup, debugfs, overlay or disk of the host."""

    def attack():
        import os

        from inside import call, first_that_works

        os.mkdir("there")
        kinds = (
            b"proc",
            b"sysfs",
            b"cgroup",
            b"cgroup2",
            b"debugfs",
            b"tracefs",
            b"overlay",
            b"devtmpfs",
            b"ext4",
            b"tmpfs",
            b"fuse",
        )
        return first_that_works(
            *(lambda kind=kind: call("mount", b"none", b"there", kind, 0, 0) == 0 and kind.decode() for kind in kinds)
        )

    attacker.attempt(attack)


def test_new_mount_calls(attacker):
    """Mount by the newer calls, which older filters do not know."""

    def attack():
        from inside import call, first_that_works

        return first_that_works(
            lambda: call("fsopen", b"tmpfs", 0) >= 0,
            lambda: call("open_tree", -100, b"/", 1) >= 0,
            lambda: call("fspick", -100, b"/", 0) >= 0,
            lambda: call("mount_setattr", -100, b"/", 0, bytes(32), 32) >= 0,
        )

    attacker.attempt(attack)


def test_umount(attacker):
    """Lift a mount off to see what is below it."""

    def attack():
        from inside import call, first_that_works

        points = (b"/proc", b"/dev/shm", b"/tmp", b"/usr", b"/dev/null", b"/workspace", b"/")
        return first_that_works(
            *(lambda at=at, flag=flag: call("umount2", at, flag) == 0 for at in points for flag in (0, 2))
        )

    attacker.attempt(attack)


def test_remount_writable(attacker):
    """Make the read-only root or `/usr` writable."""

    def attack():
        from inside import call, first_that_works

        return first_that_works(
            *(
                lambda at=at, bind=bind: call("mount", b"none", at, b"", 32 | bind, 0) == 0
                for at in (b"/", b"/usr")
                for bind in (0, 4096)
            )
        )

    attacker.attempt(attack)


def test_mount_propagation(attacker):
    """Have a mount made inside show up on the host, or one of the host show up inside."""

    def attack():
        shared = [line for line in open("/proc/self/mountinfo") if " shared:" in line or " master:" in line]
        return shared or None

    attacker.attempt(attack)


def test_make_shared(attacker):
    """Turn a private mount into one that propagates."""

    def attack():
        from inside import call

        return call("mount", b"none", b"/workspace", b"", 1 << 20, 0) == 0

    attacker.attempt(attack)


def test_mounts_are_confined(attacker):
    """Find a mount that is writable, honours setuid bits or opens devices where it should not."""

    def attack():
        import os

        # the working directory is the workspace, or a folder at its own path
        writable = {"/tmp", "/dev/shm", "/home/agent", "/workspace", "/proc", "/dev/pts", os.getcwd()}
        devices = {"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty"}
        wrong = []
        for line in open("/proc/self/mountinfo"):
            fields = line.split()
            point, options = fields[4], set(fields[5].split(","))
            if "ro" not in options and point not in writable | devices:
                wrong.append(f"writable: {point}")
            if "nosuid" not in options:
                wrong.append(f"setuid: {point}")
            if "nodev" not in options and point not in devices | {"/", "/dev", "/dev/pts"}:
                wrong.append(f"devices: {point}")
        return wrong or None

    attacker.attempt(attack)


def test_pivot_root(attacker):
    """Change the root of the sandbox."""

    def attack():
        import os

        from inside import call

        os.makedirs("new/old")
        return call("pivot_root", b"new", b"new/old") == 0

    attacker.attempt(attack)


def test_chroot(attacker):
    """Break out of the root by the double chroot."""

    def attack():
        import os

        os.mkdir("jail")
        os.chroot("jail")
        os.chdir("/".join([".."] * 64))
        os.chroot(".")
        return os.listdir("/")

    attacker.attempt(attack)


def test_join_namespaces_of_the_host(attacker):
    """Enter the namespaces of another process."""

    def attack():
        import os

        from inside import call, first_that_works

        def join(name):
            return call("setns", os.open(f"/proc/1/ns/{name}", os.O_RDONLY), 0) == 0

        return first_that_works(*(lambda name=name: join(name) for name in os.listdir("/proc/1/ns")))

    attacker.attempt(attack)


def test_join_own_namespaces(attacker):
    """Use `setns` at all: it is the first step of most escapes."""

    def attack():
        import os

        from inside import call

        return call("setns", os.open("/proc/self/ns/mnt", os.O_RDONLY), 0) == 0

    attacker.attempt(attack)


def test_block_device(attacker):
    """Make a node for the host's disk."""

    def attack():
        import os
        import stat

        from inside import first_that_works

        def make(major, minor):
            os.mknod("disk", 0o600 | stat.S_IFBLK, os.makedev(major, minor))
            return True

        return first_that_works(lambda: make(8, 0), lambda: make(254, 0), lambda: make(259, 0), lambda: make(7, 0))

    attacker.attempt(attack)


def test_memory_device(attacker):
    """Make a node for the host's memory, or for a new kernel console."""

    def attack():
        import os
        import stat

        from inside import first_that_works

        def make(at, minor):
            os.mknod(f"{at}/node", 0o600 | stat.S_IFCHR, os.makedev(1, minor))
            return True

        places = ("/workspace", "/tmp", "/dev/shm", "/home/agent")
        return first_that_works(*(lambda at=at, minor=minor: make(at, minor) for at in places for minor in (1, 3, 11)))

    attacker.attempt(attack)


def test_devices_in_sight(attacker):
    """Find a device of the host under `/dev`."""

    def attack():
        import os

        expected = {
            "fd",
            "stdin",
            "stdout",
            "stderr",
            "null",
            "zero",
            "full",
            "random",
            "urandom",
            "tty",
            "ptmx",
            "pts",
            "shm",
        }
        return sorted(set(os.listdir("/dev")) - expected) or None

    attacker.attempt(attack)


def test_kernel_log(attacker):
    """Read the kernel's log."""

    def attack():
        import ctypes

        from inside import call, first_that_works, read

        return first_that_works(
            lambda: read("/dev/kmsg"),
            lambda: read("/proc/kmsg"),
            lambda: call("syslog", 3, ctypes.create_string_buffer(4096), 4096),
        )

    attacker.attempt(attack)


def test_kernel_memory(attacker):
    """Read the kernel's memory or its addresses."""

    def attack():
        from inside import first_that_works, read

        def addresses():
            return any(line.split()[0].strip("0") for line in read("/proc/kallsyms").splitlines()[:20])

        return first_that_works(lambda: read("/proc/kcore"), lambda: read("/dev/mem"), addresses)

    attacker.attempt(attack)


def test_sys(attacker):
    """Read or change devices of the host by `/sys`."""

    def attack():
        import os

        return [f"{folder}/{name}" for folder, _directories, names in os.walk("/sys") for name in names] or None

    attacker.attempt(attack)


def test_kernel_settings(attacker):
    """Change a setting of the host's kernel. The files are only opened, never written."""

    def attack():
        import os

        opened = []
        for top, _directories, names in os.walk("/proc/sys"):
            for name in set(names) - {"ns_last_pid"}:  # of the PID namespace, and writing it takes a capability
                try:
                    os.close(os.open(f"{top}/{name}", os.O_WRONLY))
                    opened.append(f"{top}/{name}")
                except OSError:
                    pass
        return opened or None

    attacker.attempt(attack)


def test_core_pattern(attacker):
    """Have the host run a program of ours when one crashes. Only opened, never written."""

    def attack():
        import os

        return os.open("/proc/sys/kernel/core_pattern", os.O_WRONLY) >= 0

    attacker.attempt(attack)


def test_sysrq(attacker):
    """Restart the host. Only opened, never written."""

    def attack():
        import os

        return os.open("/proc/sysrq-trigger", os.O_WRONLY) >= 0

    attacker.attempt(attack)


def test_other_files_of_proc(attacker):
    """Open for writing anything in `/proc` that is not one's own."""

    def attack():
        import os

        opened = []
        for name in os.listdir("/proc"):
            path = f"/proc/{name}"
            if not name.isdigit() and os.path.isfile(path) and not os.path.islink(path):
                try:
                    os.close(os.open(path, os.O_WRONLY))
                    opened.append(path)
                except OSError:
                    pass
        for top in ("/proc/irq", "/proc/bus", "/proc/fs", "/proc/acpi", "/proc/scsi"):
            for folder, _directories, names in os.walk(top):
                for name in names:
                    try:
                        os.close(os.open(f"{folder}/{name}", os.O_WRONLY))
                        opened.append(f"{folder}/{name}")
                    except OSError:
                        pass
        return opened or None

    attacker.attempt(attack)


def test_release_agent(attacker):
    """Have the host run a program of ours when a cgroup empties."""

    def attack():
        import os

        found = [line for line in open("/proc/self/mountinfo") if " cgroup" in line]
        return found or (os.path.isdir("/sys/fs/cgroup") and os.listdir("/sys/fs/cgroup")) or None

    attacker.attempt(attack)


def test_cgroup_of_the_host(attacker):
    """See where in the host's cgroups the sandbox is, to climb out."""

    def attack():
        beyond = [line for line in open("/proc/self/cgroup") if "/.." in line]
        return beyond or None

    attacker.attempt(attack)
