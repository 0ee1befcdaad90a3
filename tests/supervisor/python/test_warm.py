"""The program of a warm interpreter: what can be told without a sandbox."""

from __future__ import annotations

import ast
import json
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from carrel.supervisor.python import kernel, warm

PYTHON = "/usr/bin/python3"


@pytest.mark.parametrize("module", [warm, kernel])
def test_stands_alone_and_reads_on_old_pythons(module: object) -> None:
    source = Path(str(module.__file__)).read_text()  # type: ignore[attr-defined]
    tree = ast.parse(source, feature_version=(3, 9))
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported - set(sys.stdlib_module_names) <= {"matplotlib"}


@pytest.mark.parametrize(("given", "code"), [(None, 0), (0, 0), (7, 7), (-1, 255), (True, 1), ("text", 1), ([], 1)])
def test_exit_codes(given: object, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert warm.exit_code(SystemExit(given)) == code


def test_the_whole_protocol(tmp_path: Path) -> None:
    """A thread that starts at an import is kept out; hosts, spares and their ends are told."""
    (tmp_path / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    (tmp_path / "plain.py").write_text("value = 1\n")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    script = warm.__file__
    options = json.dumps({"imports": ["threaded", "plain", "no_such_module"]})
    command = [PYTHON, "-c", warm.RUN % (script, script), script, options]
    environment = {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
    with ours, subprocess.Popen(command, stdin=theirs, stdout=subprocess.DEVNULL, env=environment) as process:
        theirs.close()
        ours.settimeout(20)
        assert json.loads(ours.recv(65536))["version"].startswith("3.")
        mine, hosts = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with mine:
            mine.settimeout(20)
            with hosts:
                socket.send_fds(ours, [b"host"], [hosts.fileno()])
            assert told(mine)[0] == "hello"
            for code, status in (
                ("import sys; sys.exit('threaded' in sys.modules or 'plain' not in sys.modules)", 0),
                ("exit(3)", 3),
            ):
                mine.send(b"prepare")
                assert told(mine)[0] == "spare"
                order(mine, code, environment)
                kind, value = told(mine)
                assert (kind, os.waitstatus_to_exitcode(value)) == ("ended", status)
                assert told(mine) == ("clean", 0)
        ours.close()
        assert process.wait(20) == 0


def told(connection: socket.socket) -> tuple[str, int]:
    kind, value = struct.unpack("=8sq", connection.recv(64))
    return kind.rstrip(b"\0").decode(), value


def order(connection: socket.socket, code: str, environment: dict[str, str]) -> None:
    memory = os.memfd_create("order")
    os.write(memory, json.dumps({"code": code, "env": environment}).encode())
    place, null = os.open("/", os.O_RDONLY), os.open(os.devnull, os.O_RDWR)
    socket.send_fds(connection, [b"run"], [memory, place, null, null, null])
    for descriptor in (memory, place, null):
        os.close(descriptor)
