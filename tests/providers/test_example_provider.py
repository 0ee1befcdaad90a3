"""The provider in `examples/bubblewrap-provider`, installed as a package: it keeps its promises, and a server uses it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.calls import ADMIN
from tests.support.servers import ROOT as AS_ROOT

from carrel.config import load
from carrel.control.plane import ControlPlane
from carrel.errors import Unsupported
from carrel.models import CommandRequest, SandboxInfo, SandboxRequest
from carrel.primitives.trees import remove_tree

EXAMPLE = Path(__file__).parents[2] / "examples" / "bubblewrap-provider"
USUAL = "files_are_isolated or allowlist or removal_ends_it or failed_start or masks"
"""The checks that are made in every run of the tests; with `--on-example` all are."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with the package as an installer leaves it, with its entry point."""
    if not AS_ROOT:
        pytest.skip("the provider needs a server that runs as root")
    target = tmp_path_factory.mktemp("installed")
    uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--offline", "--no-deps", "--no-build-isolation"]
    subprocess.run([*uv, "--python", sys.executable, "--target", str(target), str(EXAMPLE)], check=True)
    return str(target)


def test_its_own_test_passes(installed: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    chosen = [] if request.config.getoption("--on-example") else ["-k", USUAL]
    plain = ["-p", "no:cacheprovider", "-p", "no:langsmith_plugin", f"--basetemp={tmp_path}/own"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plain, *chosen, str(EXAMPLE / "tests")],
        env={**os.environ, "PYTHONPATH": installed},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout + done.stderr


@pytest.fixture
def data_dir() -> Iterator[str]:
    """A short path: a Unix socket address holds 107 bytes."""
    path = tempfile.mkdtemp(prefix="carrel-t-")
    yield path
    remove_tree(path)


async def test_a_server_uses_it_as_far_as_the_operator_believes_it(
    installed: str, data_dir: str, bundles: Path, forked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(installed)
    (Path(data_dir) / "bundles").symlink_to(bundles)
    flags = {"data_dir": data_dir, "volumes": "directory", "docker.socket": f"{data_dir}/none"}

    async def deployed(plane: ControlPlane, **fields: str) -> SandboxInfo:
        request = SandboxRequest.model_validate({"context_id": "c", "provider": "bubblewrap", **fields})
        return (await plane.operations.deploy_or_resume(ADMIN, request))[0]

    async def said(plane: ControlPlane, command: str) -> str:
        return (await plane.operations.run_command(ADMIN, "c", CommandRequest(command=command))).stdout

    plane = await ControlPlane.open(load(flags, environ={}))
    try:
        with pytest.raises(Unsupported, match="carrel does not check the isolation"):
            await deployed(plane)
        info = await deployed(plane, trust="high")
        assert (info.provider, info.isolation_level, info.unsafe, info.network) == ("bubblewrap", 0, False, "none")
        assert await said(plane, "echo kept > file; id -u; hostname") == "1000\ncarrel\n"
        assert [each.package for each in (await plane.host_report()).providers if each.name == "bubblewrap"] == [
            "carrel-bubblewrap 0.1.0"
        ]
        await plane.sessions.stop("c")
    finally:
        await plane.close()
    plane = await ControlPlane.open(load({**flags, "sandbox.third_party": "bubblewrap"}, environ={}))
    try:
        assert (await deployed(plane, trust="medium")).isolation_level == 1
        assert await said(plane, "cat file") == "kept\n"
    finally:
        await plane.close()
