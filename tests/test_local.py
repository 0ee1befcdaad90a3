"""A sandbox without a server, as `carrel run` uses it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from carrel.config import load
from carrel.errors import InvalidRequest, ProviderUnavailable, SandboxLost
from carrel.local import LocalSandbox, local_sandbox, needs_server

HEAVY = ("sqlalchemy", "alembic", "fastapi", "uvicorn", "httpx", "httpcore", "cryptography", "mcp", "obstore")


async def output(box: LocalSandbox, command: str | list[str], **how: object) -> tuple[dict[str, bytes], object]:
    handle = await box.commands.start(command, **how)
    stream, written = handle.stream(), {"stdout": b"", "stderr": b""}
    async for chunk in stream:
        written[chunk.stream] += chunk.data
    return written, stream.info


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary directories are made; no settings but the defaults."""
    for name in [name for name in os.environ if name.startswith("CARREL_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("carrel.local.short_temporary_directory", lambda: str(tmp_path))
    return tmp_path


async def test_commands_run_and_nothing_is_left(place: Path) -> None:
    async with local_sandbox({}) as box:
        assert box is not None and not box.unsafe
        written, info = await output(box, "echo out; echo err >&2; mkdir -m 0 closed; exit 3", env={"A": "1"})
        assert written == {"stdout": b"out\n", "stderr": b"err\n"} and info.exit_code == 3
        handle = await box.commands.start(["cat"], interactive=True)
        await handle.send_input(b"typed")
        await handle.close_input()
        assert [chunk.data async for chunk in handle.stream()] == [b"typed"]
        written, info = await output(box, ["sleep", "60"], timeout=0.1)
        assert info.timed_out
        written, _ = await output(box, "stty size", terminal=(11, 22))
        assert written["stdout"] == b"11 22\r\n"
        with pytest.raises(InvalidRequest, match="cannot be run"):
            await box.commands.start([])
    assert list(place.iterdir()) == []


async def test_signals_reach_the_command(place: Path) -> None:
    async with local_sandbox({}) as box:
        assert box is not None
        for number, name in (("INT", "SIGINT"), ("KILL", "SIGKILL")):
            handle = await box.commands.start("echo ready; exec sleep 60")
            stream = handle.stream()
            async for _chunk in stream:
                await (handle.kill() if number == "KILL" else handle.signal(number))
            assert stream.info is not None and stream.info.signal == name


async def test_tokens_are_taken_out_of_the_output(place: Path) -> None:
    token = "ghp_" + "a1B2" * 9
    async with local_sandbox({}) as box:
        assert box is not None
        written, _ = await output(box, ["echo", token])
    assert token.encode() not in written["stdout"] and b"redacted" in written["stdout"]


async def test_a_workspace_over_its_disk_limit_ends_the_sandbox(place: Path) -> None:
    async with local_sandbox({}, limits={"disk_mb": 4}) as box:
        assert box is not None
        with pytest.raises(SandboxLost, match="4 MB"):
            async with asyncio.timeout(60):
                await output(box, "while :; do head -c 1000000 /dev/zero >> data/fill; done")
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    "wanted", [{"template": "t"}, {"network": "allowlist"}, {"provider": "process"}, {"limits": {"memory_mb": 1}}]
)
async def test_the_rest_is_left_to_a_server(place: Path, wanted: dict[str, object]) -> None:
    async with local_sandbox({}, **wanted) as box:
        assert box is None
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    "setting",
    ["policy.settings_file", "policy.sources_file", "sandbox.template", "sandbox.provider"],
)
def test_settings_that_need_a_server(setting: str) -> None:
    assert not needs_server(load({}, environ={}))
    assert needs_server(load({setting: "x"}, environ={}))
    assert needs_server(load({"sandbox.network": "allowlist"}, environ={}))


async def test_a_trust_that_this_host_cannot_give_is_refused(place: Path) -> None:
    with pytest.raises(ProviderUnavailable):
        async with local_sandbox({}, trust="low"):
            pass
    assert list(place.iterdir()) == []


def test_run_without_a_server_imports_no_server(tmp_path: Path) -> None:
    """What takes a second to import: the store, the API and its client."""
    code = (
        "import json, sys\nfrom carrel.cli import main\n"
        "try:\n    main(['run', '--', 'true'])\n"
        f"finally:\n    print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))\n"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CARREL_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, "CARREL_DATA_DIR": str(tmp_path / "none")},
        cwd=tmp_path,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout) == []


async def test_a_sandbox_ends_with_its_lifetime(place: Path) -> None:
    async with local_sandbox({}, limits={"lifetime_s": 0.3}) as box:
        assert box is not None
        with pytest.raises(SandboxLost, match=r"lifetime of the sandbox \(0.3 s\) is over"):
            await output(box, "sleep 60")
