"""A real S3 server for tests: SeaweedFS from its wheel, on loopback ports that were free, in a directory of its own."""

from __future__ import annotations

import json
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

# The server's parent: it lives as long as the fixture, so that a server that is started again belongs to the fixture
# too, and it takes the server with it when the tests are killed.
_KEEPER = """
import subprocess, sys
server = None
for line in sys.stdin:
    word = line.strip()
    if word == "start":
        with open(sys.argv[1], "ab") as log:
            server = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    elif word == "stop" and server is not None:
        server.kill()
        server.wait()
    alive = server is not None and server.poll() is None
    print("alive" if alive else "dead", flush=True)
if server is not None:
    server.kill()
    server.wait()
"""
_PORTS = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc")
_MORE_PORTS = ("filer.port", "filer.port.grpc", "s3.port", "s3.port.grpc")
_PATIENCE_S = 60.0


def _free_ports(count: int) -> list[int]:
    taken = [socket.socket() for _ in range(count)]
    try:
        for each in taken:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in taken]
    finally:
        for each in taken:
            each.close()


class S3Server:
    """Started when made, with one bucket; may be stopped and started again on the same port with what it holds."""

    bucket = "carrel-tests"

    def __init__(self) -> None:
        self._keeper: subprocess.Popen[str] | None = None
        self._home = Path(tempfile.mkdtemp(prefix="s3-"))
        self.access_key, self.secret_key = secrets.token_hex(10), secrets.token_hex(20)
        identity = {
            "name": "tests",
            "credentials": [{"accessKey": self.access_key, "secretKey": self.secret_key}],
            "actions": ["Admin", "Read", "Write", "List"],
        }
        (self._home / "s3.json").write_text(json.dumps({"identities": [identity]}))
        (self._home / "data").mkdir()
        for left in reversed(range(3)):
            names = (*_PORTS, *_MORE_PORTS)
            self._ports = dict(zip(names, _free_ports(len(names)), strict=True))
            try:
                self.start()
                break
            except RuntimeError:  # another process took a port in between
                self._dismiss()
                if not left:
                    self.close()
                    raise

    @property
    def endpoint(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._ports['s3.port']}"

    @property
    def environment(self) -> dict[str, str]:
        """The keys, as programs expect them."""
        return {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}

    def url(self, prefix: str = "", bucket: str = "") -> str:
        """The URL of a place in the bucket, as carrel wants it."""
        return f"s3://{bucket or self.bucket}/{prefix}?endpoint={self.endpoint}&region=us-east-1"

    def start(self) -> None:
        """Start it and wait until it keeps an object."""
        argv = [
            str(Path(sys.executable).parent / "weed"), "-logtostderr=true", "server", f"-dir={self._home / 'data'}",
            "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false", "-master.volumeSizeLimitMB=256",
            "-master.electionTimeout=1s", "-volume.max=100", "-volume.minFreeSpace=1", "-filer", "-s3",
            f"-filer.localSocket={self._home / 'filer.sock'}", f"-s3.localSocket={self._home / 's3.sock'}",
            f"-s3.config={self._home / 's3.json'}", "-s3.autoCreateBucket=false", "-s3.port.iceberg=0",
            "-s3.port.lance=0", *(f"-{name}={port}" for name, port in self._ports.items()),
        ]  # fmt: skip
        if self._keeper is None:
            self._keeper = subprocess.Popen(
                [sys.executable, "-c", _KEEPER, str(self._home / "log"), *argv],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=self._home, text=True, start_new_session=True,
            )  # fmt: skip
        self._tell("start")
        until = time.monotonic() + _PATIENCE_S
        while not self._ready():
            if not self._tell("look") or time.monotonic() > until:
                raise RuntimeError(f"the S3 server does not start: {(self._home / 'log').read_text()[-2000:]}")
            time.sleep(0.05)

    def _tell(self, word: str) -> bool:
        assert self._keeper is not None
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        print(word, file=self._keeper.stdin, flush=True)
        return self._keeper.stdout.readline().strip() == "alive"

    def _ready(self) -> bool:
        store = S3Store(
            self.bucket,
            config={
                "endpoint": self.endpoint,
                "region": "us-east-1",
                "access_key_id": self.access_key,
                "secret_access_key": self.secret_key,
            },
            client_options={"allow_http": True, "timeout": "5s"},
            retry_config={"max_retries": 0},
        )
        try:
            obstore.put(store, "ready", b"ready")
            return bytes(obstore.get(store, "ready").bytes()) == b"ready"
        except FileNotFoundError:
            self._make_bucket()
            return False
        except BaseError:
            return False

    def _make_bucket(self) -> None:
        folder = f"http://127.0.0.1:{self._ports['filer.port']}/buckets/{self.bucket}/"
        with suppress(OSError), urllib.request.urlopen(urllib.request.Request(folder, method="POST"), timeout=5):
            pass

    def stop(self) -> None:
        """As if the machine had lost power."""
        self._tell("stop")

    def close(self) -> None:
        """Stop it and remove everything."""
        self._dismiss()
        shutil.rmtree(self._home)

    def _dismiss(self) -> None:
        if self._keeper is not None:
            self._keeper.communicate()
            self._keeper = None
