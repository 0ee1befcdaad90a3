"""Somebody in a sandbox who tries to get out another way than the one that is allowed, and the judgement of each try."""

from __future__ import annotations

import inspect
import itertools
import json
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from far import HOSTS, Far, Visit

from carrel import Client
from carrel.client import Sandbox
from carrel.models import AuditRecord

HERE = Path(__file__).parent
PATIENCE_S = 15.0
_numbers = itertools.count(1)


@dataclass
class Outcome:
    """What became of an attempt."""

    evidence: Any
    """What the sandbox saw; None where its own kernel refused."""
    records: list[AuditRecord]
    visits: list[Visit]
    names: list[str]
    asked: list[str]

    @property
    def refusals(self) -> list[AuditRecord]:
        return [each for each in self.records if each.result != "ok"]

    @property
    def targets(self) -> list[str]:
        return [request.target for visit in self.visits for request in visit.requests]


class Evader:
    """One sandbox and its policy."""

    def __init__(self, client: Client, far: Far, context: str, web: Mapping[str, object], **more: object):
        self.far, self._client, self._context = far, client, context
        addresses = more.pop("addresses", ())
        assert isinstance(addresses, Sequence)
        allowed = [f"network(outbound:{each})" for each in addresses]
        client.policy(context).put(
            settings={"permissions": {"allow": ["shell(python3:*)", "file(write:/workspace/**)", *allowed]}},
            sources={"web_access": dict(web), **more},
        )
        self.box: Sandbox = client.sandbox(context)
        assert str(self.box.info().network) == "allowlist"
        self.box.files.write("within.py", (HERE / "within.py").read_text())
        self._seq = 0

    def close(self) -> None:
        self.box.terminate(reason="end of the tests")

    def run(self, attack: Callable[..., object], *, timeout: float = 60, **arguments: object) -> Any:
        """What an attempt brings, and nothing said of it. An allowed request must work afterwards."""
        return self._run(attack, f"/after/{next(_numbers)}", timeout, arguments)

    def _run(self, attack: Callable[..., object], after: str, timeout: float, arguments: Mapping[str, object]) -> Any:
        given = {
            "code": textwrap.dedent(inspect.getsource(attack)),
            "name": attack.__name__,
            "arguments": arguments,
            "after": f"allowed.test:{self.far.http}{after}",
        }
        result = self.box.commands.run(["python3", "-I", "within.py"], stdin=json.dumps(given), timeout=timeout)
        marked = [line[2:] for line in result.stdout.splitlines() if line.startswith("@@")]
        assert marked, f"the attempt did not run: {result}"
        answer = json.loads(marked[-1])
        assert "broken" not in answer, answer.get("broken")
        assert answer["after"] is True, f"the way out is no longer what it was: {answer['after']}"
        return answer.get("evidence")

    def attempt(
        self,
        attack: Callable[..., object],
        *,
        passes: bool = False,
        decided: bool = True,
        timeout: float = 60,
        **arguments: object,
    ) -> Outcome:
        """Run an attempt and judge it by what arrived outside. Nothing forbidden may; where the attempt does not pass
        (`passes`: as something harmless) not a byte of it may arrive anywhere. `decided`: there was something to
        decide, so that the refusal is in the audit log.
        """
        mark, after = self.far.mark(), f"/after/{next(_numbers)}"
        evidence = self._run(attack, after, timeout, arguments)
        records = self._records(after)
        far = self.far
        outcome = Outcome(evidence, records, far.since(mark), far.names_since(mark), far.asked_since(mark))
        self._judge(outcome, passes)
        if decided:
            assert outcome.refusals, f"nothing was refused: {evidence} {records}"
        return outcome

    def _judge(self, outcome: Outcome, passes: bool) -> None:
        breaches = [each for each in outcome.visits if each.forbidden]
        assert not breaches, f"BREACH: {breaches}"
        assert self.far.token not in json.dumps(outcome.evidence), f"BREACH: {outcome.evidence}"
        assert {name.lower().rstrip(".") for name in outcome.names} <= set(HOSTS), f"BREACH: TLS for {outcome.names}"
        unasked = [name for name in outcome.asked if name not in HOSTS and not name.endswith(".names.test")]
        assert not unasked, f"BREACH: names that nobody allowed were looked up: {unasked}"
        for record in outcome.records:
            if record.result == "ok" and "host" in record.arguments:
                assert record.arguments["host"] in HOSTS, f"BREACH: {record}"
        for visit in outcome.visits:
            assert not visit.faults, f"BREACH: {visit.faults}"
            for request in visit.requests:
                (host,) = request.all("host")
                assert host.rpartition(":")[0] in HOSTS, f"BREACH: a request for {host}"
                assert "smuggled" not in request.target, f"BREACH: {request}"
        if not passes:
            said = [visit for visit in outcome.visits if visit.raw]
            assert not said, f"BREACH: {said}"

    def _records(self, after: str) -> list[AuditRecord]:
        """What the audit log says since the last time, once all of it has ended and the request after it is there."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            found = []
            for record in self._client.audit.search(context_id=self._context, kind="network"):
                if record.seq <= self._seq:
                    break
                found.append(record)
            if any(each.arguments.get("path") == after for each in found) and all(each.result for each in found):
                break
            assert time.monotonic() < deadline, f"the audit log has not all of it: {found}"
            time.sleep(0.01)
        self._seq = found[0].seq
        return [each for each in found[::-1] if each.arguments.get("path") != after]
