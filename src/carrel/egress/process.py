"""The egress process: serves the connections of the sandboxes that the control plane attaches, each by its own rules.

It survives a control plane that is killed: connections continue, questions for a person are refused, and the log is
kept until the next control plane connects. When the process itself is killed, a keeper forks the next one at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from carrel.egress.access import Target
from carrel.egress.access_log import AccessLog, Item
from carrel.egress.http.inspection import Inspection
from carrel.egress.index.cache import PackageCache
from carrel.egress.index.client import IndexClient
from carrel.egress.index.front import Front
from carrel.egress.listener.gateway import Gateway
from carrel.egress.outbound.connections import Outbound
from carrel.egress.outbound.resolver import Resolver
from carrel.egress.outbound.upstreams import Health, Upstreams
from carrel.egress.plan import VERSION, EgressPlan
from carrel.policy.verdict import Verdict
from carrel.primitives.channel import Channel, ChannelClosed, Message

log = logging.getLogger("carrel.egress")

DRAIN_S = 30.0
"""How long open connections may continue when the process is told to end."""
SETTLE_S = 3.0
"""How long the process waits at its end for the log to be written."""
UNUSED_S = 60.0
"""How long the process waits for a first control plane."""


class EgressProxy:
    """The proxy: all sandboxes of this process."""

    def __init__(
        self,
        cache: PackageCache,
        access_log: AccessLog,
        resolver: Resolver,
        inspect: Inspection,
        *,
        proxy: str | None = None,
    ):
        self._indexes = IndexClient(proxy=proxy)
        self._front = Front(cache, fetch=self._indexes)
        self._resolver = resolver
        self._inspect = inspect
        self._health = Health()
        self._access_log = access_log
        self._gateways: dict[str, tuple[Gateway, Outbound]] = {}
        self._dialers: dict[str, Upstreams] = {}
        self._channels: list[Channel] = []
        """The control planes that are connected: the workers of one server."""
        self._owners: dict[str, Channel] = {}
        """The control plane of each sandbox: the last one that attached it."""
        self._questions: dict[str, tuple[Channel, asyncio.Future[Verdict]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._acknowledged = asyncio.Event()
        self.ended = asyncio.Event()

    # the control plane

    def connect(self, connection: socket.socket) -> None:
        """Serve a control plane that has connected."""

        def receive(message: Message, fds: list[int]) -> None:
            self._receive(channel, message, fds)

        channel = Channel(connection, receive, lambda: self._disconnected(channel))
        self._channels.append(channel)
        self._access_log.connect(
            partial(self._send_items, channel), channel, lambda sandbox: self._owners.get(sandbox) is channel
        )

    def _send_items(self, channel: Channel, position: int, items: list[Item]) -> bool:
        try:
            channel.send({"op": "log", "upto": position, "items": items})
        except ChannelClosed:
            return False
        return True

    def _disconnected(self, channel: Channel) -> None:
        self._channels.remove(channel)
        self._owners = {sandbox: owner for sandbox, owner in self._owners.items() if owner is not channel}
        self._acknowledged.set()
        self._access_log.disconnect(channel)
        for asked, question in self._questions.values():
            if asked is channel and not question.done():
                question.set_result(_nobody_to_ask())
        self._end_if_unused()

    def _receive(self, channel: Channel, message: Message, fds: list[int]) -> None:
        act: dict[object, Callable[[Channel, Message, list[int]], object]] = {
            "attach": self._attach,
            "change": self._change,
            "detach": self._detach,
            "answer": self._answer,
            "ack": self._ack,
            "describe": self._describe,
            "drain": self._drain,
            "flush": self._flush,
        }
        known = act.get(message.get("op"))
        answer: dict[str, object] = {"op": "done"}
        try:
            if known is None:
                raise ValueError(f"the proxy does not know '{message.get('op')}'")
            more = known(channel, message, fds)
            answer |= more if isinstance(more, dict) else {}
        except Exception as error:
            log.exception("the control plane's '%s' failed", message.get("op"))
            answer = {"op": "failed", "error": f"{type(error).__name__}: {error}"[:1000]}
        finally:
            for each in fds:
                with suppress(OSError):
                    os.close(each)
        if "seq" in message:
            with suppress(ChannelClosed):
                channel.send({**answer, "seq": message["seq"]})

    def _attach(self, channel: Channel, message: Message, fds: list[int]) -> None:
        plan = EgressPlan.from_memory_file(fds.pop(0))
        self._owners[plan.sandbox] = channel
        known = self._gateways.get(plan.sandbox)
        if known is not None:
            if fds:  # a server after a restart may have made another
                known[0].listen_on(socket.socket(fileno=fds.pop(0)))
            self._replan(known[1], plan)
            return
        listener = socket.socket(fileno=fds.pop(0))
        dialer = self._dialers[plan.sandbox] = Upstreams(plan.upstreams, self._health)
        try:
            outbound = Outbound(
                plan,
                resolve=self._resolver.share(),
                dial=dialer,
                ask=self._ask,
                report=self._access_log,
                front=self._front,
                inspect=self._inspect,
            )
            gateway = Gateway(listener, outbound)
        except BaseException:
            listener.close()
            raise
        self._gateways[plan.sandbox] = (gateway, outbound)
        gateway.start()

    def _change(self, _channel: Channel, message: Message, fds: list[int]) -> None:
        plan = EgressPlan.from_memory_file(fds.pop(0))
        known = self._gateways.get(plan.sandbox)
        if known is None:
            raise ValueError("it is not attached")
        self._replan(known[1], plan)

    def _replan(self, outbound: Outbound, plan: EgressPlan) -> None:
        self._dialers[plan.sandbox].change(plan.upstreams)
        outbound.change(plan)

    def _detach(self, _channel: Channel, message: Message, _fds: list[int]) -> None:
        self._owners.pop(str(message["sandbox"]), None)
        known = self._gateways.pop(str(message["sandbox"]), None)
        self._dialers.pop(str(message["sandbox"]), None)
        if known is not None:
            known[0].close()

    def _answer(self, channel: Channel, message: Message, _fds: list[int]) -> None:
        asked, question = self._questions.get(message["ask"], (None, None))
        if question is not None and asked is channel and not question.done():
            question.set_result(Verdict(**{**message["verdict"], "parts": ()}))

    def _ack(self, channel: Channel, message: Message, _fds: list[int]) -> None:
        self._access_log.acknowledge(int(message["upto"]), channel)
        self._acknowledged.set()

    def _flush(self, _channel: Channel, _message: Message, _fds: list[int]) -> None:
        self._access_log.flush()

    def _describe(self, _channel: Channel, _message: Message, _fds: list[int]) -> dict[str, object]:
        return {"version": VERSION, "pid": os.getpid(), "sandboxes": sorted(self._gateways)}

    def _drain(self, _channel: Channel, message: Message, _fds: list[int]) -> None:
        task = asyncio.get_running_loop().create_task(self.drain(float(message.get("seconds", DRAIN_S))))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self, sandbox: str, target: Target, asks: Verdict, request: str | None) -> Verdict:
        channel = self._owners.get(sandbox)
        if channel is None:
            return _nobody_to_ask()
        # Random, so that an answer for one process is never taken for one for the next.
        number = secrets.token_hex(16)
        question: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._questions[number] = channel, question
        try:
            channel.send(
                {
                    "op": "ask",
                    "ask": number,
                    "sandbox": sandbox,
                    "host": target.host,
                    "port": target.port,
                    "reason": asks.reason[:500],
                    "request": request,
                }
            )
            return await question
        except ChannelClosed:
            return _nobody_to_ask()
        finally:
            del self._questions[number]

    # start and end

    async def drain(self, seconds: float) -> None:
        """Accept nothing new, let open connections continue for `seconds`, then end."""
        gateways = [gateway for gateway, _ in self._gateways.values()]
        self._gateways.clear()
        await asyncio.gather(*(gateway.drain(seconds) for gateway in gateways), return_exceptions=True)
        for gateway in gateways:
            gateway.close()
        self.ended.set()

    async def run(self, listener: socket.socket, begun: Callable[[], object]) -> None:
        """Serve the control planes that connect to a listening socket until told to end. Calls `begun` once they can
        connect.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.ended.set)
        listener.setblocking(False)
        self._health.start()
        loop.add_reader(listener, self._accept, listener)
        loop.call_later(UNUSED_S, self._end_if_unused)
        begun()
        try:
            await self.ended.wait()
            loop.remove_reader(listener)
            await asyncio.gather(*(gateway.drain(0) for gateway, _ in self._gateways.values()))
            self._access_log.flush()
            await self._settle()
        finally:
            for channel in list(self._channels):
                channel.close()
            await self._health.close()
            await self._front.aclose()
            await self._resolver.close()
            self._access_log.close()

    async def _settle(self) -> None:
        """Wait until the access log is written: otherwise the next process would send it again."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                while len(self._access_log) and self._channels:
                    self._acknowledged.clear()
                    await self._acknowledged.wait()

    def _end_if_unused(self) -> None:
        if not self._channels and not self._gateways and not self._tasks:
            self.ended.set()

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        self.connect(connection)


def _nobody_to_ask() -> Verdict:
    return Verdict(
        "deny", "a person would have to allow this host, and nobody can be asked now", hint="try again in a moment"
    )
