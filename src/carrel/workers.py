"""The leader of a server with several workers: forks them and the process that writes their records, replaces those
that die, and ends them in order.

It has the port and the lock of the data directory, and nothing else: no thread, no event loop, no control plane. It
forks from a state in which everything is imported, so that a replacement works within a second. It reads nothing that
comes from outside.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NoReturn

from carrel.control.nodes.workers import WorkerTable
from carrel.errors import CarrelError, PlatformError, from_problem
from carrel.primitives import libc
from carrel.primitives.backoff import Backoff

log = logging.getLogger("carrel.workers")

TURN_S = 0.25
READY_POLL_S = 0.005
SOON_S = 10.0
"""A worker that lives shorter than this has died soon: the next one waits, for longer and longer."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
HUNG_S = 15.0
"""How long the event loop of a worker may stand still until it is killed and replaced. Shorter than a lease."""
_PR_SET_PDEATHSIG = 1
_MOST_REPORT = 8192
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)

Work = Callable[[int, bool], None]
"""Runs a worker until it gets SIGTERM: its number, and whether no other worker runs."""


@dataclass(slots=True)
class _WorkerPlace:
    """A worker, or the gap until the next one is started in its place."""

    index: int
    name: str
    pid: int = 0
    report: int = -1
    """Where the worker writes why it could not start."""
    began: float = 0.0
    due: float = 0.0
    soon: int = 0
    """How often in a row it died soon."""
    backoff: Backoff = field(default_factory=lambda: Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S))


class Leader:
    """Runs the workers of one server, and the `writer` if they have one."""

    def __init__(self, table: WorkerTable, work: Work, writer: Callable[[], None] | None):
        self._table = table
        self._work = work
        self._writer = writer
        self._workers = [_WorkerPlace(index, f"worker {index}") for index in range(table.workers)]
        self._writers = [] if writer is None else [_WorkerPlace(table.writer, "the writer")]
        self._places = [*self._writers, *self._workers]
        self._ending = False
        self._alone: _WorkerPlace | None = None
        """The worker that was started while no other ran, until it takes requests: others wait for it."""
        self._turned = time.monotonic()
        self._patient_until = 0.0

    def run(self, started: Callable[[], None]) -> None:
        """Run until SIGTERM or SIGINT. Calls `started` when all workers take requests. A worker that cannot be started
        at first ends everything: the error says why.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        gc.collect()
        gc.freeze()  # keeps the memory that the workers share
        try:
            # The first cleans up what a former server left, before others work in the same directory.
            self._start_and_wait(self._writers)
            self._start_and_wait(self._workers[:1])
            self._start_and_wait(self._workers[1:])
            if not self._ending:
                started()
            while not self._ending:
                self._turn(TURN_S)
                self._replace()
                self._kill_hung()
        finally:
            self._end()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    def _start_and_wait(self, places: list[_WorkerPlace]) -> None:
        for place in places:
            self._start(place)
        while not self._ending and not all(self._table.is_ready(place.index) for place in places):
            self._turn(READY_POLL_S)
            for place in places:
                if not place.pid:
                    raise self._why(place)

    def _start(self, place: _WorkerPlace) -> None:
        alone = place in self._workers and not any(each.pid for each in self._workers)
        self._table.set_ready(place.index, False)
        place.report, write_end = os.pipe2(os.O_CLOEXEC)
        place.began = time.monotonic()
        leader = os.getpid()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            self._in_child(place, alone, write_end, leader)
        os.close(write_end)
        place.pid = pid
        if alone:
            self._alone = place

    def _in_child(self, own: _WorkerPlace, alone: bool, report: int, leader: int) -> NoReturn:
        status = 1
        try:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # as if the server were killed: its sandboxes run on
            if os.getppid() != leader:
                os._exit(1)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the leader ends the workers in order
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            for place in self._places:
                if place.report >= 0:
                    os.close(place.report)
            if self._writer is not None and own in self._writers:
                self._writer()
            else:
                self._work(own.index, alone)
            status = 0
        except CarrelError as error:
            log.error("%s: %s", own.name, error)  # noqa: TRY400 - an error for people, without a traceback
            with suppress(OSError):
                os.write(report, json.dumps(error.problem()).encode()[:_MOST_REPORT])
        except BaseException:
            log.exception("%s failed", own.name)
        finally:
            logging.shutdown()
            os._exit(status)

    def _why(self, place: _WorkerPlace) -> CarrelError:
        """Return why a worker could not be started."""
        with suppress(OSError, ValueError, TypeError, KeyError):
            return from_problem(json.loads(os.read(place.report, _MOST_REPORT)))
        return PlatformError(f"{place.name} ended while it was started", hint="the log says why")

    # turns

    def _turn(self, seconds: float) -> None:
        """Wait for a signal, and see which workers have died."""
        info = signal.sigtimedwait(_SIGNALS, seconds)
        now = time.monotonic()
        if now - self._turned > seconds + 2:  # this process stood still, and with it perhaps all workers
            self._patient_until = now + HUNG_S
        self._turned = now
        if info is not None and info.si_signo != signal.SIGCHLD:
            self._ending = True
        for place in self._places:
            if place.pid and os.waitpid(place.pid, os.WNOHANG)[0]:
                self._died(place)
        if self._alone is not None and (not self._alone.pid or self._table.is_ready(self._alone.index)):
            self._alone = None

    def _died(self, place: _WorkerPlace) -> None:
        self._table.set_ready(place.index, False)
        lived, place.pid = time.monotonic() - place.began, 0
        if self._ending:
            return
        if lived > SOON_S:
            place.backoff.reset()
            place.soon = 0
        pause = place.backoff.next_pause() if place.soon else 0.0
        place.soon += 1
        place.due = time.monotonic() + pause
        if place.soon == 1:
            log.warning("%s has died; another takes its place", place.name)
        else:
            words = "%s has died %d times soon after its start; the next one starts in %.1f s"
            log.error(words, place.name, place.soon, pause)

    def _replace(self) -> None:
        for place in self._places:
            waits = self._alone is not None and place in self._workers
            if not place.pid and not self._ending and not waits and place.due <= time.monotonic():
                if place.report >= 0:
                    os.close(place.report)
                self._start(place)

    def _kill_hung(self) -> None:
        now = time.monotonic()
        for place in self._places:
            still = now - self._table.beaten(place.index)
            if place.pid and self._table.is_ready(place.index) and still > HUNG_S and now > self._patient_until:
                log.error("%s has stood still for %.0f s and is killed", place.name, still)
                os.kill(place.pid, signal.SIGKILL)

    # the end

    def _end(self) -> None:
        """End the workers: the first one last, which ends what they share. The writer writes what they leave."""
        self._ending = True
        for places in (self._workers[1:], self._workers[:1], self._writers):
            for place in places:
                if place.pid:
                    os.kill(place.pid, signal.SIGTERM)
            while any(place.pid for place in places):
                self._turn(TURN_S)
                self._kill_hung()
        for place in self._places:
            if place.report >= 0:
                os.close(place.report)
