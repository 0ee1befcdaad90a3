"""Rules for single requests to a host that is allowed: asked, refused, and not to be avoided by another spelling."""

from __future__ import annotations

import pytest
from tests.support.inspected import Proxy, Site, setting

PUSH = {"host": "api.test", "methods": ["POST"], "paths": ["*/git-receive-pack"], "reason": "git push"}


async def post(site: Site, proxy: Proxy, path: str, method: str = "POST") -> tuple[int, bytes]:
    """The status and the body of a request whose path is sent as it is written."""
    async with proxy.raw(site) as (reader, writer):
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: api.test:{site.port}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode())
        answer = await reader.read()
    return int(answer[9:12]), answer.partition(b"\r\n\r\n")[2]


async def test_a_person_is_asked_about_the_request_and_about_no_other() -> None:
    async with setting(injected=(), inspected_domains=[], requests=[PUSH]) as (site, proxy):
        assert (await post(site, proxy, "/a/b.git/git-upload-pack"))[0] == 200
        assert (await post(site, proxy, "/a/b.git/git-receive-pack", "GET"))[0] == 200
        assert proxy.requests == []
        assert (await post(site, proxy, "/a/b.git/git-receive-pack?x=1"))[0] == 200
        assert proxy.requests == ["POST /a/b.git/git-receive-pack"]
        assert len(site.seen) == 3
        assert proxy.report.requests[-1].verdict.approval == "apr-1"


@pytest.mark.parametrize(
    "path", ["/a/git-receive-pack", "/a/git%2Dreceive-pack", "/a/GIT-receive-pack", "/a/git-receive-pack/"]
)
async def test_a_refused_request_never_arrives_however_it_is_written(path: str) -> None:
    async with setting(injected=(), inspected_domains=[], requests=[{**PUSH, "verdict": "deny"}]) as (site, proxy):
        status, body = await post(site, proxy, path)
        if path == "/a/git-receive-pack":  # git shows only what its own protocol says
            assert status == 200 and body[4:5] == b"\x03" and b"git push: this request to api.test is denied" in body
        else:
            assert status == 403 and b"denied_by_policy" in body
        assert site.seen == [] and proxy.requests == []


@pytest.mark.parametrize("path", ["/a//git-receive-pack", "/a/x;y/git-receive-pack", "/a/git-receive-pack/.", "/a%2fb"])
async def test_a_path_with_two_meanings_is_refused(path: str) -> None:
    async with setting(injected=(), inspected_domains=[], requests=[PUSH]) as (site, proxy):
        status, _ = await post(site, proxy, path)
        assert (status == 400 or path.endswith("pack")) and site.seen == []
