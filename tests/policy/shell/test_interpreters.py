from __future__ import annotations

import pytest
from tests.support.policies import sources

from carrel.policy.shell.interpreters import judge

RUNTIME = sources(runtime={"languages": ["python3.11", "bash"]}).runtime


@pytest.mark.parametrize(
    "name", ["python", "python3", "python3.11", "python3.11.4", "/usr/bin/python3", "bash", "sh", "ls", "nodejsx"]
)
def test_declared_languages_run(name: str) -> None:
    assert list(judge(RUNTIME, (name, "x"), "s")) == []


@pytest.mark.parametrize(
    "name", ["python2", "python3.12", "python3.1", "node", "perl", "ruby", "/opt/node/bin/node", "zsh", "php8.1"]
)
def test_others_do_not(name: str) -> None:
    assert [each.verdict for each in judge(RUNTIME, (name, "x"), "s")] == ["deny"]


def test_without_languages_all_run() -> None:
    assert list(judge(sources().runtime, ("node",), "s")) == []
