"""The supervisor's bundle: the same bytes each time, kept and checked, and enough for a root that has nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.bundles import MOUNTS, program

from carrel.models import Network
from carrel.providers import bundle
from carrel.providers.base import RootImage
from carrel.providers.bundle_parts import ARCHIVE

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a program in another root directory")
LARGEST = 24 << 20


@pytest.fixture(scope="module")
def made(bundles):
    return bundle.provide(str(bundles))


def test_bundle_is_small_read_only_and_names_no_path_of_this_host(made):
    assert made.size < LARGEST
    for folder, names, files in os.walk(made.path):
        for name in (*names, *files):
            path = Path(folder, name)
            if not path.is_symlink():
                assert not path.stat().st_mode & 0o222, path
                assert path.stat().st_mode & 0o444 == 0o444, path
    here = str(Path(bundle.__file__).parent.parent).encode()
    written = [path for path in Path(made.path).rglob("*") if path.suffix == ".pyc" or path.name == ARCHIVE]
    assert len(written) > 3
    assert not [path for path in written if here in path.read_bytes()]


def test_two_servers_make_the_same_bundle_once(made, tmp_path):
    with ThreadPoolExecutor() as pool:
        [one, other] = pool.map(bundle.provide, [str(tmp_path)] * 2)
    assert one == other
    assert (one.digest, one.size, one.files) == (made.digest, made.size, made.files)
    assert sorted(os.listdir(tmp_path)) == sorted([".lock", made.digest])


def test_a_damaged_bundle_and_a_killed_build_are_replaced(made, bundles, tmp_path):
    shutil.copytree(bundles, tmp_path / "copy", symlinks=True)
    victim = Path(made.path.replace(str(bundles), str(tmp_path / "copy")), "bin/python3")
    victim.chmod(0o755)
    victim.write_bytes(b"damaged")
    victim.chmod(0o555)
    others = set(os.listdir(tmp_path / "copy"))
    (tmp_path / "copy" / "draft-0").mkdir()
    again = bundle.provide(str(tmp_path / "copy"))
    assert again.digest == made.digest
    assert set(os.listdir(tmp_path / "copy")) == others
    assert Path(again.path, "bin/python3").stat().st_size > 1000


def test_another_installation_is_another_bundle(made, bundles, monkeypatch):
    calls = []
    monkeypatch.setattr(bundle, "_build", lambda directory, remote: calls.append(directory))
    bundle.provide(str(bundles))
    assert not calls
    monkeypatch.setattr(bundle, "FORMAT", bundle.FORMAT + 1)
    bundle.provide(str(bundles))
    assert calls


@needs_root
async def test_supervisor_serves_in_a_root_that_holds_nothing_else(made, tmp_path):
    root = tmp_path / "root"
    async with program(made, root, tmp_path, env={"GIVEN": "yes"}) as box:
        assert {each.name for each in root.iterdir()} == {name.split("/")[0] for name in MOUNTS}
        told = await box.python(
            "import os; print(os.getuid(), os.getgid(), os.getgroups(), os.getpid() > 1, os.environ['GIVEN']);"
            "print([line for line in open('/proc/self/status') if line.startswith(('CapPrm', 'CapEff', 'NoNew'))])"
        )
        assert told["stderr"] == ""
        ids, status = told["stdout"].splitlines()
        assert ids == "1000 1000 [] True yes"
        assert status.count("0000000000000000") == 2
        assert "NoNewPrivs:\\t1" in status
        # Nothing inside is a shell.
        assert (await box.run("echo hello"))["exit_code"] == 127
        await box.connection.request("PUT", "/files/content?path=note", b"kept")
        assert await box.connection.request("GET", "/files/content?path=note") == b"kept"


@needs_root
async def test_agent_cannot_reach_its_supervisor(made, tmp_path):
    async with program(made, tmp_path / "root", tmp_path) as box:
        secret = b64encode(b"value").decode()
        await box.connection.request_json("PUT", "/secrets", {"secrets": {"TOKEN": secret}})
        code = """
import os, socket
def attempt(name, call):
    try: print(name, 'DONE', call())
    except OSError as error: print(name, 'refused', error.errno)
