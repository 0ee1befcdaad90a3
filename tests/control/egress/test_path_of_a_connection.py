"""The page on the path of a connection names functions that exist, in the order in which they are called."""

from __future__ import annotations

import asyncio
import importlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

from tests.support.gateway_ground import Echo
from tests.support.sandboxes import until
from tests.support.wayout import OPEN, PATIENCE_S, Person, hello, plan, server, wayout

from carrel.control.egress.service import _Attached
from carrel.control.operations.caller import Caller
from carrel.control.plane import ControlPlane
from carrel.identity import Identity, OwnerKind, Scope
from carrel.models import ApprovalDecision
from carrel.policy.verdict import Verdict

PAGE = Path(__file__).parents[3] / "docs/explanation/path-of-a-connection.md"
STEP = re.compile(r"^(\d+)\. (?:`(carrel\.[\w.]+)`)?", re.MULTILINE)
PERSON = Identity("person:ann", OwnerKind.PERSON, frozenset({Scope.APPROVE}))


def steps() -> dict[int, str]:
    return {int(number): name for number, name in STEP.findall(PAGE.read_text())}


def function(name: str) -> Any:
    """The function or class that a dotted name means."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise AssertionError(f"there is no {name}")


@contextmanager
def called() -> Iterator[list[str]]:
    """The functions of carrel that are called in this thread, by their names, in order."""
    names: list[str] = []

    def note(frame: FrameType, event: str, _argument: object) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith("carrel."):
            names.append(f"{module}.{frame.f_code.co_qualname}")

    sys.setprofile(note)
    try:
        yield names
    finally:
        sys.setprofile(None)


def assert_in_order(names: list[str], expected: list[str]) -> None:
    at = 0
    for name in expected:
        assert name in names[at:], f"{name} is not called after {expected[: expected.index(name)]}"
        at = names.index(name, at) + 1


def test_page_has_at_most_25_steps_and_names_what_exists() -> None:
    found = steps()
    assert list(found) == list(range(1, len(found) + 1)) and len(found) <= 25
    for name in re.findall(r"`(carrel\.[\w.]+)`", PAGE.read_text()):
        assert callable(function(name)), name


async def test_egress_process_takes_the_steps_of_the_page_in_order() -> None:
    person = Person(Verdict("allow", "a person allowed it", source="approvals", approval="apr-1"))
    async with (
        server(Echo()) as port,
        wayout(plan([OPEN], web={"allowed_ports": [port]}), {"a.test": [OPEN]}, person) as out,
    ):
        with called() as names:
            reader, writer = await out.tunnel(f"a.test:{port}")
            writer.write(first := hello("a.test"))
            async with asyncio.timeout(PATIENCE_S):
                assert await reader.readexactly(len(first)) == first
        writer.close()
    # The question, the answer, the journal and the choice of an upstream have other tests: here stand-ins are called.
    stand_ins = {9, 20, 23, 24}
    assert_in_order(
        names, [name for number, name in steps().items() if name and not 10 <= number < 20 and number not in stand_ins]
    )


async def test_control_plane_takes_the_steps_of_the_page_in_order(plane: ControlPlane) -> None:
    record = SimpleNamespace(id="sbx-1", context_id="c")
    box: Any = SimpleNamespace(record=record, asks_as="")
    nothing: Any = None
    plane.egress._boxes["sbx-1"] = _Attached(box, -1, nothing)
    message = {"op": "ask", "ask": "1", "sandbox": "sbx-1", "host": "a.example", "port": 443, "reason": "no rule"}
    try:
        with called() as names:
            plane.egress._client._receive(message, [])

            async def found() -> Any:
                return (await plane.approvals.page()).items

            [approval] = await until(found, what="an approval")
            await plane.decisions.decide(Caller(PERSON), approval.id, ApprovalDecision(approve=True))
            await until(lambda: not plane.egress._tasks, what="the answer")
    finally:
        del plane.egress._boxes["sbx-1"]
    assert_in_order(names, [name for number, name in steps().items() if 10 <= number < 20])
