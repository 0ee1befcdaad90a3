from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.calls import ADMIN

from carrel.config import Settings
from carrel.control.governance import policies as policies_module
from carrel.control.operations.caller import Caller
from carrel.control.plane import ControlPlane
from carrel.control.sessions import templates as module
from carrel.errors import ApprovalNeeded, Conflict, Denied, InvalidRequest, LimitExceeded, NotFound, PlatformError
from carrel.identity import Identity, OwnerKind, Scope
from carrel.models import CommandRequest, PolicyDocuments, SandboxRequest, TerminateRequest
from carrel.policy.rules.decide import decide_shell
from carrel.policy.rules.layers import Policy

AGENT = Identity("agent:coder", OwnerKind.AGENT, frozenset({Scope.OPERATE}))
RECIPE = """
description = "for numbers"
limits = { memory_mb = 256, timeout_s = 60 }
env = { MODE = "batch", BOTH = "template" }
labels = { team = "data" }
"""
RULES = {"permissions": {"allow": ["shell(cat:*)", "shell(ls:*)"], "deny": ["shell(curl:*)"]}}

SHIPPED_NAMES = ["code-interpreter", "coding", "data", "file-search", "research", "web-search"]


@pytest.fixture
def folder(settings: Settings) -> Path:
    folder = Path(settings.data_dir) / "templates" / "numbers"
    folder.mkdir(parents=True)
    (folder / "template.toml").write_text(RECIPE)
    (folder / "settings.json").write_text(json.dumps(RULES))
    (folder.parent / "plain").mkdir()
    return folder


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """What changes is seen at once."""
    monkeypatch.setattr(module, "FRESH_S", 0.0)
    monkeypatch.setattr(policies_module, "FRESH_S", 0.0)


async def _run(plane: ControlPlane, name: str, command: str, caller: Caller = ADMIN) -> str:
    return (await plane.operations.run_command(caller, name, CommandRequest(command=command))).stdout


async def test_a_sandbox_is_made_by_a_template(folder: Path, plane: ControlPlane) -> None:
    request = SandboxRequest.model_validate(
        {"context_id": "c", "template": "numbers", "env": {"BOTH": "asked"}, "limits": {"timeout_s": 9}}
    )
    info, _ = await plane.operations.deploy_or_resume(ADMIN, request)
    assert (info.template, info.limits.memory_mb, info.limits.timeout_s) == ("numbers", 256, 9)
    assert info.labels == {"team": "data"}
    assert await _run(plane, "c", 'echo "$MODE $BOTH"') == "batch asked\n"
    with pytest.raises(Denied, match="curl is denied") as caught:
        await _run(plane, "c", "curl x")
    assert caught.value.extra["source"] == "numbers/settings.json"
    with pytest.raises(ApprovalNeeded):
        await _run(plane, "c", "id")
    masked = await plane.operations.run_command(ADMIN, "c", CommandRequest(command="cat /usr/bin/curl"))
    assert masked.exit_code != 0 or "denied_by_policy" in masked.stdout, "it holds inside too"


async def test_a_context_keeps_the_template_it_was_made_with(folder: Path, plane: ControlPlane) -> None:
    caller = Caller(AGENT)
    await plane.operations.deploy_or_resume(caller, SandboxRequest(context_id="c", template="numbers"))
    other = SandboxRequest(context_id="c", template="plain")
    same = SandboxRequest(context_id="c", template="numbers")

    async def refused() -> None:
        with pytest.raises(Conflict) as caught:
            await plane.operations.deploy_or_resume(caller, other)
        assert caught.value.field == "template"

    await refused()
    assert (await plane.operations.deploy_or_resume(caller, same))[1] is False
    await plane.operations.stop(caller, "c")
    await refused()
    info, _ = await plane.operations.deploy_or_resume(caller, SandboxRequest(context_id="c"))
    assert (info.template, info.limits.memory_mb) == ("numbers", 256), "also when it is not named"
    twin = await plane.snapshots.fork(caller, "c", "twin")
    assert twin.template == "numbers"
    await plane.operations.terminate(caller, "c", TerminateRequest(delete_files=True))
    await refused()
    info, _ = await plane.operations.deploy_or_resume(caller, SandboxRequest(context_id="c"))
    assert info.template == "numbers", "nobody gets rid of its rules by beginning anew"
    with pytest.raises(Denied):
        await _run(plane, "c", "curl x", caller)
    await plane.operations.terminate(caller, "c", TerminateRequest())
    caller = ADMIN
    info, _ = await plane.operations.deploy_or_resume(caller, other)
    assert info.template == "plain", "but who administers may choose another then"
    await plane.operations.deploy_or_resume(caller, SandboxRequest(context_id="bare"))
    with pytest.raises(Conflict):
        await plane.operations.deploy_or_resume(caller, SandboxRequest(context_id="bare", template="numbers"))


