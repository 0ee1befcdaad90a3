"""Somebody in a sandbox who tries to get out another way than the one that is allowed, and the judgement of each try."""

from __future__ import annotations

import inspect
import itertools
import json
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.support.far import HOSTS, Far, Visit

from carrel import Client
from carrel.client import Sandbox
from carrel.models import AuditRecord

HERE = Path(__file__).parent
PATIENCE_S = 20.0
_numbers = itertools.count(1)

Attack = Callable[..., object]


@dataclass
class Outcome:
    """What became of an attempt."""

    evidence: Any
    """What the sandbox saw; None where its own kernel refused."""
    visits: list[Visit]
    names: list[str]
    """Of TLS hellos that arrived."""
    asked: list[str]
    """Names that were looked up."""

    @property
    def targets(self) -> list[str]:
        """Of the requests that arrived."""
        return [request.target for visit in self.visits for request in visit.requests]

    def judge(self, far: Far, *, passes: bool) -> None:
        """Nothing forbidden has arrived; unless it `passes`, as something harmless, not a byte has, anywhere."""
        breaches = [each for each in self.visits if each.forbidden]
        assert not breaches, f"BREACH: {breaches}"
        assert far.token not in json.dumps(self.evidence), f"BREACH: {self.evidence}"
        assert {name.lower().rstrip(".") for name in self.names} <= set(HOSTS), f"BREACH: TLS for {self.names}"
        unasked = [name for name in self.asked if name not in HOSTS and not name.endswith(".names.test")]
        assert not unasked, f"BREACH: names that nobody allowed were looked up: {unasked}"
        for visit in self.visits:
            assert not visit.faults, f"BREACH: {visit.faults}"
            for request in visit.requests:
                (host,) = request.all("host")
                assert host.rpartition(":")[0] in HOSTS, f"BREACH: a request for {host}"
                assert "smuggled" not in request.target, f"BREACH: {request}"
        if not passes:
            said = [visit for visit in self.visits if visit.raw]
            assert not said, f"BREACH: {said}"


@dataclass
class Tried(Outcome):
    """A single attempt, with what the audit log says of it."""

    records: list[AuditRecord]
    refusals: list[AuditRecord]


@dataclass
class Series:
    """What became of several attempts of one kind, one after the other, and what the audit log says of them all."""

    far: Far
    outcomes: dict[str, Outcome]
    records: list[AuditRecord]

    @property
    def refusals(self) -> list[AuditRecord]:
        return [each for each in self.records if each.result != "ok"]

    def judged(self, name: str, *, passes: bool = False) -> Outcome:
        """One of them, after `Outcome.judge`. No allowed access of all of them was to a host that is not."""
        for record in self.records:
            if record.result == "ok" and "host" in record.arguments:
                assert record.arguments["host"] in HOSTS, f"BREACH: {record}"
        outcome = self.outcomes[name]
        outcome.judge(self.far, passes=passes)
        return outcome


class Evader:
    """One sandbox and its policy."""

    def __init__(self, client: Client, far: Far, context: str, web: Mapping[str, object], **more: object):
        self.far, self._client, self._context = far, client, context
        addresses, network = more.pop("addresses", ()), more.pop("network", None)
        assert isinstance(addresses, Sequence)
        allowed = [f"network(outbound:{each})" for each in addresses]
        client.policy(context).put(
            settings={"permissions": {"allow": ["shell(python3:*)", "file(write:/workspace/**)", *allowed]}},
            sources={"web_access": dict(web), **more},
        )
        self.box: Sandbox = client.sandbox(context, network=None if network is None else str(network))
        assert str(self.box.info().network) == (network or "allowlist")
        self.box.files.write("within.py", (HERE / "within.py").read_text())

    def close(self) -> None:
        self.box.terminate(reason="end of the tests")

    def series(self, attack: Attack, cases: Mapping[str, Mapping[str, object]], *, timeout: float = 100) -> Series:
        """Run attempts, one after the other in one process. After each, an allowed request must work."""
        mark, began = self.far.mark(), datetime.now(UTC)
        numbered = {f"/after/{next(_numbers)}": name for name in cases}
        given = {
            "code": textwrap.dedent(inspect.getsource(attack)),
            "name": attack.__name__,
            "cases": [(after, cases[name]) for after, name in numbered.items()],
            "after": f"allowed.test:{self.far.http}",
        }
        result = self.box.commands.run(["python3", "-I", "within.py"], stdin=json.dumps(given), timeout=timeout)
        answers = [json.loads(line[2:]) for line in result.stdout.splitlines() if line.startswith("@@")]
        assert len(answers) == len(cases), f"the attempts did not all run: {result}"
        records = self._records(set(numbered), began)
        series = Series(self.far, {}, records)
        for (after, name), answer in zip(numbered.items(), answers, strict=True):
            assert "broken" not in answer, f"{name}: {answer['broken']}"
            assert answer["after"] is True, f"{name}: the way out is no longer what it was: {answer['after']}"
            end = self.far.place_of(after)
            names, asked = (
                [text for at, text in list(found) if mark <= at <= end] for found in (self.far.names, self.far.asked)
            )
            visits = [each for each in self.far.visits[mark:end] if not each.after]
            series.outcomes[name] = Outcome(answer.get("evidence"), visits, names, asked)
            mark = end + 1
        return series

    def run(self, attack: Attack, **arguments: object) -> Any:
        """What an attempt brings; nothing is said of it."""
        return self.series(attack, {"": arguments}).outcomes[""].evidence

    def attempt(self, attack: Attack, *, passes: bool = False, decided: bool = True, **arguments: object) -> Tried:
        """Run an attempt and judge it. `decided`: there was something to decide, so that it is in the audit log."""
        series = self.series(attack, {"": arguments})
        outcome = series.judged("", passes=passes)
        if decided:
            assert series.refusals, f"nothing was refused: {outcome.evidence} {series.records}"
        return Tried(outcome.evidence, outcome.visits, outcome.names, outcome.asked, series.records, series.refusals)

    def _records(self, afters: set[str], since: datetime) -> list[AuditRecord]:
        """What the audit log says since then, once all of it has ended and the allowed requests are there too."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            found = list(self._client.audit.search(context_id=self._context, kind="network", since=since))
            paths = {each.arguments.get("path") for each in found}
            if afters <= paths and all(each.result for each in found):
                return [each for each in found[::-1] if each.arguments.get("path") not in afters]
            assert time.monotonic() < deadline, f"the audit log has not all of it: {found}"
            time.sleep(0.02)
