"""Attacks on secrets: those of others, and changing or keeping one's own beyond what was given."""

import base64
import errno
import hashlib
import os
import stat

import httpx
import pytest

VALUE = "canary-of-a-secret-value"


def supervisor(attacker, box, values):
    """Give secrets to a sandbox as the control plane does: over the supervisor's socket."""
    run = attacker.server.data_dir / "run"
    in_docker = hashlib.sha256(box.id.encode()).hexdigest()[:16]
    places = (f"{box.id[:40]}-*.sock", f"*/{box.id}/s", f"docker/{in_docker}/private/socket")
    [path] = [path for place in places for path in run.glob(place)]
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://sandbox") as client:
        given = {name: base64.b64encode(value.encode()).decode() for name, value in values.items()}
        return client.put("/secrets", json={"secrets": given})


@pytest.fixture
def given(attacker):
    """An attacker whose sandbox has a secret; a command of it is already running."""
    attacker.box.commands.start("sleep 60")
    assert supervisor(attacker, attacker.box, {"TOKEN": VALUE}).status_code == 200
    return attacker


def test_only_in_its_file(given):
    """Find a secret anywhere but in the file that was given: environments, command lines, the workspace, other files."""

    def attack():
        import os

        value = open("/run/secrets/TOKEN").read()
        found = [name for name, text in os.environ.items() if value in text]
        for process in filter(str.isdigit, os.listdir("/proc")):
            for name in ("environ", "cmdline", "mountinfo", "maps"):
                try:
                    with open(f"/proc/{process}/{name}", "rb") as file:
                        if value.encode() in file.read():
                            found.append(f"/proc/{process}/{name}")
                except OSError:
                    continue
        for top in ("/workspace", "/tmp", "/home", "/etc", "/dev/shm", "/var", "/run"):
            for folder, _folders, files in os.walk(top):
                if folder.startswith("/run/secrets"):
                    continue
                for name in files:
                    try:
                        with open(os.path.join(folder, name), "rb") as file:
                            if value.encode() in file.read(1 << 20):
                                found.append(os.path.join(folder, name))
                    except OSError:
                        continue
        return found

    assert given.box.commands.run("cat /run/secrets/TOKEN").stdout == VALUE
    given.attempt(attack)


def test_on_no_disk_of_the_host(given):
    """Find a secret in what the host keeps of a sandbox."""
    given.box.commands.run("cat /run/secrets/TOKEN > /dev/null")
    for folder, _folders, files in os.walk(given.server.data_dir):
        for name in files:
            path = os.path.join(folder, name)
            if stat.S_ISREG(os.lstat(path).st_mode):
                assert all(VALUE.encode() not in part for part in written_parts(path)), path


def written_parts(path):
    """What a file holds, without its holes: the image of a pool of volumes is gigabytes of almost nothing."""
    step = 16 << 20
    with open(path, "rb") as file:
        number, hole = file.fileno(), 0
        while True:
            try:
                begin = os.lseek(number, hole, os.SEEK_DATA)
            except OSError as error:
                assert error.errno == errno.ENXIO  # nothing but a hole is left
                return
            hole = os.lseek(number, begin, os.SEEK_HOLE)
            for start in range(begin, hole, step):
                yield os.pread(number, step + len(VALUE), start)


