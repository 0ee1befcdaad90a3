"""The outbound network of sandboxes: gives the egress process the plan and listening socket of each sandbox, answers
its questions through admission, and writes its access log to the audit log.

No sandbox waits for the start of the process: it is started at the first connection, or soon after the sandbox. Until
then connections wait in the listening socket. This part keeps a copy of every listening socket, so that a proxy that
died is replaced and sandboxes notice only a pause. A sandbox has no other network, whether the proxy runs or not.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import asdict, dataclass, field

from carrel.audit import AuditLog
from carrel.control.egress.client import EgressClient
from carrel.control.egress.connection_events import ConnectionEvents
from carrel.control.egress.log import AccessLogWriter, AccessOwner
from carrel.control.egress.plans import Plans, shut
from carrel.control.operations.admission import Admission, Redact
from carrel.control.operations.call import Call
from carrel.control.operations.caller import Caller
from carrel.control.sessions.attachments import Attachment, LaunchPlan
from carrel.control.sessions.lifecycle import LIVE
from carrel.control.sessions.live import LiveSandbox
from carrel.egress.plan import EgressPlan
from carrel.errors import ApprovalNeeded, CarrelError, Denied, PlatformError
from carrel.identity import Identity, OwnerKind
from carrel.metrics import Metrics
from carrel.models.operations import CONNECT
from carrel.policy.verdict import Verdict
from carrel.primitives.backoff import Backoff
from carrel.primitives.cache import Cache
from carrel.primitives.channel import ChannelClosed, Message
from carrel.primitives.process_locks import LocksOf
from carrel.primitives.tasks import cancel
from carrel.store import SessionRecord, SessionStore
from carrel.tracing import Tracing

log = logging.getLogger("carrel.egress")

MOST_ASKED = 20
"""How many hosts of one sandbox may wait for a person at once. More questions are denied."""
MOST_HOSTS = 100
"""How many hosts of one sandbox a person may be asked about in an hour."""
REFRESH_S = 5.0
"""How often plans are compared with policies, which another server may have changed."""
START_AFTER_S = 0.5
"""How long after a sandbox the process is started, so that most first connections find it. A program that ends sooner
and connects to nothing needs none.
"""
_HOUR_S = 3600.0
_MOST_KNOWN = 20_000
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0


@dataclass(slots=True)
class _Attached:
    box: LiveSandbox
    listener: int
    plan: EgressPlan
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a policy is read and sent, so that an older policy never replaces a newer one."""
    known: bool = False
    """Whether the process that runs now was told of it."""
    asking: int = 0
    asked: dict[tuple[str, int], float] = field(default_factory=dict)

    def may_ask(self, host: str, port: int, now: float) -> bool:
        """Count a question; return False when the sandbox may not ask it."""
        self.asked = {key: at for key, at in self.asked.items() if at > now - _HOUR_S}
        if self.asking >= MOST_ASKED or (len(self.asked) >= MOST_HOSTS and (host, port) not in self.asked):
            return False
        self.asked.setdefault((host, port), now)
        return True


