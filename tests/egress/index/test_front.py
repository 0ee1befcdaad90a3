import asyncio
import hashlib
import json
import os
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.indexes import IndexServer, fronting, metadata_of, sdist, serving, wheel, whole

from carrel.egress.access import AccessRefused
from carrel.egress.index import front as module
from carrel.egress.index import pages
from carrel.egress.index.catalogue import FRESH_S
from carrel.egress.index.front import AllowedPackages, Front, InstallBudget
from carrel.egress.plan import PackageIndex

JSON = {"accept": pages.JSON_TYPE}
BIG = os.urandom(300_000)


async def get(front, packages, target, headers=None, method="GET"):
    answer = await front.answer(method, target, headers or {}, packages)
    length = dict(answer.headers)["content-length"]
    body = await whole(answer)
    assert method == "HEAD" or int(length) == len(body)
    return answer, body


async def files(front, packages, project):
    answer, body = await get(front, packages, f"/simple/{project}/", JSON)
    assert answer.status == 200, body
    return {each["filename"]: each for each in json.loads(body)["files"]}


@pytest.mark.parametrize(
    ("target", "verdict"),
    [
        ("/simple/good/", "allow"),
        ("/simple/Bad_One", "deny"),
        ("/simple/bad%2Done/?x=y", "deny"),
        ("/files/main/bad.one/0/bad_one-1.0.tar.gz", "deny"),
        ("/files/main/good/0/good-1.0.tar.gz", "allow"),
        ("/simple/", "allow"),
        ("/simple/.../", "allow"),
        ("/", "allow"),
        ("/simple/" + "a" * 5000 + "/", "allow"),
    ],
)
async def test_what_is_said_before_anybody_is_asked(front, server, target, verdict):
    said = front.decide(target, AllowedPackages((server.index(),), blocked=frozenset({"bad-one"})))
    assert said.verdict == verdict
    assert (said.rule is not None) == (verdict == "deny")
    assert server.asked == []


# --- pages


async def test_a_page_in_both_forms(front, server):
    name, content = wheel("demo")
    server.add((name, content))
    server.attributes[name] = {"requires-python": ">=3.8", "yanked": "bad", "upload-time": "2024-01-01T00:00:00Z"}
    packages = AllowedPackages((server.index(),))
    answer, body = await get(front, packages, "/simple/demo/", JSON)
    digest = hashlib.sha256(content).hexdigest()
    assert dict(answer.headers)["content-type"] == pages.JSON_TYPE
    assert json.loads(body) == {
        "meta": {"api-version": "1.1"},
        "name": "demo",
        "versions": ["1.0"],
        "files": [
            {
                "filename": name,
                "url": f"/files/main/demo/{digest}/{name}",
                "hashes": {"sha256": digest},
                "size": len(content),
                "requires-python": ">=3.8",
                "yanked": "bad",
                "core-metadata": {"sha256": hashlib.sha256(metadata_of(content)).hexdigest()},
                "upload-time": "2024-01-01T00:00:00Z",
            }
        ],
    }
    answer, body = await get(front, packages, "/simple/demo/")
    assert dict(answer.headers)["content-type"] == "text/html; charset=utf-8"
    assert f'href="/files/main/demo/{digest}/{name}#sha256={digest}"' in body.decode()
    assert 'data-requires-python="&gt;=3.8"' in body.decode()


async def test_a_page_that_did_not_change(front, server):
    server.add(wheel("demo"))
    packages = AllowedPackages((server.index(),))
    answer, _ = await get(front, packages, "/simple/demo/", JSON)
    etag = dict(answer.headers)["etag"]
    answer, body = await get(front, packages, "/simple/demo/", {**JSON, "if-none-match": etag})
    assert (answer.status, body) == (304, b"")
    assert (await get(front, packages, "/simple/demo/", {"if-none-match": etag}))[0].status == 200


async def test_a_page_is_written_once_for_each_form(front, server, monkeypatch):
    server.add(wheel("demo"))
    packages = AllowedPackages((server.index(),))
    first = await get(front, packages, "/simple/demo/", JSON)
    again = await get(front, packages, "/simple/demo/", JSON)
    assert again[1] is first[1]
    named = await get(front, AllowedPackages((server.index("other"),)), "/simple/demo/", JSON)
    assert b"/files/other/demo/" in named[1]
    assert (await get(front, packages, "/simple/demo/"))[1].startswith(b"<!DOCTYPE")
    assert len(front._written) == 3
    monkeypatch.setattr(module, "_MOST_WRITTEN", len(first[1]))
    assert (await get(front, packages, "/simple/demo/", JSON))[1] == first[1]
    assert len(front._written) == 1


