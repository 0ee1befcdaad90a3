from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.support.calls import call

from carrel.control.governance.deciding import Decider, read_below
from carrel.control.operations.call import Call
from carrel.policy.documents.settings import SettingsDocument
from carrel.policy.documents.sources import Sources
from carrel.policy.rules.decide import decide_shell
from carrel.policy.rules.layers import Layer, Policy


@pytest.fixture
def rules() -> Policy:
    settings = SettingsDocument.model_validate({"permissions": {"allow": ["shell(echo:*)", "shell(pip install:*)"]}})
    sources = Sources.model_validate({"package_managers": {"pip": {"blocked_packages": ["evil"]}}})
    return Policy.of([Layer("settings.json", settings, sources)], context_id="c")


def _run(command: object) -> Call:
    return call("shell", "run_command", {"command": command}, "agent", "sbx-1", "c")


async def test_long_decisions_are_made_in_a_thread_and_short_ones_on_the_loop(
    rules: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[bool] = []
    decider = Decider()

    def decide(*args: Any, **keywords: Any) -> Any:
        used.append(threading.current_thread() is threading.main_thread())
        return decide_shell(*args, **keywords)

    monkeypatch.setattr("carrel.control.governance.deciding.decide_shell", decide)
    for command in ("echo hi", "echo " + "hi " * 1000, ["echo"] + ["hi"] * 1000):
        assert (await decider.decide(rules, _run(command), None)).verdict == "allow"
        assert (await decider.explain(rules, command, None)).verdict == "allow"
    assert used == [True, True, False, False, False, False]


async def test_explaining_text_of_very_many_steps_lets_other_requests_through(rules: Policy) -> None:
    decider = Decider()
    explaining = [asyncio.create_task(decider.explain(rules, text, None)) for text in ("eval " * 12_900, "a;" * 32_000)]
    turns = 0
    while not any(each.done() for each in explaining):
        await asyncio.sleep(0.001)
        turns += 1
    assert turns > 10
    assert {(await each).verdict for each in explaining} == {"ask"}


async def test_requirements_file_is_not_read_on_the_loop(
    rules: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[bool] = []

    def read(workspace: str, path: str) -> str | None:
        used.append(threading.current_thread() is threading.main_thread())
        return read_below(workspace, path)

    monkeypatch.setattr("carrel.control.governance.deciding.read_below", read)
    (tmp_path / "r.txt").write_text("evil\n")
    verdict = await Decider().decide(rules, _run("pip install -r r.txt"), str(tmp_path))
    assert verdict.verdict == "deny"
    assert used == [False]
