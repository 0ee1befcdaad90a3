"""Attacks as functions: shipped into a sandbox as text, and their answer read again."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

_INSIDE = (Path(__file__).parent / "inside.py").read_text()


def words(attack: Callable[..., object], *given: object, **named: object) -> list[str]:
    """The command that performs an attack."""
    code = f"""
import sys, types
inside = types.ModuleType("inside"); exec({_INSIDE!r}, inside.__dict__); sys.modules["inside"] = inside
exec({textwrap.dedent(inspect.getsource(attack))!r})
inside.perform(lambda: {attack.__name__}(*{given!r}, **{named!r}))
"""
    return ["/usr/bin/python3", "-I", "-S", "-c", code]  # no attack needs what is installed


def answer(output: str) -> dict[str, Any] | None:
    """What `inside.perform` printed; None if the attack did not come to its end."""
    marked = [line[2:] for line in output.splitlines() if line.startswith("@@")]
    if not marked:
        return None
    told = json.loads(json.dumps(ast.literal_eval(marked[-1])))  # lists, also where the attack had tuples
    assert "broken" not in told, told.get("broken")
    return dict(told)
