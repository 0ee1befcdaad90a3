"""Calls without a context, in real sandboxes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.support.calls import ADMIN
from tests.support.environments_ground import sources, stocked
from tests.support.sandboxes import ROOT, until

from carrel.audit import Filter, chain_of
from carrel.config import Settings
from carrel.control.operations.caller import Caller
from carrel.control.plane import ControlPlane
from carrel.control.python import stateless_pool as router_module
from carrel.control.python.stateless_pool import StatelessPool
from carrel.errors import (
    ApprovalNeeded,
    Conflict,
    Denied,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    PlatformError,
    SandboxLost,
)
from carrel.identity import Identity, OwnerKind, Scope
from carrel.models import (
    ApprovalDecision,
    CommandRequest,
    EnvironmentAttach,
    SandboxRequest,
    State,
    StatelessRequest,
    StatelessResult,
)
from carrel.models.files import StatRequest
from carrel.models.operations import STAT_FILE

needs_root = pytest.mark.skipif(not ROOT, reason="btrfs needs root")


@asynccontextmanager
async def opened(settings: Settings, **router: object) -> AsyncIterator[ControlPlane]:
    plane = await ControlPlane.open(
        settings.model_copy(update={"router": settings.router.model_copy(update=router), "max_sandboxes": 20})
    )
    try:
        yield plane
    finally:
        await plane.close()


def call(
    plane: ControlPlane, code: str, subject: str = "agent:a", approval: str | None = None, **more: object
) -> asyncio.Task[StatelessResult]:
    """A call of some caller."""
    identity = Identity(subject, OwnerKind.AGENT, frozenset({Scope.OPERATE}))

    async def run() -> StatelessResult:
        caller = Caller(identity, approval)
        return await plane.router.run(caller, StatelessRequest(code=code, **more))  # type: ignore[arg-type]

    return asyncio.get_running_loop().create_task(run())


def idle(plane: ControlPlane) -> int:
    return sum(each.state == "idle" for each in plane.router.table.places)


async def settled(plane: ControlPlane) -> None:
    await until(lambda: not plane.router._tasks and all(each.state == "idle" for each in plane.router.table.places))


async def test_results_and_files(settings: Settings) -> None:
    async with opened(settings, spares=0) as plane:
        done = await call(plane, "open('out', 'w').write(open('in').read() * 2); print(1)", files={"in": "YWI="})
        assert (done.output, done.exit_code, done.files_produced) == ("1\n", 0, ["out"])
        assert done.files == {"out": "YWJhYg=="}
        assert (await call(plane, "raise SystemExit(3)")).exit_code == 3
        assert (await call(plane, "while True: pass", timeout=0.3)).timed_out
        large = await call(plane, "open('large', 'wb').truncate(9 << 20); open('small', 'w').write('x')")
        assert sorted(large.files_produced) == ["large", "small"] and large.files == {"small": "eA=="}
        odd = await call(plane, r"for name in (b'\xff', b'a\nb', b'-x'): open(name, 'w').write('1'); print(1)")
        assert odd.output == "1\n" * 3 and sorted(odd.files) == odd.files_produced == ["-x", "a\nb", "\udcff"]
        with pytest.raises(NotFound):
            await call(plane, "1", env_name="no-such-environment")
        with pytest.raises(InvalidRequest, match="no template"):
            await call(plane, "1", template="no-such-template")
        await settled(plane)


LEAVE = """
import os, subprocess
for place in ('/workspace', '/tmp', os.path.expanduser('~')):
    os.makedirs(place + '/.left/deep')
    open(place + '/left', 'w').write('secret')
subprocess.Popen(['sleep', '1000'], start_new_session=True)
"""
LOOK = """
found = [f'{place}/{name}' for place in ('/workspace', '/tmp', os.path.expanduser('~')) for name in os.listdir(place)]
for pid in filter(str.isdigit, os.listdir('/proc')):
    try: found += [line for line in [open(f'/proc/{pid}/cmdline').read()] if line.startswith('sleep')]
    except OSError: pass
