"""A real SPIRE server and agent on loopback, as `scripts/build-spire` has built them."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from carrel.primitives.trees import remove_tree

_MODULES = Path(__file__).parents[2] / "scripts" / "spire" / "go.mod"
VERSION = re.findall(r"^require github.com/spiffe/spire (\S+)$", _MODULES.read_text(), re.MULTILINE)[0]
START_S = 60.0
_SERVER = """
server {{
  bind_address = "127.0.0.1" bind_port = "{port}" socket_path = "{place}/server.sock" trust_domain = "{domain}"
  data_dir = "{place}/server" log_level = "WARN" ca_ttl = "24h"
}}
plugins {{
  DataStore "sql" {{ plugin_data {{ database_type = "sqlite3" connection_string = "{place}/server/data.sqlite3" }} }}
  NodeAttestor "join_token" {{ plugin_data {{}} }}
  KeyManager "memory" {{ plugin_data {{}} }}
}}
"""
_AGENT = """
agent {{
  data_dir = "{place}/agent" log_level = "WARN" server_address = "127.0.0.1" server_port = "{port}"
  socket_path = "{place}/agent.sock" trust_domain = "{domain}" trust_bundle_path = "{place}/bundle.pem"
}}
plugins {{
  NodeAttestor "join_token" {{ plugin_data {{}} }}
  KeyManager "memory" {{ plugin_data {{}} }}
  WorkloadAttestor "unix" {{ plugin_data {{}} }}
}}
"""


def programs() -> Path:
    """The folder of the programs; without it the test is skipped with the reason."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    found = Path(cache, "carrel", "spire", VERSION)
    if not os.access(found / "spire-agent", os.X_OK) or not os.access(found / "spire-server", os.X_OK):
        pytest.skip("SPIRE is not there: scripts/build-spire builds it, which needs Go and gcc")
    return found


class Spire:
    """A trust domain. Every process of this user is a workload with all of its entries."""

    def __init__(self, trust_domain: str):
        self._programs = programs()
        self.trust_domain = trust_domain
        self._place = Path(tempfile.mkdtemp(prefix="spire"))
        self._place.chmod(0o755)
        self._running: list[subprocess.Popen[bytes]] = []
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    @property
    def agent_socket(self) -> str:
        return str(self._place / "agent.sock")

    def _start(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as found:
            port = found.getsockname()[1]
        for name, text in (("server", _SERVER), ("agent", _AGENT)):
            (self._place / name).mkdir()
            (self._place / f"{name}.conf").write_text(
                text.format(place=self._place, port=port, domain=self.trust_domain)
            )
        self._run("server", "-config", str(self._place / "server.conf"))
        self._wait("server")
        (self._place / "bundle.pem").write_text(self._ask("bundle", "show"))
        token = self._ask("token", "generate", "-spiffeID", self.id("machine")).split()[1]
        self._run("agent", "-config", str(self._place / "agent.conf"), "-joinToken", token)
        self._wait("agent")

    def _run(self, program: str, *words: str) -> None:
        with (self._place / f"{program}.log").open("wb") as log:
            command = [str(self._programs / f"spire-{program}"), "run", *words]
            self._running.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log))

    def _wait(self, program: str) -> None:
        until = time.monotonic() + START_S
        check = [str(self._programs / f"spire-{program}"), "healthcheck"]
        while subprocess.run(
            [*check, "-socketPath", str(self._place / f"{program}.sock")], capture_output=True
        ).returncode:
            log = (self._place / f"{program}.log").read_text()
            assert self._running[-1].poll() is None and time.monotonic() < until, log
            time.sleep(0.1)

    def _ask(self, *words: str) -> str:
        command = [str(self._programs / "spire-server"), *words, "-socketPath", str(self._place / "server.sock")]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def id(self, path: str) -> str:
        return f"spiffe://{self.trust_domain}/{path}"

    def register(self, path: str, *, ttl_s: int) -> str:
        """Make an entry for a workload; return its id."""
        said = self._ask(
            *("entry", "create", "-parentID", self.id("machine"), "-spiffeID", self.id(path)),
            *("-selector", f"unix:uid:{os.geteuid()}", "-x509SVIDTTL", str(ttl_s)),
        )
        return re.findall(r"Entry ID\s*: (\S+)", said)[0]

    def forget(self, entry: str) -> None:
        self._ask("entry", "delete", "-entryID", entry)

    def log(self) -> str:
        return "".join((self._place / f"{name}.log").read_text() for name in ("server", "agent"))

    def close(self) -> None:
        for process in reversed(self._running):
            process.terminate()
        for process in self._running:
            process.wait(30)
        remove_tree(str(self._place))
