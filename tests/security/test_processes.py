"""Attacks on processes: those of the host, and the supervisor."""

import os
import signal

import pytest


def test_see_host_processes(compared):
    """Find the host's processes."""

    def attack(token):
        import os

        from inside import first_that_works, read

        # Our own arguments hold the token as well.
        pids = [name for name in os.listdir("/proc") if name.isdigit() and int(name) not in (os.getpid(), os.getppid())]
        return first_that_works(*(lambda pid=pid: token in read(f"/proc/{pid}/cmdline") for pid in pids))

    compared.attempt(attack, token=compared.host.token)


def test_environment_of_host_processes(compared):
    """Read the environment of a process of the same user on the host."""

    def attack(pid, token):
        from inside import read

        return token in read(f"/proc/{pid}/environ")

    compared.attempt(attack, pid=compared.host.process, token=compared.host.token)


def test_memory_of_host_processes(compared):
    """Read the memory of a process of the same user on the host."""

    def attack(pid, token):
        import os

        found = False
        for line in open(f"/proc/{pid}/maps"):
            if "[stack]" in line:
                start, end = (int(part, 16) for part in line.split()[0].split("-"))
                memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
                found = token.encode() in os.pread(memory, end - start, start)
        return found

    compared.attempt(attack, pid=compared.host.process, token=compared.host.token)


def test_signal_host_processes(compared):
    """Send a signal to a process of the host by its number."""

    def attack(pid):
        import os

        os.kill(pid, 0)
        return "canary" in open(f"/proc/{pid}/cmdline").read()

    compared.attempt(attack, pid=compared.host.process)


def test_pidfd_of_host_processes(compared):
    """Hold a process of the host by a pidfd."""

    def attack(pid):
        import os

        os.pidfd_open(pid)
        return "canary" in open(f"/proc/{pid}/cmdline").read()

    compared.attempt(attack, pid=compared.host.process)


def test_signal_everybody(attacker):
    """End every process one can reach."""

    def attack():
        import os
        import signal

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.kill(-1, signal.SIGTERM)
        os.kill(-1, signal.SIGKILL)

    attacker.start(attack)
    assert attacker.box.commands.run("echo alive").stdout == "alive\n"
    os.kill(attacker.host.process, 0)


@pytest.mark.parametrize("number", [s.value for s in signal.Signals])
def test_signals_to_pid_1(attacker, number):
    """End or confuse the supervisor by a signal."""
    attacker.box.commands.run(["/bin/kill", f"-{number}", "1"])
    assert attacker.box.commands.run("echo alive").stdout == "alive\n"


def test_trace_pid_1(attacker):
    """Take control of the supervisor as its debugger."""

    def attack():
        from inside import call, first_that_works

        return first_that_works(lambda: call("ptrace", 16, 1, 0, 0) == 0, lambda: call("ptrace", 0x4206, 1, 0, 0) == 0)

    attacker.attempt(attack)


def test_trace_runners(attacker):
    """Take control of a process of the supervisor that is not PID 1."""
    attacker.box.commands.start("sleep 60")

    def attack():
        import os

        from inside import call

        taken = []
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            comm = open(f"/proc/{pid}/comm").read().strip()
            if pid != os.getpid() and comm not in ("sleep", "sh"):
                try:
                    call("ptrace", 0x4206, pid, 0, 0)
                    taken.append(pid)
                except OSError:
                    pass
        return taken or None

    attacker.attempt(attack)


def test_memory_of_pid_1(attacker):
    """Read or write the supervisor's memory."""

    def attack():
        import ctypes
        import os

        from inside import call, first_that_works

        class Vector(ctypes.Structure):
            _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]

        buffer = ctypes.create_string_buffer(8)
        local = Vector(ctypes.addressof(buffer), 8)
        remote = Vector(ctypes.addressof(buffer), 8)
        return first_that_works(
            lambda: call("process_vm_readv", 1, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0) >= 0,
            lambda: call("process_vm_writev", 1, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0) >= 0,
            lambda: os.open("/proc/1/mem", os.O_RDONLY),
            lambda: os.open("/proc/1/mem", os.O_RDWR),
            lambda: os.open("/proc/1/clear_refs", os.O_WRONLY),
        )

    attacker.attempt(attack)


