"""The archive when its users are killed at any point, or work at the same time: nothing is lost, nothing is left."""

from __future__ import annotations

import itertools
import os
import random
import signal
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.support.archives import MB, Node, Nodes, files_of, furnish
from tests.support.trees_for_tests import mutate, picture
from tests.support.volumes import archive_damage_of

from carrel.workspaces import manifests
from carrel.workspaces.archive import Archive
from carrel.workspaces.remote import Remote, RemoteEntry


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

    def entries(self, prefix: str) -> Iterator[RemoteEntry]:
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
    found = [
        manifests.unpack(manifests.Manifest, node.remote.get(name), name) for name in node.remote.list("manifests")
    ]
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
            assert archive_damage_of(node.remote, "v", name) is None
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
        assert archive_damage_of(node.remote, "v", f"c{point}") is None
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
        assert archive_damage_of(reader.remote, volume, snapshot_id) is None
        assert picture(reader.restore(volume, snapshot_id, "copy")) == wanted
    assert reader.leftovers() == []


def test_bundles_that_are_condemned_or_gone_are_sent_again(node: Node) -> None:
    path = furnish(node)
    node.driver.snapshot("v", "s1")
    node.archive.store("v", "s1", node.driver)
    [bundle] = list(node.remote.list("bundles"))
    node.remote.put("collecting/" + "0" * 32, manifests.pack(manifests.Note(frozenset([bundle]))))
    node.driver.snapshot("v", "s2")
    assert node.archive.store("v", "s2", node.driver).bytes > 3 * MB
    used = manifests.unpack(manifests.Manifest, node.remote.get("manifests/v/s2"), "").bundles
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
    node.remote.put(intent, manifests.pack(manifests.Intent("bundles/none/0", frozenset(node.remote.list("bundles")))))
    assert node.archive.collect().objects == 0
    assert list(node.remote.list("intents")) == [intent]
    os.utime(Path(node.remote.description, intent), (0, 0))
    assert node.archive.collect().objects == 1
    assert node.leftovers() == []
