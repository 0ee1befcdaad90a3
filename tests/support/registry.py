"""A real image registry: Debian's docker-registry, plain, with a password, and with TLS; and layers to put into it."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import shutil
import socket
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from carrel.images.documents import OCI_CONFIG, OCI_LAYER, BlobDescriptor, ImageConfig, ImageManifest, ImagePlatform
from carrel.images.storage import ImageStorage

_CONFIGURATION = """
version: 0.1
log: {{level: warn, accesslog: {{disabled: true}}}}
storage: {{filesystem: {{rootdirectory: {directory}/data}}, delete: {{enabled: true}}}}
http: {{addr: "127.0.0.1:{port}", secret: tests{tls}}}
{auth}
"""
USER, PASSWORD = "ada", "correct horse"
_BCRYPT = "$2b$04$abcdefghijklmnopqrstuujydOTSfIH/d5oUHpsygqV5X9xJLQc6e"
"""Of the password: the registry takes no other form."""


class RegistryServer:
    """Runs from the moment it is made. `host` is its name in references."""

    def __init__(self, *, password: bool = False, tls: bool = False):
        self.directory = Path(tempfile.mkdtemp(prefix="registry"))
        self.certificate = self.directory / "certificate.pem"
        self.docker_config = self.directory / "config.json"
        self.docker_config.write_text("{}")
        tls_part = auth = ""
        if tls:
            key = self.directory / "key.pem"
            subprocess.run(
                ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
                 "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
                 "-keyout", str(key), "-out", str(self.certificate)],
                check=True, capture_output=True,
            )  # fmt: skip
            tls_part = f", tls: {{certificate: {self.certificate}, key: {key}}}"
        if password:
            (self.directory / "users").write_text(f"{USER}:{_BCRYPT}\n")
            auth = f"auth: {{htpasswd: {{realm: tests, path: {self.directory}/users}}}}"
        for _attempt in range(5):
            with socket.create_server(("127.0.0.1", 0)) as free:
                port: int = free.getsockname()[1]
            path = self.directory / "config.yml"
            path.write_text(_CONFIGURATION.format(directory=self.directory, port=port, tls=tls_part, auth=auth))
            with open(self.directory / "said", "wb") as said:
                self._process = subprocess.Popen(
                    ["docker-registry", "serve", str(path)], stdin=subprocess.DEVNULL, stdout=said, stderr=said
                )
            until = time.monotonic() + 30
            while self._process.poll() is None and time.monotonic() < until:
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                except OSError:
                    time.sleep(0.02)
                else:
                    self.host = f"localhost:{port}"
                    if password:
                        self._log_in()
                    return
            self._process.kill()
            self._process.wait()
        words = (self.directory / "said").read_text()
        shutil.rmtree(self.directory)
        raise RuntimeError(f"the registry did not start: {words}")

    def _log_in(self) -> None:
        auth = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        self.docker_config.write_text(json.dumps({"auths": {self.host: {"auth": auth}}}))

    def blob_path(self, digest: str) -> Path:
        """Where it keeps a blob."""
        digits = digest.removeprefix("sha256:")
        return self.directory / "data/docker/registry/v2/blobs/sha256" / digits[:2] / digits / "data"

    def close(self) -> None:
        """End it and remove everything."""
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self.directory)


def tar_of(entries: Iterable[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    """The bytes of a layer."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, data in entries:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def tar_entry(
    name: str, data: bytes = b"", *, kind: bytes = tarfile.REGTYPE, **values: object
) -> tuple[tarfile.TarInfo, bytes]:
    """One entry of a layer."""
    info = tarfile.TarInfo(name)
    info.type, info.mode = kind, 0o755 if kind == tarfile.DIRTYPE else 0o644
    for key, value in values.items():
        setattr(info, key, value)
    return info, data


def store_blobs(storage: ImageStorage, layers: list[tuple[bytes, bytes]], **config: object) -> str:
    """Put an image into a storage as blobs, and return the digest of its manifest. A layer is its blob and its tar."""
    diff_ids = tuple(f"sha256:{hashlib.sha256(tar).hexdigest()}" for _blob, tar in layers)
    document = ImageConfig(architecture=ImagePlatform.of_host().architecture, diff_ids=diff_ids, **config).encode()  # type: ignore[arg-type]
    descriptors = []
    for blob, _tar in layers:
        kind = OCI_LAYER + {b"\x1f\x8b": "+gzip", b"\x28\xb5": "+zstd"}.get(blob[:2], "")
        descriptors.append(BlobDescriptor(mediaType=kind, digest=storage.add_blob(blob), size=len(blob)))
    config_blob = BlobDescriptor(mediaType=OCI_CONFIG, digest=storage.add_blob(document), size=len(document))
    return storage.add_blob(ImageManifest.of(config_blob, descriptors))
