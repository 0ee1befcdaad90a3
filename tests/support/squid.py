"""A real Squid with a configuration, a password file and a place of its own."""

from __future__ import annotations

import glob
import os
import secrets
import socket
import subprocess
import tempfile
import time
from pathlib import Path

_CONFIGURATION = """
http_port 127.0.0.1:{port}
pid_filename none
access_log none
cache_effective_user nobody
cache_effective_group nogroup
cache_log {directory}/cache.log
coredump_dir {directory}
cache deny all
netdb_filename none
pinger_enable off
visible_hostname squid.test
connect_timeout 2 seconds
auth_param basic program /usr/lib/squid/basic_ncsa_auth {directory}/users
auth_param basic children 2 startup=1 idle=1
auth_param basic utf8 on
acl known proxy_auth REQUIRED
acl closed dst {closed}
http_access deny !known
http_access deny closed
http_access allow all
"""


class Squid:
    """Runs from the moment it is made. Lets `user` through with `password`, and nobody to the address `closed`."""

    def __init__(self, user: str, password: str, *, closed: str = "127.0.0.3"):
        self.directory = Path(tempfile.mkdtemp(prefix="squid"))
        self.directory.chmod(0o777)  # it gives up root by itself
        hashed = subprocess.run(
            ["openssl", "passwd", "-1", "-stdin"], input=password.encode(), capture_output=True, check=True
        ).stdout
        (self.directory / "users").write_bytes(user.encode() + b":" + hashed)
        self._name = "t" + secrets.token_hex(6)  # of what it keeps in /dev/shm
        self._start(closed)

    def _start(self, closed: str) -> None:
        for _attempt in range(5):
            with socket.create_server(("127.0.0.1", 0)) as free:
                self.port: int = free.getsockname()[1]
            path = self.directory / "squid.conf"
            path.write_text(_CONFIGURATION.format(port=self.port, directory=self.directory, closed=closed))
            with open(self.directory / "said", "wb") as said:
                self._process = subprocess.Popen(
                    ["/usr/sbin/squid", "-N", "-n", self._name, "-f", str(path)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=said,
                )
            until = time.monotonic() + 30
            while self._process.poll() is None and time.monotonic() < until:
                try:
                    socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                except OSError:
                    time.sleep(0.02)
                else:
                    return
            self.kill()
        said = (self.directory / "said").read_text()
        self.close()
        raise RuntimeError(f"Squid did not start: {said}")

    def kill(self) -> None:
        """End it at once. Its way of ending by itself takes seconds."""
        self._process.kill()
        self._process.wait()
        for path in glob.glob(f"/dev/shm/{self._name}-*"):
            os.unlink(path)

    def close(self) -> None:
        """End it and remove what it left."""
        self.kill()
        for path in self.directory.iterdir():
            path.unlink()
        self.directory.rmdir()
