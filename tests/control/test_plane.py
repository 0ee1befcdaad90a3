from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from tests.support.calls import ADMIN

from carrel.config import Settings
from carrel.control.plane import ControlPlane
from carrel.errors import PlatformError, ProviderUnavailable
from carrel.models import CommandRequest, SandboxRequest
from carrel.providers import open_providers
from carrel.providers.built_in import BUILT_IN


async def test_closing_ends_everything(settings: Settings) -> None:
    tasks = asyncio.all_tasks()
    plane = await ControlPlane.open(settings)
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c", trust="high"))
    box = plane.sessions.live()[0]
    await plane.operations.start_command(ADMIN, "c", CommandRequest(command="sleep 4321"))
    await plane.close()
    assert not await box.provider.alive(box.handle)
    assert asyncio.all_tasks() == tasks
    await plane.close()  # a second time does no harm


async def test_ready_while_some_provider_can_be_used(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    await plane.ready()
    for provider in plane.providers.values():
        monkeypatch.setattr(provider, "missing", lambda: "a test took it away")
    with pytest.raises(ProviderUnavailable, match="carrel doctor"):
        await plane.ready()
    report = await plane.host_report()
    assert {provider.name for provider in report.providers} == plane.providers.keys() | BUILT_IN.keys()
    assert not any(provider.available for provider in report.providers)


async def test_a_damaged_database_leaves_nothing_open(settings: Settings) -> None:
    Path(settings.data_dir, "carrel.db").write_bytes(b"no database " * 100)
    with pytest.raises(PlatformError) as caught:
        await ControlPlane.open(settings)
    assert caught.value.field == "data_dir"


async def test_a_provider_that_fails_to_start_leaves_nothing_open(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken() -> None:
        raise PlatformError("no zygote today")

    providers = open_providers(
        str(Path(settings.data_dir, "run")), str(Path(settings.data_dir, "storage", "volumes")), allow_process=True
    )
    closed = []
    for name, provider in providers.items():
        monkeypatch.setattr(provider, "warm", broken)
        close = provider.close

        async def closing(name: str = name, close: object = close) -> None:
            closed.append(name)
            await close()  # type: ignore[operator]

        monkeypatch.setattr(provider, "close", closing)
    with pytest.raises(PlatformError, match="no zygote today"):
        await ControlPlane.open(settings, providers=providers)
    assert sorted(closed) == sorted(providers)


async def test_a_provider_that_cannot_be_closed_does_not_hold_up_the_rest(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = await ControlPlane.open(settings)
    first = next(iter(plane.providers.values()))
    close = first.close

    async def broken() -> None:
        await close()
        raise OSError("stuck")

    monkeypatch.setattr(first, "close", broken)
    await plane.close()
    assert os.listdir(settings.data_dir).count("carrel.db-wal") == 0, "the database is closed"
