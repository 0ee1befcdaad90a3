"""Attacks by way of the file calls of the API: whoever asks for a path must never leave the workspace with it."""

import io
import os
import tarfile
import threading
import time

import pytest

from carrel.errors import CarrelError, FileMissing, InvalidPath, InvalidRequest
from carrel.models import FileKind

UP = "/".join([".."] * 24)
REFUSED = (InvalidPath, FileMissing, InvalidRequest)


@pytest.fixture
def paths(attacker):
    """Ways to name the canary: upwards, from the root, through links of several kinds."""
    host = attacker.host
    attacker.box.commands.run(
        f"ln -s {host.secret} file; ln -s {host.directory} directory; ln -s / root; ln -s {UP}/ up; mkdir -p a/b; "
        f"ln -s ../../../../../../../../{host.directory} a/b/far; ln -s /proc/1/root magic; ln -s /proc/self/cwd cwd; ln -s first second; ln -s second first"
    )
    inside = host.secret.lstrip("/")
    return [
        f"{UP}/{inside}",
        host.secret,
        f"data/{UP}/{inside}",
        f"/workspace/{UP}/{inside}",
        f"././/data/../../{UP}/{inside}",
        "file",
        "directory/secret",
        f"root/{inside}",
        f"up/{inside}",
        "a/b/far/secret",
        f"magic/{inside}",
        f"cwd/{UP}/{inside}",
        "first",
        f"/proc/self/root{host.secret}",
        f"/proc/1/root{host.secret}",
    ]


def refused(act):
    """Nothing but a clear refusal will do."""
    with pytest.raises(CarrelError) as caught:
        act()
    assert isinstance(caught.value, REFUSED), caught.value


def test_read(attacker, paths):
    """Read a host file by the file call."""
    for path in paths:
        refused(lambda path=path: attacker.box.files.read(path))


def test_write(attacker, paths):
    """Write a host file by the file call."""
    for path in paths:
        try:
            attacker.box.files.write(path, b"overwritten")
        except CarrelError as error:
            assert error.status < 500, error
    assert attacker.host.intact()


def test_write_beside(attacker, paths):
    """Make a new file on the host by the file call."""
    drop = attacker.host.drop
    for path in (f"{UP}{drop}/x", f"{drop}/x", f"root{drop}/x", "directory/drop/x", "a/b/far/drop/x", f"up{drop}/x"):
        refused(lambda path=path: attacker.box.files.write(path, b"x"))
    assert attacker.host.dropped() == []


def test_list(attacker, paths):
    """List a host directory by the file call."""
    for path in (*paths, "root", "up", "directory", "magic", "a/b/far", "/", "..", f"{UP}/etc", "/etc"):
        refused(lambda path=path: attacker.box.files.list(path))


def test_list_recursively(attacker, paths):
    """Have a recursive listing follow a link out."""
    found = attacker.box.files.list(".", recursive=True, limit=10_000)
    assert not any("secret" in entry.path for entry in found)


def test_stat(attacker, paths):
    """Learn whether a host file exists, by the file call."""
    for path in (p for p in paths if p not in ("file", "first")):
        refused(lambda path=path: attacker.box.files.stat(path))
    assert attacker.box.files.stat("file").kind is FileKind.SYMLINK


def test_move_from(attacker, paths):
    """Move a host file into the workspace."""
    for path in (p for p in paths if p not in ("file", "first")):
        refused(lambda path=path: attacker.box.files.move(path, "taken"))
    assert attacker.host.intact()


def test_move_to(attacker, paths):
    """Move a file of the workspace onto the host."""
    attacker.box.files.write("mine", b"x")
    drop = attacker.host.drop
    for path in (f"{UP}{drop}/x", f"{drop}/x", f"root{drop}/x", "directory/drop/x", "a/b/far/drop/x", f"up{drop}/x"):
        refused(lambda path=path: attacker.box.files.move("mine", path))
    assert attacker.host.dropped() == []
    assert attacker.box.files.read("mine") == b"x"


