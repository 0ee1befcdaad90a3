from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.calls import ADMIN, call

from carrel.control.governance.deciding import read_below
from carrel.control.governance.policies import Policies
from carrel.control.operations.call import Call
from carrel.control.plane import ControlPlane
from carrel.control.sessions.live import LiveSandboxes
from carrel.control.sessions.templates import Templates
from carrel.errors import Conflict, Denied, InvalidRequest, LimitExceeded, PlatformError
from carrel.models import CommandRequest, ExecuteRequest, Limits, PolicyDocuments, SandboxRequest
from carrel.store import Database, SessionStore
from carrel.store.policies import PolicyRecord, PolicyStore

SETTINGS: dict[str, object] = {
    "permissions": {
        "allow": ["shell(echo:*)", "shell(pip install:*)", "file(read:${WORKSPACE}/**)", "file(write:${WORKSPACE}/data/**)"],
        "deny": ["shell(curl:*)", "file(read:${WORKSPACE}/secret/**)"],
    }
}  # fmt: skip
SOURCES: dict[str, object] = {"package_managers": {"pip": {"enabled": True, "blocked_packages": ["evil"]}}}


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[PolicyStore]:
    database = await Database.open(str(tmp_path / "db"))
    yield PolicyStore(database)
    await database.close()


def _templates(store: PolicyStore) -> Templates:
    return Templates("/nowhere", None, SessionStore(store._database), LiveSandboxes(), search_url=None)


@pytest.fixture
async def policies(store: PolicyStore) -> Policies:
    policies = Policies(store, None, _templates(store))
    await policies.write("c", PolicyDocuments(settings=SETTINGS, sources=SOURCES), "person:ann")
    return policies


def _op(kind: str, name: str, context: str | None = "c", **arguments: object) -> Call:
    return call(kind, name, arguments, "agent", "sbx-1", context)


@pytest.mark.parametrize(
    ("operation", "verdict"),
    [
        (_op("shell", "run_command", command="echo hi"), "allow"),
        (_op("shell", "run_command", command="echo hi | curl x"), "deny"),
        (_op("shell", "start_command", command=["curl", "x"]), "deny"),
        (_op("shell", "execute", command="git push"), "ask"),
        (_op("shell", "run_command", command="echo hi", env={"LD_PRELOAD": "x"}), "ask"),
        (_op("shell", "run_command", command="pip install evil"), "deny"),
        (_op("shell", "run_command", command="echo hi > notes"), "ask"),
        (_op("shell", "run_command", command="echo hi > data/notes"), "allow"),
        (_op("shell", "run_command", command="echo hi > notes", cwd="data"), "allow"),
        (_op("shell", "list_commands"), "allow"),
        (_op("shell", "send_input", id="c1"), "allow"),
        (_op("file", "read", path="data/x"), "allow"),
        (_op("file", "read", path="secret/key"), "deny"),
        (_op("file", "read", path="data/../secret/key"), "deny"),
        (_op("file", "write", path="data/x"), "allow"),
        (_op("file", "write", path="x"), "ask"),
        (_op("file", "delete", path="data/x"), "ask"),
        (_op("file", "move", path="data/a", destination="data/b"), "ask"),
        (_op("file", "move", path="secret/key", destination="data/b"), "deny"),
        (_op("file", "filespace_read", path="secret/key"), "deny"),
        (_op("network", "connect", host="example.org", port=443), "ask"),
        (_op("mcp", "call", server="s", tool="t"), "ask"),
        (_op("session", "stop"), "allow"),
        (_op("shell", "run_command", context="free", command="curl x"), "allow"),
        (_op("shell", "run_command", context=None, command="curl x"), "allow"),
    ],
)
async def test_every_kind_of_operation_is_decided(policies: Policies, operation: Call, verdict: str) -> None:
    assert (await policies.decide(operation)).verdict == verdict