private = '/run/carrel/private'
attempt('list', lambda: os.listdir('/run/carrel'))
attempt('report', lambda: socket.socket(socket.AF_UNIX).connect(private + '/report'))
attempt('socket', lambda: socket.socket(socket.AF_UNIX).connect(private + '/socket'))
attempt('rename', lambda: os.rename('/run/carrel/private', '/run/carrel/other'))
attempt('put', lambda: open('/run/carrel/egress', 'w'))
attempt('memory', lambda: open('/proc/1/mem', 'rb+'))
attempt('variables', lambda: open('/proc/1/environ').read())
attempt('descriptors', lambda: os.listdir('/proc/1/fd'))
attempt('secret', lambda: open('/run/secrets/TOKEN', 'w'))
attempt('unlink', lambda: os.unlink('/run/secrets/TOKEN'))
attempt('second', lambda: os.listdir(private + '/secrets'))
attempt('bundle', lambda: open('/opt/carrel/bin/python3', 'ab'))
os.kill(1, 9), os.kill(1, 15)
print(open('/run/secrets/TOKEN').read())
"""
        said = (await box.python(code))["stdout"].splitlines()
        assert said.pop() == "value"
        assert len(said) == 12
        assert not [line for line in said if "DONE" in line]
        assert (await box.connection.request_json("GET", "/health"))["status"] == "ok"


@needs_root
async def test_modules_that_are_imported_later_come_from_the_bundle(made, tmp_path):
    async with program(made, tmp_path / "root", tmp_path) as box:
        code = "import sys\nsys.meta_path[0].close()\nimport socket, json, _json; print(json.__file__, _json.__file__)"
        told = await box.python(code)
        assert told["stderr"] == ""
        pure, shared = told["stdout"].split()
        assert pure.endswith("/json/__init__.pyc")
        assert os.path.isfile(pure.replace(bundle.BUNDLE, made.path, 1)) is False
        assert os.path.isfile(shared.replace(bundle.BUNDLE, made.path, 1))


@needs_root
async def test_orphans_are_reaped(made, tmp_path):
    async with program(made, tmp_path / "root", tmp_path) as box:
        await box.python("import os\nfor _ in range(5):\n    if os.fork() == 0:\n        os.setsid(); os._exit(0)")

        async def children() -> str:
            return Path(f"/proc/{box.pid}/task/{box.pid}/children").read_text()

        async with asyncio.timeout(10):
            while await children():
                await asyncio.sleep(0.02)


@needs_root
async def test_connections_leave_by_the_socket_of_the_sandbox(made, tmp_path):
    client = (
        "import socket; c = socket.create_connection(('127.0.0.1', 3128)); c.sendall(b'x' * 600000); "
        "c.shutdown(socket.SHUT_WR); got = b''\n"
        "while part := c.recv(65536): got += part\n"
        "print(len(got), got[:5])"
    )
    loop = asyncio.get_running_loop()

    async def answer(listener: socket.socket) -> None:
        listener.setblocking(False)
        connection, _ = await loop.sock_accept(listener)
        with connection:
            connection.setblocking(False)
            count = 0
            while part := await loop.sock_recv(connection, 65536):
                count += len(part)
            await loop.sock_sendall(connection, b"hello" * count)

    async with program(made, tmp_path / "root", tmp_path, network=Network.ALLOWLIST) as box:
        asked = asyncio.ensure_future(box.python(client))  # nobody listens yet: it waits
        for _ in range(2):  # the second socket replaces the first, as after a restart of the server
            with box.control.listen_for_egress() as listener:
                await answer(listener)
            assert (await asked)["stdout"] == "3000000 b'hello'\n"
            asked = asyncio.ensure_future(box.python(client))
        asked.cancel()


@needs_root
async def test_libraries_that_an_image_preloads_are_not_loaded(made, tmp_path):
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    (root / "etc/ld.so.preload").write_text("/nothing.so\n")
    async with program(made, root, tmp_path) as box:
        assert (await box.python("print(1)"))["stderr"] == ""


@needs_root
async def test_facts_that_are_wrong_are_reported(made, tmp_path):
    with pytest.raises(Exception, match=r"did not start: .*/nowhere"):
        async with program(
            made, tmp_path / "root", tmp_path, image=RootImage("", (0, 0), working_directory="/nowhere")
        ):
            pass


def test_command_line_makes_it_and_prints_its_path(tmp_path, made):
    said = subprocess.run(
        [shutil.which("carrel", path=str(Path(sys.executable).parent)), "bundle", "--json", "--data-dir", tmp_path],
        check=True,
        capture_output=True,
    )
    shown = json.loads(said.stdout)
    assert shown["digest"] == made.digest
    assert Path(shown["path"]).is_dir()
