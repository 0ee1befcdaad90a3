"""Attacks on files of the host by way of links, `/proc`, inherited descriptors and paths."""

from carrel.isolation.inside import BUNDLE, CONTROL
from carrel.supervisor.environment import variables


def test_absolute_path(compared):
    """Read a host file by its own path."""

    def attack(path, token):
        return token in open(path).read()

    compared.attempt(attack, path=compared.host.secret, token=compared.host.token)


def test_symlink_in_the_workspace(compared):
    """Read a host file through a symlink in the workspace."""

    def attack(path, token):
        import os

        os.symlink(path, "link")
        return token in open("link").read()

    compared.attempt(attack, path=compared.host.secret, token=compared.host.token)


def test_hard_link(compared):
    """Give a host file a second name in the workspace."""

    def attack(path):
        import os

        os.close(os.open(path, os.O_PATH))
        try:
            os.link(path, "link")
        except OSError as error:
            return f"the file can be seen: {error}"  # another file system or a protected link is no protection of ours
        return os.path.exists("link")

    compared.attempt(attack, path=compared.host.secret)


def test_write_where_anybody_may(compared):
    """Leave a file in a host directory that every user can write."""

    def attack(path):
        with open(f"{path}/was-here", "w") as file:
            file.write("x")
        return True

    compared.run(attack, path=compared.host.drop)
    compared.expect(compared.host.dropped())


def test_root_of_pid_1(compared):
    """Enter the host's file system by `/proc/1/root`."""

    def attack(path, token):
        from inside import first_that_works, read

        return first_that_works(
            *(lambda at=at: token in read(f"{at}{path}") for at in ("/proc/1/root", "/proc/self/root"))
        )

    compared.attempt(attack, path=compared.host.secret, token=compared.host.token)


def test_root_of_every_process(compared):
    """Enter the host's file system by `/proc/PID/root` of any process."""

    def attack(path, token):
        import os

        from inside import first_that_works, read

        pids = [name for name in os.listdir("/proc") if name.isdigit()] + ["thread-self", "self/task/1"]
        return first_that_works(*(lambda pid=pid: token in read(f"/proc/{pid}/root{path}") for pid in pids))

    compared.attempt(attack, path=compared.host.secret, token=compared.host.token)


def test_working_directory_of_other_processes(compared):
    """Climb from `/proc/PID/cwd` of any process to the host's root."""

    def attack(path, token):
        import os

        from inside import first_that_works, read

        up = "/".join([".."] * 20)
        pids = [name for name in os.listdir("/proc") if name.isdigit()]
        return first_that_works(*(lambda pid=pid: token in read(f"/proc/{pid}/cwd/{up}{path}") for pid in pids))

    compared.attempt(attack, path=compared.host.secret, token=compared.host.token)


def test_dotdot_above_the_root(compared):
    """Climb above the root with `..`."""

    def attack(path, token):
        from inside import read

        return token in read("/".join([".."] * 64) + path)

    compared.attempt(attack, path=compared.host.secret, token=compared.host.token)


def extra_descriptors():
    """Every descriptor but the three a program expects, and sockets among those three."""
    import os

    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the one that listed the directory
        if int(name) > 2 or target.startswith("socket:"):
            found[name] = target
    return found or None


def test_inherited_descriptors(attacker):
    """Use a descriptor that a command inherited by mistake, such as the socket the supervisor is asked on."""
    attacker.attempt(extra_descriptors)


def test_inherited_descriptors_of_a_second_command(attacker):
    """Use a descriptor that a command beside another one inherited by mistake."""
    attacker.box.commands.start("sleep 60")
    attacker.attempt(extra_descriptors)


def test_inherited_descriptors_of_a_terminal(attacker):
    """Use a descriptor that a program in a terminal inherited by mistake."""
    command = attacker.box.commands.start(attacker.words(extra_descriptors), terminal=(24, 1000))
    attacker.expect(attacker.outcome(command.wait()))


def test_descriptors_of_pid_1(attacker):
    """Open what PID 1 has open: the control socket, the workspace, the host's id locks."""

    def attack():
        import os

        from inside import first_that_works

        return first_that_works(lambda: os.listdir("/proc/1/fd"), lambda: os.listdir("/proc/1/task/1/fd"))

    attacker.attempt(attack)


def test_descriptors_of_runners(attacker):
    """Open what the supervisor's other processes have open."""
    attacker.box.commands.start("sleep 60")

    def attack():
        import os

        own, seen = os.getpid(), {}
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            try:
                comm = open(f"/proc/{pid}/comm").read().strip()
                if pid != own and comm not in ("sleep", "sh"):
                    seen[pid] = os.listdir(f"/proc/{pid}/fd")
            except OSError:
                continue
        return seen or None

    attacker.attempt(attack)


def test_password_hashes(attacker):
    """Read the host's password hashes."""

    def attack():
        from inside import first_that_works, read

        return first_that_works(
            *(lambda name=name: read(name) for name in ("/etc/shadow", "/etc/gshadow", "/etc/shadow-", "/etc/sudoers"))
        )

    attacker.attempt(attack)


def test_accounts_of_the_host(attacker):
    """Learn who has an account on the host."""

    def attack():
        names = {line.split(":")[0] for line in open("/etc/passwd")}
        return sorted(names - {"root", "agent", "nobody"}) or None

    attacker.attempt(attack)


