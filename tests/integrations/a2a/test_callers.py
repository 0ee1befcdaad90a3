"""Callers are carrel tokens: carrel says which."""

from __future__ import annotations

import pytest
from a2a.server.context import ServerCallContext
from tests.support.a2a_ground import Ground

from carrel.errors import ServerUnreachable, Unauthorized
from carrel.integrations.a2a.callers import MAX_CLIENTS, TRUSTED_S, A2aCaller, Callers, caller_of


async def test_a_token_is_taken_and_its_caller_does_what_it_may(ground: Ground) -> None:
    callers = Callers(ground.url)
    caller = await callers.admit(ground.token)
    assert caller.is_authenticated
    async with callers.client(caller) as client:
        assert (await client.sandbox(ground.context)).context_id == ground.context
    await callers.close()


@pytest.mark.parametrize("token", ["", "carrel_nobody", "x" * 600, "carrel_\u00e9", "a\nb"])
async def test_others_are_not(ground: Ground, token: str) -> None:
    callers = Callers(ground.url)
    with pytest.raises(Unauthorized):
        await callers.admit(token)
    await callers.close()


async def test_a_narrow_token_is_taken(ground: Ground) -> None:
    narrow = await ground.owner.tokens.create("n", kind="agent", scopes=["read"], contexts=[ground.context])
    callers = Callers(ground.url)
    await callers.admit(narrow.token)
    await callers.close()


async def test_a_revoked_token_is_taken_a_moment_longer_at_most(ground: Ground) -> None:
    now = 0.0
    made = await ground.owner.tokens.create("short", kind="agent", scopes=["operate"])
    callers = Callers(ground.url, clock=lambda: now)
    await callers.admit(made.token)
    await ground.owner.tokens.revoke(made.id)
    await callers.admit(made.token)
    now += TRUSTED_S
    with pytest.raises(Unauthorized):
        await callers.admit(made.token)
    await callers.close()


async def test_no_carrel_no_callers() -> None:
    callers = Callers("http://127.0.0.1:9")
    with pytest.raises(ServerUnreachable):
        await callers.admit("carrel_x")
    await callers.close()


async def test_idle_clients_are_closed_in_the_end(ground: Ground) -> None:
    callers = Callers(ground.url)
    kept = A2aCaller("carrel_kept", "kept")
    async with callers.client(kept) as client:
        for number in range(MAX_CLIENTS + 10):
            async with callers.client(A2aCaller(f"carrel_{number}", "others")):
                pass
        async with callers.client(kept) as again:
            assert again is client
    assert len(callers._clients) == MAX_CLIENTS
    await callers.close()


def test_no_token_is_printed() -> None:
    context = ServerCallContext(user=A2aCaller("carrel_secret", "me"))
    assert "carrel_secret" not in repr(context) + str(context) + repr(context.user)
    assert caller_of(context).user_name == A2aCaller("carrel_secret", "me").name
    assert A2aCaller("carrel_secret", "me").name != A2aCaller("carrel_other", "other").name
    with pytest.raises(Unauthorized):
        caller_of(ServerCallContext())
