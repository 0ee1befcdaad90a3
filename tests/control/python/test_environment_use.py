from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.calls import ADMIN
from tests.support.environments_ground import PYTHON, attach, context, sources, stocked
from tests.support.sandboxes import until

from carrel.audit import Filter, chain_of
from carrel.config import Settings
from carrel.control.operations.call import Call
from carrel.control.operations.caller import OWN_WORK
from carrel.control.plane import ControlPlane
from carrel.errors import Conflict, Denied, Unsupported
from carrel.models import (
    CommandRequest,
    EnvironmentAttach,
    EnvironmentBuild,
    Network,
    PolicyDocuments,
    SandboxRequest,
    TerminateRequest,
    Trust,
)
from carrel.policy.verdict import Verdict


async def test_it_is_decided_as_the_install_it_stands_for(plane: ControlPlane) -> None:
    async with stocked() as index:
        name = await context(plane, index)
        with pytest.raises(Denied, match="blocked-thing is blocked"):
            await attach(plane, name, "Blocked.Thing")
        ready = await attach(plane, name, "nail")
        shelf = await attach(plane, name, "shelf")
        other = await context(plane, index, "other")
        await plane.policy_changes.put(
            other, PolicyDocuments(sources=sources(index, blocked_packages=["plank"])), "tests"
        )
        with pytest.raises(Denied, match="plank is blocked"):
            await plane.envs.attach(ADMIN, other, EnvironmentAttach(env=shelf.name))
        strict = {"permissions": {"allow": ["shell(echo:*)"], "deny": ["shell(pip:*)"]}}
        await plane.policy_changes.put(name, PolicyDocuments(settings=strict, sources=sources(index)), "tests")
        for request in (EnvironmentAttach(requirements=["nail"]), EnvironmentAttach(env=ready.name)):
            with pytest.raises(Denied) as caught:
                await plane.envs.attach(ADMIN, name, request)
            assert caught.value.rule == "shell(pip:*)"

        async def recorded() -> bool:
            records = (await plane.audit.search(Filter(chain_of(name)), limit=50)).items
            return sorted(each.name for each in records).count("attach_env") == 5 and any(
                each.name == "package" for each in records
            )

        await until(recorded)


async def test_a_provider_that_isolates_nothing_has_none(plane: ControlPlane) -> None:
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="p", provider="process", trust=Trust.HIGH))
    with pytest.raises(Unsupported, match="environments"):
        await attach(plane, "p", "nail")


async def test_built_without_a_sandbox_under_the_servers_policy(settings: Settings) -> None:
    async with stocked() as index:
        file = Path(settings.data_dir, "sources.json")
        file.write_text(json.dumps(sources(index)))
        policy = settings.policy.model_copy(update={"sources_file": str(file)})
        plane = await ControlPlane.open(settings.model_copy(update={"policy": policy}))
        try:
            with pytest.raises(Denied, match="blocked"):
                await plane.envs.build(ADMIN, EnvironmentBuild(requirements=["blocked-thing"]))
            built = await plane.envs.build(ADMIN, EnvironmentBuild(requirements=["nail"], name="tools"))
            assert built.labels == ["tools"] and built.built_by is None and not built.in_use
            again = await plane.envs.build(ADMIN, EnvironmentBuild(requirements=["nail"], name="more"))
            assert again.labels == ["more", "tools"] and again.name == built.name
            await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
            assert (await plane.envs.attach(ADMIN, "c", EnvironmentAttach(env="tools"))).in_use
        finally:
            await plane.close()


async def run(plane: ControlPlane, name: str, command: str, *, ok: bool = True) -> str:
    result = await plane.operations.run_command(ADMIN, name, CommandRequest(command=command, timeout=60))
    assert not ok or result.exit_code == 0, result.stdout + result.stderr
    return result.stdout + ("" if ok else result.stderr)


async def test_the_contexts_own_on_top_of_a_shared_one(plane: ControlPlane) -> None:
    async with stocked() as index:
        name = await context(plane, index, network="allowlist")
        shared = await plane.envs.attach(ADMIN, name, EnvironmentAttach(requirements=["plank"], venv=True))
        look = "python3 -c 'import plank, nail; print(plank.__file__, nail.__file__)'"
        own = f"/workspace/.venv/lib/{PYTHON}/site-packages"
        both = f"{shared.path}/lib/{PYTHON}/site-packages/plank/__init__.py {own}/nail/__init__.py\n"
        assert (await run(plane, name, f"pip install -q nail && {look}")) == both
        assert "already satisfied" in await run(plane, name, "pip install plank")
        await plane.operations.stop(ADMIN, name)
        await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id=name))
        assert (await run(plane, name, look)) == both
        fork = await plane.snapshots.fork(ADMIN, name, "fork")
        assert (await run(plane, fork.id, look)) == both
        await plane.operations.terminate(ADMIN, name, TerminateRequest())
        plane.environments.grace_s = 0
        assert await plane.environments._store.holds("fork") == [shared.name]
        with pytest.raises(Conflict, match="in use by fork"):
            await plane.environments.remove(ADMIN, shared.name)


