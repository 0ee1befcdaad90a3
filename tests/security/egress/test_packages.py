"""Attempts by way of the package index that the proxy serves: past its rules, past its indexes, and out through it."""

# ruff: noqa: F821 — what an attempt calls is of `within`, beside which it runs

import hashlib

import pytest
from tests.support.indexes import wheel


@pytest.fixture(scope="module", autouse=True)
def packages(far):
    """An allowed package on both indexes, a blocked one, and one that only the second index has."""
    made = {name: wheel(name) for name in ("good-one", "py-auto-gui", "second-one")}
    far.index.add(made["good-one"])
    far.index.add(made["py-auto-gui"])
    far.second_index.add(made["second-one"])
    far.second_index.add(wheel("good-one", "9.9"))
    return {name: (filename, hashlib.sha256(content).hexdigest()) for name, (filename, content) in made.items()}


def got(path, host="127.0.0.1:3128"):
    """Ask the index for a path."""
    return say(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")


SPELLINGS = {
    "as-it-is": "/simple/py-auto-gui/",
    "upper-case": "/simple/PY-AUTO-GUI/",
    "mixed-case": "/simple/Py-Auto-Gui/",
    "underscores": "/simple/py_auto_gui/",
    "dots": "/simple/py.auto.gui/",
    "mixed-marks": "/simple/py_auto-gui/",
    "repeated-marks": "/simple/py--auto__..gui/",
    "percent-encoded": "/simple/%70y-auto-gui/",
    "percent-encoded-mark": "/simple/py%2dauto%5Fgui/",
    "without-the-slash": "/simple/py-auto-gui",
    "query": "/simple/py-auto-gui/?x=y",
}


@pytest.fixture(scope="module")
def spelled(evader, far):
    """The attempts, and what the index was asked for during them."""
    before = len(far.index.asked)
    return evader.series(got, {name: {"path": path} for name, path in SPELLINGS.items()}), far.index.asked[before:]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_blocked_package_by_another_spelling(spelled, spelling):
    outcome = spelled[0].judged(spelling)
    assert outcome.evidence.startswith("HTTP/1.1 403 "), outcome.evidence


def test_blocked_packages_are_asked_of_nobody(spelled):
    """They are refused before the index hears of it, and in the log as refused."""
    series, asked = spelled
    assert asked == []
    assert [(record.name, record.decision) for record in series.refusals] == [("package", "deny")] * len(SPELLINGS)


PATHS = {
    "parent": "/simple/../../etc/passwd",
    "parent-of-an-allowed-one": "/simple/good-one/../py-auto-gui/",
    "encoded-parent": "/simple/%2e%2e/%2e%2e/etc/passwd",
    "encoded-slash": "/simple/good-one%2f..%2fpy-auto-gui/",
    "encoded-slash-twice": "/simple/good-one%252f..%252fpy-auto-gui/",
    "two-slashes": "/simple//py-auto-gui/",
    "slash-before": "//simple/py-auto-gui/",
    "url-as-a-name": "/simple/http://forbidden.test/",
    "encoded-url-as-a-name": "/simple/http%3A%2F%2Fforbidden.test%2F/",
    "line-end-in-a-name": "/simple/good-one%0d%0aHost:%20forbidden.test/",
    "nul-in-a-name": "/simple/good-one%00/",
    "space-in-a-name": "/simple/good-one%20py-auto-gui/",
    "unicode-in-a-name": "/simple/p%D1%83-auto-gui/",
    "very-long-name": "/simple/" + "a" * 3000 + "/",
    "parent-of-the-files": "/files/main/good-one/{good-one-hash}/../../../etc/passwd",
    "blocked-file-by-its-hash": "/files/main/py-auto-gui/{py-auto-gui-hash}/{py-auto-gui-file}",
    "blocked-file-under-another-project": "/files/main/good-one/{py-auto-gui-hash}/{py-auto-gui-file}",
    "blocked-hash-under-another-file": "/files/main/good-one/{py-auto-gui-hash}/{good-one-file}",
    "file-of-another-index": "/files/second/good-one/{good-one-hash}/{good-one-file}",
    "file-of-no-index": "/files/third/good-one/{good-one-hash}/{good-one-file}",
    "file-of-an-index-that-is-a-url": "/files/http%3A%2F%2Fforbidden.test/good-one/{good-one-hash}/{good-one-file}",
    "file-by-the-path-of-the-index": "/pool/py-auto-gui/{py-auto-gui-file}",
    "metadata-of-a-blocked-file": "/files/main/py-auto-gui/{py-auto-gui-hash}/{py-auto-gui-file}.metadata",
    "made-up-hash": "/files/main/good-one/" + "0" * 64 + "/{good-one-file}",
}


def put_in(path, packages):
    for name, (filename, digest) in packages.items():
        path = path.replace(f"{{{name}-hash}}", digest).replace(f"{{{name}-file}}", filename)
    return path


@pytest.fixture(scope="module")
def walked(evader, far, packages):
    """The attempts, and what the indexes were asked for during them."""
    before = len(far.index.asked), len(far.second_index.asked)
    series = evader.series(got, {name: {"path": put_in(path, packages)} for name, path in PATHS.items()})
    return series, far.index.asked[before[0] :] + far.second_index.asked[before[1] :]


@pytest.mark.parametrize("attempt", PATHS)
def test_paths(walked, attempt):
    """What is not exactly a page or a file of an allowed package is refused."""
    outcome = walked[0].judged(attempt)
    assert outcome.evidence.startswith("HTTP/1.1 4"), outcome.evidence


def test_odd_paths_are_asked_of_nobody(walked):
    """An index hears of the allowed package at most, and every refusal is in the log."""
    series, asked = walked
    assert {each.strip("/") for each in asked} <= {"simple/good-one"}
    assert len(series.refusals) == len(PATHS)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PROPFIND"])
def test_writing(evader, method):
    """Carry data out by putting it up."""

    def attack(method):
        head = f"{method} /simple/good-one/ HTTP/1.1\r\nHost: 127.0.0.1:3128\r\n"
        return [say(head + "\r\n"), say(head + "Content-Length: 6\r\n\r\nsecret")]

    outcome = evader.attempt(attack, method=method)
    assert all(answer.startswith("HTTP/1.1 4") for answer in outcome.evidence), outcome.evidence


@pytest.mark.parametrize("way", ["request", "tunnel", "direct"])
def test_the_index_without_the_front(evader, far, way):
    """The index's own server has every package; a direct connection would go around the rules."""

    def attack(way, host, port):
        path = "/simple/py-auto-gui/"
        if way == "request":
            return say(f"GET http://{host}:{port}{path} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n")
        if way == "tunnel":
            return through(connect(f"{host}:{port}"), f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n")
        with dial((host, port)) as one:
            send(one, [f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n"])
            return rest_of(one).decode("latin-1")

    before = len(far.index.asked)
    evader.attempt(attack, way=way, host="127.0.0.1", port=far.index.web.port, decided=way != "direct")
    assert far.index.asked[before:] == []


def test_a_later_index_does_not_take_over(evader, far):
    """A newer version on a later index is not offered: who puts it there cannot take the package over."""
    outcome = evader.attempt(got, path="/simple/good-one/", decided=False)
    assert "1.0" in outcome.evidence
    assert "9.9" not in outcome.evidence


def test_control_packages(evader, far, packages):
    """Allowed packages are served, from the index that has them."""
    filename, digest = packages["good-one"]
    assert evader.run(got, path="/simple/good-one/").startswith("HTTP/1.1 200 ")
    assert evader.run(got, path=f"/files/main/good-one/{digest}/{filename}").startswith("HTTP/1.1 200 ")
    assert evader.run(got, path="/simple/second-one/").startswith("HTTP/1.1 200 ")
