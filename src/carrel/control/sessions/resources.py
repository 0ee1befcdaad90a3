"""The processor time and memory of running sandboxes: measured when somebody asks, for metrics and records.

Nothing is measured when nobody asks. All who ask within `FRESH_S` share one measurement, of a bounded number of
sandboxes.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from carrel.control.sessions.live import LiveSandbox, LiveSandboxes
from carrel.errors import CarrelError
from carrel.metrics import Metrics, SandboxSample
from carrel.models import ResourceUsage, SandboxInfo, State
from carrel.providers.base import Handle, Provider, ResourceUse

log = logging.getLogger("carrel.resources")

FRESH_S = 2.0


class Resources:
    """Measures the sandboxes of one server, at most `most` of them: those that were used last."""

    def __init__(self, live: LiveSandboxes, metrics: Metrics, *, most: int):
        self._live = live
        self._metrics = metrics
        self._most = most
        self._measuring = asyncio.Lock()
        self._measured_at = float("-inf")
        self._shown: list[tuple[LiveSandbox, ResourceUse]] = []
        self._found: dict[str, ResourceUse] = {}
        self._peaks: dict[str, int] = {}

    async def measure(self) -> Mapping[str, ResourceUse]:
        """Return what sandboxes use, by the id of the session, at most `FRESH_S` old. The metrics show the same."""
        async with self._measuring:
            if time.monotonic() - self._measured_at < FRESH_S:
                self._show(self._shown)  # without those that have ended since
                return self._found
            boxes = heapq.nlargest(self._most, self._live.all(), key=lambda box: box.last_activity)
            found = await self._ask(boxes)
            boxes = [box for box in boxes if box.instance in found]
            found = {box.instance: self._with_peak(box.instance, found[box.instance]) for box in boxes}
            self._peaks = {
                instance: used.memory_peak_bytes
                for instance, used in found.items()
                if used.memory_peak_bytes is not None
            }
            self._show([(box, found[box.instance]) for box in boxes])
            self._measured_at = time.monotonic()
            return self._found

    async def fill(self, infos: Iterable[SandboxInfo]) -> None:
        """Write what they use into the records of running sandboxes of this server."""
        running = [info for info in infos if info.state is State.RUNNING]
        found = await self.measure() if running else {}
        for info in running:
            if (used := found.get(info.id)) is not None:
                info.resources = ResourceUsage(
                    cpu_seconds=used.cpu_s,
                    memory_bytes=used.memory_bytes,
                    memory_peak_bytes=used.memory_peak_bytes,
                )

    def _show(self, measured: Sequence[tuple[LiveSandbox, ResourceUse]]) -> None:
        self._shown = [(box, used) for box, used in measured if self._live.has(box)]
        self._found = {box.record.id: used for box, used in self._shown}
        self._metrics.resources([_sample(box, used) for box, used in self._shown])

    async def _ask(self, boxes: list[LiveSandbox]) -> dict[str, ResourceUse]:
        """Ask the providers; return the answers by the name of the instance."""
        asked: dict[Provider, list[LiveSandbox]] = {}
        for box in boxes:
            asked.setdefault(box.provider, []).append(box)
        answers = await asyncio.gather(*(self._ask_one(provider, some) for provider, some in asked.items()))
        return {instance: used for answer in answers for instance, used in answer.items()}

    @staticmethod
    async def _ask_one(provider: Provider, boxes: list[LiveSandbox]) -> dict[str, ResourceUse]:
        handles: list[Handle] = [box.handle for box in boxes]
        try:
            found = await provider.resources(handles)
        except (CarrelError, OSError) as error:
            log.warning("provider '%s' cannot say what its sandboxes use: %s", provider.name, error)
            return {}
        return {box.instance: found[id] for box in boxes if (id := str(box.handle["id"])) in found}

    def _with_peak(self, instance: str, used: ResourceUse) -> ResourceUse:
        seen = max(used.memory_peak_bytes or 0, used.memory_bytes or 0, self._peaks.get(instance, 0))
        return replace(used, memory_peak_bytes=seen or None)


def _sample(box: LiveSandbox, used: ResourceUse) -> SandboxSample:
    return SandboxSample(
        box.record.id, box.record.template or "", used.cpu_s, used.memory_bytes, used.memory_peak_bytes
    )
