"""Attacks of one sandbox on another: on its files, its memory, its processes, and on the one that comes next."""

import os
import time
from pathlib import Path

import pytest
from tests.support.places import volumes

from carrel.providers import groups


@pytest.fixture
def victim(attacker):
    """A neighbour on the same server with a secret in every place it has."""
    box = attacker.another()
    token = attacker.host.token
    box.files.write("secret", token)
    box.commands.run(
        f"for d in /tmp /dev/shm /home/agent; do echo {token} > $d/secret || exit 1; done; chmod 777 /tmp /dev/shm; true",
        check=True,  # in a pod these belong to root, and are everybody's already
    )
    return box


def test_files(compared):
    """Read the files of another sandbox."""
    box = compared.another()
    box.files.write("secret", compared.host.token)
    path = str(volumes(compared.server.data_dir) / f"eph-{box.id}" / "secret")
    assert os.path.exists(path)

    def attack(path, token):
        return token in open(path).read()

    compared.attempt(attack, path=path, token=compared.host.token)


@pytest.mark.parametrize("place", ["/tmp", "/dev/shm", "/home/agent", "/workspace", "/run", "/var/tmp"])
def test_shared_places(attacker, victim, place):
    """Find another sandbox's files in a place that looks shared."""

    def attack(place, token):
        import os

        for folder, _directories, names in os.walk(place):
            for name in names:
                if token in open(f"{folder}/{name}", errors="replace").read():
                    return f"{folder}/{name}"
        return None

    attacker.attempt(attack, place=place, token=attacker.host.token)


def test_shared_tmp(compared):
    """Leave something in `/tmp` for another sandbox."""
    name = f"/tmp/carrel-test-{compared.box.id}"
    other = compared.another()
    compared.box.commands.run(["touch", name], check=True)
    seen = other.commands.run(["test", "-e", name]).ok
    compared.box.commands.run(["rm", name], check=True)
    compared.expect(seen)


