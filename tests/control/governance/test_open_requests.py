from __future__ import annotations

import asyncio

from carrel.control.governance.open_requests import OpenRequests
from carrel.identity import ROOT, Identity, OwnerKind, Scope


def who(token_id: str, expires_at: float | None = None) -> Identity:
    return Identity("agent:a", OwnerKind.AGENT, frozenset({Scope.READ}), token_id=token_id, expires_at=expires_at)


async def test_what_stays_open_ends_with_its_token() -> None:
    requests = OpenRequests()
    assert requests.open(ROOT) is None, "nobody can revoke that"
    ended: list[str] = []
    opened = {}
    for name, token in (("one", "tok-1"), ("two", "tok-1"), ("other", "tok-2"), ("short", "tok-1"), ("over", "tok-1")):
        request = opened[name] = requests.open(who(token))
        assert request is not None and not request.token_ended
        if name != "short":
            request.stays_open(lambda name=name: ended.append(name))
    opened["over"].close()
    requests.revoked("tok-1")
    requests.revoked("tok-1")
    assert sorted(ended) == ["one", "two"], "each once; and what is no stream is only told so"
    assert opened["one"].cancelled and opened["short"].token_ended and not opened["short"].cancelled
    assert not opened["other"].token_ended
    assert "was revoked" in opened["one"].refusal().detail
    opened["short"].stays_open(lambda: ended.append("short"))
    assert ended[-1] == "short", "a stream that begins too late ends at once"
    for request in opened.values():
        request.close()
        request.close()
    assert requests.tokens() == []


async def test_an_expiry_needs_nobody_to_tell() -> None:
    loop = asyncio.get_running_loop()
    requests = OpenRequests(loop.time)
    ended = asyncio.Event()
    request = requests.open(who("tok-1", loop.time() + 0.05))
    assert request is not None
    request.stays_open(ended.set)
    assert not request.cancelled and requests.tokens() == ["tok-1"]
    async with asyncio.timeout(10):
        await ended.wait()
    assert request.token_ended and "has expired" in request.refusal().detail
    request.close()


async def test_a_clock_that_was_set_back_ends_nothing_too_early() -> None:
    now, asked = 1000.0, 0

    def clock() -> float:
        nonlocal asked
        asked += 1
        return now

    requests = OpenRequests(clock)
    ended: list[int] = []
    request = requests.open(who("tok-1", 1000.01))
    assert request is not None
    request.stays_open(lambda: ended.append(1))
    async with asyncio.timeout(10):
        while asked < 8:
            await asyncio.sleep(0.005)
    assert not ended
    now = 1000.02
    async with asyncio.timeout(10):
        while not ended:
            await asyncio.sleep(0.005)
    request.close()
