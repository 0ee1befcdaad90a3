"""Both clients have the same names, and the blocking one is what the generator makes."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import carrel
from carrel import client

ROOT = Path(__file__).resolve().parents[2]
PAIRS = [
    "Approvals", "Audit", "Client", "Sandbox", "Commands", "Command", "Files", "Filespace", "Policy", "Terminal",
    "Tokens", "OutputStream", "Environments", "SandboxEnvironments", "StatelessPython", "Mcp",
]  # fmt: skip
SPECIAL = {
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
}


def surface(cls: type) -> dict[str, list[tuple[str, object, object]]]:
    members = {}
    for name, member in vars(cls).items():
        if name.startswith("_") and name not in {*SPECIAL, *SPECIAL.values(), "__init__"}:
            continue
        function = member.__func__ if isinstance(member, classmethod) else member
        parameters = inspect.signature(function).parameters.values() if callable(function) else []
        members[SPECIAL.get(name, name)] = [(p.name, p.kind, p.default) for p in parameters]
    return members


@pytest.mark.parametrize("name", PAIRS)
def test_both_clients_have_the_same_surface(name: str) -> None:
    asynchronous, blocking = getattr(client, f"Async{name}"), getattr(client, name)
    assert surface(asynchronous) == surface(blocking)
    assert surface(blocking)
    assert not [each for each in vars(blocking).values() if inspect.iscoroutinefunction(each)]


def test_generated_files_are_fresh() -> None:
    check = subprocess.run(
        [sys.executable, ROOT / "scripts/generate.py", "--check"], capture_output=True, text=True, check=False
    )
    assert check.returncode == 0, check.stdout + check.stderr


def test_public_names_resolve_and_nothing_else_does() -> None:
    for name in carrel.__all__:
        assert getattr(carrel, name) is not None
    assert set(dir(carrel)) == set(carrel.__all__)
    with pytest.raises(AttributeError):
        _ = carrel.Manager  # type: ignore[attr-defined]


def test_import_is_cheap() -> None:
    code = "import sys; before = set(sys.modules); import carrel; print(*sorted(set(sys.modules) - before))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert set(shown) <= {"carrel", "__future__"}
