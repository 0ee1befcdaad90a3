from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from archives import Node
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trees_for_tests import mutate, picture

from carrel.errors import ArchiveUnavailable, InvalidRequest, NotFound, SnapshotDamaged
from carrel.workspaces import manifests
from carrel.workspaces.archive import Archive
from carrel.workspaces.layout import CANONICAL_UID
from carrel.workspaces.remote import Entry, Remote
from carrel.workspaces.volumes import DirectoryDriver, VolumeDriver
from children import in_child
from s3 import S3Server

MB = 1 << 20
Nodes = Callable[..., Node]


@pytest.fixture
def nodes(tmp_path: Path, drivers: Callable[[str], VolumeDriver]) -> Nodes:
    """Makes a node with a driver of a kind on a remote."""
    numbers = itertools.count()

    def one(url: str | Path, kind: str = "directory") -> Node:
        return Node(str(url), tmp_path / f"cache{next(numbers)}", drivers(kind))

    return one


@pytest.fixture
def node(nodes: Nodes, tmp_path: Path) -> Iterator[Node]:
    """A node with the directory driver on a directory."""
    node = nodes(tmp_path / "remote")
    yield node
    assert node.leftovers() == []


def furnish(node: Node, volume: str = "v", seed: int = 1) -> str:
    """A volume with a bit of everything in it."""
    node.driver.create(volume, None)
    path = node.driver.path(volume)
    mutate(path, random.Random(seed), 60)
    Path(path, "big").write_bytes(random.Random(seed).randbytes(3 * MB))
    with open(os.path.join(path, "sparse"), "wb") as file:
        file.seek(5 * MB)
        file.write(b"end")
        file.truncate(9 * MB)
    os.link(os.path.join(path, "big"), os.path.join(path, "linked"))
    return path


def files_of(node: Node, prefix: str) -> list[Path]:
    """The files beneath a directory remote."""
    return sorted(path for path in Path(node.remote.description, prefix).rglob("*") if path.is_file())


@pytest.mark.parametrize(("one", "other"), [("directory", "btrfs"), ("btrfs", "directory")])
def test_any_node_restores_what_another_stored(nodes: Nodes, where: str, one: str, other: str) -> None:
    here, there = nodes(where, one), nodes(where, other)
    path = furnish(here)
    first = picture(path)
    here.driver.snapshot("v", "s1")
    kept = here.archive.store("v", "s1", here.driver, attachment=b"note" * 1000)
    assert kept.bytes > 3 * MB
    assert kept.bundles == 1
    assert here.archive.store("v", "s1", here.driver).bytes == 0
    mutate(path, random.Random(2), 30)
    Path(path, "small").write_text("changed")
    second = picture(path)
    here.driver.snapshot("v", "s2", "s1")
    here.archive.store("v", "s2", here.driver)
    for node in (there, here):
        assert node.archive.snapshots("v") == ["s1", "s2"]
        assert picture(node.restore("v", "s2", "w")) == second
        assert picture(node.restore("v", "s1", "w")) == first
        assert os.stat(os.path.join(node.driver.path("w"), "sparse")).st_blocks * 512 < MB
        assert os.stat(os.path.join(node.driver.path("w"), "big")).st_uid == (
            CANONICAL_UID if os.geteuid() == 0 else os.geteuid()
        )
        assert node.archive.attachment("v", "s1") == b"note" * 1000
        assert node.archive.attachment("v", "s2") == b""
        assert node.archive.verify("v", "s2") == []
        assert node.leftovers() == []


@pytest.mark.parametrize("kind", ["directory", "btrfs"])
def test_storing_costs_what_changed_also_on_another_node(nodes: Nodes, tmp_path: Path, kind: str) -> None:
    here, there = nodes(tmp_path / "remote", kind), nodes(tmp_path / "remote", kind)
    path = furnish(here)
    here.driver.snapshot("v", "s1")
    first = here.archive.store("v", "s1", here.driver)
    Path(path, "new").write_bytes(random.Random(5).randbytes(10_000))
    here.driver.snapshot("v", "s2")
    second = here.archive.store("v", "s2", here.driver)
    assert second.bytes < 40_000 < first.bytes
    assert second.bundles == 2
    path = there.restore("v", "s2", "v")  # the workspace goes on elsewhere
    Path(path, "newer").write_bytes(random.Random(6).randbytes(10_000))
    there.driver.snapshot("v", "s3")
    third = there.archive.store("v", "s3", there.driver)
    assert third.bytes < 40_000
    here.driver.snapshot("v", "s4")
    os.unlink(os.path.join(here.driver.path("v"), "new"))
    assert here.archive.store("v", "s4", here.driver).bytes < 40_000
    assert picture(here.restore("v", "s3", "w")) == picture(path)