class EgressService(Attachment):
    """The outbound network of all sandboxes of this server."""

    def __init__(
        self,
        run_dir: str,
        arguments: list[str],
        plans: Plans,
        admission: Admission,
        audit: AuditLog,
        metrics: Metrics,
        *,
        events: ConnectionEvents,
        tracing: Tracing | None,
        redact: Redact,
        store: SessionStore,
        locks: LocksOf,
        last: bool,
        ask_wait_s: float,
    ):
        """`last`: no other process uses the egress process after `close`, which then ends it."""
        self._store = store
        self._plans = plans
        self._admission = admission
        self._ask_wait_s = ask_wait_s
        self._boxes: dict[str, _Attached] = {}
        self._owners: Cache[str, AccessOwner] = Cache(_MOST_KNOWN)
        self._client = EgressClient(
            run_dir, arguments, on_message=self._receive, on_down=self._process_ended, locks=locks, last=last
        )
        self._log = AccessLogWriter(audit, metrics, events, redact, self._acknowledge, tracing, self._find_owner)
        self._tasks: set[asyncio.Task[None]] = set()
        self._restoring: asyncio.Task[None] | None = None
        self._starting_soon: asyncio.TimerHandle | None = None
        self._upkeep: asyncio.Task[None] | None = None
        self._closing = False

    @property
    def pid(self) -> int:
        """The pid of the egress process; 0 when there is none now."""
        return self._client.pid

    async def open(self, boxes: list[LiveSandbox], *, warm: bool) -> None:
        """Attach the sandboxes that run already. `warm`: start the process now, so that the first sandbox need not
        wait.
        """
        self._log.start()
        wanting = [box for box in boxes if box.record.network.proxied]
        for box in wanting:
            self._remember_owner(box)
        if wanting or self._client.left_behind():
            known = await self._client.connect()
            for box in wanting:
                try:
                    await self._attach_now(await self._attachable(box))
                except CarrelError as error:
                    log.warning("sandbox %s has no outbound network: %s", box.record.id, error)
            # Those of other workers stay, and nobody else has any.
            recorded = {record.id for record in await self._store.in_states(LIVE)} if known else set()
            for name in known:
                if name not in self._boxes and name not in recorded:
                    with suppress(ChannelClosed):  # the process is gone, with all its sandboxes
                        self._client.send("detach", sandbox=name)
        elif warm:
            self._restoring = asyncio.get_running_loop().create_task(self._restore())
        self._upkeep = asyncio.get_running_loop().create_task(self._refresh_all())

    async def prepare(self, plan: LaunchPlan, workspace: str) -> LaunchPlan:
        """Begin to make the authority that the sandbox will trust, if its connections are inspected."""
        if plan.trusts_proxy:
            self._plans.prepare(plan.record.id)
            plan.undo.callback(self._plans.forget, plan.record.id)
        return plan

    async def attach(self, box: LiveSandbox) -> None:
        """Attach a new sandbox, if its network goes through the proxy. Its connections wait until the process has its
        plan.
        """
        if not box.record.network.proxied:
            return
        attached = self._boxes[box.record.id] = await self._attachable(box)
        if self._client.up:
            self._start(self._attach_late(attached))
        else:
            self._start_soon(attached)

    async def _attachable(self, box: LiveSandbox) -> _Attached:
        self._remember_owner(box)
        plan = await self._plans.of(box.record)
        listener = await box.provider.way_out(box.handle)
        if listener is None:
            raise PlatformError("the sandbox has no outbound network", hint="its provider lost it; restart the sandbox")
        return _Attached(box, listener, plan)

    async def _attach_late(self, attached: _Attached) -> None:
        if not await self._attach_again(attached):
            self._replace()

    async def _attach_now(self, attached: _Attached) -> None:
        sandbox = attached.box.record.id
        try:
            await self._client.connect()
            await self._attach(attached)
        except BaseException:
            os.close(attached.listener)
            with suppress(ChannelClosed):  # it may have attached the sandbox without answering
                self._client.send("detach", sandbox=sandbox)
            raise
        self._boxes[sandbox] = attached
        attached.known = self._client.up
        if not attached.known:
            self._replace()  # it died before this sandbox was in the list

    def detach(self, box: LiveSandbox) -> None:
        """Detach a sandbox that ends."""
        self._plans.forget(box.record.id)  # also without a proxied network
        attached = self._boxes.pop(box.record.id, None)
        if attached is None:
            return
        self._close_listener(attached)
        with suppress(ChannelClosed):
            self._client.send("detach", sandbox=box.record.id)

    async def save(self, record: SessionRecord, workspace: str) -> None:
        """Write the accesses of a sandbox that has ended, so that the records of its run are complete."""
        if record.network.proxied and self._client.up:
            with suppress(PlatformError):  # it has just died: the next process sends them
                await self._client.request("flush")
            await self._log.wait_until_written()

    async def refresh(self, box: LiveSandbox) -> None:
        """Send the current policy of a sandbox's context to the proxy."""
        attached = self._boxes.get(box.record.id)
        if attached is None:
            return
        try:
            async with attached.changing:
                await self._renew(attached)
        except CarrelError as error:
            log.warning("the network of sandbox %s keeps its old policy: %s", box.record.id, error)
        except Exception:
            log.exception("the network of sandbox %s keeps its old policy", box.record.id)

    async def _renew(self, attached: _Attached) -> None:
        """Send the current policy to the proxy. A policy that cannot be carried out closes the network of the sandbox:
        what it denies must not stay open because another part of it is wrong.
        """
        record = attached.box.record
        read = await self._plans.read(record)
        try:
            plan = await self._plans.make(record, *read)
        except (CarrelError, OSError) as error:
            log.warning("the network of sandbox %s is closed: %s", record.id, error)
            plan = shut(attached.plan, error)
        if plan == attached.plan or self._boxes.get(record.id) is not attached:
            return
        before, attached.plan = attached.plan, plan
        if not self._client.up:
            return  # the next process will get it
        try:
            await self._send_plan("change", attached)
        except PlatformError as error:
            if not self._client.pid:
                return  # it died meanwhile; the next process will get it
            log.warning("the network of sandbox %s is closed: %s", record.id, error)
            attached.plan = shut(before, error)
            await self._send_plan("change", attached)

    async def close(self) -> None:
        """End the process, after all sandboxes have ended."""
        self._closing = True
        if self._starting_soon is not None:
            self._starting_soon.cancel()
        await cancel([self._upkeep, self._restoring, *self._tasks])
        for attached in self._boxes.values():
            self._close_listener(attached)
        self._boxes.clear()
        try:
            await self._client.close()
        finally:
            await self._log.close()

    # the process

    def _start_soon(self, attached: _Attached) -> None:
        """Start the process at the first connection of this sandbox, or after a while."""
        loop = asyncio.get_running_loop()
        loop.add_reader(attached.listener, self._start_now)
        if self._starting_soon is None:
            self._starting_soon = loop.call_later(START_AFTER_S, self._start_now)

    def _start_now(self) -> None:
        if self._starting_soon is not None:
            self._starting_soon.cancel()
            self._starting_soon = None
        loop = asyncio.get_running_loop()
        for attached in self._boxes.values():
            loop.remove_reader(attached.listener)
        if self._boxes and not self._client.up and (self._restoring is None or self._restoring.done()):
            self._restoring = loop.create_task(self._restore())

    @staticmethod
    def _close_listener(attached: _Attached) -> None:
        asyncio.get_running_loop().remove_reader(attached.listener)
        os.close(attached.listener)

    async def _attach(self, attached: _Attached) -> None:
        await self._send_plan("attach", attached, attached.listener)

    async def _send_plan(self, op: str, attached: _Attached, *fds: int) -> None:
        plan = attached.plan.to_memory_file()
        try:
            await self._client.request(op, (plan, *fds), sandbox=attached.box.record.id)
        finally:
            os.close(plan)

    def _process_ended(self) -> None:
        for attached in self._boxes.values():
            attached.known = False
        self._log.lost()
        self._replace()

    def _replace(self) -> None:
        if self._closing or (self._restoring is not None and not self._restoring.done()):
            return
        if self._boxes:
            log.warning("the egress process is gone; another is started")
            self._restoring = asyncio.get_running_loop().create_task(self._restore())

    async def _restore(self) -> None:
        backoff, pause = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S), 0.0
        while True:
            await asyncio.sleep(pause)
            pause = backoff.next_pause()
            try:
                await self._client.connect()
                for each in list(self._boxes.values()):
                    await self._attach_again(each)
            except (CarrelError, OSError) as error:
                log.warning("the egress process could not be started: %s", error)
                if not self._boxes:
                    return
                continue
            if self._client.up and all(each.known for each in self._boxes.values()):
                log.info("the egress process runs")
                return

    async def _attach_again(self, attached: _Attached) -> bool:
        """Attach a sandbox to the new process; return whether it succeeded. A failure affects no other sandbox. A plan
        that the process refuses closes the network of the sandbox.
        """
        sandbox = attached.box.record.id
        async with attached.changing:
            for _ in range(2):
                if attached.known or self._boxes.get(sandbox) is not attached:
                    return True  # it has ended, and its descriptor number may be in use again
                asyncio.get_running_loop().remove_reader(attached.listener)
                attached.known = True
                try:
                    await self._attach(attached)
                except CarrelError as error:
                    attached.known = False
                    if not self._client.pid:
                        break  # it has died, and the next process will get it
                    log.warning("the network of sandbox %s is closed: %s", sandbox, error)
                    attached.plan = shut(attached.plan, error)
        return attached.known

    async def _refresh_all(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            for attached in list(self._boxes.values()):
                await self.refresh(attached.box)

    # messages of the process

    def _receive(self, message: Message) -> None:
        if message.get("op") == "log":
            self._log.take(int(message["upto"]), message["items"], self._owners.get)
        elif message.get("op") == "ask":
            self._start(self._answer_question(message))

    def _remember_owner(self, box: LiveSandbox) -> None:
        """Remember whose a sandbox is: its accesses may arrive after it has ended."""
        context = box.record.context_id or box.record.acts_for or None
        self._owners.put(box.record.id, AccessOwner(context, box.record.agent, box.record.template))

    async def _find_owner(self, sandbox: str) -> AccessOwner:
        """Return whose a sandbox is that this process never had: its worker died before it wrote the access."""
        record = await self._store.get(sandbox)
        if record is None:
            return AccessOwner()
        return AccessOwner(record.context_id or record.acts_for or None, record.agent, record.template)

    def _acknowledge(self, upto: int) -> None:
        with suppress(ChannelClosed):
            self._client.send("ack", upto=upto)

    async def _answer_question(self, message: Message) -> None:
        """Answer a question of the proxy with the verdict of admission."""
        attached = self._boxes.get(str(message["sandbox"]))
        host, port = str(message["host"]), int(message["port"])
        if attached is None:
            verdict = Verdict("deny", "the sandbox is gone")
        elif not attached.may_ask(host, port, time.monotonic()):
            reason = "this sandbox has asked a person about too many hosts already"
            verdict = Verdict("deny", reason, hint="wait until those are decided")
        else:
            asks = Verdict("ask", str(message.get("reason") or f"no rule allows or denies {host}"))
            attached.asking += 1
            try:
                verdict = await self._admit(attached.box, host, port, asks, _text(message.get("request")))
            finally:
                attached.asking -= 1
        with suppress(ChannelClosed):
            self._client.send("answer", ask=message["ask"], verdict=asdict(verdict))

    async def _admit(self, box: LiveSandbox, host: str, port: int, asks: Verdict, request: str | None) -> Verdict:
        """Pass an outbound connection, or one request, through admission like every operation. The access log records
        it.
        """
        record = box.record
        actor = f"sandbox:{record.id}"
        arguments: dict[str, object] = {"host": host, "port": port}
        if request is not None:
            arguments["request"] = request
        # Programs in a sandbox have no token: they cannot decide approvals.
        who = Caller(identity=Identity(actor, OwnerKind.AGENT, frozenset()), wait_s=self._ask_wait_s)
        call = Call(CONNECT, arguments, who, record.id, record.context_id, box.asks_as, proxy_verdict=asks)
        try:
            async with self._admission.admit(call) as admitted:
                return Verdict("allow", "a person allowed it", source="approvals", approval=admitted.approval)
        except ApprovalNeeded as error:
            approval = _text(error.extra.get("approval"))
            if approval is None:
                return Verdict("deny", error.detail, hint=error.hint)
            hint = f"carrel approve {approval}, then try again"
            return Verdict("deny", f"{host}:{port} waits for approval {approval}", hint=hint, approval=approval)
        except Denied as error:
            rule, source, approval = (_text(error.extra.get(name)) for name in ("rule", "source", "approval"))
            return Verdict("deny", error.detail, rule, source, error.hint, approval)
        except CarrelError as error:
            return Verdict("deny", error.detail, hint=error.hint)
        except Exception:
            log.exception("a question of the egress process could not be answered")
            return Verdict("deny", "nobody could be asked", hint="try again later")

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
