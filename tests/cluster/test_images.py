"""The image of the server: the same files make the same bytes, and nobody in it is root."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import make_images  # noqa: E402


def test_the_layer_of_carrel_is_the_same_each_time(tmp_path: Path) -> None:
    made = []
    for name in ("one", "two"):
        root = tmp_path / name
        root.mkdir()
        make_images.add_carrel(root)
        make_images.write_tar(root, tmp_path / f"{name}.tar")
        made.append(hashlib.sha256((tmp_path / f"{name}.tar").read_bytes()).hexdigest())
    assert made[0] == made[1]


def test_the_image_is_of_an_ordinary_user_and_has_no_program_of_root() -> None:
    with tarfile.open(Path(os.environ["CARREL_IMAGES"], "carrel-server.tar")) as image:

        def read(name: str) -> bytes:
            file = image.extractfile(name)
            assert file is not None
            return file.read()

        (saved,) = json.loads(read("manifest.json"))
        config = json.loads(read(saved["Config"]))
        assert config["config"]["User"] == "1000:1000"
        assert config["config"]["Entrypoint"] == ["/usr/local/bin/carrel"]
        for layer in saved["Layers"]:
            with tarfile.open(fileobj=image.extractfile(layer)) as files:
                assert [each.name for each in files if each.mode & 0o6000] == []
