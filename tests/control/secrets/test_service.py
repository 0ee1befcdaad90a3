from __future__ import annotations

import pytest
from tests.support.calls import ADMIN
from tests.support.killed import killed

from carrel.audit import Filter, chain_of
from carrel.config import Settings
from carrel.control.plane import ControlPlane
from carrel.errors import InvalidRequest, LimitExceeded, NotFound, Unsupported
from carrel.models import CommandRequest, PolicyDocuments, SandboxRequest

VALUE = b"correct-horse-battery"


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"sandbox": settings.sandbox.model_copy(update={"provider": "namespace"})})


async def _cat(plane: ControlPlane, name: str = "PASSWORD") -> str:
    command = (
        f"wc -c < /run/secrets/{name}; cat /run/secrets/{name}; base64 /run/secrets/{name}; env; cat /proc/*/environ"
    )
    result = await plane.operations.run_command(ADMIN, "c", CommandRequest(command=command))
    assert VALUE.decode() not in result.stdout + result.stderr
    return result.stdout


async def test_a_secret_reaches_the_sandbox_and_nothing_else(plane: ControlPlane) -> None:
    info = await plane.secrets.put("c", "PASSWORD", VALUE)
    assert (info.name, info.version) == ("PASSWORD", 1)
    await plane.operations.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    shown = await _cat(plane)
    assert shown.startswith(f"{len(VALUE)}\n[secret:PASSWORD]") and shown.count("[secret:PASSWORD]") == 2
    await plane.operations.run_command(ADMIN, "c", CommandRequest(command=f"echo {VALUE.decode()}"))
    page = await plane.audit.search(Filter(chain=chain_of("c")), limit=100)
    assert VALUE.decode() not in str(page.model_dump()) and "[secret:PASSWORD]" in str(page.model_dump())
    taken = await plane.snapshots.take(ADMIN, "c")
    tar = b"".join([piece async for piece in await plane.snapshots.export(ADMIN, "c", taken.id)])
    assert VALUE not in tar
    streamed = await plane.operations.start_command(
        ADMIN, "c", CommandRequest(command="cat /run/secrets/PASSWORD; echo")
    )
    chunks = [chunk.data async for chunk in plane.operations.command_output(ADMIN, "c", streamed.id)]
    assert VALUE not in b"".join(chunks) and b"[secret:PASSWORD]" in b"".join(chunks)


async def test_a_secret_is_rotated_and_taken_away_while_the_sandbox_runs(plane: ControlPlane) -> None:
    await plane.operations.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    await plane.secrets.put("c", "PASSWORD", b"first-value")
    assert (await plane.secrets.put("c", "PASSWORD", VALUE)).version == 2
    assert (await _cat(plane)).startswith(f"{len(VALUE)}\n")
    assert [each.name for each in (await plane.secrets.list("c")).items] == ["PASSWORD"]
    await plane.secrets.delete("c", "PASSWORD")
    with pytest.raises(NotFound):
        await plane.secrets.delete("c", "PASSWORD")
    result = await plane.operations.run_command(ADMIN, "c", CommandRequest(command="ls /run/secrets"))
    assert result.stdout == ""
    assert (await plane.secrets.list("c")).items == []


async def _said(plane: ControlPlane, command: str) -> str:
    result = await plane.operations.run_command(ADMIN, "c", CommandRequest(command=command))
    return result.stdout + result.stderr


async def test_a_value_that_a_running_sandbox_saw_is_taken_out_after_it_changed(settings: Settings) -> None:
    first = await ControlPlane.open(settings)
    await first.operations.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    for name, value in (("PASSWORD", "first-value-0"), ("PASSWORD", "second-value-0"), ("GONE", "third-value-0")):
        await first.secrets.put("c", name, value.encode())
        await first.operations.run_command(
            ADMIN, "c", CommandRequest(command=f"cat /run/secrets/{name} >> kept; echo >> kept")
        )
    await first.secrets.delete("c", "GONE")
    taken_out = "[secret:PASSWORD]\n[secret:PASSWORD]\n[secret:GONE]\n"
    assert await _said(first, "cat kept") == taken_out
    assert await _said(first, "base64 -w0 kept") != ""
    await killed(first)
    second = await ControlPlane.open(settings)  # as if the first had been killed
    try:
        assert await _said(second, "cat kept") == taken_out, "also by the server that took it over"
        await second.secret_values.forget_former()
        assert await _said(second, "cat kept") == taken_out, "as long as the sandbox runs"
        await second.operations.stop(ADMIN, "c")
        await second.secret_values.forget_former()
        await second.operations.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
        assert await _said(second, "cat kept") == "first-value-0\n[secret:PASSWORD]\nthird-value-0\n"
    finally:
        await second.close()
        await first.close()


