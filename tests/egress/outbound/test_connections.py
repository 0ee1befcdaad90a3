from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from ipaddress import ip_address
from typing import Any

import pytest
from tests.support.ports import in_common
from tests.support.wayout import CLOSED, OPEN, Names, Person, Records, plan

from carrel.egress.access import Access, AccessRefused, Address, Target
from carrel.egress.outbound.connections import PROXY_PORT, Outbound
from carrel.egress.outbound.upstreams import dial_directly
from carrel.egress.plan import EgressPlan, PackageIndex, Upstream
from carrel.policy.verdict import Verdict


class Dialled:
    """A `access.Dial` that notes what it was given."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    async def __call__(self, target: Target, addresses: Sequence[Address], access: Access) -> socket.socket:
        self.calls.append([str(each) for each in addresses])
        return await dial_directly(target, addresses, access)


class Ground:
    def __init__(self, given: EgressPlan, port: int, names: dict[str, Sequence[str]] | None = None):
        self.port = port
        self.records, self.names, self.person, self.dial = Records(), Names(names or {}), Person(), Dialled()
        parts: dict[str, Any] = {"front": None, "inspect": None}  # neither is called here
        self.outbound = Outbound(
            given, resolve=self.names, dial=self.dial, ask=self.person, report=self.records, **parts
        )

    def access(self) -> Access:
        return Access("s1", "connect")

    async def refused(self, target: Target) -> AccessRefused:
        with pytest.raises(AccessRefused) as refused:
            await self.outbound.open(self.access(), target)
        last = self.records.closed_[-1]
        assert self.records.opened_[-1] is last
        assert last.result == refused.value.code
        assert last.ended is not None
        return refused.value


@asynccontextmanager
async def listening(host: str = OPEN) -> AsyncIterator[int]:
    with socket.create_server((host, 0)) as server:
        yield server.getsockname()[1]


async def test_open_decides_looks_up_once_checks_and_dials_what_was_checked() -> None:
    async with listening() as port:
        ground = Ground(plan([f"a.test:{port}", OPEN]), port, {"a.test": [OPEN]})
        access = ground.access()
        with await ground.outbound.open(access, Target("a.test", port)) as made:
            assert made.getpeername() == (OPEN, port)
            assert ground.outbound.budget.open == 1
            assert [each.verdict.verdict for each in ground.records.opened_] == ["allow"]
            assert ground.records.closed_ == []
        ground.outbound.close(access)
        ground.outbound.close(access)
        assert ground.names.asked == ["a.test"]
        assert ground.dial.calls == [[OPEN]]
        assert ground.records.closed_ == [access]
        assert (access.result, access.address) == ("ok", OPEN)
        assert ground.outbound.budget.open == 0


async def test_a_denied_name_is_not_even_looked_up() -> None:
    ground = Ground(plan(deny=["a.test"]), 80, {"a.test": [OPEN]})
    refusal = await ground.refused(Target("a.test", 80))
    assert (refusal.code, refusal.status) == ("denied_by_policy", 403)
    assert refusal.verdict.rule is not None
    assert ground.names.asked == []
    assert ground.dial.calls == []


async def test_one_forbidden_address_among_others_is_enough() -> None:
    async with listening() as port:
        ground = Ground(plan([f"a.test:{port}", OPEN]), port, {"a.test": [OPEN, CLOSED]})
        refusal = await ground.refused(Target("a.test", port))
        assert CLOSED in refusal.reason
        assert ground.dial.calls == []


async def test_a_name_that_changes_is_caught_at_every_look_up() -> None:
    async with listening() as port:
        ground = Ground(plan([f"a.test:{port}", OPEN]), port, {"a.test": [OPEN]})
        access = ground.access()
        (await ground.outbound.open(access, Target("a.test", port))).close()
        ground.outbound.close(access)
        for address in (CLOSED, "169.254.169.254", "::ffff:127.0.0.3", "10.0.0.1"):
            ground.names.table["a.test"] = [address]
            await ground.refused(Target("a.test", port))
        assert ground.dial.calls == [[OPEN]]


async def test_a_name_without_an_address() -> None:
    ground = Ground(plan(["a.test", "b.test"]), 80, {"a.test": []})
    assert (await ground.refused(Target("a.test", 80))).status == 502
    assert (await ground.refused(Target("b.test", 80))).status == 502


async def test_what_nobody_decided_is_asked() -> None:
    async with listening() as port:
        ground = Ground(plan([OPEN], web={"allowed_ports": [port]}), port, {"new.test": [OPEN]})
        refusal = await ground.refused(Target("new.test", port))
        assert (refusal.reason, refusal.verdict.approval) == ("a person said no", "a1")
        assert ground.names.asked == []
        ground.person.says = Verdict("allow", "a person said yes", approval="a2")
        access = ground.access()
        (await ground.outbound.open(access, Target("new.test", port))).close()
        ground.outbound.close(access)
        assert access.verdict.approval == "a2"
        assert len(ground.person.asked) == 2


async def test_a_policy_that_changes_while_a_person_is_asked_holds() -> None:
    ground = Ground(plan([OPEN], web={"allowed_ports": [80]}), 80, {"new.test": [OPEN]})
    ground.person.says = Verdict("allow", "yes")
    ground.person.before = lambda: ground.outbound.change(plan([OPEN], ["new.test"]))
    await ground.refused(Target("new.test", 80))
    assert ground.dial.calls == []


async def test_so_it_does_where_an_upstream_proxy_looks_names_up() -> None:
    proxies = (Upstream("up", "http://127.0.0.2:3128", remote_names=True),)
    ground = Ground(plan([OPEN], web={"allowed_ports": [80]}, upstreams=proxies), 80)
    ground.person.says = Verdict("allow", "yes")
    ground.person.before = lambda: ground.outbound.change(plan([OPEN], ["new.test"], upstreams=proxies))
    await ground.refused(Target("new.test", 80))
    assert ground.dial.calls == []


async def test_so_it_does_for_one_more_request_over_the_same_connection() -> None:
    async with listening() as port:
        asks = plan([OPEN], web={"allowed_ports": [port]})
        ground = Ground(asks, port, {"new.test": [OPEN]})
        ground.person.says = Verdict("allow", "yes")
        first, target = ground.access(), Target("new.test", port)
        (await ground.outbound.open(first, target)).close()
        ground.outbound.close(first)
        for now in (plan([OPEN], ["new.test"]), plan(web={"allowed_ports": [port]})):
            ground.outbound.change(asks)
            ground.person.before = lambda now=now: ground.outbound.change(now)  # type: ignore[misc]
            with pytest.raises(AccessRefused) as refused:
                await ground.outbound.admit_again(ground.access(), target, first)
            assert refused.value.code == "denied_by_policy"
            assert ground.outbound.budget.open == 0


async def test_so_it_does_when_its_host_gets_a_credential() -> None:
    """What such a host answers has to be looked at, and whoever asked for the connection does not know."""
    web = {"allowed_ports": [80]}
    ground = Ground(plan([OPEN], web=web), 80, {"new.test": [OPEN]})
    ground.person.says = Verdict("allow", "yes")
    credited = {**web, "credentials": [{"host": "new.test", "secret": "KEY"}]}
    ground.person.before = lambda: ground.outbound.change(plan([OPEN], web=credited))
    await ground.refused(Target("new.test", 80))
    assert ground.dial.calls == []


async def test_a_target_that_does_not_answer_is_reported_with_its_end() -> None:
    async with listening() as port:
        pass
    ground = Ground(plan([f"{OPEN}:{port}"]), port)
    access = ground.access()
    with pytest.raises(AccessRefused) as refused:
        await ground.outbound.open(access, Target(OPEN, port, ip_address(OPEN)))
    assert refused.value.status == 502
    assert ground.records.opened_ == ground.records.closed_ == [access]
    assert (access.verdict.verdict, access.result) == ("allow", "unreachable")
    assert ground.outbound.budget.open == 0


@pytest.mark.parametrize("address", ["127.0.0.1", "127.9.9.9", "0.0.0.0", "::1", "::", "::ffff:127.0.0.1"])
async def test_the_proxy_is_no_target_of_its_own(address: str) -> None:
    rules = ["127.0.0.0/8", "0.0.0.0/8", "::/96", f"self.test:{PROXY_PORT}"]
    ground = Ground(plan(rules), PROXY_PORT, {"self.test": [address]})
    refusal = await ground.refused(Target("self.test", PROXY_PORT))
    assert "itself" in refusal.reason
    assert ground.dial.calls == []


async def test_what_cannot_be_written_down_does_not_happen() -> None:
    async with listening() as port:
        ground = Ground(plan([f"a.test:{port}", OPEN]), port, {"a.test": [OPEN]})
        ground.records.full = True
        for target in (Target("a.test", port), Target("b.test", 99)):
            with pytest.raises(AccessRefused):
                await ground.outbound.open(ground.access(), target)
        assert ground.dial.calls == []
        assert ground.records.opened_ == ground.records.closed_ == []
        assert ground.outbound.budget.open == 0


async def test_limits_refuse_and_are_reported() -> None:
    async with listening() as port:
        given = plan([f"{OPEN}:{port}", f"a.test:{port}"], web={"max_connections": 1})
        ground = Ground(given, port, {"a.test": [OPEN]})
        access = ground.access()
        made = await ground.outbound.open(access, Target("a.test", port))
        with pytest.raises(AccessRefused) as refused:
            await ground.outbound.open(ground.access(), Target("a.test", port))
        assert (refused.value.status, refused.value.code) == (429, "limit_exceeded")
        assert ground.records.closed_[-1].result == "limit_exceeded"
        made.close()
        ground.outbound.close(access)
        again = ground.access()
        (await ground.outbound.open(again, Target("a.test", port))).close()
        ground.outbound.close(again)


async def test_a_new_policy_cuts_what_it_denies_and_nothing_else() -> None:
    with in_common(OPEN, "127.0.0.4") as servers:
        for each in servers:
            each.listen()
        port = servers[0].getsockname()[1]
        rules = [f"a.test:{port}", f"b.test:{port}", f"c.test:{port}", OPEN, "127.0.0.4"]
        names = {"a.test": [OPEN], "b.test": [OPEN], "c.test": ["127.0.0.4"]}
        ground = Ground(plan(rules), port, names)
        accesses = [ground.access() for _ in names]

        async def hold(access: Access, name: str) -> None:
            with await ground.outbound.open(access, Target(name, port)):
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError as error:
                    ground.outbound.close(access, error)
                    raise

        tasks = [asyncio.ensure_future(hold(*each)) for each in zip(accesses, names, strict=True)]
        async with asyncio.timeout(20):
            while ground.outbound.budget.open < 3:
                await asyncio.sleep(0)
            while any(each.address is None for each in accesses):
                await asyncio.sleep(0)
        ground.outbound.change(plan(rules, ["a.test", "127.0.0.4"]))
        await asyncio.wait([tasks[0], tasks[2]], timeout=20)
        assert [task.done() for task in tasks] == [True, False, True]
        assert [each.result for each in accesses] == ["denied_by_policy", "ok", "denied_by_policy"]
        await ground.refused(Target("a.test", port))
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert accesses[1].result == "cancelled"


async def test_one_more_request_over_the_same_connection() -> None:
    async with listening() as port:
        ground = Ground(plan([f"a.test:{port}", OPEN]), port, {"a.test": [OPEN]})
        first, second = ground.access(), ground.access()
        made = await ground.outbound.open(first, Target("a.test", port))
        ground.outbound.close(first)
        await ground.outbound.admit_again(second, Target("a.test", port), first)
        assert second.address == OPEN
        ground.outbound.close(second)
        ground.outbound.change(plan(deny=["a.test"]))
        with pytest.raises(AccessRefused):
            await ground.outbound.admit_again(ground.access(), Target("a.test", port), first)
        made.close()
        assert ground.names.asked == ["a.test"]
        assert len(ground.records.closed_) == 3


async def test_cancelled_while_somebody_is_asked() -> None:
    ground = Ground(plan(web={"allowed_ports": [80]}), 80)
    asked = asyncio.Event()

    async def ask(sandbox: str, target: Target, said: Verdict, request: str | None) -> Verdict:
        asked.set()
        await asyncio.Event().wait()
        return said

    ground.outbound._ask = ask
    access = ground.access()
    task = asyncio.ensure_future(ground.outbound.open(access, Target("new.test", 80)))
    await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (access.result, ground.outbound.budget.open) == ("cancelled", 0)
    assert ground.records.closed_ == [access]


async def test_packages_are_those_of_the_policy_or_of_the_host() -> None:
    own = PackageIndex("host", "https://index.test/simple/")
    ground = Ground(plan(indexes=(own,)), 80)
    packages = ground.outbound.packages()
    assert packages.indexes == (own,)
    assert packages.budget is ground.outbound.packages().budget
