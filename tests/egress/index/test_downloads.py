import asyncio
import hashlib
import os

import pytest
from tests.support.indexes import wheel

from carrel.egress.index import downloads
from carrel.egress.index.cache import PackageCache, key
from carrel.egress.index.client import IndexClient, Unreachable
from carrel.egress.index.downloads import TAIL, DownloadBody, Downloads, IndexedFile, Missing, Wrong
from carrel.egress.plan import PackageIndex

NAME = key("demo")
BIG = os.urandom(400_000)
FILE = "demo-1.0-py3-none-any.whl"


@pytest.fixture
async def many(tmp_path):
    fetch = IndexClient()
    made = Downloads(PackageCache(str(tmp_path), 1_000_000), fetch)
    yield made
    await made.aclose()
    await fetch.aclose()
    assert not os.listdir(tmp_path / "drafts")


@pytest.fixture
def wanted(server):
    def make(content=BIG, **given):
        server.projects["demo"] = {FILE: content}
        digest = ("sha256", hashlib.sha256(content).hexdigest())
        return IndexedFile(
            server.index(), f"{server.web.url}/pool/demo/{FILE}", **{"digest": digest, "sealed": True, **given}
        )

    return make


async def nothing():
    pass


def body(download, size=None):
    return DownloadBody(download, size or download.known_size, nothing, lambda: None)


async def take(many, what):
    download = many.join(NAME, what)
    try:
        await download.until(lambda: download.done)
        stream = body(download)
    except BaseException:
        download.leave()
        raise
    return b"".join([chunk async for chunk in stream])


async def test_everybody_together_downloads_once(many, wanted, server):
    found = await asyncio.gather(*(take(many, wanted()) for _ in range(20)))
    assert set(found) == {BIG}
    assert await take(many, wanted()) == BIG
    assert len(server.asked) == 1


async def test_a_file_comes_before_it_is_whole_but_for_its_end(many, wanted, server):
    server.gate = asyncio.Event()
    download = many.join(NAME, wanted())
    await download.until(lambda: download.written == len(BIG) - 1)
    stream, seen = body(download), b""
    while len(seen) < len(BIG) - 1 - TAIL:
        seen += await anext(stream)
    assert len(seen) <= len(BIG) - TAIL
    rest = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    assert not rest.done()
    server.gate.set()
    seen += await rest
    async for chunk in stream:
        seen += chunk
    assert seen == BIG


@pytest.mark.parametrize("early", [True, False])
async def test_a_wrong_file_is_never_whole(many, wanted, server, early):
    what = wanted()
    server.wrong[FILE] = BIG[:-1] + bytes([BIG[-1] ^ 1])
    download = many.join(NAME, what)
    if early:
        server.gate = asyncio.Event()
        await download.until(lambda: download.written > TAIL + 1000)
        stream, seen = body(download), b""
        server.gate.set()
        with pytest.raises(Wrong, match="its hash is another"):
            async for chunk in stream:
                seen += chunk
        assert len(seen) <= len(BIG) - TAIL
    else:
        with pytest.raises(Wrong, match="its hash is another"):
            await download.until(lambda: download.done)
        download.leave()
    server.wrong.clear()
    server.gate = None
    assert await take(many, what) == BIG


@pytest.mark.parametrize("algorithm", ["sha512", "md5"])
async def test_other_hashes_count_too(many, wanted, algorithm):
    with pytest.raises(Wrong):
        await take(many, wanted(digest=(algorithm, "0" * 32)))
    right = hashlib.new(algorithm, BIG).hexdigest()
    assert await take(many, wanted(digest=(algorithm, right))) == BIG


async def test_without_a_hash(many, wanted):
    assert await take(many, wanted(digest=None, sealed=False)) == BIG
    assert await take(many, wanted(b"", digest=None, sealed=False)) == BIG  # it is kept under its key


async def test_an_empty_file(many, wanted):
    assert await take(many, wanted(b"")) == b""


async def test_sizes_that_are_not_true(many, wanted, server):
    with pytest.raises(Wrong, match="longer than its index says"):
        await take(many, wanted(size=len(BIG) - 1))
    with pytest.raises(Wrong, match="shorter than its index says"):
        await take(many, wanted(size=len(BIG) + 1))
    assert await take(many, wanted(size=len(BIG))) == BIG