async def test_a_requirements_file_is_read_from_the_workspace_and_no_link_is_followed(
    policies: Policies, tmp_path: Path
) -> None:
    workspace = tmp_path / "w"
    (workspace / "sub").mkdir(parents=True)
    (workspace / "good.txt").write_text("requests\n")
    (workspace / "sub" / "bad.txt").write_text("requests\nevil==1\n")
    (tmp_path / "outside").write_text("requests\n")
    (workspace / "link.txt").symlink_to(tmp_path / "outside")
    (workspace / "dir").symlink_to(tmp_path)

    async def said(path: str) -> str:
        operation = _op("shell", "run_command", command=f"pip install -r {path}")
        return (await policies.decide(operation, str(workspace))).verdict

    assert await said("good.txt") == "allow"
    assert await said("sub/bad.txt") == "deny"
    for path in ("link.txt", "dir/outside", "../outside", "absent.txt", "/etc/hostname"):
        assert await said(path) == "ask"
    assert read_below(str(workspace), "/workspace/good.txt") == "requests\n"


async def test_a_policy_that_cannot_hold_is_refused_whole(policies: Policies) -> None:
    for wrong in (
        {"permissions": {"allow": ["shell(*)"]}},
        {"permissions": {"allow": ["nonsense"]}},
        {"premissions": {}},
    ):
        with pytest.raises(InvalidRequest):
            await policies.write("c", PolicyDocuments(settings=wrong), "person:ann")
    assert (await policies.get("c")).settings == SETTINGS


async def test_versions_keep_two_editors_apart(policies: Policies) -> None:
    first = await policies.get("c")
    assert (first.version, first.updated_by) == (1, "person:ann")
    changed = await policies.write("c", PolicyDocuments(sources=None, version=1), "person:bob")
    assert (changed.version, changed.sources, changed.settings) == (2, None, SETTINGS)
    with pytest.raises(Conflict, match="changed meanwhile"):
        await policies.write("c", PolicyDocuments(settings=None, version=1), "person:ann")
    await policies.erase("c")
    assert (await policies.get("c")).version == 0


async def test_a_rule_is_added_and_a_fork_has_it_too(policies: Policies) -> None:
    for wrong in ("nonsense", "shell(*)"):
        with pytest.raises(InvalidRequest):
            await policies.check_rule("c", wrong)
    await policies.check_rule("c", "shell(git push:*)")
    await policies.add_rule("c", "shell(git push:*)", "person:ann")
    await policies.add_rule("c", "shell(git push:*)", "person:ann")
    await policies.copy(ADMIN, "c", "twin")
    await policies.copy(ADMIN, "none", "other")
    for context in ("c", "twin"):
        push = _op("shell", "run_command", context=context, command="git push origin")
        assert (await policies.decide(push)).verdict == "allow"
    await policies.add_rule("fresh", "shell(ls:*)", "person:ann")
    assert (await policies.get("fresh")).settings == {"permissions": {"allow": ["shell(ls:*)"]}}


@pytest.mark.parametrize("before", [None, {"permissions": {"allow": ["shell(true)"]}}])
async def test_what_is_put_while_a_fork_is_taken_back_stays(
    policies: Policies, store: PolicyStore, before: dict[str, object] | None
) -> None:
    if before is not None:
        await policies.write("twin", PolicyDocuments(settings=before), "person:ann")
    undo = await policies.copy(ADMIN, "c", "twin")
    inner, given = policies._store, {"permissions": {"deny": ["shell(rm:*)"]}}

    class Late(PolicyStore):
        """Somebody else comes first whenever something is changed."""

        async def delete(self, context_id: str, **named: Any) -> bool:
            await inner.put(context_id, given, None, by="person:bob", at=1.0)
            return await super().delete(context_id, **named)

        async def put(self, context_id: str, *documents: Any, **named: Any) -> int:
            await inner.put(context_id, given, None, by="person:bob", at=1.0)
            return await super().put(context_id, *documents, **named)

    policies._store = Late(store._database)
    await undo()
    assert (await policies.get("twin")).settings == given


async def test_rules_that_are_given_at_once_are_all_kept(policies: Policies) -> None:
    rules = [f"shell(tool{number}:*)" for number in range(8)]
    await asyncio.gather(*(policies.add_rule("c", rule, "person:ann") for rule in rules))
    for number in range(8):
        assert (await policies.decide(_op("shell", "run_command", command=f"tool{number} x"))).verdict == "allow"


class _Slow(PolicyStore):
    """A store whose answers are late."""

    def __init__(self, store: PolicyStore) -> None:
        super().__init__(store._database)
        self.read, self.go_on = asyncio.Event(), asyncio.Event()

    async def get(self, context_id: str) -> PolicyRecord | None:
        found = await super().get(context_id)
        if not self.read.is_set():
            self.read.set()
            await self.go_on.wait()
        return found


