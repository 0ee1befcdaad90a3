"""Archives of `docker save` and OCI layouts."""

from __future__ import annotations

import gzip
import hashlib
import json
import tarfile
from pathlib import Path

import pytest
from tests.support.registry import store_blobs, tar_entry, tar_of

from carrel.errors import ImageRefused
from carrel.images.archives import LayoutExport, import_archive
from carrel.images.documents import ImageConfig, ImagePlatform
from carrel.images.layer_reading import LayerLimits
from carrel.images.reference import ImageReference
from carrel.images.storage import ImageStorage, LayerProgress

HOST = ImagePlatform.of_host()
LAYER = tar_of([tar_entry("bin/tool", b"tool", mode=0o755)])
NAME = ImageReference.parse("r.example/team/tool:2")


def quiet(_progress: LayerProgress) -> None:
    pass


def docker_archive(path: Path, layer: bytes = LAYER, diff_id: str | None = None, link: str = "") -> Path:
    diff_id = diff_id or f"sha256:{hashlib.sha256(layer).hexdigest()}"
    config = ImageConfig(architecture=HOST.architecture, diff_ids=(diff_id,), command=("/bin/tool",)).encode()
    manifest = [{"Config": "c.json", "RepoTags": [str(NAME)], "Layers": ["a/layer.tar"]}]
    layer_entry = (
        tar_entry("a/layer.tar", kind=tarfile.SYMTYPE, linkname=link) if link else tar_entry("a/layer.tar", layer)
    )
    path.write_bytes(
        tar_of(
            [
                layer_entry,
                tar_entry("b/layer.tar", layer),
                tar_entry("c.json", config),
                tar_entry("manifest.json", json.dumps(manifest).encode()),
            ]
        )
    )
    return path


async def test_docker_archives(storage: ImageStorage, tmp_path: Path) -> None:
    plain = docker_archive(tmp_path / "plain.tar")
    [image] = await import_archive(storage, str(plain), HOST, quiet)
    assert image.names == (str(NAME),) and image.config.command == ("/bin/tool",)
    assert Path(image.root, "bin/tool").read_bytes() == b"tool"
    squeezed = tmp_path / "squeezed.tgz"
    squeezed.write_bytes(gzip.compress(docker_archive(tmp_path / "linked.tar", link="../b/layer.tar").read_bytes()))
    other = ImageReference.parse("other:1")
    [again] = await import_archive(storage, str(squeezed), HOST, quiet, name=other)
    assert again.digest == image.digest and str(other) in again.names


@pytest.mark.parametrize("kind", ["lying", "link out", "nothing", "no tar", "bomb", "large header"])
async def test_hostile_archives_leave_nothing(storage: ImageStorage, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.tar"
    if kind == "lying":
        docker_archive(path, diff_id="sha256:" + "0" * 64)
    elif kind == "link out":
        docker_archive(path, link="/etc/passwd")
    elif kind == "nothing":
        path.write_bytes(tar_of([tar_entry("x", b"x")]))
    elif kind == "large header":
        path.write_bytes(tar_of([tar_entry("x", b"x", pax_headers={"note": "n" * (2 << 20)})]))
    elif kind == "no tar":
        path.write_bytes(b"x" * 5000)
    else:
        path.write_bytes(gzip.compress(bytes(80 << 20), 1))
    with pytest.raises(ImageRefused):
        await import_archive(storage, str(path), HOST, quiet)
    storage.prepare()
    for folder in ("blobs", "layers", "roots", "images", "names", "temporary", "partial"):
        assert not list(Path(storage.directory, folder).iterdir()), folder


@pytest.mark.parametrize("kind", ["layout", "docker"])
async def test_images_go_out_and_in(storage: ImageStorage, tmp_path: Path, kind: str) -> None:
    with storage.adding():
        digest = store_blobs(storage, [(gzip.compress(LAYER), LAYER)])
        image = await storage.add_image(digest, [NAME], quiet)
    path = tmp_path / "image.tar"
    layout = LayoutExport(storage, image, NAME)
    with path.open("wb") as file:
        file.writelines(layout.pieces())
    assert path.stat().st_size == layout.size
    if kind == "docker":  # as a version of Docker reads it that knows no layouts
        with tarfile.open(path) as tar:
            tar.extractall(tmp_path / "out")
        with tarfile.open(path, "w") as tar:
            for name in ("manifest.json", "blobs"):
                tar.add(tmp_path / "out" / name, name)
    another = ImageStorage(str(tmp_path / "another"), LayerLimits(64 << 20, 100, 100))
    another.prepare()
    [copy] = await import_archive(another, str(path), HOST, quiet)
    assert (copy.names, copy.config) == (image.names, image.config)
    assert copy.digest == image.digest or kind == "docker"
    assert Path(copy.root, "bin/tool").read_bytes() == b"tool"