@pytest.mark.parametrize("target", ["/simple/De_.mo", "/simple/de-mo/", "/simple/de%2Dmo/?x=1"])
async def test_any_spelling_of_a_name(front, server, target):
    server.add(wheel("de-mo"), "de-mo")
    assert (await get(front, AllowedPackages((server.index(),)), target))[0].status == 200
    assert server.asked == ["/simple/de-mo/"]


async def test_the_page_for_people_shows_no_password(front):
    packages = AllowedPackages((PackageIndex("mine<", "http://me:pass@h/simple"),))
    answer, body = await get(front, packages, "/simple/")
    assert answer.status == 200
    assert b"mine&lt; (http://h/simple)" in body
    assert b"pass" not in body


async def test_refusals(front, server):
    server.add(wheel("demo"))
    blocked = AllowedPackages((server.index(),), blocked=frozenset({"demo"}))
    answer, body = await get(front, blocked, "/simple/Demo/")
    assert answer.status == 403
    assert answer.reason == "the package demo is blocked for this agent"
    assert json.loads(body) == {
        "code": "denied_by_policy",
        "operation": "network",
        "rule": "package_managers.pip.blocked_packages: demo",
        "source": "sources.json",
        "reason": "the package demo is blocked for this agent",
        "retry": False,
        "approval": None,
        "hint": None,
        "title": "Forbidden",
        "status": 403,
        "detail": "the package demo is blocked for this agent",
    }
    assert isinstance(answer.refused, AccessRefused)
    answer, _ = await get(front, blocked, "/simple/demo/", {"user-agent": "pip/23"})
    assert answer.status == 200
    assert answer.refused is not None
    other = AllowedPackages((server.index(),), allowed=frozenset({"other"}))
    assert (await get(front, other, "/simple/demo/"))[0].status == 403
    off = AllowedPackages((server.index(),), enabled=False)
    for target in ("/simple/", "/simple/demo/", f"/files/main/demo/{'0' * 64}/demo-1.tar.gz"):
        assert (await get(front, off, target))[0].status == 403
    assert server.asked == []


async def test_what_is_not_there(front, server):
    packages = AllowedPackages((server.index(),))
    server.add(wheel("demo"))
    (entry,) = (await files(front, packages, "demo")).values()
    good = entry["url"]
    server.asked.clear()
    for target in (
        "/",
        "*",
        "",
        "/simple",
        "/simple/../etc/passwd",
        "/simple/%2e%2e/",
        "/simple//",
        "/files/",
        good.replace("/main/", "/other/"),
        good.replace("/demo/", "/other/", 1),
        good.replace(entry["hashes"]["sha256"], "0" * 64),
        good.replace("1.0-py3", "2.0-py3"),
        good.replace("/demo-1.0", "/%2e%2e%2fdemo-1.0"),
        good + "/",
        good + ".metadata.metadata",
        "/files/main/demo/x/demo-1.0.tar.gz",
    ):
        answer, body = await get(front, packages, target)
        assert answer.status == (200 if target == "/simple" else 404), target
        if answer.status == 404:
            assert json.loads(body)["code"] == "not_found"
    assert not server.files_asked()
    assert (await get(front, packages, "/simple/none/"))[0].status == 404
    assert (await get(front, packages, "/" + "x" * 3000))[0].status == 414
    answer, _ = await get(front, packages, good, method="POST")
    assert answer.status == 405
    assert ("allow", "GET, HEAD") in answer.headers


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=60), st.text(max_size=30), st.sampled_from(["GET", "HEAD", "PUT", ""]))
def test_no_request_does_more_than_be_refused(tmp_path, target, accept, method):
    async def ask():
        async with fronting(str(tmp_path / "cache")) as front:
            for each in (target, "/simple/" + target, "/files/" + target, f"/files/main/{target}/x/y"):
                answer = await front.answer(method, each, {"accept": accept}, AllowedPackages(()))
                await whole(answer)
                assert answer.status in {200, 404, 405}
                assert answer.reason.isascii()
                assert answer.reason.isprintable()

    asyncio.run(ask())


# --- indexes


async def test_the_first_index_that_has_a_project_is_the_only_one(front, server):
    async with serving(IndexServer()) as second:
        server.add(wheel("mine"))
        second.add(wheel("mine", "99.0"))
        second.add(wheel("theirs"))
        packages = AllowedPackages((server.index("first"), second.index("second")))
        assert list(await files(front, packages, "mine")) == ["mine-1.0-py3-none-any.whl"]
        assert second.asked == []
        (entry,) = (await files(front, packages, "theirs")).values()
        assert entry["url"].startswith("/files/second/")
        assert (await get(front, packages, entry["url"]))[0].status == 200
        # Not by its URL either.
        (entry,) = (await files(front, AllowedPackages((second.index("second"),)), "mine")).values()
        assert (await get(front, packages, entry["url"]))[0].status == 404
        # One that fails might have it.
        for broken in (500, 403, 401):
            server.broken = broken
            answer, body = await get(front, packages, "/simple/other/")
            assert answer.status == 502
            assert json.loads(body)["reason"] == f"the package index first failed: it answered {broken}"
            assert json.loads(body)["retry"] is True


