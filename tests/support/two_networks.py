"""Two network namespaces with a line between them that can be cut as a network cuts it: packets are lost, nobody is told."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

import httpx
from tests.support.fleet import TOKEN

ADDRESSES = {"a": "10.99.0.1", "b": "10.99.0.2"}
NOBODY = "02:00:00:00:00:99"


class TwoNetworks:
    """The namespaces `a` and `b`. They end with the block."""

    def __enter__(self) -> TwoNetworks:
        self._holders = {name: subprocess.Popen(["unshare", "--net", "--", "sleep", "3600"]) for name in ADDRESSES}
        self._relays: list[subprocess.Popen[str]] = []
        try:
            for holder in self._holders.values():
                _until_apart(holder.pid)
            pids = {name: str(holder.pid) for name, holder in self._holders.items()}
            veth = ["ip", "link", "add", "line", "netns", pids["a"], "type", "veth"]
            subprocess.run([*veth, "peer", "name", "line", "netns", pids["b"]], check=True)
            for name, address in ADDRESSES.items():
                self._ip(name, "link", "set", "lo", "up")
                self._ip(name, "address", "add", f"{address}/24", "dev", "line")
                self._ip(name, "link", "set", "line", "up")
        except BaseException:
            self._end()
            raise
        return self

    def within(self, name: str) -> list[str]:
        """The words before a command that runs in a namespace."""
        return ["nsenter", f"--net=/proc/{self._holders[name].pid}/ns/net", "--"]

    def _ip(self, name: str, *words: str) -> None:
        subprocess.run([*self.within(name), "ip", *words], check=True)

    def cut(self) -> None:
        """Lose every packet between the two."""
        for name, other in (("a", "b"), ("b", "a")):
            words = ("neigh", "replace", ADDRESSES[other], "lladdr", NOBODY, "nud", "permanent", "dev", "line")
            self._ip(name, *words)

    def mend(self) -> None:
        """Undo `cut`."""
        for name, other in (("a", "b"), ("b", "a")):
            self._ip(name, "neigh", "del", ADDRESSES[other], "dev", "line")

    def http(self, name: str, url: str, directory: Path) -> httpx.AsyncClient:
        """A client of a server in a namespace, from outside."""
        path = str(directory / f"{name}.sock")
        where = httpx.URL(url)
        words = [sys.executable, "-m", "tests.support.relays", path, str(where.host), str(where.port)]
        relay = subprocess.Popen(
            [*self.within(name), *words],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._relays.append(relay)
        assert relay.stdout is not None
        assert relay.stdout.readline() == "ready\n"
        headers = {"authorization": f"Bearer {TOKEN}"}
        return httpx.AsyncClient(
            base_url=url, headers=headers, timeout=90, transport=httpx.AsyncHTTPTransport(uds=path)
        )

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        for relay in self._relays:
            relay.communicate()
        for holder in self._holders.values():
            holder.kill()
            holder.wait()


def _until_apart(pid: int) -> None:
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}/ns/net").readlink() == Path("/proc/self/ns/net").readlink():
        assert time.monotonic() < deadline
        time.sleep(0.005)