async def test_secrets_that_no_sandbox_could_hold_are_refused_when_they_are_put(plane: ControlPlane) -> None:
    await plane.operations.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    for number in range(16):
        await plane.secrets.put("c", f"N{number}", b"x" * 65_536)
    with pytest.raises(LimitExceeded, match="1048580 bytes together, and there is room for 1048576") as caught:
        await plane.secrets.put("c", "MORE", b"abcd")
    assert caught.value.field == "value" and caught.value.hint
    assert len((await plane.secrets.list("c")).items) == 16, "what was refused is not kept"
    await plane.secrets.put("c", "N0", b"abcd")
    await plane.secrets.put("c", "MORE", b"abcd")
    assert await _said(plane, "ls /run/secrets | wc -l") == "17\n"


async def test_a_server_that_took_over_a_sandbox_takes_its_secrets_away(settings: Settings) -> None:
    first = await ControlPlane.open(settings)
    await first.secrets.put("c", "PASSWORD", VALUE)
    await first.operations.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    await killed(first)
    second = await ControlPlane.open(settings)  # as if the first had been killed
    try:
        assert second.recovered.adopted == 1
        await second.secrets.delete("c", "PASSWORD")
        listed = await second.operations.run_command(ADMIN, "c", CommandRequest(command="ls /run/secrets"))
        assert listed.stdout == ""
        assert (await second.policy_changes.put("c", PolicyDocuments(settings=None), "person:ann")).restart_needed
    finally:
        await second.close()
        await first.close()


async def test_what_cannot_be_a_secret(plane: ControlPlane) -> None:
    for name, value in (("a b", VALUE), ("OK", b"abc"), ("OK", b"x" * 70_000)):
        with pytest.raises(InvalidRequest):
            await plane.secrets.put("c", name, value)


async def test_a_sandbox_without_a_place_for_them_does_not_start(settings: Settings) -> None:
    plane = await ControlPlane.open(settings)
    try:
        await plane.secrets.put("c", "PASSWORD", VALUE)
        with pytest.raises(Unsupported, match="cannot enforce: secrets"):
            await plane.sessions.deploy_or_resume(
                ADMIN, SandboxRequest(context_id="c", provider="process", trust="high")
            )
        assert plane.sessions.live() == []
    finally:
        await plane.close()


async def _in_twin(plane: ControlPlane, command: str) -> str:
    return (await plane.operations.run_command(ADMIN, "twin", CommandRequest(command=command))).stdout


async def test_a_fork_has_the_secrets_of_its_origin(plane: ControlPlane) -> None:
    await plane.operations.deploy_or_resume(ADMIN, SandboxRequest(context_id="origin"))
    await plane.secrets.put("origin", "KEY", b"open-sesame")
    await plane.secrets.put("origin", "OWN", b"of-the-origin")
    await plane.secrets.put("twin", "OWN", b"given-before")
    await plane.snapshots.fork(ADMIN, "origin", "twin")
    shown = await _in_twin(plane, "wc -c < /run/secrets/KEY; grep -c given-before /run/secrets/OWN")
    assert shown.split() == ["11", "1"]
    assert "sesame" not in await _in_twin(plane, "cat /run/secrets/KEY"), "it is taken out of what is shown"
    await plane.secrets.delete("origin", "KEY")
    assert await _in_twin(plane, "wc -c < /run/secrets/KEY") == "11\n", "the two are independent from now on"
    await plane.audit.flush()
    found = (await plane.audit.search(Filter(chain=chain_of("twin")), limit=100)).items
    copied = next(each for each in found if each.name == "copy_secrets")
    assert copied.arguments == {"from": "origin", "names": ["KEY"]}


async def test_a_fork_without_secrets(plane: ControlPlane) -> None:
    await plane.operations.deploy_or_resume(ADMIN, SandboxRequest(context_id="origin"))
    await plane.secrets.put("origin", "KEY", b"open-sesame")
    await plane.snapshots.fork(ADMIN, "origin", "twin", secrets=False)
    assert (await plane.secrets.list("twin")).items == []