async def test_installed_by_the_agent_and_kept(plane: ControlPlane) -> None:
    async with stocked() as index:
        name = await context(plane, index, network="allowlist")
        assert await run(plane, name, "test -e .venv || echo none; echo $VIRTUAL_ENV") == "none\n\n"
        assert "/etc/carrel/python/pip" in await run(plane, name, "pip --version")
        assert await run(plane, name, "test -e .venv || echo none") == "none\n", "looking needs none"
        assert "system-wide" not in await run(
            plane, name, "python3 -m pip install -q plank && python3 -m pip --version"
        )
        found = f"/workspace/.venv/lib/{PYTHON}/site-packages/shelf/__init__.py\n"
        code = "python3 -c 'import shelf; print(shelf.__file__)'"
        assert (await run(plane, name, f"pip install -q --user shelf && {code}")) == found
        assert await run(plane, name, "cd data && uv pip install -q nail && python3 -c 'import nail'") == ""
        where = (
            "echo $VIRTUAL_ENV; python3 -c 'import sys; print(sys.prefix)'; python -c 'import sys; print(sys.prefix)'"
        )
        assert await run(plane, name, where) == "/workspace/.venv\n" * 3
        planted = "printf '#!/bin/sh\\necho evil' > .venv/bin/id; chmod +x .venv/bin/id; cp .venv/bin/id .venv/bin/own"
        assert await run(plane, name, f"{planted}; id -u; own") == "1000\nevil\n", "no name of the host's is taken"
        listed = await run(plane, name, ". .venv/bin/activate && python3 -m pip list")
        assert "shelf" in listed and "nail" in listed
        refused = await run(plane, name, "pip3 uninstall -q -y nail; python3 -c 'import nail'", ok=False)
        assert "No module named 'nail'" in refused
        assert (await run(plane, name, "pip install -q --target lib nail && ls lib")).startswith("nail\n")


async def test_two_at_once_on_first_need(plane: ControlPlane) -> None:
    async with stocked() as index:
        name = await context(plane, index, network="allowlist")
        await run(plane, name, "pip install -q nail & uv pip install -q plank & pip3 install -q shelf & wait")
        assert await run(plane, name, "python3 -c 'import nail, plank, shelf'; ls -d .venv*") == ".venv\n"
        own = await run(
            plane, name, "uv venv -q other && VIRTUAL_ENV=/workspace/other pip install -q nail; ls other/lib/*/*"
        )
        assert "nail" in own.split()


async def test_what_policy_denies_outright_is_masked_too(plane: ControlPlane) -> None:
    async with stocked() as index:
        strict = {"permissions": {"allow": ["shell(sh:*)"], "deny": ["shell(pip:*)", "shell(uv:*)"]}}
        await plane.policy_changes.put("m", PolicyDocuments(settings=strict, sources=sources(index)), "tests")
        await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="m", network=Network.ALLOWLIST))
        script = (
            "for each in pip uv /etc/carrel/bin/pip /etc/carrel/bin/uv /etc/carrel/tools/uv; do $each --version; done"
        )
        await plane.own_operations.write_file(OWN_WORK, "m", "s.sh", script.encode())
        result = await plane.own_operations.run_command(OWN_WORK, "m", CommandRequest(command="sh s.sh"))
        assert result.stdout.count("denied_by_policy") + result.stderr.count("denied_by_policy") == 5


async def test_what_was_decided_is_what_is_attached(settings: Settings) -> None:
    async with stocked() as index:
        file = Path(settings.data_dir, "sources.json")
        file.write_text(json.dumps(sources(index)))
        policy = settings.policy.model_copy(update={"sources_file": str(file)})
        plane = await ControlPlane.open(settings.model_copy(update={"policy": policy}))
        try:
            await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
            decided = await plane.envs.build(ADMIN, EnvironmentBuild(requirements=["nail"], name="tools"))
            other = await plane.envs.build(ADMIN, EnvironmentBuild(requirements=["plank"]))
            decide = plane.policies.decide

            async def move_label(asked: Call, *paths: str | None) -> Verdict:
                if asked.name == "attach_env" and asked.arguments["env"] == "tools":
                    await plane.environments.label(plane.environments.find(ADMIN, other.name), "tools")
                return await decide(asked, *paths)

            plane.policies.decide = move_label  # type: ignore[method-assign]
            assert (await plane.envs.attach(ADMIN, "c", EnvironmentAttach(env="tools"))).name == decided.name
            assert plane.environments.find(ADMIN, "tools").name == other.name
        finally:
            await plane.close()