@pytest.mark.parametrize("chunked", [True, False])
async def test_what_is_too_long_to_be_kept(many, wanted, server, chunked):
    server.chunked = chunked
    with pytest.raises(Wrong, match="more than the 1000000 bytes"):
        await take(many, wanted(os.urandom(1_000_001)))
    with pytest.raises(Wrong, match="more than the 1000 bytes"):
        await take(many, wanted(most=1000))
    assert await take(many, wanted()) == BIG


async def test_what_an_index_lists_and_does_not_have(many, wanted, server):
    what = wanted()
    server.projects.clear()
    with pytest.raises(Missing):
        await take(many, what)
    server.broken = 503
    with pytest.raises(Unreachable, match="it answered 503"):
        await take(many, what)


async def test_what_nobody_waits_for_is_broken_off(many, wanted, server, monkeypatch):
    monkeypatch.setattr(downloads, "LINGER_S", 0.01)
    server.gate = asyncio.Event()
    download = many.join(NAME, wanted())
    await download.until(lambda: download.written > 0)
    download.leave()
    await asyncio.wait([download.task])
    assert download.task.cancelled()
    server.gate.set()
    assert await take(many, wanted()) == BIG
    assert len(server.asked) == 2


async def test_who_leaves_for_good_ends_it(many, wanted, server):
    server.gate = asyncio.Event()
    download = many.join(NAME, wanted())
    other = many.join(NAME, wanted())
    assert other is download
    await download.until(lambda: download.written > 0)
    other.leave(for_good=True)
    await asyncio.sleep(0)
    assert not download.task.done()
    download.leave(for_good=True)
    await asyncio.wait([download.task])
    assert download.task.cancelled()


async def test_broken_off_at_any_moment(many, wanted, server, tmp_path):
    """Nothing stays open, nothing half is kept, and nothing is written where it does not belong."""
    server.gate = asyncio.Event()
    for steps in range(60):
        download = many.join(NAME, wanted())
        for _ in range(steps):
            await asyncio.sleep(0)
        download.leave(for_good=True)
        await asyncio.wait([download.task])
        assert not os.listdir(tmp_path / "drafts")
    assert not os.listdir(tmp_path / "files")
    server.gate.set()
    assert await take(many, wanted()) == BIG


async def test_one_that_comes_back_finds_it_going_on(many, wanted, server):
    server.gate = asyncio.Event()
    download = many.join(NAME, wanted())
    await download.until(lambda: download.written > 0)
    download.leave()
    again = asyncio.ensure_future(take(many, wanted()))
    server.gate.set()
    assert await again == BIG
    assert len(server.asked) == 1


async def test_a_body_that_is_let_go(many, wanted):
    download = many.join(NAME, wanted())
    await download.until(lambda: download.done)
    stream = body(download)
    await anext(stream)
    await stream.aclose()
    await stream.aclose()
    forgotten = many.join(NAME, wanted())
    await forgotten.until(lambda: forgotten.done)
    body(forgotten)  # the watch for descriptors sees whether it closes itself


async def test_a_slow_index_is_waited_for_only_by_who_chose_it(many, wanted, server):
    server.gate = asyncio.Event()
    what = wanted()
    slow = many.join(NAME, what)
    await slow.until(lambda: slow.written > 0)
    server.gate = None
    other = PackageIndex("main", what.index.url + "?other")
    assert await take(many, IndexedFile(other, what.url, what.digest, True)) == BIG
    slow.leave()


async def test_settling_comes_before_the_end(many, wanted):
    async def refuse():
        raise Wrong("no")

    download = many.join(NAME, wanted())
    await download.until(lambda: download.written > TAIL)
    stream = DownloadBody(download, len(BIG), refuse, lambda: None)
    seen = b""
    with pytest.raises(Wrong, match="no"):
        async for chunk in stream:
            seen += chunk
    assert len(seen) <= len(BIG) - TAIL


async def test_what_is_at_hand_is_not_asked_for(many, wanted, server):
    assert await take(many, wanted(at_hand=lambda: BIG)) == BIG
    assert server.asked == []


async def test_what_is_at_hand_and_wrong_is(many, wanted, server):
    assert await take(many, wanted(at_hand=lambda: b"other")) == BIG
    assert len(server.asked) == 1


async def test_a_cache_that_cannot_be_written(many, wanted, tmp_path):
    (tmp_path / "drafts").rmdir()
    with pytest.raises(Unreachable, match="carrel could not keep the file"):
        await take(many, wanted())
    (tmp_path / "drafts").mkdir()
    assert wheel("demo")[0] == FILE
