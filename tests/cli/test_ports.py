"""`carrel port`: a URL, the list, and a local port that many programs use at once."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.cli.conftest import environment
from tests.support import port_server

Carrel = Callable[..., subprocess.CompletedProcess[bytes]]


def ask(address: tuple[str, int], number: int) -> bytes:
    """Send bytes to an echoing server, end this direction, and read the rest."""
    with socket.create_connection(address, 30) as connection:
        connection.sendall(b"%d" % number)
        connection.shutdown(socket.SHUT_WR)
        data = b""
        while more := connection.recv(1000):
            data += more
    return data


def test_urls_and_a_forwarded_port(carrel: Carrel, data_dir: Path) -> None:
    name = f"cli-{uuid.uuid4().hex[:12]}"
    program = Path(port_server.__file__).read_text()
    assert carrel("exec", name, "cat > server.py", stdin=program.encode()).returncode == 0
    try:
        assert carrel("exec", name, "python3 server.py >/dev/null 2>&1 &").returncode == 0
        made = carrel("port", name, "8000", "--wait", "30")
        assert made.returncode == 0, made.stderr
        with urllib.request.urlopen(made.stdout.decode().strip()) as answer:
            assert json.load(answer)["target"] == "/"
        assert b"7000" in carrel("port", name).stdout
        closed = carrel("port", name, "1", "--local", "0", "--public")
        assert closed.returncode == 2
        refused = carrel("port", name, "8000", "--public")
        assert refused.returncode == 1 and b"CARREL_PORTS_ALLOW_PUBLIC" in refused.stderr

        command = [sys.executable, "-m", "carrel", "port", name, "7000", "--local", "0"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment(data_dir)) as forwarding:
            assert forwarding.stderr is not None
            told = forwarding.stderr.readline().decode()
            found = re.search(r"127\.0\.0\.1:(\d+)", told)
            assert found is not None, told
            address = "127.0.0.1", int(found[1])
            with ThreadPoolExecutor(20) as pool:
                answers = list(pool.map(lambda number: ask(address, number), range(40)))
            assert answers == [b"%dbye" % number for number in range(40)]
            with socket.create_connection(address, 30) as connection:
                connection.sendall(b"x")
                assert connection.recv(1) == b"x"
                forwarding.send_signal(signal.SIGINT)
                assert connection.recv(1) == b"", "it ends with the command"
            assert forwarding.wait(30) == 130
            assert forwarding.stderr.read() == b""
    finally:
        carrel("rm", "--yes", "--files", name)