def test_homes_of_the_host(attacker):
    """Read the homes of the host's users."""

    def attack():
        import os

        found = [f"/root/{name}" for name in os.listdir("/root")]
        found += [f"/home/{name}" for name in os.listdir("/home") if name not in ("agent", "user")]
        if os.path.realpath("/home/user") not in ("/home/user", "/workspace"):
            found.append("/home/user")
        return found or None

    attacker.attempt(attack)


def test_other_directories_of_the_host(attacker):
    """Read services' data, logs and temporary files of the host."""

    def attack(own):
        import os

        found = []
        for path in ("/var/lib", "/var/log", "/var/cache", "/srv", "/mnt", "/opt", "/run", "/boot", "/media", "/work"):
            try:
                found += [f"{path}/{name}" for name in os.listdir(path)]
            except OSError:
                pass
        if "/run/secrets" in found and os.listdir("/run/secrets") == []:
            found.remove("/run/secrets")  # the sandbox's own, and it was given none
        return sorted(set(found) - set(own)) or None

    own = [BUNDLE, CONTROL] if attacker.from_bundle else []
    attacker.attempt(attack, own=own)


def test_secrets_in_the_environment(attacker):
    """Read the environment that the server was started with."""

    def attack(own):
        import os

        own = {
            *own,
            "PATH",
            "HOME",
            "LANG",
            "USER",
            "LOGNAME",
            "SHELL",
            "TERM",
            "PWD",
            "TMPDIR",
            "LC_CTYPE",
            "OLDPWD",
            "SHLVL",
            "WORKSPACE",
            "CARREL_PYTHON",
            "_",
        }
        return sorted(name for name in os.environ if name not in own and not name.startswith("CARREL_SANDBOX")) or None

    told = variables(workspace="", home="", path="", proxy_port=3128, offline=True, trust=False, given={})
    attacker.attempt(attack, own=sorted(told))


def test_environment_of_pid_1(attacker):
    """Read the environment and the arguments of the supervisor."""

    def attack():
        from inside import first_that_works, read

        return first_that_works(
            lambda: read("/proc/1/environ"), lambda: read("/proc/1/maps"), lambda: read("/proc/1/auxv")
        )

    attacker.attempt(attack)


def test_arguments_show_no_host_path(attacker):
    """Learn paths of the host from the arguments of a process."""

    def attack():
        import os

        found = []
        for pid in (name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()):
            words = open(f"/proc/{pid}/cmdline").read().replace("\0", " ")
            if "/" in words:
                found.append(words)
        return found or None

    attacker.attempt(attack)


def test_mounts_show_no_data_directory(attacker):
    """Learn from the list of mounts where the server keeps its data."""

    def attack():
        seen = open("/proc/self/mountinfo").read()
        return [line for line in seen.splitlines() if "token" in line or "/run/" in line.split()[3]] or None

    attacker.attempt(attack)


def test_handles_of_files(attacker):
    """Open a host file by its handle, past every path check."""

    def attack():
        import ctypes
        import os

        from inside import call

        handle = ctypes.create_string_buffer(8 + 128)
        handle[:4] = (128).to_bytes(4, "little")
        mount = ctypes.c_int()
        root = os.open("/workspace", os.O_RDONLY)
        call("name_to_handle_at", root, b"", handle, ctypes.byref(mount), 0x1000)
        return call("open_by_handle_at", root, handle, 0) >= 0

    attacker.attempt(attack)


def test_handles_guessed(attacker):
    """Open the root inode of the host's disk by a guessed handle."""

    def attack():
        import ctypes
        import os
        import struct

        from inside import call

        root = os.open("/workspace", os.O_RDONLY)
        handle = ctypes.create_string_buffer(struct.pack("<Ii", 8, 1) + struct.pack("<II", 2, 0))
        return call("open_by_handle_at", root, handle, 0) >= 0

    attacker.attempt(attack)


def test_programs_of_the_host(attacker):
    """Change a program or a setting that the host, or the next sandbox, will use."""

    def attack():
        import os

        written = []
        for path in (
            "/",
            "/usr",
            "/usr/bin",
            "/usr/local/bin",
            "/bin",
            "/sbin",
            "/lib",
            "/etc",
            "/opt",
            "/var",
            "/usr/lib/python3",
            "/home",
            "/root",
            "/mnt",
            "/srv",
            "/run",
            "/sys",
            "/dev",
        ):
            try:
                name = f"{path}/carrel-was-here"
                os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
                os.unlink(name)
                written.append(path)
            except OSError:
                pass
        for path in ("/etc/passwd", "/etc/hosts", "/etc/resolv.conf", "/etc/ld.so.cache", "/usr/bin/env", "/bin/sh"):
            try:
                os.close(os.open(path, os.O_WRONLY))
                written.append(path)
            except OSError:
                pass
        return written or None

    attacker.attempt(attack)


def test_permissions_of_shared_files(attacker):
    """Change mode or owner of a program everybody uses."""

    def attack():
        import os

        from inside import first_that_works

        def done(act):
            act()
            return True

        mode = os.stat("/usr/bin/env").st_mode & 0o7777
        return first_that_works(
            lambda: done(lambda: os.chmod("/usr/bin/env", mode)),
            lambda: done(lambda: os.chown("/usr/bin/env", 1000, 1000)),
            lambda: done(lambda: os.utime("/usr/bin/env")),
            lambda: done(lambda: os.setxattr("/usr/bin/env", "user.carrel", b"x")),
            lambda: done(lambda: os.rename("/usr/bin/env", "/workspace/env")),
        )

    attacker.attempt(attack)
