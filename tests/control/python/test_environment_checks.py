from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.control.governance.policies import building_layer
from carrel.control.python.environment_checks import (
    Lock,
    Requester,
    ResolvableRequest,
    interpreter_of,
    interpreters,
    lock_of,
    name_of,
    requirements_of,
    wanted,
)
from carrel.egress.access import Target
from carrel.egress.outbound.rules import EgressRules
from carrel.egress.plan import PackageIndex
from carrel.errors import InvalidRequest
from carrel.policy.documents import sources
from carrel.policy.rules.layers import Layer, Policy

HASH = "a" * 64
LOCK = f"six==1.17.0 \\\n    --hash=sha256:{HASH}\n"
PYTHON = ("3.11", "/usr/bin/python3.11")
HOST = [PackageIndex("default", "https://user:password@index.test/simple/")]


def policy(text: str) -> Policy:
    return Policy.of([Layer("server", None, sources.load(text))], context_id="c", workspace="/workspace")


def test_requirements_in_one_way_of_writing() -> None:
    assert requirements_of(["Pandas >=2", "pandas>=2", "a.b[X, y]"]) == ("a-b[X,y]", "pandas>=2")
    for wrong in ("pandas >", "-r file", "--index-url x", "../here", ""):
        with pytest.raises(InvalidRequest, match="not a requirement"):
            requirements_of([wrong])
    with pytest.raises(InvalidRequest, match="names a URL"):
        requirements_of(["x @ https://files.test/x.whl"])


@given(st.text(max_size=40))
def test_no_text_becomes_an_option(text: str) -> None:
    try:
        found = requirements_of([text])
    except InvalidRequest:
        return
    assert all(each[0].isalnum() and "\n" not in each for each in found)


def test_interpreters(tmp_path: Path) -> None:
    for name, mode in (("python3.9", 0o755), ("python3.12", 0o755), ("python3.8", 0o644), ("python3.12-config", 0o755)):
        (tmp_path / name).touch(mode)
    assert set(interpreters([str(tmp_path), "/nowhere"])) == {"3.9", "3.12"}
    version, path = interpreter_of(None)
    assert os.access(path, os.X_OK) and interpreter_of(version) == (version, path)
    with pytest.raises(InvalidRequest, match=r"no Python 3\.99") as caught:
        interpreter_of("3.99")
    assert caught.value.hint is not None and version in caught.value.hint


def test_a_lock_is_pinned_packages_with_hashes_and_nothing_else() -> None:
    lock = lock_of(f"# made by\nB_b==1 \\\n    --hash=sha256:{HASH}\n{LOCK}")
    assert lock.packages == (("b-b", "1"), ("six", "1.17.0"))
    assert lock_of(lock.text) == lock
    for line in (
        "--index-url https://evil.test/simple",
        "-r /etc/passwd",
        "-e .",
        "six>=1",
        "six @ https://evil.test/six.whl",
        f"six==1 --hash=sha256:{HASH}",
        f"    --hash=md5:{HASH}",
        "six==1 ; python_version > '3' \\ --pre",
    ):
        with pytest.raises(InvalidRequest):
            lock_of(f"{LOCK}{line}\n")
    for empty in ("", "six==1\n", "# nothing"):
        with pytest.raises(InvalidRequest, match="no hashes"):
            lock_of(empty)


@given(st.text(max_size=60))
def test_no_line_is_taken_that_is_no_pin(text: str) -> None:
    try:
        lock = lock_of(f"{LOCK}{text}")
    except InvalidRequest:
        return
    for line in lock.text.splitlines():
        assert line.startswith("    --hash=sha") or "==" in line.split(" ")[0]


def test_what_makes_environments_the_same() -> None:
    base = ResolvableRequest(("six",), *PYTHON, ("https://a.test/simple/",), "[]")
    lock = lock_of(LOCK)
    other = ResolvableRequest(("six", "six>1"), *PYTHON, ("https://a.test/simple/",), '["blocked"]')
    assert base.key != other.key and base.hash(lock) == other.hash(lock), "only the lock and where it is from count"
    elsewhere = ResolvableRequest(("six",), *PYTHON, ("https://b.test/simple/",), "[]")
    assert base.hash(lock) != elsewhere.hash(lock), "what others' registries build is not shared"
    assert base.hash(lock) != base.hash(Lock(lock.text + "\n", lock.packages))
    assert name_of(b"one", "h") != name_of(b"two", "h") and len(name_of(b"one", "h")) == 40


def test_a_request_under_a_policy() -> None:
    found = wanted(("six",), PYTHON, Policy.open(), HOST, None)
    assert found.registries == (HOST[0].url,)
    assert wanted(("six",), PYTHON, Policy.open(), HOST, "default").registries == found.registries
    two = [*HOST, PackageIndex("extra", "https://extra.test/simple/")]
    with pytest.raises(InvalidRequest, match="no registries to choose"):
        wanted(("six",), PYTHON, Policy.open(), two, "extra")
    named = policy(
        '{"package_managers": {"pip": {"registries": [{"name": "a", "url": "https://a.test/simple/"},'
        ' {"name": "b", "url": "https://b.test/simple/"}]}}}'
    )
    assert wanted(("six",), PYTHON, named, HOST, "b").registries == ("https://b.test/simple/",)
    with pytest.raises(InvalidRequest, match="no registry 'c'") as caught:
        wanted(("six",), PYTHON, named, HOST, "c")
    assert caught.value.hint == "there is: a, b"
    with pytest.raises(InvalidRequest, match="may not install"):
        wanted(("six",), PYTHON, policy('{"package_managers": {"pip": {"enabled": false}}}'), HOST, None)
    layers = [*named.layers, building_layer(named, "b")]
    rules = EgressRules(Policy.of(layers, context_id="c", workspace="/workspace"))
    assert rules.packages.registries is not None and [each.name for each in rules.packages.registries] == ["b"]


def test_where_it_is_built_no_host_is_reached() -> None:
    allowed = Policy.of(
        [Layer("server", None, sources.load('{"web_access": {"allowed_domains": ["api.test"]}}'))],
        context_id="c",
        workspace="/workspace",
    )
    assert EgressRules(allowed).decide(Target("api.test", 443)).verdict == "allow"
    for given_policy in (allowed, Policy.open()):
        layers = [*given_policy.layers, building_layer(given_policy, None)]
        rules = EgressRules(Policy.of(layers, context_id="c", workspace="/workspace"))
        assert rules.decide(Target("api.test", 443)).verdict == "deny"
        assert rules.packages.enabled


def test_who_asks() -> None:
    assert Requester().name is None and Requester(sandbox_id="eph-1").name == "eph-1"
