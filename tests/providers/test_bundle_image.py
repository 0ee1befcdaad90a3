"""The bundle as an image."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile

import pytest

from carrel.errors import PlatformError
from carrel.providers import bundle_image
from carrel.providers.bundle import SupervisorBundle


@pytest.fixture
def made(tmp_path):
    root = tmp_path / "bundle"
    (root / "lib").mkdir(parents=True)
    (root / "lib/one.so").write_bytes(b"one")
    (root / "lib/one.so").chmod(0o555)
    (root / "lib/link").symlink_to("one.so")
    return SupervisorBundle(str(root), "digest", 3, 2)


def test_an_image_has_the_bundle_at_its_place_and_nothing_else(made, tmp_path):
    path = tmp_path / "image.tar"
    bundle_image.write(made, str(path), "localhost/bundle:1")
    with tarfile.open(path) as archive:
        (manifest,) = json.load(archive.extractfile("manifest.json"))
        config = json.load(archive.extractfile(manifest["Config"]))
        layer = archive.extractfile(*manifest["Layers"]).read()
    assert manifest["RepoTags"] == ["localhost/bundle:1"]
    assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(layer).hexdigest()}"]
    with tarfile.open(fileobj=io.BytesIO(layer)) as archive:
        entries = {each.name: each for each in archive}
        assert archive.extractfile("opt/carrel/lib/one.so").read() == b"one"
    assert list(entries) == ["opt", "opt/carrel", "opt/carrel/lib", "opt/carrel/lib/link", "opt/carrel/lib/one.so"]
    assert entries["opt/carrel/lib/link"].linkname == "one.so"
    assert {(each.uid, each.gid, each.mtime) for each in entries.values()} == {(0, 0, 0)}


def test_the_same_bundle_makes_the_same_image(made, tmp_path):
    for name in ("one", "two"):
        bundle_image.write(made, str(tmp_path / name), "localhost/bundle:1")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_place_that_cannot_be_written_is_named(made, tmp_path):
    with pytest.raises(PlatformError, match="missing/image"):
        bundle_image.write(made, str(tmp_path / "missing/image"), "localhost/bundle:1")
