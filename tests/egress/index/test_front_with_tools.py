"""The index as pip and uv see it."""

import os
import re
import tempfile

import pytest
from tests.support.indexes import gateway, run, sdist, wheel

from carrel.egress.index.front import AllowedPackages

BIG = os.urandom(300_000)


async def install(tool, url, target, *names):
    if tool == "pip":
        return await run("pip", "install", "--no-cache-dir", "--target", str(target), "-i", url, *names)
    # With `--no-cache` a uv that fails sometimes leaves the temporary one it makes instead.
    cache = tempfile.mkdtemp(prefix="cache-", dir=target.parent)
    return await run(
        "uv", "pip", "install", "--cache-dir", cache, "--target", str(target), "--default-index", url, *names
    )


@pytest.mark.parametrize("tool", ["pip", "uv"])
@pytest.mark.parametrize("form", ["both", "html"])
async def test_an_install_and_a_second_one_that_asks_nobody(front, server, tmp_path, tool, form):
    server.form = form
    server.add(wheel("alpha", requires=("beta>=1",), payload=BIG))
    server.add(wheel("beta"))
    server.add(sdist("beta", "0.9"))
    for number in range(2):
        async with gateway(front, AllowedPackages((server.index(),))) as url:
            code, out = await install(tool, url, tmp_path / f"{number}", "Alpha")
        assert code == 0, out
        assert (tmp_path / f"{number}/alpha/payload").read_bytes() == BIG
        assert (tmp_path / f"{number}/beta/__init__.py").exists()
        asked, server.asked = server.asked, []
        assert len(asked) == len(set(asked))
        assert bool(asked) == (number == 0)


async def test_after_pip_uv_needs_nothing_more(front, server, tmp_path):
    server.add(wheel("alpha"))
    async with gateway(front, AllowedPackages((server.index(),))) as url:
        assert (await run("pip", "download", "--no-cache-dir", "-d", str(tmp_path / "d"), "-i", url, "alpha"))[0] == 0
        server.asked.clear()
        assert (await install("uv", url, tmp_path / "u", "alpha"))[0] == 0
    assert server.asked == []


async def test_what_pip_says_of_a_blocked_package(front, server, tmp_path):
    server.add(wheel("alpha", requires=("beta",)))
    server.add(wheel("beta"))
    async with gateway(front, AllowedPackages((server.index(),), blocked=frozenset({"beta"}))) as url:
        code, out = await install("pip", url, tmp_path, "alpha")
        assert code == 1
        assert "the package beta is blocked for this agent" in out
        code, out = await install("pip", url, tmp_path, "beta==1.0")
        assert code == 1
        assert "denied.by.policy" in out
    assert not any("beta" in path for path in server.asked)


async def test_what_uv_says_of_a_blocked_package(front, server, tmp_path):
    async with gateway(front, AllowedPackages((server.index(),), blocked=frozenset({"beta"}))) as url:
        code, out = await install("uv", url, tmp_path, "beta")
    assert code != 0
    assert "the package beta is blocked for this agent" in out


async def test_what_pip_says_when_the_index_is_down(front, server, tmp_path):
    server.broken = 500
    async with gateway(front, AllowedPackages((server.index(),))) as url:
        code, out = await install("pip", url, tmp_path, "beta")
    assert code == 1
    assert "the package index main failed: it answered 500" in out


@pytest.mark.parametrize("tool", ["pip", "uv"])
async def test_an_install_that_is_too_large(front, server, tmp_path, tool):
    server.add(wheel("alpha", requires=("beta",), payload=b"\0" * 500_000))
    server.add(wheel("beta", payload=b"\0" * 600_000))
    async with gateway(front, AllowedPackages((server.index(),), max_install_bytes=1_000_000)) as url:
        code, out = await install(tool, url, tmp_path, "alpha")
        assert code != 0
        assert "403" in out
        if tool == "pip":
            assert re.search(r"has taken 0\.5 MB; 0\.6 MB more is over the 1\.0 MB it may take", out), out
        assert not (tmp_path / "beta").exists()
