"""An event loop that is made before a fork and taken over after it.

Making a loop writes to some 200 pages of objects, which every sandbox would then have to itself; a loop that comes with
the fork costs only what is renewed here: the descriptors, which parent and child must not share.
"""

from __future__ import annotations

import asyncio
import select
import selectors
import signal


class _Selector(selectors.EpollSelector):
    """An epoll selector whose kernel object can be replaced."""

    _selector: select.epoll

    def renew(self) -> None:
        """A new, empty epoll; the old one is closed in this process only."""
        self._selector.close()
        self._selector = select.epoll()


class InheritedLoop(asyncio.SelectorEventLoop):
    """Made once in the zygote, where it never runs. Signal handlers added there are in force in the child."""

    def __init__(self) -> None:
        self._own = _Selector()
        super().__init__(self._own)

    def take_over(self) -> set[int]:
        """Call once, in the child, before anything is registered; the descriptors that are now the loop's own."""
        self._own.renew()
        # The way signals and other threads wake the loop: shared, one sandbox could wake another.
        self._close_self_pipe()  # type: ignore[attr-defined]
        self._make_self_pipe()  # type: ignore[attr-defined]
        ssock, csock = self._ssock, self._csock  # type: ignore[attr-defined]
        signal.set_wakeup_fd(csock.fileno(), warn_on_full_buffer=False)
        return {self._own.fileno(), ssock.fileno(), csock.fileno()}