def test_descriptors_by_pidfd(attacker):
    """Copy the control socket out of PID 1."""

    def attack():
        import os

        from inside import call, first_that_works

        one = os.pidfd_open(1)
        return first_that_works(
            *(lambda number=number: call("pidfd_getfd", one, number, 0) >= 0 for number in range(32))
        )

    attacker.attempt(attack)


def test_compare_with_pid_1(attacker):
    """Learn of the supervisor's memory and files by comparing them with one's own."""

    def attack():
        import os

        from inside import call

        return call("kcmp", os.getpid(), 1, 0, 0, 0) >= 0

    attacker.attempt(attack)


def test_preload_into_pid_1(attacker):
    """Have the supervisor load a library of the agent's."""
    box = attacker.another(
        env={"LD_PRELOAD": "/workspace/evil.so", "PYTHONPATH": "/workspace", "PYTHONSTARTUP": "/workspace/evil.py"}
    )
    box.files.write("sitecustomize.py", "open('/workspace/loaded', 'w').write('x')\n")
    box.files.write("evil.py", "open('/workspace/loaded', 'w').write('x')\n")
    box.files.write("asyncio.py", "open('/workspace/loaded', 'w').write('x')\n")
    assert box.commands.run(["/bin/true"]).exit_code is not None
    box.health()
    assert not box.files.exists("loaded")


def test_children_of_pid_1_see_nothing_of_it(attacker):
    """Change how the supervisor is chosen by the kernel when memory is short."""

    def attack():
        import os

        from inside import first_that_works

        return first_that_works(
            *(
                lambda name=name: os.open(f"/proc/1/{name}", os.O_WRONLY) and name
                for name in ("oom_score_adj", "oom_adj", "coredump_filter", "setgroups", "uid_map")
            )
        )

    attacker.attempt(attack)


def test_control_socket_in_sight(attacker):
    """Find the socket on which the supervisor is asked."""

    def attack():
        import os

        named = [line for line in open("/proc/net/unix") if line.split()[-1].startswith(("/", "@"))]
        found = []
        for top in ("/run", "/tmp", "/workspace", "/home/agent", "/dev/shm", "/var"):
            for folder, _directories, names in os.walk(top):
                found += [f"{folder}/{name}" for name in names if name.endswith((".sock", ".log"))]
        return named + found or None

    attacker.attempt(attack)


def test_control_socket_by_its_path(attacker):
    """Connect to the supervisor, to give it orders of one's own."""
    sockets = [str(path) for path in (attacker.server.data_dir / "run").glob("*.sock")]
    assert attacker.box.id and sockets

    def attack(paths):
        import socket

        from inside import first_that_works

        def connect(path, kind):
            with socket.socket(socket.AF_UNIX, kind) as one:
                one.connect(path)
                return True

        return first_that_works(
            *(
                lambda path=path, kind=kind: connect(path, kind)
                for path in paths
                for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET)
            )
        )

    attacker.attempt(attack, paths=sockets)


def test_server_from_inside(attacker):
    """Ask the server for sandboxes of one's own."""

    def attack(port):
        import socket

        socket.create_connection(("127.0.0.1", port), 5)
        return True

    attacker.attempt(attack, port=int(attacker.server.client.url.rpartition(":")[2].strip("/")))


def test_priority(attacker):
    """Run ahead of every process of the host."""

    def attack():
        import os

        from inside import first_that_works

        def done(act):
            act()
            return True

        return first_that_works(
            lambda: done(lambda: os.setpriority(os.PRIO_PROCESS, 0, -10)),
            lambda: done(lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))),
            lambda: done(lambda: os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))),
        )

    attacker.attempt(attack)


def test_raise_limits(attacker):
    """Lift the limits the sandbox was given."""
    attacker.with_limits(processes=64, disk_mb=20)

    def attack():
        import resource

        raised = []
        for name in ("RLIMIT_NPROC", "RLIMIT_NOFILE", "RLIMIT_FSIZE", "RLIMIT_CORE"):
            which = getattr(resource, name)
            hard = resource.getrlimit(which)[1]
            if hard == resource.RLIM_INFINITY:
                raised.append(f"{name} has no bound")
                continue
            try:
                resource.setrlimit(which, (hard + 1, hard + 1))
                raised.append(name)
            except (OSError, ValueError):
                pass
        return raised or None

    attacker.attempt(attack)
