from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.support.stored_images import docker_archive, layer, small

Carrel = Callable[..., subprocess.CompletedProcess[bytes]]


def test_imported_run_and_removed(carrel: Carrel, tmp_path: Path) -> None:
    def said(*words: str, ok: bool = True) -> bytes:
        done = carrel(*words)
        assert (done.returncode == 0) is ok, done.stderr
        return done.stdout if ok else done.stderr

    config = {"environment": {"PATH": "/usr/bin:/bin"}, "entry_point": ("/bin/echo", "from"), "command": ("inside",)}
    archive = tmp_path / "small.tar"
    archive.write_bytes(docker_archive("small:cli", layer(small), **config, working_directory="/home"))
    digest = said("image", "import", str(archive)).decode().strip()
    shown = said("image", "ls").decode()
    assert "small:cli" in shown and digest[7:19] in shown
    assert json.loads(said("image", "inspect", "small:cli", "--json"))["entry_point"] == ["/bin/echo", "from"]
    assert "PATH=/usr/bin:/bin" in said("image", "inspect", digest).decode()
    assert said("run", "--image", "small:cli", "--", "cat", "/etc/os-release") == b"ID=copied\n"
    assert said("run", "--image", "small:cli") == b"from inside\n", "the entry point of the image"
    assert b"name a command" in said("run", ok=False)
    said("exec", "--image", "small:cli", "image-user", "true")
    assert b"is the root of image-user" in said("image", "rm", "small:cli", ok=False)
    assert b"image" in said("exec", "--image", "other:1", "image-user", "true", ok=False)
    said("rm", "--yes", "--files", "image-user")
    assert json.loads(said("image", "rm", "--json", "small:cli")) == {"removed": ["small:cli"]}
    assert b"no image small:cli" in said("image", "inspect", "small:cli", ok=False)
    assert b"cannot be reached" in said("image", "pull", "localhost:1/x", ok=False)