def test_nothing_is_read_again_after_a_restore_or_a_store(nodes: Nodes, tmp_path: Path) -> None:
    node = nodes(tmp_path / "remote", "btrfs")
    furnish(node)
    node.driver.snapshot("v", "s1")
    node.archive.store("v", "s1", node.driver)
    node.restore("v", "s1", "v")
    known = (node.cache / "volumes" / "v" / "known").stat().st_ino
    os.sync()
    node.driver.snapshot("v", "s2")
    assert node.archive.store("v", "s2", node.driver).bytes < 5000
    assert (node.cache / "volumes" / "v" / "known").stat().st_ino != known


def test_a_change_within_one_tick_of_a_snapshot_is_not_missed(nodes: Nodes, tmp_path: Path) -> None:
    """Files rewritten right after a snapshot may show the same times as in it."""
    node = nodes(tmp_path / "remote", "btrfs")
    node.driver.create("v", None)
    path = node.driver.path("v")
    for round_ in range(8):
        for number in range(20):
            Path(path, str(number)).write_bytes(f"{round_}-a-{number}".encode())
        node.driver.snapshot("v", f"s{round_}")
        for number in range(20):
            Path(path, str(number)).write_bytes(f"{round_}-b-{number}".encode())
        node.driver.snapshot("v", f"t{round_}")
        expected = picture(path)
        node.archive.store("v", f"s{round_}", node.driver)
        node.archive.store("v", f"t{round_}", node.driver)
        assert picture(node.restore("v", f"t{round_}", "w")) == expected


def test_a_fork_refers_to_the_bundles_of_its_origin(node: Node) -> None:
    furnish(node)
    node.driver.snapshot("v", "s1")
    node.archive.store("v", "s1", node.driver)
    node.driver.fork("s1", "f", None)
    Path(node.driver.path("f"), "mine").write_text("x")
    node.driver.snapshot("f", "f1")
    assert node.archive.store("f", "f1", node.driver, origin="v").bytes < 20_000
    node.archive.forget("v")
    assert node.archive.snapshots("v") == []
    assert node.archive.collect().objects == 0
    assert picture(node.restore("f", "f1", "w")) == picture(node.driver.path("f"))
    node.archive.forget("f")
    node.archive.collect()
    assert files_of(node, "bundles") == files_of(node, "manifests") == []


def test_forgetting_removes_what_nobody_else_needs(node: Node) -> None:
    for volume in ("v", "w"):
        furnish(node, volume)
        node.driver.snapshot(volume, f"{volume}1")
        node.archive.store(volume, f"{volume}1", node.driver)
    node.archive.forget("v")
    assert [path.parent.name for path in files_of(node, "bundles")] == ["w"]
    assert os.listdir(node.cache / "volumes") == ["w"]
    node.archive.forget("never")
    assert node.archive.verify("w", "w1") == []


def test_deleted_snapshots_are_collected_and_the_rest_stays(node: Node) -> None:
    path = furnish(node)
    pictures = {}
    for number in range(6):
        Path(path, "big").write_bytes(random.Random(100 + number).randbytes(MB))
        mutate(path, random.Random(number), 20)
        pictures[f"s{number}"] = picture(path)
        node.driver.snapshot("v", f"s{number}")
        node.archive.store("v", f"s{number}", node.driver)
    for number in (0, 1, 2, 4):
        node.archive.delete("v", f"s{number}")
        node.archive.delete("v", f"s{number}")
        del pictures[f"s{number}"]
    before = sum(file.stat().st_size for file in files_of(node, "bundles"))
    collected = node.archive.collect()
    after = sum(file.stat().st_size for file in files_of(node, "bundles"))
    assert collected.objects >= 1
    assert before - after == collected.bytes
    assert node.archive.snapshots("v") == sorted(pictures)
    for snapshot_id, expected in pictures.items():
        assert picture(node.restore("v", snapshot_id, "w")) == expected
    with pytest.raises(NotFound):
        node.restore("v", "s1", "w")


