"""Plans as whole values, and what carrying one out makes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.isolation import rootfs
from carrel.isolation.rootfs import (
    Bind,
    Copy,
    Device,
    EmptyDirectory,
    Override,
    Proc,
    Symlink,
    Terminals,
    TextFile,
    Tmpfs,
    WorkspaceMount,
)


def test_the_private_plan() -> None:
    assert rootfs.private_plan(512) == (
        Tmpfs("/dev/shm", "32m", 4096, 0o1777, executable=False),
        Tmpfs("/tmp", "128m", 65536, 0o1777),
        Tmpfs("/home/agent", "128m", 65536, 0o755),
        WorkspaceMount("/workspace"),
    )
    assert rootfs.private_plan(512, "nameserver 192.0.2.1\n") == (
        *rootfs.private_plan(512),
        Override("/etc/resolv.conf", "nameserver 192.0.2.1\n"),
    )
    assert (
        Proc("/proc"),
        Terminals("/dev/pts"),
        Tmpfs("/run/secrets", "8m", 2048, 0o700, executable=False),
    ) == rootfs.COMMON_PLAN


@given(st.none() | st.integers(1, 1 << 20))
def test_memory_file_systems_stay_below_the_memory(memory_mb: int | None) -> None:
    sizes = [int(step.size[:-1]) for step in rootfs.private_plan(memory_mb) if isinstance(step, Tmpfs)]
    assert all(8 <= size <= 512 for size in sizes)
    if memory_mb is not None and memory_mb >= 64:
        assert sum(sizes) < memory_mb


def test_the_base_plan_of_a_merged_host() -> None:
    plan = rootfs.base_plan({"bin": "usr/bin", "lib64": None}, "/host")
    assert [step for step in plan if isinstance(step, Bind)] == [
        Bind("/host/usr", "/usr"),
        Bind("/host/lib64", "/lib64"),
    ]
    assert Symlink("/bin", "usr/bin") in plan
    assert plan.index(EmptyDirectory("/lib64")) < plan.index(Bind("/host/lib64", "/lib64"))
    assert {step.target for step in plan if isinstance(step, Device)} == {
        f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty")
    }
    assert TextFile("/etc/resolv.conf", "") in plan
    copied = {step.source for step in plan if isinstance(step, Copy)}
    assert all(source.startswith("/host/etc/") for source in copied)
    assert not copied & {f"/host/etc/{name}" for name in ("passwd", "shadow", "hosts", "resolv.conf", "ssh", "sudoers")}


def test_a_plan_makes_each_thing_once_and_parents_first() -> None:
    plan = rootfs.base_plan(rootfs.host_links())
    targets = [step.target for step in plan if not isinstance(step, Bind)]
    assert len(targets) == len(set(targets))
    made = {"/"}
    for step in plan:
        assert os.path.dirname(step.target) in made, step
        if isinstance(step, EmptyDirectory):
            made.add(step.target)


def test_host_links(tmp_path: Path) -> None:
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / "bin").symlink_to("usr/bin")
    (tmp_path / "lib").mkdir()
    assert rootfs.host_links(str(tmp_path)) == {"bin": "usr/bin", "lib": None}


def test_only_what_everybody_may_read_is_copied(tmp_path: Path) -> None:
    source, root = tmp_path / "source", tmp_path / "root"
    (source / "open" / "closed").mkdir(parents=True)
    root.mkdir()
    (source / "open" / "public").write_text("public")
    (source / "open" / "tool").write_text("#!")
    (source / "open" / "tool").chmod(0o755)
    (source / "open" / "private").write_text("secret")
    (source / "open" / "private").chmod(0o640)
    (source / "open" / "closed" / "public").write_text("not reachable")
    (source / "open" / "closed").chmod(0o700)
    (source / "open" / "link").symlink_to("/etc/shadow")
    os.mkfifo(source / "open" / "pipe")
    (source / "open" / "huge").write_bytes(b"")
    os.truncate(source / "open" / "huge", rootfs.LARGEST_COPY + 1)
    rootfs.apply_plan(
        (
            Copy(str(source / "open"), "/copy"),
            Copy(str(source / "missing"), "/none"),
            TextFile("/t", "é"),
            EmptyDirectory("/d", 0o700),
        ),
        str(root),
    )
    assert sorted(os.listdir(root / "copy")) == ["link", "public", "tool"]
    assert os.readlink(root / "copy" / "link") == "/etc/shadow"
    assert (root / "copy" / "tool").stat().st_mode & 0o777 == 0o755
    assert (root / "t").read_text() == "é"
    assert (root / "d").stat().st_mode & 0o777 == 0o700
    assert not (root / "none").exists()


def test_the_first_step_that_fails_is_raised(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        rootfs.apply_plan((Symlink("/missing/link", "x"), TextFile("/after", "")), str(tmp_path))
    assert os.listdir(tmp_path) == []


def test_configuration_of_packages_is_shown_and_nothing_secret(tmp_path: Path) -> None:
    etc, root = tmp_path / "host" / "etc", tmp_path / "root"
    shown = {"chromium.d/default-flags": "export A=b\n", "apt/sources.list.d/a.sources": "URIs: http://deb.example/\n"}
    hidden = {
        "chromium.d/proxy": "export http_proxy=http://user:hunter2@proxy.example:3128\n",
        "ssl/site.pem": "-----BEGIN RSA PRIVATE KEY-----\n",
        "apt/sources.list": "deb https://user:hunter2@deb.example/ stable main\n",
        "apt/auth.conf": "machine deb.example login user password hunter2\n",
        "apt/auth.conf.d/ours.conf": "machine deb.example login user password hunter2\n",
        "apt/apt.conf.d/proxy": "Acquire::http::Proxy;\n",
        **dict.fromkeys(("npmrc", "pip.conf", "gitconfig", "wgetrc", "environment", "machine-id", "shadow"), "x\n"),
        **dict.fromkeys(("ssh/ssh_config", "sudoers.d/a", "docker/key.json", "wireguard/wg0.conf"), "x\n"),
    }
    for name, text in (shown | hidden).items():
        (etc / name).parent.mkdir(parents=True, exist_ok=True)
        (etc / name).write_text(text)
    root.mkdir()
    plan = rootfs.base_plan({}, str(tmp_path / "host"))
    rootfs.apply_plan([step for step in plan if isinstance(step, EmptyDirectory | Copy)], str(root))
    found = {str(path.relative_to(root / "etc")) for path in (root / "etc").rglob("*") if path.is_file()}
    assert found == set(shown)