async def test_an_index_with_a_password(front, server):
    server.login = "me:pass"
    name, content = wheel("demo")
    server.add((name, content))
    packages = AllowedPackages((server.index(),))
    (entry,) = (await files(front, packages, "demo")).values()
    answer, body = await get(front, packages, entry["url"])
    assert body == content
    # Who does not know it has nothing of it, though the file is in the cache and its hash is known.
    stranger = AllowedPackages((PackageIndex("main", f"{server.web.url}/simple/"),))
    answer, body = await get(front, stranger, entry["url"])
    assert answer.status == 502
    assert b"pass" not in body


async def test_a_page_that_is_old_while_the_index_is_down(tmp_path, server):
    now = [1_000_000.0]
    name, content = wheel("demo")
    server.add((name, content))
    packages = AllowedPackages((server.index(),))
    async with fronting(str(tmp_path / "cache"), clock=lambda: now[0]) as front:
        (entry,) = (await files(front, packages, "demo")).values()
        await get(front, packages, entry["url"])
    server.broken = 500
    now[0] += 2 * FRESH_S
    async with fronting(str(tmp_path / "cache"), clock=lambda: now[0]) as front:
        assert list(await files(front, packages, "demo")) == [name]
        assert (await get(front, packages, entry["url"]))[1] == content
        assert (await get(front, packages, "/simple/other/"))[0].status == 502


# --- files


async def test_one_download_for_all(front, server):
    name, content = wheel("demo", payload=BIG)
    server.add((name, content))
    sandboxes = [AllowedPackages((server.index(),)) for _ in range(20)]
    entries = await asyncio.gather(*(files(front, each, "demo") for each in sandboxes))
    found = await asyncio.gather(*(get(front, each, entries[0][name]["url"]) for each in sandboxes))
    assert {body for _answer, body in found} == {content}
    assert len(server.asked) == 2


async def test_a_head_request(front, server):
    name, content = wheel("demo")
    server.add((name, content))
    packages = AllowedPackages((server.index(),))
    url = (await files(front, packages, "demo"))[name]["url"]
    answer, body = await get(front, packages, url, method="HEAD")
    assert (answer.status, body) == (200, b"")
    assert dict(answer.headers)["content-length"] == str(len(content))


@pytest.mark.parametrize("known", [True, False])
async def test_metadata(front, server, known):
    name, content = wheel("demo")
    server.add((name, content))
    if not known:
        server.attributes[name] = {"core-metadata": True}
    packages = AllowedPackages((server.index(),), max_install_bytes=1)
    url = (await files(front, packages, "demo"))[name]["url"] + ".metadata"
    for _ in range(2):
        assert (await get(front, packages, url))[1] == metadata_of(content)
    assert len(server.files_asked()) == 1
    assert packages.budget.taken == 0


async def test_metadata_that_is_wrong_or_not_offered(front, server):
    name, content = wheel("demo")
    server.add((name, content))
    server.wrong[f"{name}.metadata"] = b"Name: other"
    packages = AllowedPackages((server.index(),))
    url = (await files(front, packages, "demo"))[name]["url"] + ".metadata"
    answer, body = await get(front, packages, url)
    assert answer.status == 502
    assert b"its hash is another" in body
    server.add(sdist("plain"))
    (entry,) = (await files(front, packages, "plain")).values()
    assert (await get(front, packages, entry["url"] + ".metadata"))[0].status == 404


async def test_a_wrong_file_is_not_given(front, server):
    name, content = wheel("demo")
    server.add((name, content))
    server.wrong[name] = wheel("demo", payload=b"evil")[1]
    server.sizes = False
    packages = AllowedPackages((server.index(),))
    url = (await files(front, packages, "demo"))[name]["url"]
    answer, body = await get(front, packages, url)
    assert answer.status == 502
    assert b"gave a wrong file" in body
    assert packages.budget.taken == 0
    server.wrong.clear()
    assert (await get(front, packages, url))[1] == content


