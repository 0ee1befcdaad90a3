"""What is covered: patterns against the rules' own, and the zygote's store of mask_mounts. Sandboxes that wear them are in
`tests/security/test_masks.py`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.nesting import nested
from tests.support.sandboxes import KINDS

from carrel.errors import PlatformError
from carrel.isolation import inside, mask_mounts
from carrel.policy.rules.patterns import path_pattern

TREES = st.lists(st.lists(st.sampled_from(["a", "b", "ab", ".c"]), min_size=1, max_size=4).map("/".join), max_size=8)
PATTERNS = st.lists(
    st.lists(st.sampled_from(["a", "b", "*", "a*", "?", "**", ".c"]), min_size=1, max_size=4).map("/".join),
    min_size=1,
    max_size=3,
)


@settings(max_examples=60)
@given(TREES, PATTERNS)
def test_patterns_mean_what_they_mean_in_rules(tree: list[str], patterns: list[str]) -> None:
    top = tempfile.mkdtemp(prefix="x")
    try:
        for path in tree:
            os.makedirs(f"{top}/{path}", exist_ok=True)
        absolute = [f"{top}/{pattern}" for pattern in patterns]
        found = set(mask_mounts.expand(absolute))
        tests = [path_pattern(pattern) for pattern in absolute]
        there = [top, *(str(path) for path in Path(top).rglob("*"))]
        assert found <= set(there)
        for path in there:
            meant = any(test.matches(path) for test in tests)
            above = any(path == other or path.startswith(f"{other}/") for other in found)
            assert above if meant else path not in found
    finally:
        shutil.rmtree(top)


def test_links_are_covered_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "real" / "deep" / "x.pem").write_text("")
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "broken.pem").symlink_to("nowhere")
    (tmp_path / "odd\nname\udce9.pem").write_text("")
    found = set(mask_mounts.expand([f"{tmp_path}/**/*.pem"]))
    expected = {"real/deep/x.pem", "broken.pem", "odd\nname\udce9.pem"}
    assert found == {f"{tmp_path}/{name}" for name in expected}
    assert list(mask_mounts.expand([f"{tmp_path}/link"])) == [f"{tmp_path}/link"]
    assert list(mask_mounts.expand([f"{tmp_path}/missing", f"{tmp_path}/real/deep/x.pem/**/y", "/no/such/*"])) == []


def test_what_lies_beyond_the_longest_path_is_covered_with_its_directory(tmp_path: Path) -> None:
    with nested(tmp_path, 40, "n" * 250, beside=True):
        found = list(mask_mounts.expand([f"{tmp_path}/**/.env", f"{tmp_path}/*.key"]))
        assert len(found) == 1
        depth = found[0].removeprefix(f"{tmp_path}/").count("/") + 1
        assert found == [f"{tmp_path}/{'/'.join(['n' * 250] * depth)}"]
        assert 3700 < len(found[0]) < 4096
        assert list(mask_mounts.expand([f"{tmp_path}/*.key"])) == []


def test_what_a_sandbox_needs_stays_and_its_neighbours_do_not() -> None:
    found = set(mask_mounts.expand(["/proc/version", "/tmp*", "/dev*/**", "/sy*/**", "/*tc/host*"]))
    assert "/etc/hosts" in found
    assert "/proc/version" in found
    assert not found & {"/tmp", "/dev", "/sys", "/proc"}
    assert not any(path.startswith(("/dev/", "/tmp/", "/sys/")) for path in found)


def test_only_what_lies_beside_a_needed_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("home/agent/x", "home/other", "workspace/a", "workspace/b"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setattr(mask_mounts, "_NEEDED", (f"{tmp_path}/home/agent",))
    monkeypatch.setattr(inside, "WORKSPACE", f"{tmp_path}/workspace")
    assert list(mask_mounts.expand([f"{tmp_path}/home/**"])) == [f"{tmp_path}/home/other"]
    assert set(mask_mounts.expand([f"{tmp_path}/workspace"])) == {f"{tmp_path}/workspace/{name}" for name in "ab"}
    assert set(mask_mounts.expand([f"{tmp_path}/*"])) == {
        f"{tmp_path}/{name}" for name in ("home/other", "workspace/a", "workspace/b")
    }


SMALL_TREES = st.lists(
    st.lists(st.sampled_from("ab"), min_size=2, max_size=4).map("/".join), min_size=1, max_size=3, unique=True
)
SMALL_PATTERNS = st.lists(
    st.lists(st.sampled_from(["a", "b", "*", "**"]), min_size=1, max_size=4).map("/".join),
    min_size=1,
    max_size=2,
)


@settings(max_examples=60)
@given(SMALL_TREES, SMALL_PATTERNS)
def test_what_a_pattern_means_is_meant_wherever_it_can_be_moved(tree: list[str], patterns: list[str]) -> None:
    """Every directory that is neither covered nor held in its place is moved to every other: what was hidden is found."""
    top = tempfile.mkdtemp(prefix="x")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(inside, "WORKSPACE", top)
            for path in tree:
                os.makedirs(f"{top}/{path}", exist_ok=True)
            absolute = [f"{top}/{pattern}" for pattern in patterns]
            hidden = dict(mask_mounts.search(absolute))
            held = {above for path, count in hidden.items() for above in mask_mounts._above(path, count)}
            folders = [top, *(str(path) for path in Path(top).rglob("*"))]
            seen = [path for path in folders if not any(_lies_in(path, other) for other in hidden)]
            for moved in set(seen) - {top} - held:
                for goal in (f"{place}/c" for place in seen if not _lies_in(place, moved)):
                    os.rename(moved, goal)
                    found = list(mask_mounts.expand(absolute))
                    for path in hidden:
                        now = goal + path.removeprefix(moved) if _lies_in(path, moved) else path
                        assert any(_lies_in(now, other) for other in found), f"{moved} to {goal}: {now} is seen"
                    os.rename(goal, moved)
    finally:
        shutil.rmtree(top)


def _lies_in(path: str, other: str) -> bool:
    return path == other or path.startswith(f"{other}/")


def test_what_is_not_to_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inside, "WORKSPACE", str(tmp_path))
    for name in ("a/x.d/y.d", "kept/x.d", "b/kept-not"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("a/x.d/1.lock", "a/1.lock", "kept/1.lock", "kept-too.lock"):
        (tmp_path / name).write_text("")
    (tmp_path / "a" / "link.lock").symlink_to("1.lock")
    (tmp_path / "behind").symlink_to("a")
    patterns = ["**/*.lock", "**/*.d", "kept/**", "behind/1.lock", "missing/**"]
    readonly, busy = mask_mounts._unwritable([f"{tmp_path}/{pattern}" for pattern in patterns])
    assert readonly == [f"{tmp_path}/{name}" for name in ("a/1.lock", "a/x.d/1.lock", "kept", "kept-too.lock")]
    assert busy == {
        f"{tmp_path}/{name}": directory
        for name, directory in {"a/x.d": True, "a/x.d/y.d": True, "a/link.lock": False, "behind": False}.items()
    }


def test_more_than_can_be_mounted_on_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        (tmp_path / f"{number}.lock").write_text("")
    monkeypatch.setattr(inside, "WORKSPACE", str(tmp_path))
    monkeypatch.setattr(mask_mounts, "MOST_COVERS", 4)
    with pytest.raises(PlatformError, match="more than 4 paths are to be masked; let rules name folders"):
        mask_mounts._unwritable([f"{tmp_path}/*.lock"])


def test_a_tree_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        (tmp_path / f"d{number}").mkdir()
    monkeypatch.setattr(mask_mounts, "LARGEST_WALK", 19)
    with pytest.raises(PlatformError, match="19"):
        list(mask_mounts.expand([f"{tmp_path}/**/x"]))


PREPARE = """
import json, os, sys
from carrel.isolation import linux, mask_mounts, programs
from carrel.isolation.masks import Masks, content, pack

