"""Secrets that are put, changed and taken away while something goes on: a stream, another change, a sandbox that is
gone.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from pathlib import Path

import pytest
from pydantic import SecretStr
from tests.support.calls import ADMIN
from tests.support.sandboxes import until

from carrel.config import Settings
from carrel.control.plane import ControlPlane
from carrel.control.supervisor.client import SupervisorClient
from carrel.errors import CarrelError
from carrel.models import CommandRequest, SandboxRequest
from carrel.store.secrets import FormerSecret, SecretRecord

KEY = SecretStr("a2tra2tra2tra2tra2tra2tra2tra2tra2tra2tra2s=")
OLD, NEW = "first-value-of-it", "correct-horse-battery"


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"sandbox": settings.sandbox.model_copy(update={"provider": "namespace"})})


@pytest.mark.parametrize("before", [OLD, None])
async def test_a_stream_that_is_open_already_does_not_show_a_secret_put_since(
    plane: ControlPlane, before: str | None
) -> None:
    await plane.operations.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    if before is not None:
        await plane.secrets.put("c", "PASSWORD", before.encode())
    command = "echo ready; read line; cat /run/secrets/PASSWORD; echo; echo done"
    started = await plane.operations.start_command(ADMIN, "c", CommandRequest(command=command, interactive=True))
    shown = b""
    async with aclosing(plane.operations.command_output(ADMIN, "c", started.id)) as chunks:  # type: ignore[type-var]
        async for chunk in chunks:
            if chunk.stream != "end":
                shown += chunk.data
            if chunk.data == b"ready\n":
                await plane.secrets.put("c", "PASSWORD", NEW.encode())
                await plane.operations.send_input(ADMIN, "c", started.id, b"go\n")
    assert shown == b"ready\n[secret:PASSWORD]\ndone\n"


async def test_what_takes_out_secrets_is_not_older_than_the_last_change(plane: ControlPlane) -> None:
    await plane.secrets.put("c", "PASSWORD", OLD.encode())
    store, asked, changed = plane.secret_values._store, asyncio.Event(), asyncio.Event()
    look = store.former

    async def slow(context: str | None, templates: Sequence[str] = ()) -> list[FormerSecret]:
        found = await look(context, templates)
        asked.set()
        await changed.wait()
        return found

    store.former = slow  # type: ignore[method-assign]
    making = asyncio.ensure_future(plane.secret_values.redactor("c"))
    await asked.wait()
    await plane.secrets.put("c", "PASSWORD", NEW.encode())
    changed.set()
    assert (await making).text(f"{OLD} {NEW}") == "[secret:PASSWORD] [secret:PASSWORD]"
    assert await plane.secret_values.clean_text("c", f"{OLD} {NEW}") == "[secret:PASSWORD] [secret:PASSWORD]"


async def test_what_a_sandbox_gets_is_taken_out_also_when_another_server_put_it_on_the_way(plane: ControlPlane) -> None:
    await plane.operations.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    store, vault, put = plane.secret_values._store, plane.secret_values._vault, plane.secrets.put
    await put("c", "PASSWORD", OLD.encode())
    look, waiting = store.of_scope, True

    async def overtaken(context: str | None, templates: Sequence[str] = ()) -> list[SecretRecord]:
        nonlocal waiting
        if waiting:
            waiting = False
            await plane.secret_values.redactor("c")
            sealed = vault.seal("context", "c", "PASSWORD", NEW.encode())
            await store.put(
                "context",
                "c",
                "PASSWORD",
                sealed=sealed.data,
                key_id=sealed.key_id,
                sandboxes=(),
                check=lambda _sizes: None,
            )
        return await look(context, templates)

    store.of_scope = overtaken  # type: ignore[method-assign]
    await plane.attachments.secrets.refresh(plane.sessions.live()[0])
    result = await plane.operations.run_command(ADMIN, "c", CommandRequest(command="cat /run/secrets/PASSWORD"))
    assert result.stdout == "[secret:PASSWORD]"


async def test_changes_at_once_reach_the_sandbox_in_their_order(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    await plane.operations.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    deliver, inside, most = SupervisorClient.put_secrets, 0, 0

    async def watched(supervisor: SupervisorClient, values: Mapping[str, bytes]) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        while len((await plane.secrets.list("c")).items) < 8:  # until every change is stored
            await asyncio.sleep(0)
        await deliver(supervisor, values)
        inside -= 1

    monkeypatch.setattr(SupervisorClient, "put_secrets", watched)
    await asyncio.gather(*(plane.secrets.put("c", f"N{number}", NEW.encode()) for number in range(8)))
    assert most == 1, "or an older set could replace a newer one"
    listed = await plane.operations.run_command(ADMIN, "c", CommandRequest(command="ls /run/secrets"))
    assert listed.stdout.split() == [f"N{number}" for number in range(8)]


async def test_a_sandbox_that_is_gone_keeps_no_other_from_a_changed_secret(settings: Settings) -> None:
    folder = Path(settings.data_dir) / "templates" / "numbers"
    folder.mkdir(parents=True)
    (folder / "template.toml").write_text('description = "numbers"\n')
    plane = await ControlPlane.open(settings)
    try:
        for name in ("a", "b", "c"):
            await plane.operations.deploy_or_resume(ADMIN, SandboxRequest(context_id=name, template="numbers"))
        first = plane.sessions.live()[0]
        os.unlink(str(first.handle["socket"]))
        first.connection.close()
        with pytest.raises(CarrelError):
            await plane.secrets.put("numbers", "PASSWORD", NEW.encode(), kind="template")
        others = [box.record.context_id for box in plane.sessions.live() if box is not first]
        assert len(others) == 2
        for name in others:
            found = await plane.operations.run_command(ADMIN, str(name), CommandRequest(command="ls /run/secrets"))
            assert found.stdout == "PASSWORD\n"
    finally:
        await plane.close()


async def test_what_another_server_changed_reaches_a_sandbox_that_runs(
    node_settings: list[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    planes = [await ControlPlane.open(each.model_copy(update={"secret_key": KEY})) for each in node_settings]
    here, there = planes
    try:
        await here.operations.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
        delivered, deliver = 0, SupervisorClient.put_secrets

        async def counted(supervisor: SupervisorClient, values: Mapping[str, bytes]) -> None:
            nonlocal delivered
            delivered += 1
            await deliver(supervisor, values)

        monkeypatch.setattr(SupervisorClient, "put_secrets", counted)
        command = CommandRequest(command="cat /run/secrets/*")
        await there.secrets.put("c", "PASSWORD", OLD.encode())
        await until(lambda: delivered == 1, what="the secret, brought by the upkeep")
        assert (await here.operations.run_command(ADMIN, "c", command)).stdout == "[secret:PASSWORD]"
        await there.secrets.put("c", "PASSWORD", NEW.encode())
        await here.attachments.secrets.catch_up()  # type: ignore[attr-defined]
        assert (await here.operations.run_command(ADMIN, "c", command)).stdout == "[secret:PASSWORD]"
        await here.attachments.secrets.catch_up()  # type: ignore[attr-defined]
        await here.secrets.put("c", "PASSWORD", NEW.encode())
        assert delivered == 2, "what it has already is not brought again"
        await there.secrets.delete("c", "PASSWORD")
        await here.attachments.secrets.catch_up()  # type: ignore[attr-defined]
        gone = await here.operations.run_command(ADMIN, "c", CommandRequest(command="ls /run/secrets"))
        assert (gone.stdout, delivered) == ("", 3)
    finally:
        for each in planes:
            await each.close()
