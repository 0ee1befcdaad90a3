"""What the archive says and keeps when something in it is damaged, gone, or not what it looks like."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.archives import MB, Node, Nodes, files_of, furnish
from tests.support.s3 import S3Server
from tests.support.trees_for_tests import picture
from tests.support.volumes import archive_damage_of, damage_of

from carrel.errors import ArchiveUnavailable, SnapshotDamaged

Damage = Callable[[Path], None]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("damage", [_flip, _cut, Path.unlink], ids=["flipped", "truncated", "missing"])
def test_a_damaged_bundle_is_named_and_mended_by_the_next_snapshot(node: Node, damage: Damage) -> None:
    path = furnish(node)
    node.driver.snapshot("v", "s1")
    node.archive.store("v", "s1", node.driver, attachment=b"x" * 5000)
    [bundle] = files_of(node, "bundles")
    damage(bundle)
    name = str(bundle.relative_to(node.remote.description))
    node.driver.create("w", None)
    before = picture(node.driver.path("w"))
    with pytest.raises(SnapshotDamaged) as caught:
        node.restore("v", "s1", "w")
    assert name in caught.value.detail
    assert caught.value.extra["bundles"] == [name]
    assert f"object {caught.value.extra['object']}" in caught.value.detail
    assert picture(node.driver.path("w")) == before
    node.driver.snapshot("v", "s2")
    assert node.archive.store("v", "s2", node.driver).bytes > 3 * MB
    assert picture(node.restore("v", "s2", "w")) == picture(path)


def test_a_damaged_attachment_is_named(node: Node) -> None:
    furnish(node)
    node.driver.snapshot("v", "s1")
    note = random.Random(77).randbytes(5000)
    node.archive.store("v", "s1", node.driver, attachment=note)
    [bundle] = files_of(node, "bundles")
    data = bundle.read_bytes()
    assert data.count(note) == 1
    bundle.write_bytes(data.replace(note, note[::-1]))
    with pytest.raises(SnapshotDamaged, match=bundle.name):
        node.archive.attachment("v", "s1")
    bundle.unlink()
    with pytest.raises(SnapshotDamaged, match=f"{bundle.name} is missing"):
        node.archive.attachment("v", "s1")


@pytest.mark.parametrize("damage", [_flip, _cut], ids=["flipped", "truncated"])
def test_a_damaged_manifest_is_named_and_what_it_may_need_is_kept(node: Node, damage: Damage) -> None:
    path = furnish(node)
    node.driver.snapshot("v", "s1")
    node.archive.store("v", "s1", node.driver)
    [manifest] = files_of(node, "manifests")
    damage(manifest)
    for ask in (lambda: node.restore("v", "s1", "w"), lambda: node.archive.attachment("v", "s1")):
        with pytest.raises(SnapshotDamaged, match="manifests/v/s1"):
            ask()
    assert archive_damage_of(node.remote, "v", "s1") == "the archive's manifest manifests/v/s1 is damaged"
    kept = files_of(node, "bundles")
    os.utime(manifest, (manifest.stat().st_mtime + 1, manifest.stat().st_mtime + 1))
    furnish(node, "u", 2)
    node.driver.snapshot("u", "u1")
    node.archive.store("u", "u1", node.driver)
    [later] = set(files_of(node, "bundles")) - set(kept)
    os.utime(later, (later.stat().st_mtime + 60, later.stat().st_mtime + 60))
    node.archive.forget("u")
    collected = node.archive.collect()
    assert (collected.objects, collected.damaged) == (0, ("manifests/v/s1",))
    assert files_of(node, "bundles") == kept
    node.archive.store("v", "s1", node.driver)  # written anew where the snapshot still is
    assert picture(node.restore("v", "s1", "w")) == picture(path)
    assert node.archive.collect().damaged == ()
    assert files_of(node, "bundles") != kept


def test_a_manifest_under_another_name_is_not_believed(node: Node) -> None:
    furnish(node)
    node.driver.snapshot("v", "s1")
    node.archive.store("v", "s1", node.driver)
    node.remote.put("manifests/w/s1", node.remote.get("manifests/v/s1"))
    with pytest.raises(SnapshotDamaged, match="another"):
        node.archive.attachment("w", "s1")
    node.archive.delete("w", "s1")


def test_a_cache_that_is_gone_or_torn_is_no_loss(node: Node) -> None:
    path = furnish(node)
    node.driver.snapshot("v", "s1")
    node.archive.store("v", "s1", node.driver)
    folder = node.cache / "volumes" / "v"
    for file in list(folder.iterdir()):
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    Path(path, "one").write_text("1")
    node.driver.snapshot("v", "s2")
    assert node.archive.store("v", "s2", node.driver).bytes < 20_000
    for file in list(folder.iterdir()):
        file.unlink()
    Path(path, "two").write_text("2")
    node.driver.snapshot("v", "s3")
    assert node.archive.store("v", "s3", node.driver).bytes < 20_000
    assert picture(node.restore("v", "s3", "w")) == picture(path)


def test_a_file_that_looks_like_a_directory_hides_nothing(node: Node) -> None:
    """An agent can write a file whose content is the object of one of its directories."""
    node.driver.create("v", None)
    path = Path(node.driver.path("v"))
    (path / "z").mkdir()
    (path / "z" / "inner").write_bytes(b"only here" * 20)
    node.driver.snapshot("v", "s1")
    node.archive.store("v", "s1", node.driver)
    [bundle] = files_of(node, "bundles")
    with open(bundle, "rb") as file:
        index = manifest_index(file.read())
    trees = [data for data in index if b"inner" in data]
    for number, data in enumerate(trees):
        (path / f"a{number}").write_bytes(data)
    node.driver.snapshot("v", "s2")
    node.driver.delete_snapshot("s1")
    node.driver.collect_garbage()
    assert damage_of(node.driver, "s2") is None
    other = Node(node.remote.description + "2", node.cache.with_name("cache-other"), node.driver)
    other.archive.store("v", "s2", node.driver)
    assert archive_damage_of(other.remote, "v", "s2") is None
    assert picture(other.restore("v", "s2", "w")) == picture(str(path))


def manifest_index(raw: bytes) -> list[bytes]:
    from carrel.workspaces.volumes.objects import inflate, read_index

    index = read_index(lambda start, length: raw[start : start + length], len(raw))
    assert index is not None
    return [inflate(codec, raw[at : at + stored], length) for at, stored, codec, length in index.values()]


def test_a_server_that_is_down_loses_nothing(nodes: Nodes, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    node = nodes(s3.url("down-archive"))
    path = furnish(node)
    node.driver.snapshot("v", "s1")
    node.archive.store("v", "s1", node.driver)
    Path(path, "more").write_bytes(os.urandom(MB))
    node.driver.snapshot("v", "s2")
    node.driver.create("w", None)
    before = picture(node.driver.path("w"))
    s3.stop()
    try:
        for ask in (
            lambda: node.archive.store("v", "s2", node.driver),
            lambda: node.restore("v", "s1", "w"),
            lambda: node.archive.snapshots("v"),
            lambda: node.archive.collect(),
        ):
            with pytest.raises(ArchiveUnavailable):
                ask()
    finally:
        s3.start()
    assert picture(node.driver.path("w")) == before
    assert node.archive.snapshots("v") == ["s1"]
    node.archive.store("v", "s2", node.driver)
    assert picture(node.restore("v", "s2", "w")) == picture(path)
    assert node.leftovers() == []