def test_many_snapshots_stay_in_few_bundles(node: Node) -> None:
    path = furnish(node)
    rng = random.Random(3)
    total = 0
    for number in range(manifests.MOST_BUNDLES + 20):
        Path(path, f"f{number}").write_bytes(rng.randbytes(2000))
        node.driver.snapshot("v", f"s{number}")
        kept = node.archive.store("v", f"s{number}", node.driver)
        assert kept.bundles <= manifests.MOST_BUNDLES + 1
        total += kept.bytes if number else 0
    assert total < 3 * MB
    assert picture(node.restore("v", f"s{number}", "w")) == picture(path)
    for each in range(number):
        node.archive.delete("v", f"s{each}")
    node.archive.collect()
    assert picture(node.restore("v", f"s{number}", "w")) == picture(path)


def test_garbage_in_bundles_is_left_behind(node: Node) -> None:
    path = furnish(node)
    for number in range(4):
        Path(path, "huge").write_bytes(random.Random(number).randbytes(4 * MB))
        node.driver.snapshot("v", f"s{number}")
        node.archive.store("v", f"s{number}", node.driver)
        node.archive.delete("v", f"s{number - 1}")
    node.archive.collect()
    stored = sum(file.stat().st_size for file in files_of(node, "bundles"))
    assert stored < 13 * MB  # 7 MB are needed
    assert picture(node.restore("v", "s3", "w")) == picture(path)


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
    problems = node.archive.verify("v", "s1")
    assert any(line.startswith(f"bundle {name}") for line in problems)
    assert any(line.startswith("object ") and name in line for line in problems)
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
    assert node.archive.verify("v", "s1") == ["the archive's manifest manifests/v/s1 is damaged"]
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


def test_names_are_checked_and_absence_is_told(node: Node) -> None:
    for ask in (
        lambda: node.archive.store("../v", "s", node.driver),
        lambda: node.archive.store("v", "s/../s", node.driver),
        lambda: node.archive.snapshots("/etc"),
        lambda: node.archive.forget(".."),
        lambda: node.archive.delete("v", ""),
    ):
        with pytest.raises(InvalidRequest):
            ask()
    assert node.archive.snapshots("v") == []
    for missing in (
        lambda: node.archive.fetch("v", "s", "/nowhere"),
        lambda: node.archive.attachment("v", "s"),
        lambda: node.archive.verify("v", "s"),
        lambda: node.archive.store("v", "s", node.driver),
    ):
        with pytest.raises(NotFound):
            missing()


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
    assert node.driver.verify("s2") == []
    other = Node(node.remote.description + "2", node.cache.with_name("cache-other"), node.driver)
    other.archive.store("v", "s2", node.driver)
    assert other.archive.verify("v", "s2") == []
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


class Fatal(Remote):
    """A remote that kills this process, for real, at the given call, before or after it had its effect."""

    def __init__(self, inner: Remote, point: int):
        self._inner = inner
        self._left = point
        self.description = inner.description

    def _call(self, work: Callable[[], Any]) -> Any:
        for step in (lambda: None, work):
            result = step()
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self._left -= 1
        return result

    def put(self, name: str, data: bytes) -> None:
        self._call(lambda: self._inner.put(name, data))

    def put_file(self, name: str, path: str) -> None:
        self._call(lambda: self._inner.put_file(name, path))

    def get(self, name: str) -> bytes:
        return self._call(lambda: self._inner.get(name))

    def get_file(self, name: str, path: str) -> None:
        self._call(lambda: self._inner.get_file(name, path))

    def get_range(self, name: str, start: int, length: int) -> bytes:
        return self._call(lambda: self._inner.get_range(name, start, length))

    def size(self, name: str) -> int | None:
        return self._call(lambda: self._inner.size(name))

    def entries(self, prefix: str) -> Iterator[Entry]:
        return self._call(lambda: self._inner.entries(prefix))

    def delete(self, names: Iterable[str]) -> None:
        self._call(lambda: self._inner.delete(names))


