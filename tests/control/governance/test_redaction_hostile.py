"""Output that is made to be slow to look through: nobody else waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from hypothesis import given
from hypothesis import strategies as st
from tests.support.calls import ADMIN

from carrel.control.plane import ControlPlane
from carrel.models import CommandRequest, ExecuteRequest, SandboxRequest
from carrel.redaction.redact import BLOCK, Redactor

SLOW = "yes ' sk-' | tr -d '\\n' | head -c 400000"
SECRET = b"correct-horse-battery"
REDACTOR = Redactor({"KEY": SECRET})


class Turns:
    """How often others had their turn while something was looked through."""

    def __init__(self) -> None:
        self.most = 0
        self._now = 0

    async def run(self) -> None:
        while True:
            await asyncio.sleep(0)
            self._now += 1

    def watch(self, redactor: Redactor) -> None:
        """Count while this one looks."""
        turns, find = self, redactor.find

        def counted(data: bytes, floor: int, *, final: bool) -> object:
            before = turns._now
            found = find(data, floor, final=final)
            turns.most = max(turns.most, turns._now - before)
            return found

        redactor.find = counted  # type: ignore[method-assign,assignment]


@asynccontextmanager
async def turning(turns: Turns) -> AsyncIterator[None]:
    task = asyncio.ensure_future(turns.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_others_have_their_turn_while_an_output_is_looked_through(plane: ControlPlane) -> None:
    await plane.operations.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    turns = Turns()
    plane.secret_values._shapes = Redactor()
    turns.watch(plane.secret_values._shapes)
    for call in (
        lambda: plane.operations.run_command(ADMIN, "c", CommandRequest(command=SLOW)),
        lambda: plane.tools.execute(ADMIN, "c", ExecuteRequest(code=SLOW, language="shell")),
        lambda: plane.operations.run_command(ADMIN, "c", CommandRequest(command="true", stdin=" sk-" * 100_000)),
        lambda: plane.secret_values.clean_text("c", " sk-" * 100_000),
    ):
        turns.most = 0
        async with turning(turns):
            await call()
        assert turns.most > 0


@given(st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=3), st.integers(-30, 30))
def test_what_is_long_is_cleaned_like_what_is_short(places: list[tuple[int, bool]], shift: int) -> None:
    data = bytearray(b"." * (2 * BLOCK + 1000))
    for number, (offset, escaped) in enumerate(places):
        at = BLOCK * (number % 2 + 1) + shift - offset
        value = b"%63" + SECRET[1:] if escaped else SECRET
        data[at : at + len(value)] = value
    whole = REDACTOR.stream().finish(bytes(data))
    assert REDACTOR.data(bytes(data)) == whole


def test_what_is_long_and_clean_is_given_back() -> None:
    data = b"." * (BLOCK + 1)
    assert REDACTOR.data(data) is data