def test_delete(attacker, paths):
    """Delete a host file by the file call."""
    for path in (p for p in paths if p not in ("file", "first")):
        refused(lambda path=path: attacker.box.files.delete(path))
    assert attacker.host.intact()


def test_delete_recursively(attacker, paths):
    """Have a recursive delete follow a link out."""
    attacker.box.files.delete("a", recursive=True)
    for path in ("directory", "root", "up"):
        attacker.box.files.delete(path, recursive=True)  # the link itself
    assert attacker.host.intact()
    for path in ("..", "/", f"{UP}{attacker.host.directory}"):
        refused(lambda path=path: attacker.box.files.delete(path, recursive=True))


def test_mkdir(attacker, paths):
    """Make a directory on the host by the file call."""
    drop = attacker.host.drop
    for path in (f"{UP}{drop}/x", f"{drop}/x", f"root{drop}/x", "directory/drop/x", "a/b/far/drop/x"):
        refused(lambda path=path: attacker.box.files.mkdir(path))
    assert attacker.host.dropped() == []


def test_edit(attacker, paths):
    """Edit a host file by the file call."""
    for path in paths:
        refused(lambda path=path: attacker.box.files.edit(path, attacker.host.token, "x"))
    assert attacker.host.intact()


def test_upload(attacker, paths):
    """Upload onto the host."""
    drop = attacker.host.drop
    for path in (f"{UP}{drop}/x", f"{drop}/x", f"root{drop}/x", "directory/drop/x"):
        refused(lambda path=path: attacker.box.files.upload(io.BytesIO(b"x" * 1_000_000), path))
    assert attacker.host.dropped() == []


def test_download(attacker, paths, tmp_path):
    """Have a download bring a host file, or write outside the directory it was told."""
    for path in paths:
        refused(lambda path=path: attacker.box.files.read(path))
    attacker.box.files.download(".", tmp_path / "got")
    taken = [
        path for path in (tmp_path / "got").rglob("*") if path.is_file() and attacker.host.token in path.read_text()
    ]
    assert taken == []
    assert os.listdir(tmp_path) == ["got"]


def test_working_directory(attacker, paths):
    """Run a command in a host directory."""
    for path in (
        f"{UP}{attacker.host.directory}",
        str(attacker.host.directory),
        "directory",
        "root",
        "up",
        "magic",
        "..",
        "/",
    ):
        try:
            result = attacker.box.commands.run(["/bin/ls"], cwd=path)
        except CarrelError as error:
            assert isinstance(error, REFUSED), error
        else:
            assert "secret" not in result.stdout


def test_files_of_execute(attacker, paths):
    """Place a file on the host with the files of `execute`."""
    for path in (f"{UP}{attacker.host.drop}/x", f"{attacker.host.drop}/x", "directory/drop/x"):
        refused(lambda path=path: attacker.box.execute("true", files={path: b"x"}))
    assert attacker.host.dropped() == []


def test_tool_paths(attacker, paths):
    """Place a file on the host with the tool `create_file`."""
    for path in (f"{UP}{attacker.host.drop}/x", f"{attacker.host.drop}/x", "directory/drop/x"):
        refused(lambda path=path: attacker.box.tool("create_file", {"path": path, "content": "x"}))
    assert attacker.host.dropped() == []


def test_odd_names(attacker):
    """Confuse the file calls by names that are not text, too long, empty, or hold a NUL."""
    for path in ("", "a\0b", "x" * 300, "a/" * 2100, "."):
        try:
            attacker.box.files.write(path, b"x")
        except CarrelError as error:
            assert error.status < 500, (path, error)
    assert attacker.box.commands.run("echo alive").stdout == "alive\n"


def test_special_files(attacker):
    """Hang the supervisor on a file that never answers."""
    attacker.box.commands.run("mkfifo pipe; ln -s /dev/zero zero; ln -s /dev/tty tty", check=True)
    attacker.box.commands.start(
        ["/usr/bin/python3", "-c", "import socket,time; s=socket.socket(1); s.bind('sock'); s.listen(); time.sleep(60)"]
    )
    for name in ("pipe", "zero", "tty", "sock"):  # who hangs here fails the test by the time it takes
        for act in (attacker.box.files.read, lambda name: attacker.box.files.edit(name, "a", "b")):
            refused_or_conflict(lambda name=name, act=act: act(name))
    assert attacker.box.commands.run("echo alive").stdout == "alive\n"