async def test_a_file_without_a_hash(front, server):
    server.hashes = False
    name, content = wheel("demo")
    server.add((name, content))
    packages = AllowedPackages((server.index(),))
    url = (await files(front, packages, "demo"))[name]["url"]
    assert re.fullmatch(rf"/files/main/demo/x[0-9a-f]{{64}}/{name}", url)
    for _ in range(2):
        assert (await get(front, packages, url))[1] == content
    assert len(server.files_asked()) == 1


async def test_a_file_that_takes_long_comes_while_it_comes(front, server, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    name, content = wheel("demo", payload=BIG)
    server.add((name, content))
    server.gate = asyncio.Event()
    packages = AllowedPackages((server.index(),))
    url = (await files(front, packages, "demo"))[name]["url"]
    answer = await front.answer("GET", url, {}, packages)
    assert answer.status == 200
    first = await anext(answer.body)
    assert content.startswith(first)
    server.gate.set()
    assert first + await whole(answer) == content


async def test_a_file_of_unknown_length_is_waited_for(front, server, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 0.01)
    server.chunked, server.sizes = True, False
    name, content = wheel("demo", payload=BIG)
    server.add((name, content))
    packages = AllowedPackages((server.index(),))
    url = (await files(front, packages, "demo"))[name]["url"]
    assert (await get(front, packages, url))[1] == content


# --- sizes


async def test_a_file_that_is_too_large_is_not_downloaded(front, server):
    name, content = wheel("demo", payload=BIG)
    server.add((name, content))
    packages = AllowedPackages((server.index(),), max_install_bytes=100_000)
    url = (await files(front, packages, "demo"))[name]["url"]
    answer, body = await get(front, packages, url)
    assert answer.status == 403
    assert json.loads(body)["code"] == "limit_exceeded"
    assert "has taken 0 bytes; 0.3 MB more is over the 0.1 MB it may take" in answer.reason
    assert packages.budget.taken == 0
    await whole(await front.answer("GET", "/simple/other/", {}, packages))  # a download would be under way by now
    assert server.files_asked() == []
    assert not front._downloads._tasks


@pytest.mark.parametrize("chunked", [True, False])
async def test_nor_to_its_end_when_the_index_does_not_say(front, server, chunked):
    server.sizes, server.chunked = False, chunked
    name, content = wheel("demo", payload=BIG)
    server.add((name, content))
    small, large = (AllowedPackages((server.index(),), max_install_bytes=most) for most in (100_000, None))
    url = (await files(front, small, "demo"))[name]["url"]
    (refused, _), (given, body) = await asyncio.gather(get(front, small, url), get(front, large, url))
    assert (refused.status, given.status) == (403, 200)
    assert body == content
    assert len(server.files_asked()) == 1


async def test_what_wheels_hold_is_what_counts(front, server):
    name, content = wheel("demo", payload=b"\0" * 1_000_000)
    server.add((name, content))
    server.add(sdist("plain", payload=b"\0" * 1_000_000))
    packages = AllowedPackages((server.index(),), max_install_bytes=2_000_000)
    url = (await files(front, packages, "demo"))[name]["url"]
    (plain,) = (await files(front, packages, "plain")).values()
    for _ in range(3):
        assert (await get(front, packages, url))[0].status == 200
        assert 1_000_000 < packages.budget.taken < 1_010_000
    before = packages.budget.taken
    await get(front, packages, plain["url"])
    assert packages.budget.taken == before + plain["size"]
    small = AllowedPackages((server.index(),), max_install_bytes=900_000)
    answer, _ = await get(front, small, url)
    assert answer.status == 403
    assert small.budget.taken == 0


async def test_many_files_together_and_a_pause(front, server):
    now = [0.0]
    packages = AllowedPackages((server.index(),), max_install_bytes=250_000, budget=InstallBudget(lambda: now[0]))
    urls = []
    for number in range(3):
        server.add(sdist(f"demo{number}", payload=os.urandom(100_000)))
        urls += [each["url"] for each in (await files(front, packages, f"demo{number}")).values()]
    answers = await asyncio.gather(*(get(front, packages, url) for url in urls))
    assert sorted(answer.status for answer, _ in answers) == [200, 200, 403]
    (late,) = [url for url, (answer, _) in zip(urls, answers, strict=True) if answer.status == 403]
    now[0] += 59
    assert (await get(front, packages, late))[0].status == 403
    now[0] += 60
    assert (await get(front, packages, late))[0].status == 200


async def test_a_failure_inside_is_a_readable_answer(front, monkeypatch, caplog):
    async def fail(*arguments):
        raise ZeroDivisionError

    monkeypatch.setattr(Front, "_route", fail)
    answer, body = await get(front, AllowedPackages(()), "/simple/")
    assert answer.status == 500
    assert json.loads(body)["code"] == "platform_error"
    assert "ZeroDivisionError" in caplog.text
