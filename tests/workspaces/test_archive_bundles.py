from __future__ import annotations

import fcntl
import os
import random
from pathlib import Path

import pytest

from carrel.errors import ArchiveUnavailable, NotFound
from carrel.workspaces.archive_bundles import ArchiveCache, BundleBatch, Outbox, file_digest
from carrel.workspaces.manifests import Bundle
from carrel.workspaces.remote import Remote
from carrel.workspaces.volumes.capture import Folder
from carrel.workspaces.volumes.objects import digest

MB = 1 << 20
PREFIX = "bundles/v/" + "a" * 16
KNOWN = {b"": Folder(b"t" * 32, (1, 2, 3), None, {}, [])}


@pytest.fixture
def remote(tmp_path: Path) -> Remote:
    return Remote.open(str(tmp_path / "remote"))


@pytest.fixture
def cache(tmp_path: Path) -> ArchiveCache:
    return ArchiveCache(str(tmp_path / "cache"))


def send(
    cache: ArchiveCache, remote: Remote, *contents: bytes
) -> list[tuple[Bundle, dict[bytes, tuple[int, int, int, int]]]]:
    with cache.working() as place:
        outbox = Outbox(place, remote, PREFIX, {digest(b"archived")})
        try:
            with BundleBatch(outbox) as batch:
                for data in contents:
                    batch.put(data)
                batch.finish()
            sent = outbox.sent()
            assert os.listdir(outbox.temporary) == []
            return sent
        finally:
            outbox.close()


def test_objects_go_out_in_bundles_big_and_small(cache: ArchiveCache, remote: Remote, tmp_path: Path) -> None:
    contents = [random.Random(number).randbytes(30 * MB) for number in range(3)] + [b"small", b"archived", b"small"]
    sent = send(cache, remote, *contents)
    assert len(sent) == 2
    assert {key for _, index in sent for key in index} == {digest(data) for data in contents if data != b"archived"}
    for bundle, index in sent:
        assert bundle.name.startswith(PREFIX)
        assert len(remote.get(bundle.name)) == bundle.size
        assert bundle.stored == bundle.live == sum(spot[1] for spot in index.values())
        assert file_digest(str(tmp_path / "remote" / bundle.name)) == bundle.digest
        assert cache.index(bundle, remote) == index  # from the bundle's end
        remote.delete([bundle.name])
        assert cache.index(bundle, remote) == index  # from here
    assert send(cache, remote, b"archived") == []


def test_a_remote_that_fails_fails_the_batch(cache: ArchiveCache, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    remote = Remote.open(str(tmp_path / "file"))
    with pytest.raises(ArchiveUnavailable):
        send(cache, remote, b"x")
    assert os.listdir(tmp_path / "cache" / "work") == []


def test_an_index_that_is_torn_here_is_read_again_and_a_damaged_bundle_has_none(
    cache: ArchiveCache, remote: Remote, tmp_path: Path
) -> None:
    [(bundle, index)] = send(cache, remote, b"one", b"two")
    cache.keep_index(bundle, index)
    kept = tmp_path / "cache" / "volumes" / "v" / bundle.name.rpartition("/")[2]
    kept.write_bytes(kept.read_bytes()[:-3])
    assert cache.index(bundle, remote) == index
    kept.unlink()
    remote.put(bundle.name, remote.get(bundle.name)[:-5])
    assert cache.index(bundle, remote) is None
    remote.delete([bundle.name])
    with pytest.raises(NotFound):
        cache.index(bundle, remote)


def test_what_was_known_and_distrusted_is_kept_pruned_and_forgotten(cache: ArchiveCache, remote: Remote) -> None:
    assert cache.known("v") == {}
    cache.keep_known("v", KNOWN)
    found = cache.known("v")[b""]
    assert (found.tree, found.signature) == (KNOWN[b""].tree, KNOWN[b""].signature)
    [(bundle, index)] = send(cache, remote, b"one")
    cache.keep_index(bundle, index)
    assert not cache.distrusts(bundle.name)
    cache.mark_damaged(bundle.name)
    assert cache.distrusts(bundle.name)
    cache.prune({bundle.name, "bundles/stray"})
    assert cache.distrusts(bundle.name)
    remote.delete([bundle.name])
    assert cache.index(bundle, remote) == index
    cache.prune(set())
    assert not cache.distrusts(bundle.name)
    with pytest.raises(NotFound):
        cache.index(bundle, remote)
    assert cache.known("v") != {}
    cache.forget("v")
    cache.forget("v")
    assert cache.known("v") == {}


def test_work_of_killed_processes_is_removed_and_that_of_living_ones_is_not(
    cache: ArchiveCache, tmp_path: Path
) -> None:
    work = tmp_path / "cache" / "work"
    (work / "dead" / "deep").mkdir(parents=True)
    (work / "dead" / "deep" / "file").write_text("x")
    (work / "alive").mkdir()
    fd = os.open(work / "alive", os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with cache.working() as outer, cache.working() as inner:
            assert {path.name for path in work.iterdir()} == {"alive", os.path.basename(outer), os.path.basename(inner)}
        assert [path.name for path in work.iterdir()] == ["alive"]
    finally:
        os.close(fd)
    with cache.working():
        pass
    assert list(work.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_no_failure(cache: ArchiveCache, tmp_path: Path) -> None:
    (tmp_path / "cache" / "volumes" / "v").write_text("in the way")
    cache.keep_known("v", KNOWN)
    assert os.listdir(tmp_path / "cache" / "work") == []
