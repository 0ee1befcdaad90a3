from __future__ import annotations

import asyncio
import os
import signal
import uuid
from pathlib import Path

import pytest

from carrel.cli.connecting import find_or_create, find_or_resume
from carrel.cli.failures import Terminated
from carrel.cli.options import SandboxOptions
from carrel.cli.running import context_sandbox, ephemeral_sandbox, run_with_cleanup
from carrel.client import AsyncClient, Client
from carrel.errors import InvalidRequest, NotFound, ServerUnreachable
from carrel.models import State


@pytest.fixture
def here(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CARREL_URL", raising=False)
    monkeypatch.delenv("CARREL_TOKEN", raising=False)
    monkeypatch.setenv("CARREL_DATA_DIR", str(data_dir))


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CARREL_URL", raising=False)
    monkeypatch.setenv("CARREL_DATA_DIR", str(tmp_path))


@pytest.mark.usefixtures("here")
async def test_by_name() -> None:
    name = f"reach-{uuid.uuid4().hex[:8]}"
    with Client(administrator=True) as client:
        with pytest.raises(NotFound):
            find_or_resume(client, name)
        box = find_or_create(client, name, SandboxOptions())
        try:
            assert find_or_resume(client, name).id == find_or_create(client, box.id, SandboxOptions()).id == box.id
            async with context_sandbox(name, SandboxOptions()) as same:
                assert same.id == box.id
            assert box.info().state is State.RUNNING, "leaving it does not end it"
        finally:
            box.terminate(delete_files=True)


@pytest.mark.usefixtures("here")
async def test_on_the_server_it_is_gone_afterwards() -> None:
    async with ephemeral_sandbox(SandboxOptions(trust="high")) as box, AsyncClient(administrator=True) as client:
        assert (await client.find(box.id)).ephemeral
    async with AsyncClient(administrator=True) as client:
        with pytest.raises(NotFound):
            await client.find(box.id)
    async with ephemeral_sandbox(SandboxOptions(), keep=True) as box:
        pass
    async with AsyncClient(administrator=True) as client:
        assert (await client.attach(await client.find(box.id)).terminate()).state is State.TERMINATED


@pytest.mark.usefixtures("nowhere")
async def test_without_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ephemeral_sandbox(SandboxOptions(provider="process", trust="high")) as box:
        assert (await box.commands.run("echo here")).stdout == "here\n"
    with pytest.raises(InvalidRequest):
        async with ephemeral_sandbox(SandboxOptions(provider="nowhere")):
            pass
    with pytest.raises(ServerUnreachable, match="carrel serve"):
        async with ephemeral_sandbox(SandboxOptions(), keep=True):
            pass
    monkeypatch.setenv("CARREL_URL", "http://127.0.0.1:9")
    with pytest.raises(ServerUnreachable):
        async with ephemeral_sandbox(SandboxOptions()):
            pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_the_work_tidy_up(number: signal.Signals) -> None:
    tidied = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), number)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            tidied.append(True)

    with pytest.raises(Terminated) as caught:
        run_with_cleanup(work())
    assert (caught.value.number, tidied) == (number, [True])
    assert signal.getsignal(number) == signal.SIG_DFL


def test_results_and_errors_pass() -> None:
    async def value() -> int:
        return 7

    async def broken() -> int:
        raise KeyError("x")

    assert run_with_cleanup(value()) == 7
    with pytest.raises(KeyError):
        run_with_cleanup(broken())