def test_change_it(given):
    """Write, remove, replace or re-mode a secret, or leave a file beside it."""

    def attack():
        import os

        from inside import call, first_that_works

        path = os.path.realpath("/run/secrets/TOKEN")
        folder = os.open("/run/secrets", os.O_RDONLY)
        return first_that_works(
            lambda: os.open("/run/secrets/TOKEN", os.O_RDWR) and "write",
            lambda: os.chmod(path, 0o600) or "chmod",
            lambda: os.fchmod(os.open(path, os.O_RDONLY), 0o600) or "fchmod",
            lambda: os.unlink("/run/secrets/TOKEN") or "unlink",
            lambda: os.unlink("/run/secrets/.current") or "unlink",
            lambda: os.rename(path, path + "x") or "rename",
            lambda: os.symlink("/tmp", "/run/secrets/NEW") or "symlink",
            lambda: os.link(path, "/run/secrets/LINK") or "link",
            lambda: os.open("NEW", os.O_CREAT | os.O_WRONLY, dir_fd=folder) and "create",
            lambda: os.open(".", os.O_TMPFILE | os.O_WRONLY, dir_fd=folder) and "tmpfile",
            lambda: os.utime(path) or "utime",
            lambda: os.setxattr(path, "user.x", b"y") or "setxattr",
            lambda: os.open(f"/proc/self/fd/{os.open(path, os.O_RDONLY)}", os.O_RDWR) and "reopen",
            lambda: call("mount", b"none", b"/run/secrets", b"", 32 | 4096, 0) == 0 and "remount",
            lambda: call("umount2", b"/run/secrets", 2) == 0 and "unmount",
        )

    given.attempt(attack)
    assert given.box.commands.run("cat /run/secrets/TOKEN").stdout == VALUE


def test_the_descriptor_that_writes(given):
    """Take over the descriptor through which secrets are written."""

    def attack():
        import os

        from inside import first_that_works

        def through(descriptor):
            handle = os.open(f"/proc/1/fd/{descriptor}", os.O_RDONLY | os.O_DIRECTORY)
            os.close(os.open("NEW", os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=handle))
            return descriptor

        def mine(descriptor):
            os.close(os.open("NEW", os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=descriptor))
            return descriptor if os.path.exists("/run/secrets/NEW") else None

        return first_that_works(
            lambda: os.listdir("/proc/1/fd"),
            *(lambda number=number: through(number) for number in range(64)),
            *(lambda number=number: mine(number) for number in range(3, 64)),
        )

    given.attempt(attack)


def test_run_from_there(given):
    """Run a program that came as a secret."""
    supervisor(given, given.box, {"PROGRAM": "#!/bin/sh\necho ran\n"})
    result = given.box.commands.run("/run/secrets/PROGRAM; chmod +x /run/secrets/PROGRAM; /run/secrets/PROGRAM")
    assert "ran" not in result.stdout
    options = given.box.commands.run("grep ' /run/secrets ' /proc/self/mounts").stdout.split()[3].split(",")
    assert {"ro", "nosuid", "nodev", "noexec"} <= set(options)


def test_of_another_sandbox(given):
    """Read the secrets of another sandbox, or of the one before."""
    other = given.another()
    assert other.commands.run("ls -A /run/secrets").stdout == ""
    supervisor(given, other, {"OTHER": "another-canary-value"})
    assert given.box.commands.run("ls /run/secrets").stdout == "TOKEN\n"
    other.terminate()
    assert given.another().commands.run("ls -A /run/secrets").stdout == ""


def test_gone_with_the_sandbox(attacker):
    """Find a secret again after the sandbox was stopped and started anew on the same workspace."""
    box = attacker.another(f"secretive-{attacker.setting.replace(' ', '-')}")
    supervisor(attacker, box, {"TOKEN": VALUE})
    assert box.commands.run("cat /run/secrets/TOKEN").stdout == VALUE
    box.stop()
    box = attacker.another(f"secretive-{attacker.setting.replace(' ', '-')}")
    assert box.commands.run("ls -A /run/secrets; grep -r canary-of-a-secret . ; true").stdout == ""


def test_replaced_live(given):
    """Go on reading a secret that was replaced, by its name."""
    supervisor(given, given.box, {"TOKEN": "the-next-value"})
    assert given.box.commands.run("cat /run/secrets/TOKEN").stdout == "the-next-value"
    supervisor(given, given.box, {})
    assert given.box.commands.run("cat /run/secrets/TOKEN").exit_code == 1


def test_without_isolation_there_is_no_place(compared):
    """Have secrets laid where every process of the user can read them."""
    answer = supervisor(compared, compared.box, {"TOKEN": VALUE})
    assert answer.status_code == (200 if compared.sealed else 422)
