from __future__ import annotations

import os
import random
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.archives import MB, Node, Nodes, files_of, furnish
from tests.support.children import in_child
from tests.support.trees_for_tests import mutate, picture
from tests.support.volumes import archive_damage_of

from carrel.errors import InvalidRequest, NotFound
from carrel.workspaces import manifests
from carrel.workspaces.archive import Archive
from carrel.workspaces.layout import CANONICAL_UID
from carrel.workspaces.remote import Remote
from carrel.workspaces.volumes import DirectoryDriver


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
        assert archive_damage_of(node.remote, "v", "s2") is None
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
    assert archive_damage_of(node.remote, "w", "w1") is None


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
        lambda: node.archive.store("v", "s", node.driver),
    ):
        with pytest.raises(NotFound):
            missing()


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
        return [*same, picture(str(path)) == picture(str(restored))]

    try:
        assert in_child(work) == [True] * 3
    finally:
        shutil.rmtree(top)


def test_an_archive_opens_without_asking_the_remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    Archive(Remote.open("s3://nowhere-at-all?endpoint=http://127.0.0.1:1"), str(tmp_path / "cache"))