linux.unshare(linux.CLONE_NEWNS | (0 if os.geteuid() == 0 else linux.CLONE_NEWUSER))
linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
place, root = sys.argv[1] + "/covers", sys.argv[1] + "/root"
store = mask_mounts.CoverFiles(place, root)

def packed(**given):
    descriptor = pack(Masks(**given))
    try:
        return content(descriptor)
    finally:
        os.close(descriptor)

def made():
    return sorted(set(os.listdir(place)) - {"file", "directory"})

def order(**given):
    return store.plan(packed(**given))

programs._JUST_NOW_NS = 0
"""


def run(tmp_path: Path, body: str) -> None:
    (tmp_path / "covers").mkdir()
    (tmp_path / "root" / "usr" / "bin").mkdir(parents=True)
    for name in ("curl", "wget", "nc"):
        (tmp_path / "root" / "usr" / "bin" / name).write_text(name)
    command = [sys.executable, "-c", PREPARE + textwrap.dedent(body), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


needs_namespaces = pytest.mark.skipif("namespace" not in KINDS, reason="this host cannot make such sandboxes")


@needs_namespaces
def test_an_order_names_paths_and_covers(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        found = mask_mounts.read(order(programs=("curl", "nc", "absent"), hidden=("/etc/x",), refusal={"nc": "not nc"}))
        assert sorted(found.programs) == ["/usr/bin/curl", "/usr/bin/nc"]
        assert sorted(found.programs.values()) == made()
        assert (found.hidden, found.writable) == (["/etc/x"], None)
        with open(f"{place}/{found.programs['/usr/bin/nc']}", "rb") as file:
            assert file.read().endswith(b"not nc\\n")
        for name in (*made(), "file", "new"):
            try:
                os.open(f"{place}/{name}", os.O_WRONLY | os.O_CREAT)
            except OSError as error:
                assert error.strerror == "Read-only file system"
            else:
                raise AssertionError("a cover can be written")
        assert os.stat(f"{place}/file").st_mode & 0o777 == os.stat(f"{place}/directory").st_mode & 0o777 == 0
        first = mask_mounts.read(order(programs=("curl", "/usr/bin/curl"), refusal={"curl": "by name", "/usr/bin/curl": "by path"}))
        with open(f"{place}/{first.programs['/usr/bin/curl']}", "rb") as file:
            assert file.read().endswith(b"by name\\n")
        """,
    )