async def test_ephemeral_ones_have_its_rules_and_secrets_too(folder: Path, plane: ControlPlane) -> None:
    await plane.secrets.put("numbers", "KEY", b"open-sesame", kind="template")
    info, _ = await plane.operations.deploy_or_resume(ADMIN, SandboxRequest(template="numbers"))
    with pytest.raises(Denied):
        await _run(plane, info.id, "curl x")
    assert await _run(plane, info.id, "cat /run/secrets/KEY") == "[secret:KEY]"
    bare, _ = await plane.operations.deploy_or_resume(ADMIN, SandboxRequest())
    assert await _run(plane, bare.id, "ls /run/secrets; id -un") == "agent\n"


async def test_the_layers_are_server_template_context(
    folder: Path, settings: Settings, tmp_path: Path, fresh: None
) -> None:
    server = tmp_path / "server.json"
    server.write_text(json.dumps({"permissions": {"deny": ["shell(ls:*)"]}}))
    governed = settings.policy.model_copy(update={"settings_file": str(server)})
    plane = await ControlPlane.open(settings.model_copy(update={"policy": governed}))
    try:
        own = {"permissions": {"allow": ["shell(curl:*)", "shell(id:*)"], "deny": ["shell(cat:*)"]}}
        await plane.policy_changes.put("c", PolicyDocuments(settings=own), "person:ann")
        assert (await plane.policies.explain("c", "curl x", None)).verdict == "allow", "it has no template yet"
        await plane.operations.deploy_or_resume(ADMIN, SandboxRequest(context_id="c", template="numbers"))
        for command, source in (
            ("ls", str(server)),
            ("curl x", "numbers/settings.json"),
            ("cat x", "settings.json"),
        ):
            with pytest.raises(Denied) as caught:
                await _run(plane, "c", command)
            assert caught.value.extra["source"] == source
        assert await _run(plane, "c", "id -un") == "agent\n"
        [void] = [each for each in (await plane.policies.get("c")).warnings if each.rule == "shell(curl:*)"]
        assert "numbers/settings.json denies" in void.text
        await plane.operations.stop(ADMIN, "c")
        assert (await plane.policies.explain("c", "curl x", None)).verdict == "deny", "whether it runs or not"
    finally:
        await plane.close()


async def test_what_the_operator_changes_holds_at_once(folder: Path, plane: ControlPlane, fresh: None) -> None:
    await plane.operations.deploy_or_resume(ADMIN, SandboxRequest(context_id="c", template="numbers"))
    assert await _run(plane, "c", "cat /dev/null") == ""
    (folder / "settings.json").write_text(json.dumps({"permissions": {"deny": ["shell(cat:*)", "shell(curl:*)"]}}))
    with pytest.raises(Denied):
        await _run(plane, "c", "cat /dev/null")
    (folder / "settings.json").write_text("{")
    with pytest.raises(PlatformError, match=r"numbers/settings\.json is not JSON") as caught:
        await _run(plane, "c", "echo hi")
    assert caught.value.field == "template" and caught.value.hint
    for each in folder.iterdir():
        each.unlink()
    folder.rmdir()
    with pytest.raises(PlatformError, match="there is no template 'numbers'"):
        await _run(plane, "c", "echo hi")
    await plane.operations.stop(ADMIN, "c")
    with pytest.raises(PlatformError):
        await plane.operations.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))


async def test_unknown_and_broken_ones_are_told_of(folder: Path, plane: ControlPlane) -> None:
    for wrong, hint in (
        ("number", "did you mean 'numbers'?"),
        ("zzz", "the templates are: " + ", ".join(sorted([*SHIPPED_NAMES, "numbers", "plain"]))),
    ):
        with pytest.raises(InvalidRequest) as caught:
            await plane.operations.deploy_or_resume(ADMIN, SandboxRequest(template=wrong))
        assert (caught.value.field, caught.value.hint) == ("template", hint)
    for name in ("..", "numbers/../plain", ".", ""):
        with pytest.raises(InvalidRequest):
            await plane.templates.get(name)
    for number, text in enumerate(('{"permissions": {"allow": ["shell(:*)"]}}', '{"permissions": {"deny": ["what"]}}')):
        broken = folder.parent / f"broken{number}"
        broken.mkdir()
        (broken / "settings.json").write_text(text)
        with pytest.raises(InvalidRequest, match=f"broken{number}/settings.json"):
            await plane.operations.deploy_or_resume(ADMIN, SandboxRequest(template=broken.name))
    listed = {each.name: each for each in (await plane.templates.list()).items}
    assert list(listed) == sorted(["broken0", "broken1", *SHIPPED_NAMES, "numbers", "plain"])
    assert listed["broken0"].error and listed["numbers"].error is None
    assert (listed["numbers"].settings, listed["numbers"].sources, listed["plain"].settings) == (True, False, False)
    assert listed["numbers"].env == ["BOTH", "MODE"], "values of variables are not shown"