def _killed(work: Callable[[], object]) -> bool:
    """Do it in a child; whether the child was killed."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert status in {0, signal.SIGKILL}
    return status != 0


def _needed(node: Node) -> set[str]:
    found = [manifests.unpack_manifest(node.remote.get(name), name) for name in node.remote.list("manifests")]
    return {bundle.name for manifest in found for bundle in manifest.bundles}


def test_a_killed_store_leaves_nothing_and_the_next_one_works(node: Node) -> None:
    path = furnish(node)
    node.driver.snapshot("v", "s0")
    node.archive.store("v", "s0", node.driver)
    for point in itertools.count():
        Path(path, "much").write_bytes(random.Random(point).randbytes(MB))
        expected = picture(path)
        name = f"s{point + 1}"
        node.driver.snapshot("v", name)
        before = node.archive.snapshots("v")
        archive = Archive(Fatal(node.remote, point), str(node.cache))
        killed = _killed(lambda name=name, archive=archive: archive.store("v", name, node.driver, attachment=b"note"))
        listed = name in node.archive.snapshots("v")
        assert killed or listed
        assert set(node.archive.snapshots("v")) - {name} == set(before)
        if listed:
            assert node.archive.verify("v", name) == []
        node.archive.store("v", name, node.driver)
        assert picture(node.restore("v", name, "w")) == expected
        assert os.listdir(node.cache / "work") == []
        if not killed:
            break
    assert point > 10
    node.archive.collect()
    assert set(node.remote.list("bundles")) >= _needed(node)
    # What killed stores had sent is removed once it is too old to be on its way.
    for file in files_of(node, "intents"):
        os.utime(file, (0, 0))
    node.archive.collect()
    assert set(node.remote.list("bundles")) == _needed(node)


def test_a_killed_collection_or_restore_leaves_nothing(node: Node) -> None:
    node.driver.create("v", None)
    node.driver.create("w", None)
    path = node.driver.path("v")
    mutate(path, random.Random(1), 20)
    for point in itertools.count(0, 3):  # before one call, after the next
        for name in (f"a{point}", f"b{point}"):
            Path(path, "much").write_bytes(os.urandom(10_000))
            node.driver.snapshot("v", name)
            node.archive.store("v", name, node.driver)
            node.archive.delete("v", f"a{point}")
        expected = picture(path)
        archive = Archive(Fatal(node.remote, point), str(node.cache))
        collecting = _killed(archive.collect)
        archive = Archive(Fatal(node.remote, point), str(node.cache))
        directory = tempfile.mkdtemp(dir=node.cache.parent)
        restoring = _killed(lambda to=directory, name=name, archive=archive: archive.fetch("v", name, to))
        assert picture(node.restore("v", name, "w")) == expected
        assert os.listdir(node.cache / "work") == []
        # As long as what a killed collection had condemned may yet be removed, nobody relies on it.
        Path(path, "little").write_bytes(os.urandom(10))
        node.driver.snapshot("v", f"c{point}")
        node.archive.store("v", f"c{point}", node.driver)
        assert node.archive.verify("v", f"c{point}") == []
        node.archive.delete("v", name)
        node.archive.delete("v", f"c{point - 3}")
        if not collecting and not restoring:
            break
    assert point > 5
    for file in files_of(node, "collecting"):
        os.utime(file, (0, 0))
    node.archive.collect()
    assert set(node.remote.list("bundles")) == _needed(node)


def test_collecting_while_others_store_and_delete_loses_nothing(nodes: Nodes, where: str) -> None:
    workers = [nodes(where) for _ in range(3)]
    failures: list[BaseException] = []
    expected: dict[str, tuple[str, dict[str, object]]] = {}
    ended = threading.Event()

    def work(number: int, node: Node) -> None:
        try:
            volume = f"v{number % 2}-{number}"
            node.driver.create(volume, None)
            path = node.driver.path(volume)
            rng = random.Random(number)
            for step in range(8):
                mutate(path, rng, 10)
                snapshot_id = f"s{number}-{step}"
                node.driver.snapshot(volume, snapshot_id)
                node.archive.store(volume, snapshot_id, node.driver)
                if step >= 2:
                    # The last one but one goes at once, so that the next refers to bundles being condemned.
                    node.archive.delete(volume, f"s{number}-{step - 1}")
                expected[volume] = snapshot_id, picture(path)
                node.archive.delete(volume, f"s{number}-{step - 2}")
        except BaseException as error:
            failures.append(error)

    def collect(node: Node) -> None:
        try:
            while not ended.is_set():
                node.archive.collect()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=each) for each in enumerate(workers)]
    collectors = [threading.Thread(target=collect, args=(node,)) for node in workers[:2]]
    for thread in threads + collectors:
        thread.start()
    for thread in threads:
        thread.join()
    ended.set()
    for thread in collectors:
        thread.join()
    assert failures == []
    reader = workers[0]
    for volume, (snapshot_id, wanted) in expected.items():
        assert reader.archive.verify(volume, snapshot_id) == []
        assert picture(reader.restore(volume, snapshot_id, "copy")) == wanted
    assert reader.leftovers() == []


def test_bundles_that_are_condemned_or_gone_are_sent_again(node: Node) -> None:
    path = furnish(node)
    node.driver.snapshot("v", "s1")
    node.archive.store("v", "s1", node.driver)
    [bundle] = list(node.remote.list("bundles"))
    node.remote.put("collecting/" + "0" * 32, manifests.pack_note([bundle]))
    node.driver.snapshot("v", "s2")
    assert node.archive.store("v", "s2", node.driver).bytes > 3 * MB
    used = manifests.unpack_manifest(node.remote.get("manifests/v/s2"), "").bundles
    assert bundle not in {each.name for each in used}
    node.remote.delete(["collecting/" + "0" * 32])
    node.remote.delete([each.name for each in used])
    node.driver.snapshot("v", "s3")
    assert node.archive.store("v", "s3", node.driver).bytes > 3 * MB
    assert picture(node.restore("v", "s3", "w")) == picture(path)


def test_an_intent_keeps_bundles_and_a_stale_one_does_not(node: Node) -> None:
    furnish(node)
    node.driver.snapshot("v", "s1")
    node.archive.store("v", "s1", node.driver)
    node.archive.delete("v", "s1")
    intent = "intents/" + "0" * 32
    node.remote.put(
        intent, manifests.pack_intent(manifests.Intent("bundles/none/0", frozenset(node.remote.list("bundles"))))
    )
    assert node.archive.collect().objects == 0
    assert list(node.remote.list("intents")) == [intent]
    os.utime(Path(node.remote.description, intent), (0, 0))
    assert node.archive.collect().objects == 1
    assert node.leftovers() == []


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), steps=st.lists(st.sampled_from("mmmsssdcrfn"), min_size=3, max_size=14))
def test_whatever_happens_a_stored_snapshot_comes_back_as_it_was(seed: int, steps: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        driver = DirectoryDriver(str(top / "volumes"))
        driver.open()
        nodes = [Node(str(top / "remote"), top / f"cache{number}", driver) for number in range(2)]
        rng = random.Random(seed)
        driver.create("v", None)
        path = driver.path("v")
        stored: dict[str, dict[str, object]] = {}
        for number, step in enumerate(steps):
            archive = rng.choice(nodes).archive
            if step == "m":
                mutate(path, rng, 15)
            elif step == "s":
                driver.snapshot("v", f"s{number}")
                archive.store("v", f"s{number}", driver)
                stored[f"s{number}"] = picture(path)
            elif step == "d" and stored:
                gone = rng.choice(sorted(stored))
                archive.delete("v", gone)
                del stored[gone]
            elif step == "c":
                archive.collect()
            elif step == "r" and stored:
                with driver.replacing("v") as directory:
                    archive.fetch("v", rng.choice(sorted(stored)), directory)
            elif step == "f":
                nodes[0] = Node(str(top / "remote"), top / f"cache-new{number}", driver)
            elif step == "n" and stored:
                node = rng.choice(nodes)
                assert set(node.archive.snapshots("v")) == set(stored)
        for snapshot_id, expected in stored.items():
            assert picture(rng.choice(nodes).restore("v", snapshot_id, "w")) == expected


def test_an_ordinary_user_can_archive_what_forbids_reading() -> None:
    top = Path(tempfile.mkdtemp())
    user = 65534 if os.geteuid() == 0 else os.geteuid()
    os.chown(top, user, -1)

    def work() -> list[bool]:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        driver = DirectoryDriver(str(top / "volumes"))
        driver.open()
        node = Node(str(top / "remote"), top / "cache", driver)
        path = Path(furnish(node))
        (path / "secret").write_text("mine")
        (path / "secret").chmod(0)
        driver.snapshot("v", "s")
        node.archive.store("v", "s", driver)
        restored = Path(node.restore("v", "s", "w"))
        same = [(each / "secret").stat().st_mode & 0o777 == 0 for each in (path, restored)]
        for each in (path, restored):
            (each / "secret").chmod(0o600)
        return [*same, picture(str(path)) == picture(str(restored)), node.archive.verify("v", "s") == []]

    try:
        assert in_child(work) == [True] * 4
    finally:
        shutil.rmtree(top)


def test_an_archive_opens_without_asking_the_remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    Archive(Remote.open("s3://nowhere-at-all?endpoint=http://127.0.0.1:1"), str(tmp_path / "cache"))
