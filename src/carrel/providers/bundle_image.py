"""Writes the bundle as an image, for the init containers of pods: an archive as `docker save` makes it, of one layer.

The same bundle makes the same bytes. Blocking.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import tarfile
import tempfile
from typing import IO

from carrel.errors import PlatformError
from carrel.isolation.inside import BUNDLE
from carrel.primitives.atomic import draft
from carrel.providers.bundle import SupervisorBundle

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_CHUNK = 1 << 20


def write(made: SupervisorBundle, path: str, name: str) -> None:
    """Write the image of a bundle for remote supervisors to a file. Raises `PlatformError`."""
    try:
        with tempfile.TemporaryFile() as layer:
            _write_layer(made.path, layer)
            size, digest = _measured(layer)
            config = {
                "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
                "os": "linux",
                "created": "1970-01-01T00:00:00Z",
                "config": {"WorkingDir": "/"},
                "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
            }
            manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
            with (
                draft(path, mode=0o644) as file,
                open(file, "wb", closefd=False) as output,
                tarfile.open(fileobj=output, mode="w", format=tarfile.PAX_FORMAT) as archive,
            ):
                _add(archive, "config.json", json.dumps(config).encode())
                layer.seek(0)
                archive.addfile(_entry("layer.tar", size), layer)
                _add(archive, "manifest.json", json.dumps(manifest).encode())
    except OSError as error:
        raise PlatformError(f"the image of the bundle cannot be written to {path}: {error}") from error


def _write_layer(root: str, layer: IO[bytes]) -> None:
    with tarfile.open(fileobj=layer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for parent in (os.path.dirname(BUNDLE), BUNDLE):
            entry = _entry(parent.lstrip("/"), 0, 0o755)
            entry.type = tarfile.DIRTYPE
            archive.addfile(entry)
        for folder, names, files in os.walk(root):
            names.sort()
            for name in sorted((*names, *files)):
                place = os.path.join(folder, name)
                inside = os.path.join(BUNDLE.lstrip("/"), os.path.relpath(place, root))
                archive.add(place, inside, recursive=False, filter=_anonymous)


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


def _measured(layer: IO[bytes]) -> tuple[int, str]:
    whole = hashlib.sha256()
    layer.seek(0)
    while chunk := layer.read(_CHUNK):
        whole.update(chunk)
    return layer.tell(), whole.hexdigest()


def _entry(name: str, size: int, mode: int = 0o644) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = size, mode
    return entry


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    archive.addfile(_entry(name, len(content)), io.BytesIO(content))