@needs_namespaces
def test_the_same_masks_are_looked_for_once_until_something_changes(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        one = order(programs=("curl", "later"))
        assert order(programs=("curl", "later")) == one
        assert order(programs=("curl", "later"), hidden=("/etc/x",)) != one
        with open(f"{root}/usr/bin/later", "w"):
            pass
        assert sorted(mask_mounts.read(order(programs=("curl", "later"))).programs) == ["/usr/bin/curl", "/usr/bin/later"]
        os.rename(f"{root}/usr/bin/later", f"{root}/usr/bin/gone")
        assert list(mask_mounts.read(order(programs=("curl", "later"))).programs) == ["/usr/bin/curl"]
        """,
    )


@needs_namespaces
def test_what_no_order_needs_is_given_up(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        before = len(os.listdir("/proc/self/fd"))
        for number in range(3 * mask_mounts.MOST_PLANS):
            names = mask_mounts.read(order(programs=("curl", "wget"), refusal={"curl": str(number)})).programs.values()
            assert set(names) <= set(made())
        assert len(made()) == mask_mounts.MOST_PLANS + 1
        assert len(os.listdir("/proc/self/fd")) == before + mask_mounts.MOST_PLANS
        mask_mounts.MOST_MADE = 10
        names = mask_mounts.read(order(programs=("curl", "wget", "nc"))).programs.values()
        assert set(names) <= set(made())
        assert len(made()) <= 10
        mask_mounts.MOST_MADE = 1
        order(programs=("curl", "wget", "nc"))
        assert len(made()) == 3, "what was asked for last is always there"
        """,
    )


@needs_namespaces
def test_nonsense_leaves_the_store_as_it_was(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        from carrel.errors import InvalidRequest
        order(programs=("curl",))
        kept = made()
        for body in (b"", b"{}", packed(programs=("curl",)).replace(b"curl", b"../x")):
            try:
                store.plan(body)
            except InvalidRequest:
                pass
            else:
                raise AssertionError("nonsense was taken")
        assert made() == kept
        """,
    )
