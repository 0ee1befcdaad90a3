"""The outbound connections of one sandbox: its plan, rules and budget, and the one function that opens a connection.

Every connection is decided, its name looked up once, each address checked, and the access reported before it is
dialled.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from ipaddress import ip_address

from carrel.egress.access import Access, AccessRecorder, AccessRefused, Address, Ask, Dial, Resolve, Target
from carrel.egress.http import answers
from carrel.egress.index.front import AllowedPackages, Front, InstallBudget
from carrel.egress.outbound.budget import Budget, Meter
from carrel.egress.outbound.rules import EgressRules
from carrel.egress.plan import EgressPlan, PackageIndex
from carrel.isolation.inside import PROXY_PORT
from carrel.policy.rules import addresses
from carrel.policy.verdict import Verdict
from carrel.primitives.cache import Cache

_MOST_VERDICTS = 4096
_MOST_REFUSALS = 10
_LONGEST_REQUEST = 500


Inspect = Callable[[socket.socket, socket.socket, Target, "Outbound", Access], Awaitable[None]]
"""Opens the TLS of a tunnel, decides each request inside, and serves the tunnel to its end. Every byte that the client
sent after its CONNECT is still unread, and the name in its ClientHello was checked. Closes neither socket.
"""


@dataclass(slots=True)
class _Running:
    access: Access
    task: asyncio.Task[object] | None
    entered: bool


class Outbound:
    """Decides, opens, counts and cuts the outbound connections of one sandbox."""

    def __init__(
        self,
        plan: EgressPlan,
        *,
        resolve: Resolve,
        dial: Dial,
        ask: Ask,
        report: AccessRecorder,
        front: Front,
        inspect: Inspect,
        own_port: int = PROXY_PORT,
    ):
        self.plan = plan
        self.rules = _rules(plan)
        self.budget = Budget(self.rules.limits)
        self.report = report
        self.front = front
        self.inspect = inspect
        self._resolve = resolve
        self._dial = dial
        self._ask = ask
        self._own_port = own_port
        self._installs = InstallBudget()
        self._running: dict[int, _Running] = {}
        self.refusals: deque[str] = deque(maxlen=_MOST_REFUSALS)
        """The last refusals as text, for a page that programs in the sandbox can read."""
        self._verdicts: Cache[tuple[str, int, Address | None], Verdict] = Cache(_MOST_VERDICTS)

    async def open(self, access: Access, target: Target) -> socket.socket:
        """Open a connection to the target. The caller owns the non-blocking socket, and calls `close` once it has
        ended.

        Reports the access; a refused one is closed at once. Raises `AccessRefused`. A later policy that denies the
        target cancels the calling task.
        """
        access.target = target
        try:
            self.budget.enter()
        except AccessRefused as refusal:
            self.refuse(access, refusal)
            raise
        try:
            found = await self._decide(access, target)
        except BaseException as error:
            self.budget.leave()
            self.refuse(access, error)
            raise
        access.address = str(found[0]) if found else None  # logged before anything is sent there
        self._report_open(access, entered=True)
        try:
            return await self._dial(target, found, access)
        except BaseException as error:
            self.close(access, error)
            raise

    async def decide_request(self, access: Access, target: Target, path: str) -> Verdict | None:
        """Follow the rules for single requests: return the permission of a person, or None if no rule is for this
        request. Raises `AccessRefused`.
        """
        method = access.method or ""
        verdict = self.rules.decide_request(target, method, path)
        if verdict is None:
            return None
        access.target, rules = target, self.rules
        await self._consent(access, target, verdict, f"{method} {path.partition('?')[0]}"[:_LONGEST_REQUEST])
        if self.rules is not rules:
            now = self.rules.decide_request(target, method, path)
            if now is not None and now.denies:
                raise AccessRefused(now)
        return access.verdict

    async def admit_again(
        self, access: Access, target: Target, before: Access, permission: Verdict | None = None
    ) -> None:
        """Admit another request over the connection that `before` opened to the same target. The request is decided and
        reported by itself, but nothing is looked up or dialled. It counts as a connection, unless `before` still does.
        `permission` is what `decide_request` returned. Raises `AccessRefused`.
        """
        access.target, access.address, access.upstream = target, before.address, before.upstream
        entering, rules = id(before) not in self._running, self.rules
        try:
            self.budget.enter() if entering else self.budget.count()
        except AccessRefused as refusal:
            self.refuse(access, refusal)
            raise
        try:
            await self._consent(access, target, self._verdict(target))
            if before.address is not None:
                verdict = self._verdict(target, ip_address(before.address))
                if verdict.denies:
                    await self._consent(access, target, verdict)
            self._check_change(access, rules)
        except BaseException as error:
            if entering:
                self.budget.leave()
            self.refuse(access, error)
            raise
        access.verdict = permission or access.verdict
        self._report_open(access, entered=entering)

    async def admit_in_tunnel(
        self, access: Access, target: Target, tunnel: Access, permission: Verdict | None = None
    ) -> None:
        """Admit a request inside a tunnel, as `admit_again` does. A person who was asked about the tunnel, or about a
        request in it, is not asked again.
        """
        asks = self._verdict(target).asks
        if asks and tunnel.verdict.rule is None:
            access.target, access.address, access.upstream = target, tunnel.address, tunnel.upstream
            access.verdict = permission or tunnel.verdict
            self.admit_without_connection(access)
            return
        await self.admit_again(access, target, tunnel, permission)
        if asks:
            tunnel.verdict = access.verdict

    def admit_without_connection(self, access: Access) -> None:
        """Report an access that was allowed elsewhere and needs no connection. Raises `AccessRefused`."""
        try:
            self.budget.count()
        except AccessRefused as refusal:
            self.refuse(access, refusal)
            raise
        self._report_open(access, entered=False)

    def refuse(self, access: Access, error: BaseException) -> None:
        """Report a refused access. `open` and `admit_again` call it themselves."""
        access.result = _code(error)
        if isinstance(error, AccessRefused):
            if not (access.verdict.denies and access.verdict.reason):
                access.verdict = error.verdict
            self.refusals.append(f"{access.target or 'a request'}: {answers.sentence_of(error)}")
        access.ended = time.time()
        unlogged = self.budget.log_refusal()
        if unlogged is None:
            return
        if unlogged:
            more = f"{access.verdict.reason} (and {unlogged} more refusals before it)"
            access.verdict = replace(access.verdict, reason=more)
        with suppress(AccessRefused):  # the log is full; this access is refused anyway
            self.report.opened(access)
            self.report.closed(access)

    def close(self, access: Access, error: BaseException | None = None) -> None:
        """End an access, with the error if there is one. Does nothing if it is not running."""
        running = self._running.pop(id(access), None)
        if running is None:
            return
        if running.entered:
            self.budget.leave()
        if error is not None and access.result == "ok":
            access.result = _code(error)
            if isinstance(error, AccessRefused) and error.status in (403, 421, 429):
                access.verdict = error.verdict
        access.ended = time.time()
        self.report.closed(access)

    def meter(self, access: Access) -> Meter:
        """Return the byte counter of an open access."""
        most = None if access.target is None else self.rules.most_received(access.target)
        return Meter(access, self.budget, most)

    def packages(self) -> AllowedPackages:
        """Return what the sandbox may install, and from which indexes."""
        rules = self.rules.packages
        if rules.registries is None:
            indexes = self.plan.indexes
        else:
            indexes = tuple(PackageIndex(each.name, each.url, each.trusted) for each in rules.registries)
        return AllowedPackages(
            indexes, rules.blocked, rules.allowed, rules.max_install_bytes, rules.enabled, self._installs
        )

    def change(self, plan: EgressPlan) -> None:
        """Replace the plan, and cut the running accesses that the new one denies."""
        before = self.rules
        self.plan, self.rules = plan, _rules(plan)
        self._verdicts.clear()
        self.budget.change(self.rules.limits)
        for running in list(self._running.values()):
            verdict = self._verdict_now(running.access, before)
            if verdict.denies and running.task is not None:
                if running.access.result == "ok":
                    running.access.result = "denied_by_policy"
                running.access.verdict = verdict
                running.task.cancel()

    def _verdict_now(self, access: Access, before: EgressRules) -> Verdict:
        """Return the verdict of the current rules on an access that was allowed by the rules `before`."""
        target = access.target
        if target is None:
            return access.verdict
        verdict = self._verdict(target)
        # An access that a person allowed needs no rule. In an inspected tunnel, the next request asks again.
        asks = access.protocol == "http" or not access.inspected
        if verdict.asks and access.verdict.rule is not None and asks:
            return replace(verdict, verdict="deny")
        if not verdict.denies and not access.inspected and _newly_inspected(target, before, self.rules):
            return Verdict("deny", f"requests to {target.host} are inspected from now on", hint="connect again")
        if not verdict.denies and access.address is not None:
            return self._verdict(target, ip_address(access.address))
        return verdict

    # deciding

    def _verdict(self, target: Target, address: Address | None = None) -> Verdict:
        """Return the verdict on a target, or on an address of it. Cached until the rules change."""
        key = (target.host, target.port, address)
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self.rules.decide(target) if address is None else self.rules.check_address(target, address)
            self._verdicts.put(key, verdict)
        return verdict

    async def _decide(self, access: Access, target: Target) -> Sequence[Address]:
        """Decide an access, set its verdict, and return the checked addresses to dial. Raises `AccessRefused`."""
        rules = self.rules
        verdict = access.verdict = self._verdict(target)
        if not verdict.allows:
            await self._consent(access, target, verdict)
        asked = verdict.asks
        found = (target.literal,) if target.literal is not None else await self._look_up(target)
        if found is None:
            self._check_change(access, rules)
            return ()
        if not found:
            raise AccessRefused(f"{target.host} has no address", code="unreachable", status=502)
        for address in found:
            if target.port == self._own_port:
                self._check_own(access, target, address)
            verdict = self._verdict(target, address)
            if verdict.denies or (verdict.asks and not asked):
                await self._consent(access, target, verdict)
                asked = True
        self._check_change(access, rules, found)
        return found

    async def _look_up(self, target: Target) -> Sequence[Address] | None:
        """Look up a target; return None when its upstream proxies look names up themselves."""
        if self.plan.upstreams and all(each.remote_names for each in self.plan.upstreams):
            return None
        return await self._resolve(target.host)

    async def _consent(self, access: Access, target: Target, verdict: Verdict, request: str | None = None) -> None:
        """Follow a verdict; if it is to ask, follow the verdict of the control plane. Raises `AccessRefused`."""
        access.verdict = verdict
        if verdict.asks:
            access.verdict = await self._ask(self.plan.sandbox, target, verdict, request)
        if not access.verdict.allows:
            raise AccessRefused(access.verdict)

    def _check_change(self, access: Access, before: EgressRules, found: Sequence[Address] = ()) -> None:
        """Refuse an access that a newer plan denies, if the plan changed while the access was decided by the rules
        `before`: `change` cuts only running accesses. Raises `AccessRefused`.
        """
        if self.rules is before or access.target is None:
            return
        target = access.target
        for verdict in (self._verdict_now(access, before), *(self._verdict(target, each) for each in found)):
            if verdict.denies:
                access.verdict = verdict
                raise AccessRefused(verdict)

    def _check_own(self, access: Access, target: Target, address: Address) -> None:
        """Refuse the proxy's own address: one request could otherwise use up all connections of the sandbox."""
        meant = addresses.destination(address)
        if meant.is_loopback or meant.is_unspecified:
            hint = "connect to loopback directly, without the proxy"
            access.verdict = Verdict("deny", f"{target} is the proxy itself", hint=hint)
            raise AccessRefused(access.verdict)

    def _report_open(self, access: Access, *, entered: bool) -> None:
        try:
            self.report.opened(access)
        except BaseException:
            if entered:
                self.budget.leave()
            raise
        self._running[id(access)] = _Running(access, asyncio.current_task(), entered)


def _rules(plan: EgressPlan) -> EgressRules:
    return EgressRules(plan.policy(), indexes=plan.indexes, internet=plan.internet, registries=plan.registries)


def _newly_inspected(target: Target, before: EgressRules, now: EgressRules) -> bool:
    """Whether the responses of a host must be inspected from now on: they could hold a credential."""
    return (now.inspected(target) and not before.inspected(target)) or (
        now.credited(target) and not before.credited(target)
    )


def _code(error: BaseException) -> str:
    if isinstance(error, AccessRefused):
        return error.code
    if isinstance(error, asyncio.CancelledError):
        return "cancelled"
    if isinstance(error, TimeoutError):
        return "timed_out"
    return "reset" if isinstance(error, OSError) else "platform_error"