async def test_a_default_for_who_asks_for_none(folder: Path, settings: Settings) -> None:
    sandbox = settings.sandbox.model_copy(update={"template": "numbers"})
    plane = await ControlPlane.open(settings.model_copy(update={"sandbox": sandbox}))
    try:
        info, _ = await plane.operations.deploy_or_resume(ADMIN, SandboxRequest())
        assert info.template == "numbers"
    finally:
        await plane.close()


async def test_a_secret_of_a_template_is_taken_out_from_the_first_moment(folder: Path, plane: ControlPlane) -> None:
    await plane.secrets.put("numbers", "KEY", b"of-the-template", kind="template")
    assert (await plane.secret_values.redactor("new")).text("of-the-template") == "of-the-template"
    await plane.operations.deploy_or_resume(ADMIN, SandboxRequest(context_id="new", template="numbers"))
    assert await _run(plane, "new", "cat /run/secrets/KEY") == "[secret:KEY]"


async def test_secrets_of_a_template_reach_all_made_by_it(folder: Path, plane: ControlPlane) -> None:
    for name in ("a", "b"):
        await plane.operations.deploy_or_resume(ADMIN, SandboxRequest(context_id=name, template="numbers"))
    await plane.operations.deploy_or_resume(ADMIN, SandboxRequest(context_id="bare"))
    await plane.secrets.put("numbers", "KEY", b"of-the-template", kind="template")
    await plane.secrets.put("b", "KEY", b"of-the-context")
    assert await _run(plane, "a", "cat /run/secrets/KEY | cat") == "[secret:KEY]"
    assert await _run(plane, "a", "cat /run/secrets/KEY") == "[secret:KEY]"
    size = "cat /run/secrets/KEY | ls -l /run/secrets/.current/KEY"
    assert " 15 " in await _run(plane, "a", size) and " 14 " in await _run(plane, "b", size)
    assert await _run(plane, "bare", "ls /run/secrets") == ""
    assert (await plane.secrets.list("numbers")).items == []
    assert [each.name for each in (await plane.secrets.list("numbers", kind="template")).items] == ["KEY"]
    await plane.secrets.delete("b", "KEY")
    assert " 15 " in await _run(plane, "b", size), "the template's again"
    await plane.secrets.delete("numbers", "KEY", kind="template")
    assert await _run(plane, "a", "ls /run/secrets") == ""
    with pytest.raises(NotFound, match="template 'numbers' has no secret"):
        await plane.secrets.delete("numbers", "KEY", kind="template")


async def test_a_template_and_a_context_share_the_room_for_secrets(folder: Path, plane: ControlPlane) -> None:
    await plane.operations.deploy_or_resume(ADMIN, SandboxRequest(context_id="c", template="numbers"))
    for number in range(10):
        await plane.secrets.put("c", f"N{number}", b"x" * 65_536)
    for number in range(6):
        await plane.secrets.put("numbers", f"T{number}", b"x" * 65_536, kind="template")
    for scope, kind in (("c", "context"), ("numbers", "template")):
        with pytest.raises(LimitExceeded, match="together"):
            await plane.secrets.put(scope, "MORE", b"x" * 100, kind=kind)  # type: ignore[arg-type]
    await plane.secrets.put("numbers", "N0", b"x" * 65_536, kind="template")  # the context has one of that name


async def test_unknown_template_for_a_terminated_context_is_told_like_any_other(plane: ControlPlane) -> None:
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    await plane.sessions.terminate(ADMIN, "c")
    with pytest.raises(InvalidRequest, match="there is no template 'absent'") as caught:
        await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c", template="absent"))
    assert caught.value.field == "template"


async def test_policies_for_agent_types_are_shipped(plane: ControlPlane) -> None:
    for name, allowed, denied in (
        ("data", "python3 -m venv x", "curl example.org"),
        ("coding", "npm test", "sudo make install"),
        ("research", "curl https://arxiv.org/abs/1", "git push"),
    ):
        template = await plane.templates.get(name)
        assert template.shipped and template.layer is not None
        policy = Policy.of([template.layer], context_id="c")
        assert decide_shell(policy, allowed).verdict == "allow", name
        assert decide_shell(policy, denied).verdict == "deny", name


async def test_the_search_template_has_the_endpoint_of_the_operator(settings: Settings) -> None:
    url = "https://find.example.org/search?format=json&q={query}"
    for search_url in (None, url):
        plane = await ControlPlane.open(settings.model_copy(update={"search_url": search_url}))
        try:
            if search_url is None:
                with pytest.raises(InvalidRequest, match="names none") as caught:
                    await plane.templates.get("web-search")
                assert "CARREL_SEARCH_URL" in (caught.value.hint or "")
                continue
            template = await plane.templates.get("web-search")
            assert template.recipe.env == {"WEB_SEARCH_URL": url}
            assert template.layer is not None and template.layer.sources is not None
            access = template.layer.sources.web_access
            assert access is not None and access.allowed_domains == ("find.example.org",)
        finally:
            await plane.close()
