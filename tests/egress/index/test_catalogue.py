import asyncio

import pytest
from tests.support.indexes import IndexServer, serving, wheel

from carrel.egress.index.cache import PackageCache
from carrel.egress.index.catalogue import FRESH_S, RETRY_S, PageCatalogue, describe, page_url, scope
from carrel.egress.index.client import IndexClient, Unreachable
from carrel.egress.index.pages import BadPage
from carrel.egress.plan import PackageIndex


class Clock:
    now = 1_000_000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
async def catalogue(tmp_path, clock):
    fetch = IndexClient()
    catalogue = PageCatalogue(PackageCache(str(tmp_path / "cache"), 1 << 30), fetch, clock)
    yield catalogue
    await catalogue.aclose()
    await fetch.aclose()


@pytest.fixture
def again(tmp_path, clock, catalogue):
    """The catalogue of another process on the same cache."""
    return lambda: PageCatalogue(PackageCache(str(tmp_path / "cache"), 1 << 30), catalogue._fetch, clock)


def files(page):
    return [link.filename for link in page.links]


async def test_everybody_together_asks_once(catalogue, server):
    server.add(wheel("demo"))
    found = await asyncio.gather(*(catalogue.page(server.index(), "demo") for _ in range(20)))
    assert {tuple(files(page)) for page in found} == {("demo-1.0-py3-none-any.whl",)}
    assert server.asked == ["/simple/demo/"]


async def test_a_page_is_fresh_for_a_while_also_in_the_next_process(catalogue, again, server, clock):
    server.add(wheel("demo"))
    first = await catalogue.page(server.index(), "demo")
    clock.now += FRESH_S - 1
    assert await catalogue.page(server.index(), "demo") == first
    assert await again().page(server.index(), "demo") == first
    assert len(server.asked) == 1


@pytest.mark.parametrize("etags", [True, False])
async def test_an_old_page_is_asked_for_again(catalogue, again, server, clock, etags):
    server.etags = etags
    server.add(wheel("demo"))
    first = await catalogue.page(server.index(), "demo")
    clock.now += FRESH_S
    assert await catalogue.page(server.index(), "demo") == first
    assert len(server.asked) == 2
    assert ("if-none-match" in server.seen[-1]) == etags
    assert await again().page(server.index(), "demo") == first  # the disk knows that it was asked for
    assert len(server.asked) == 2
    server.add(wheel("demo", "2.0"))
    clock.now += FRESH_S
    assert len(files(await catalogue.page(server.index(), "demo"))) == 2


async def test_that_there_is_none_is_remembered(catalogue, again, server, clock):
    assert await catalogue.page(server.index(), "demo") is None
    assert await catalogue.page(server.index(), "demo") is None
    assert await again().page(server.index(), "demo") is None
    assert len(server.asked) == 1
    server.add(wheel("demo"))
    clock.now += FRESH_S
    assert await catalogue.page(server.index(), "demo") is not None


async def test_an_old_page_serves_while_the_index_is_down(catalogue, again, server, clock):
    server.add(wheel("demo"))
    first = await catalogue.page(server.index(), "demo")
    clock.now += FRESH_S
    server.broken = 500
    assert await catalogue.page(server.index(), "demo") == first
    assert await catalogue.page(server.index(), "demo") == first
    assert len(server.asked) == 2  # one that failed is not asked at once again
    clock.now += RETRY_S
    assert await again().page(server.index(), "demo") == first
    server.broken = None
    server.add(wheel("demo", "2.0"))
    clock.now += RETRY_S
    assert len(files(await catalogue.page(server.index(), "demo"))) == 2


async def test_an_old_page_serves_when_the_index_talks_nonsense(catalogue, server, clock):
    server.add(wheel("demo"))
    first = await catalogue.page(server.index(), "demo")
    clock.now += FRESH_S
    server.redirects["/simple/demo/"] = "ftp://x/"
    assert await catalogue.page(server.index(), "demo") == first