async def test_a_policy_that_was_read_before_a_change_does_not_stay(policies: Policies, store: PolicyStore) -> None:
    slow = _Slow(store)
    policies = Policies(slow, None, _templates(store))
    run = _op("shell", "run_command", command="echo hi")
    asking = asyncio.create_task(policies.decide(run))
    await slow.read.wait()
    denied = {"permissions": {"deny": ["shell(echo:*)"]}}
    await policies.write("c", PolicyDocuments(settings=denied), "person:ann")
    slow.go_on.set()
    assert (await asking).verdict == "deny"
    assert (await policies.decide(run)).verdict == "deny"


async def test_the_servers_layer_cannot_be_loosened(store: PolicyStore, tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"permissions": {"deny": ["shell(curl:*)"], "allow": ["shell(ls:*)"]}}))
    policies = Policies(store, Policies.server_layer(str(file), None), _templates(store))
    info = await policies.write("c", PolicyDocuments(settings={"permissions": {"allow": ["shell(curl:*)"]}}), "p")
    assert any("has no effect" in warning.text for warning in info.warnings)
    for context in ("c", None):
        decision = await policies.decide(_op("shell", "run_command", context=context, command="curl x"))
        assert (decision.verdict, decision.source) == ("deny", str(file))
        assert (await policies.decide(_op("shell", "run_command", context=context, command="ls"))).verdict == "allow"
    assert Policies.server_layer(None, None) is None
    with pytest.raises(PlatformError, match="cannot be read"):
        Policies.server_layer(str(tmp_path / "absent"), None)


async def test_a_rule_of_the_server_can_name_the_context(store: PolicyStore, tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    rule = "file(write:${WORKSPACE}/${CONTEXT_ID}/**)"
    file.write_text(json.dumps({"permissions": {"allow": [rule], "deny": ["shell(curl:*)"]}}))
    policies = Policies(store, Policies.server_layer(str(file), None), _templates(store))
    for context, verdict in (("a", "allow"), ("b", "ask"), ("a", "allow"), (None, "ask")):
        assert (await policies.decide(_op("file", "write", context, path="a/x"))).verdict == verdict


async def test_explaining(policies: Policies) -> None:
    found = await policies.explain("c", "echo hi && curl x", None)
    assert found.verdict == "deny" and found.rule == "shell(curl:*)"
    assert [(part.text.split()[0], part.verdict) for part in found.parts if part.kind == "shell"] == [
        ("echo", "allow"),
        ("curl", "deny"),
    ]


async def test_the_limits_of_the_sources_hold(plane: ControlPlane) -> None:
    sources = {"runtime": {"max_execution_time_seconds": 20, "max_memory_mb": 256}}
    await plane.policy_changes.put("c", PolicyDocuments(sources=sources), "person:ann")
    with pytest.raises(LimitExceeded, match="memory_mb = 256"):
        await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c", limits=Limits(memory_mb=512)))
    info, _ = await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    assert (info.limits.memory_mb, info.limits.timeout_s) == (256, 20)
    with pytest.raises(Denied, match="20 seconds at most"):
        await plane.operations.run_command(ADMIN, "c", CommandRequest(command="true", timeout=21))
    assert (await plane.operations.run_command(ADMIN, "c", CommandRequest(command="true", timeout=19))).ok


async def test_a_command_without_a_deadline_stays_within_the_policy(plane: ControlPlane) -> None:
    sources = {"runtime": {"max_execution_time_seconds": 1}}
    await plane.policy_changes.put("c", PolicyDocuments(sources=sources), "person:ann")
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    started = await plane.operations.start_command(ADMIN, "c", CommandRequest(command="sleep 60"))
    assert (await plane.operations.command_result(ADMIN, "c", started.id)).timed_out, (
        "the policy's limit is its deadline"
    )
    for start in (plane.operations.run_command, plane.operations.start_command):
        with pytest.raises(Denied, match="1 seconds at most"):
            await start(ADMIN, "c", CommandRequest(command="true", timeout=0))
    for timeout in (0, 2):
        with pytest.raises(Denied, match="1 seconds at most"):
            await plane.tools.execute(ADMIN, "c", ExecuteRequest(code="true", timeout=timeout))