def refused_or_conflict(act):
    with pytest.raises(CarrelError) as caught:
        act()
    assert caught.value.status < 500, caught.value


RACE = """
import os, sys
target = sys.argv[1]
os.makedirs("real", exist_ok=True); open("real/secret", "w").write("mine"); os.makedirs("real/drop", exist_ok=True)
if not os.path.lexists("way"): os.symlink(target, "way")
os.rename("real", "swap")
import ctypes
rename = ctypes.CDLL(None).renameat2
while True:
    rename(-100, b"swap", -100, b"way", 2)  # exchanged at once
"""


def test_race_of_a_directory_and_a_link(attacker):
    """Exchange a directory for a link to the host between the check and the use."""
    host, files = attacker.host, attacker.box.files
    attacker.box.commands.start(["/usr/bin/python3", "-c", RACE, str(host.directory)], timeout=90)
    outcomes = set()

    def hammer():
        began = time.monotonic()
        # Longer where the race takes its time to begin.
        while (spent := time.monotonic() - began) < 2.5 or (spent < 60 and "mine" not in outcomes):
            for act in (
                lambda: files.read("way/secret"),
                lambda: files.write("way/drop/x", b"x", parents=False),
                lambda: files.list("way"),
                lambda: files.delete("way/drop/x"),
                lambda: files.edit("way/secret", host.token, "gone"),
                lambda: files.move("way/secret", "way/secret"),
            ):
                try:
                    answer = act()
                    if isinstance(answer, bytes):
                        outcomes.add(answer.decode())
                except CarrelError as error:
                    outcomes.add(error.code)
                    assert error.status < 500, error

    threads = [threading.Thread(target=hammer) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert host.token not in outcomes
    met = {"file_not_found", "invalid_path"} <= outcomes and attacker.own_kernel  # both, and its reads come late
    assert "mine" in outcomes or met, "the race was never run"
    assert host.dropped() == []
    assert host.intact()


@pytest.mark.parametrize("how", ["up", "absolute", "symlink", "hardlink"])
def test_archive_members(attacker, how):
    """Have an archive, unpacked inside, write outside."""
    drop = attacker.host.drop
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:

        def add(name, **fields):
            member = tarfile.TarInfo(name)
            member.size = 1 if not fields else 0
            for key, value in fields.items():
                setattr(member, key, value)
            archive.addfile(member, io.BytesIO(b"x") if not fields else None)

        if how == "up":
            add(f"{UP}{drop}/x")
        elif how == "absolute":
            add(f"{drop}/x")
        elif how == "symlink":
            add("way", type=tarfile.SYMTYPE, linkname=drop)
            add("way/x")
        else:
            add("link", type=tarfile.LNKTYPE, linkname=attacker.host.secret)
    attacker.box.files.write("evil.tar", data.getvalue())
    attacker.box.commands.run(
        "tar -P -xf evil.tar; python3 -c 'import tarfile; tarfile.open(\"evil.tar\").extractall()'"
    )
    assert attacker.host.dropped() == []
    assert attacker.box.commands.run("cat link 2>/dev/null").stdout == ""


def test_owner_of_uploads(attacker):
    """Have a file of the API's end up owned by somebody with more rights."""
    attacker.box.files.write("mine", b"x", mode=0o755)
    refused(lambda: attacker.box.files.write("mine", b"x", mode=0o4755))
    assert attacker.box.commands.run("stat -c %u mine").stdout == attacker.box.commands.run("id -u").stdout


def test_workspace_is_replaced(attacker):
    """Exchange the root of the workspace itself for a link."""
    attacker.box.commands.run("cd /; mv /workspace /workspace2; rm -rf /workspace; ln -s / /workspace")
    attacker.box.files.write("still", b"here")
    assert attacker.box.commands.run("cat /workspace/still").stdout == "here"