@pytest.mark.parametrize("status", [401, 403, 500, 503, 204])
async def test_a_failure_is_no_answer(catalogue, server, clock, status):
    server.broken = status
    with pytest.raises(Unreachable, match=f"it answered {status}"):
        await catalogue.page(server.index(), "demo")
    server.broken = None
    assert await catalogue.page(server.index(), "demo") is None
    clock.now += FRESH_S
    server.broken = status  # that it did not have it once says nothing of now
    with pytest.raises(Unreachable):
        await catalogue.page(server.index(), "demo")


async def test_any_age_will_do_for_files(catalogue, server, clock):
    server.add(wheel("demo"))
    first = await catalogue.page(server.index(), "demo")
    clock.now += 100 * FRESH_S
    assert await catalogue.page(server.index(), "demo", any_age=True) == first
    assert len(server.asked) == 1


async def test_a_clock_that_goes_back_does_not_keep_pages_for_ever(catalogue, server, clock):
    server.add(wheel("demo"))
    await catalogue.page(server.index(), "demo")
    clock.now -= 10
    await catalogue.page(server.index(), "demo")
    assert len(server.asked) == 2


async def test_who_asks_differently_shares_nothing(catalogue, server):
    server.add(wheel("demo"))
    plain = server.index()
    await catalogue.page(plain, "demo")
    await catalogue.page(PackageIndex("main", plain.url, trusted=True), "demo")
    await catalogue.page(PackageIndex("main", plain.url.replace("://", "://u:p@")), "demo")
    assert len(server.asked) == 3
    await catalogue.page(PackageIndex("other", plain.url.rstrip("/")), "demo")
    assert len(server.asked) == 3


async def test_a_damaged_page_is_asked_for_again(catalogue, again, server, tmp_path):
    server.add(wheel("demo"))
    first = await catalogue.page(server.index(), "demo")
    (path,) = (tmp_path / "cache/pages").iterdir()
    for damage in (b"", b"{}", b"[]\n", path.read_bytes()[:-5], b'{"v": 2, "etag": null}\n{}', b"\xff\xff"):
        path.write_bytes(damage)
        assert await again().page(server.index(), "demo") == first
    assert len(server.asked) == 7


async def test_a_page_without_end(catalogue, server, monkeypatch):
    monkeypatch.setattr("carrel.egress.index.pages.MOST_BYTES", 100)
    server.add(wheel("demo"))
    with pytest.raises(BadPage, match="more than 100 bytes"):
        await catalogue.page(server.index(), "demo")


async def test_one_that_gives_up_does_not_take_the_page_from_the_others(catalogue, server):
    server.add(wheel("demo"))
    impatient = asyncio.ensure_future(catalogue.page(server.index(), "demo"))
    patient = asyncio.ensure_future(catalogue.page(server.index(), "demo"))
    while not server.asked:
        await asyncio.sleep(0)
    impatient.cancel()
    assert await patient is not None
    assert len(server.asked) == 1


async def test_memory_is_bounded(catalogue, server, monkeypatch):
    monkeypatch.setattr("carrel.egress.index.catalogue._MOST_LINKS_IN_MEMORY", 30)
    for number in range(10):
        server.add(wheel(f"demo{number}"))
        await catalogue.page(server.index(), f"demo{number}")
    assert len(catalogue._memory) == 2
    await catalogue.page(server.index(), "demo0")
    assert len(server.asked) == 10


async def test_a_redirect_is_the_base_of_what_the_page_names(catalogue, server):
    async with serving(IndexServer()) as other:
        other.add(wheel("demo"))
        server.redirects["/simple/demo/"] = f"{other.web.url}/simple/demo/"
        (link,) = (await catalogue.page(server.index(), "demo")).links
        assert link.url == f"{other.web.url}/pool/demo/demo-1.0-py3-none-any.whl"


def test_where_a_project_lies():
    assert page_url(PackageIndex("a", "http://u:p@h/simple"), "demo") == "http://u:p@h/simple/demo/"
    assert page_url(PackageIndex("a", "http://h/"), "demo") == "http://h/demo/"
    assert page_url(PackageIndex("a", "http://h/simple/?k=1#x"), "demo") == "http://h/simple/demo/?k=1"
    assert describe(PackageIndex("a", "http://u:p@h/simple")) == "a (http://h/simple)"
    assert scope(PackageIndex("a", "http://h"), "page") != scope(PackageIndex("a", "http://h"), "file")
