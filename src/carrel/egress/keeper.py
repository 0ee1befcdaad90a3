"""Keeps a process running: loads its modules once, forks it, and forks it again when it has died.

Loading takes most of a second and forking a few milliseconds, so that what was killed is back before anybody who waits
for it gives up. Knows nothing of what the process does. Runs in one thread, before any event loop.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import NoReturn

log = logging.getLogger("carrel.egress")

_OFTEN = 20
_LATELY_S = 10.0
_PAUSE_S = 1.0

Work = Callable[[Callable[[], None]], None]
"""Runs until it is told to end, and says by its argument that it has begun."""


class Keeper:
    """One process at a time, and the next when it dies. It is told to end by the signals that end this one."""

    def __init__(self, work: Work):
        self._work = work
        self._child = 0
        self._ending = False
        self._deaths: deque[float] = deque(maxlen=_OFTEN)

    def run(self) -> int:
        """Keep it running until it ends by itself; the status to exit with. One that dies before it has begun is not
        tried again: what hinders it would hinder the next.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)
        gc.collect()
        gc.freeze()  # what is shared stays shared
        while True:
            status, begun = self._once()
            if status == 0 or self._ending or not begun:
                for number in (signal.SIGTERM, signal.SIGINT):
                    signal.signal(number, signal.SIG_IGN)  # it ends anyway
                return 0 if self._ending else status
            log.warning("the process died with status %d and is forked again", status)
            if len(self._deaths) == _OFTEN and self._deaths[0] > time.monotonic() - _LATELY_S:
                time.sleep(_PAUSE_S)
            self._deaths.append(time.monotonic())

    def _once(self) -> tuple[int, bool]:
        begun, tell = os.pipe2(os.O_CLOEXEC)
        self._child = os.fork()
        if self._child == 0:
            self._in_child(tell)
        os.close(tell)
        _, status = os.waitpid(self._child, 0)
        self._child = 0
        try:
            return os.waitstatus_to_exitcode(status), os.read(begun, 1) == b"1"
        finally:
            os.close(begun)

    def _in_child(self, tell: int) -> NoReturn:
        status = 1
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            self._work(lambda: _write(tell))
            status = 0
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        except BaseException:
            log.exception("the process failed")
        finally:
            logging.shutdown()
            os._exit(status)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self._ending = True
        if self._child == 0:
            raise SystemExit(0)
        with suppress(ProcessLookupError):  # it has just ended by itself
            os.kill(self._child, number)


def _write(descriptor: int) -> None:
    os.write(descriptor, b"1")