def test_processes(compared):
    """See the processes of another sandbox."""
    marker = f"61{compared.host.tcp}"
    sleeper = compared.another().commands.start(["sleep", marker])

    def attack(marker):
        import os

        from inside import first_that_works, read

        pids = [name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
        return first_that_works(
            *(lambda pid=pid: marker in read(f"/proc/{pid}/cmdline").split("\0")[1:2] for pid in pids)
        )

    compared.attempt(attack, marker=marker)
    sleeper.kill()


def test_environment(compared):
    """Read the environment of another sandbox's processes."""
    victim = compared.another(env={"VICTIM": compared.host.token})
    sleeper = victim.commands.start("exec sleep 60")

    def attack(token):
        import os

        from inside import first_that_works, read

        pids = [name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
        return first_that_works(
            *(lambda pid=pid: f"VICTIM={token}" in read(f"/proc/{pid}/environ", 100_000) for pid in pids)
        )

    compared.attempt(attack, token=compared.host.token)
    sleeper.kill()


def test_abstract_sockets(compared):
    """Connect to an abstract Unix socket of another sandbox."""
    name = f"carrel-neighbour-{compared.host.tcp}"
    code = f"import socket; s=socket.socket(1); s.bind('\\0{name}'); s.listen(); print('ready', flush=True); s.accept(); import time; time.sleep(60)"
    listener = compared.another().commands.start(["/usr/bin/python3", "-c", code])
    next(iter(listener.stream()))

    def attack(name):
        import socket

        with socket.socket(socket.AF_UNIX) as one:
            one.connect("\0" + name)
            return True

    compared.attempt(attack, name=name)
    listener.kill()


def test_tcp_between_sandboxes(compared):
    """Connect to a service in another sandbox."""
    code = "import socket; s=socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); s.accept(); import time; time.sleep(60)"
    listener = compared.another().commands.start(["/usr/bin/python3", "-c", code])
    port = int(next(iter(listener.stream())).text)

    def attack(port):
        import socket

        socket.create_connection(("127.0.0.1", port), 5).close()
        return True

    compared.attempt(attack, port=port)
    listener.kill()


SHARE = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True); libc.shmat.restype = ctypes.c_void_p
key, act = int(sys.argv[1]), sys.argv[2]
if act == "make":
    number = libc.shmget(key, 4096, 0o1666); at = libc.shmat(number, None, 0)
    ctypes.memmove(at, b"shared", 6); print("made" if number >= 0 else "no")
elif act == "read":
    number = libc.shmget(key, 4096, 0)
    print(ctypes.string_at(libc.shmat(number, None, 0), 6).decode() if number >= 0 else "none")
else:
    libc.shmctl(libc.shmget(key, 4096, 0), 0, None)
"""


def test_shared_memory(compared):
    """Share memory with another sandbox by a System V key."""
    key = str(0x43000000 + compared.host.tcp)
    other = compared.another()
    assert compared.box.commands.run(["python3", "-c", SHARE, key, "make"]).stdout == "made\n"
    seen = other.commands.run(["python3", "-c", SHARE, key, "read"]).stdout
    compared.box.commands.run(["python3", "-c", SHARE, key, "remove"])
    compared.expect(seen == "shared\n")


def test_shared_memory_of_the_next(attacker):
    """Leave shared memory for the sandbox that comes next."""
    key = str(0x42000000 + attacker.host.tcp)
    first = attacker.new()
    assert first.commands.run(["python3", "-c", SHARE, key, "make"]).stdout == "made\n"
    first.terminate()
    assert attacker.box.commands.run(["python3", "-c", SHARE, key, "read"]).stdout == "none\n"


QUEUE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
queue = libc.mq_open(sys.argv[1].encode(), os.O_RDWR | (os.O_CREAT if sys.argv[2] == "make" else 0), 0o666, None)
print("none" if queue < 0 else "open")
"""


def test_message_queues(attacker):
    """Share a POSIX message queue with another sandbox."""
    name = f"/carrel-{attacker.host.tcp}"
    attacker.box.commands.run(["python3", "-c", QUEUE, name, "make"], check=True)  # the kernel may have none at all
    assert attacker.another().commands.run(["python3", "-c", QUEUE, name, "read"]).stdout == "none\n"


def test_same_user_on_the_host(attacker):
    """Be the same user as another sandbox on the host, so that one hole opens both."""
    if attacker.setting.startswith("user"):
        told = {check.name: check.status for check in attacker.server.client.host().checks}
        assert told["own user ids"] == "degraded"  # an ordinary user has one id to give, and is told so
        return
    if attacker.own_kernel:  # what belongs to it on the host are the programs around its kernel
        of_each = [set(_users(box.id)) for box in (attacker.box, attacker.another())]
        assert of_each[0] and of_each[1] and not of_each[0] & of_each[1]
        assert not (of_each[0] | of_each[1]) & {0, 1000, 65534}
        return
    marker = f"62{attacker.host.udp}"
    for box in (attacker.box, attacker.another()):
        box.commands.start(f"echo; exec sleep {marker}").info()
    deadline = time.monotonic() + 60
    uids = []
    while len(uids) < 2 and time.monotonic() < deadline:
        uids = [
            os.stat(path.parent).st_uid for path in Path("/proc").glob("[0-9]*/cmdline") if _argument(path) == marker
        ]
    assert len(uids) == len(set(uids)) == 2
    assert not set(uids) & {0, 1000, 65534}


def _users(id):
    return [os.stat(f"/proc/{pid}").st_uid for group, _ in groups.find(id) for pid in groups.processes(group)]


def _argument(path):
    try:
        return path.read_text(errors="replace").split("\0")[1]
    except (OSError, IndexError):
        return ""


def test_leave_a_program_for_the_next(attacker):
    """Have the next sandbox run a program of ours by its `PATH` or its home."""
    first = attacker.new()
    first.commands.run(
        "mkdir -p ~/bin ~/.local/bin; for p in ~/bin/ls ~/.local/bin/ls /tmp/ls ./ls; do echo 'echo evil' > $p; chmod +x $p; done; echo 'echo evil' > ~/.profile; echo 'echo evil' > ~/.bashrc",
        check=True,
    )
    first.terminate()
    assert "evil" not in attacker.box.commands.run("ls; bash -lic ls; sh -lc ls").stdout


def test_path_has_no_workspace(attacker):
    """Have a plain command name run a file of the workspace."""
    path = attacker.box.commands.run("echo $PATH").stdout.strip().split(":")
    assert path.pop() == "/workspace/.venv/bin", "what the agent installs comes after every program of the host"
    assert all(folder.startswith("/") and not folder.startswith(("/workspace", "/tmp", "/home")) for folder in path)
    for name in ("ls", "id", "sh"):
        attacker.box.files.write(name, "#!/bin/sh\necho evil\n", mode=0o755)
        attacker.box.files.write(f".venv/bin/{name}", "#!/bin/sh\necho evil\n", mode=0o755)
    assert attacker.box.commands.run(["id", "-u"]).stdout.strip().isdigit()
    assert attacker.box.commands.run("id -u").stdout.strip().isdigit()


def test_modified_root(attacker):
    """Change the root that the next sandbox starts from."""
    first = attacker.new()
    first.commands.run(
        "for d in / /etc /usr /usr/bin /var /var/lib /root /home /run /opt /dev /proc; do touch $d/evil; done 2>/dev/null"
    )
    first.terminate()
    assert attacker.box.commands.run("find / -xdev -name evil 2>/dev/null").stdout == ""


def test_leftover_mounts(attacker):
    """Find mounts that a sandbox before has left."""
    counts = []
    for _ in range(3):
        box = attacker.new()
        counts.append(int(box.commands.run("wc -l < /proc/self/mountinfo").stdout))
        box.terminate()
    assert len(set(counts)) == 1, counts


def test_sandbox_of_another_context(attacker):
    """Reach the workspace of another context by a name that looks like a path."""
    from carrel.errors import CarrelError

    for name in ("../x", "a/b", ".", "..", "a\0b", "%2e%2e", ".trash"):
        with pytest.raises(CarrelError) as caught:
            attacker.another(name)
        assert caught.value.status < 500


def test_names_that_collide(attacker):
    """Get the workspace of another context by a name that is written alike."""
    first = attacker.another(f"a:{attacker.box.id}")
    first.files.write("secret", b"x")
    for name in (f"a+{attacker.box.id}", f"A:{attacker.box.id}", f"a.{attacker.box.id}"):
        try:
            other = attacker.another(name)
        except ValueError:
            continue
        except Exception as error:
            assert getattr(error, "status", 500) < 500, error
            continue
        assert not other.files.exists("secret")


def test_predictable_socket(attacker):
    """Guess the socket of another sandbox: its name and its directory must both keep others out."""
    run = attacker.server.data_dir / "run"
    assert attacker.box.id
    assert run.stat().st_mode & 0o077 == 0
    for path in run.glob("*.sock"):
        assert path.stat().st_mode & 0o077 == 0