print(found)
"""


@pytest.mark.parametrize("volumes", ["directory", pytest.param("btrfs", marks=needs_root)])
async def test_nothing_stays_and_callers_share_nothing(settings: Settings, volumes: str) -> None:
    async with opened(settings.model_copy(update={"volumes": volumes}), spares=0) as plane:
        new = (await call(plane, LOOK)).output
        await settled(plane)
        await call(plane, LEAVE)
        await settled(plane)
        [first] = plane.sessions.live()
        assert (await call(plane, LOOK)).output == new
        await settled(plane)
        assert plane.sessions.live() == [first], "the same sandbox, as new"
        await call(plane, "1", "agent:b")
        await settled(plane)
        assert len(plane.sessions.live()) == 2, "nobody gets the sandbox of another"
        await call(plane, "open('.context.json', 'a').write(' ')")
        await settled(plane)
        assert first not in plane.sessions.live(), "one that was changed is not used again"
        assert (await call(plane, LOOK)).output == new


async def test_many_files_come_back_at_once_in_their_order(settings: Settings) -> None:
    async with opened(settings) as plane:
        read, now, most = plane.operations.read_file, 0, 0

        async def counted(*given: object, **more: object) -> AsyncIterator[object]:
            nonlocal now, most
            now, most = now + 1, max(most, now + 1)
            async for piece in read(*given, **more):  # type: ignore[arg-type]
                yield piece
            now -= 1

        plane.operations.read_file = counted  # type: ignore[method-assign,assignment]
        code = "for n in range(50): open(f'f{n:02}', 'w').write(str(n) * (40_000 if n % 7 == 0 else 1))"
        done = await call(plane, code)
        assert list(done.files) == done.files_produced == [f"f{number:02}" for number in range(50)]
        assert done.files["f03"] == "Mw==" and len(done.files["f49"]) > 100_000
        assert now == 0 and most > 1


async def test_what_does_not_isolate_is_not_used(settings: Settings) -> None:
    sandbox = settings.sandbox.model_copy(update={"provider": "process"})
    async with opened(settings.model_copy(update={"sandbox": sandbox}), spares=0) as plane:
        await call(plane, "print(1)")
        assert [each.record.provider for each in plane.sessions.live()] == ["namespace"]


async def test_spares_and_idle_ones(settings: Settings) -> None:
    async with opened(settings, spares=1) as plane:
        await call(plane, "1")
        await until(lambda: idle(plane) == 2)
        spare = next(each for each in plane.router.table.places if each.owner is None)
        plane.router.table.settings = plane.router.table.settings.model_copy(update={"idle_s": 0.2})
        await call(plane, "1", "agent:b")
        assert spare.owner == ("agent:b", None)
        await call(plane, "1")
        await until(lambda: not plane.router.table.places and not plane.sessions.live())


async def test_nobody_else_works_in_them(settings: Settings) -> None:
    async with opened(settings, spares=1) as plane:
        await call(plane, "1")
        await until(lambda: idle(plane) == 2)
        used, spare = sorted((each for each in plane.router.table.places), key=lambda each: each.owner is None)
        for subject, place, works in (("a", used, True), ("b", used, False), ("a", spare, False), ("b", spare, False)):
            caller = Caller(Identity(f"agent:{subject}", OwnerKind.AGENT, frozenset({Scope.OPERATE})))
            if works:
                await plane.operations.forward(caller, STAT_FILE, place.id, StatRequest(path="."))
                continue
            with pytest.raises(NotFound, match="without a context only"):
                await plane.operations.run_command(caller, place.id, CommandRequest(command="touch /tmp/planted"))
            with pytest.raises(NotFound):
                await plane.operations.write_file(caller, place.id, "planted", b"x")
            # An environment below the workspace's own Python would be what the next call runs in.
            with pytest.raises(NotFound, match="without a context only"):
                await plane.envs.attach(caller, place.id, EnvironmentAttach(requirements=["nail"], venv=True))
            with pytest.raises(NotFound, match="without a context only"):
                await plane.envs.detach(caller, place.id, "nail")
        assert (await call(plane, LOOK, "agent:b")).output == (await call(plane, LOOK)).output


async def test_back_pressure(settings: Settings) -> None:
    async with opened(settings, max_sandboxes=1, queue=1, wait_s=0.5, spares=0) as plane:
        code = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\nprint('ran')"
        running = call(plane, code)
        await until(lambda: any(each.state == "busy" for each in plane.router.table.places))
        refused = await asyncio.gather(call(plane, "1"), call(plane, "1", "agent:b"), return_exceptions=True)
        assert all(isinstance(each, LimitExceeded) for each in refused)
        assert {"too many calls" in str(each) for each in refused} == {True, False}
        assert "CARREL_ROUTER_MAX_SANDBOXES" in str(refused[0])
        [box] = plane.sessions.live()
        Path(box.workspace, "go").touch()
        assert (await running).output == "ran\n"
        await settled(plane)
        text = plane.metrics.render()[0].decode()
        assert 'carrel_router_calls_total{outcome="limit_exceeded"} 2.0' in text
        assert "carrel_router_waiting 0.0" in text and 'carrel_router_sandboxes{state="idle"} 1.0' in text


async def test_callers_take_turns(settings: Settings) -> None:
    async with opened(settings, max_sandboxes=1, wait_s=60, spares=0) as plane:
        ran: list[str] = []

        async def noted(name: str, task: Awaitable[StatelessResult]) -> None:
            await task
            ran.append(name)

        many = [noted("a", call(plane, "1")) for _ in range(5)]
        few = [noted(name, call(plane, "1", f"agent:{name}")) for name in "bc"]
        await asyncio.gather(*many, *few)
        assert sorted(ran) == ["a"] * 5 + ["b", "c"] and {"b", "c"} < set(ran[:4]), ran
        await settled(plane)


async def test_who_gives_up_holds_nothing(settings: Settings) -> None:
    async with opened(settings, max_sandboxes=1, wait_s=60, spares=0) as plane:
        running = call(plane, "import time; time.sleep(60)")
        await until(lambda: any(each.state == "busy" for each in plane.router.table.places))
        waiting, last = call(plane, "1"), call(plane, "print(2)")
        await until(lambda: plane.router.table.waiting == 2)
        for task in (waiting, running):
            task.cancel()
        assert (await last).output == "2\n"
        await asyncio.gather(running, waiting, return_exceptions=True)
        await settled(plane)


async def test_eight_at_once(settings: Settings) -> None:
    code = "open('mine', 'x').write('{0}'); import os, time; time.sleep(0.1); print(open('mine').read(), 'mine' in os.listdir())"
    async with opened(settings, max_sandboxes=4, wait_s=60) as plane:
        tasks = [call(plane, code.format(number), f"agent:{number % 3}") for number in range(24)]
        results = await asyncio.gather(*tasks)
        assert [each.output for each in results] == [f"{number} True\n" for number in range(24)]
        assert len(plane.router.table.places) <= 4


async def test_who_does_not_send_its_files_loses_the_sandbox(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_module, "HELD_S", 0.3)
    async with opened(settings, max_sandboxes=1, spares=0, wait_s=60) as plane:
        stuck = asyncio.Event()

        async def put(_sandbox: str) -> None:
            await stuck.wait()

        async def send() -> None:
            async with plane.router.running(ADMIN, StatelessRequest(code="1"), put):
                pass

        sending = asyncio.get_running_loop().create_task(send())
        await until(lambda: plane.router.table.places)
        assert (await call(plane, "print(2)", "agent:b")).output == "2\n"
        stuck.set()
        with pytest.raises(PlatformError, match="ended"):
            await sending
        await settled(plane)


async def test_a_sandbox_that_dies(settings: Settings) -> None:
    async with opened(settings, spares=0) as plane:
        running = call(plane, "import time; time.sleep(60)")
        await until(lambda: any(each.state == "busy" for each in plane.router.table.places))
        [box] = plane.sessions.live()
        await until(lambda: box.in_flight)
        await box.provider.remove(box.handle)
        with pytest.raises(SandboxLost):
            await running
        await until(lambda: not plane.router.table.places)
        assert (await call(plane, "print(2)")).output == "2\n"
        await settled(plane)
        [box] = plane.sessions.live()
        await box.provider.remove(box.handle)  # while nobody uses it
        assert (await call(plane, "print(3)")).output == "3\n"
        await settled(plane)
        [box] = plane.sessions.live()
        await plane.sessions.terminate(ADMIN, box.record.id)
        assert not plane.router.table.places, "the table follows"


async def test_what_a_server_left_is_ended(settings: Settings) -> None:
    async with opened(settings, spares=0) as plane:
        await call(plane, "1")
        await settled(plane)
        [used] = plane.sessions.live()
        kept, _ = await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="kept"))
        after = StatelessPool(
            settings.router, plane.sessions, plane.operations, plane.own_operations, plane.python, plane.packages,
            plane.metrics,
        )  # fmt: skip
        await after.open()
        assert (await plane.sessions.get(used.record.id)).state is State.TERMINATED
        assert [box.record.id for box in plane.sessions.live()] == [kept.id]


async def test_it_is_governed(settings: Settings) -> None:
    file = Path(settings.data_dir, "policy.json")
    file.write_text(json.dumps({"permissions": {"deny": ["shell(python3:*)"]}}))
    changed = settings.policy.model_copy(update={"settings_file": str(file)})
    async with opened(settings.model_copy(update={"policy": changed}), spares=0) as plane:
        with pytest.raises(Denied) as refused:
            await call(plane, "print(1)")
        assert refused.value.rule == "shell(python3:*)"
        await settled(plane)
        [used] = plane.sessions.live()

        async def recorded() -> set[tuple[str, str]]:
            records = (await plane.audit.search(Filter(chain_of(None, used.record.id)), limit=50)).items
            return {(each.name, each.actor) for each in records}

        assert ("python_exec", "agent:a") in await until(recorded)


@asynccontextmanager
async def asking(settings: Settings) -> AsyncIterator[ControlPlane]:
    """Where a person is asked about Python."""
    file = Path(settings.data_dir, "policy.json")
    file.write_text(json.dumps({"permissions": {"allow": ["shell(true)", "file(read:${WORKSPACE}/**)"]}}))
    changed = settings.policy.model_copy(update={"settings_file": str(file)})
    async with opened(settings.model_copy(update={"policy": changed}), spares=0) as plane:
        yield plane


PERSON = Identity("user:p", OwnerKind.PERSON, frozenset({Scope.APPROVE}))


async def test_an_approval_is_the_callers_whichever_sandbox_answers(settings: Settings) -> None:
    async with asking(settings) as plane:
        with pytest.raises(ApprovalNeeded) as asked:
            await call(plane, "print(1)")
        approval = str(asked.value.extra["approval"])
        with pytest.raises(ApprovalNeeded) as again:
            await call(plane, "print(1)")
        assert again.value.extra["approval"] == approval, "one question, however often it is asked"
        with pytest.raises(ApprovalNeeded) as other:
            await call(plane, "print(1)", "agent:b")
        assert other.value.extra["approval"] != approval
        await plane.decisions.decide(Caller(PERSON), approval, ApprovalDecision(approve=True))
        await settled(plane)
        for box in plane.sessions.live():
            await plane.sessions.terminate(ADMIN, box.record.id)
        assert not plane.router.table.places
        for code, subject, more in (
            ("print(2)", "agent:a", {}),
            ("print(1)", "agent:b", {}),
            ("print(1)", "agent:a", {"timeout": 7}),
        ):
            with pytest.raises(Conflict, match=r"another (operation|caller)"):
                await call(plane, code, subject, approval, **more)
        tries = await asyncio.gather(
            *(call(plane, "print(1)", "agent:a", approval) for _ in range(3)), return_exceptions=True
        )
        done = [each for each in tries if isinstance(each, StatelessResult)]
        assert [each.output for each in done] == ["1\n"], tries
        assert sum(isinstance(each, Conflict) and "used already" in str(each) for each in tries) == 2
        await settled(plane)


async def test_environments(settings: Settings) -> None:
    async with stocked() as index:
        file = Path(settings.data_dir, "sources.json")
        file.write_text(json.dumps(sources(index)))
        changed = settings.policy.model_copy(update={"sources_file": str(file)})
        async with opened(settings.model_copy(update={"policy": changed}), spares=0) as plane:
            with pytest.raises(Denied, match="blocked"):
                await call(plane, "1", requirements=["blocked-thing"])
            await settled(plane)
            built = await call(plane, "import nail; print(1)", requirements=["nail"])
            assert (built.output, built.stderr) == ("1\n", "")
            await settled(plane)
            assert [len(each.envs) for each in plane.router.table.places] == [1]
            mixed = await asyncio.gather(
                *(call(plane, "import nail; print(2)", f"agent:{name}", requirements=["nail"]) for name in "ab"),
                *(call(plane, "import nail", f"agent:{name}") for name in "ab"),
            )
            assert [each.output for each in mixed] == ["2\n", "2\n", "", ""]
            assert ["ModuleNotFoundError" in each.stderr for each in mixed] == [False, False, True, True]
            await settled(plane)
            assert (await call(plane, "import nail", requirements=["nail"])).exit_code == 0
