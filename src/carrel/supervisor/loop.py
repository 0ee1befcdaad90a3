"""An event loop that is created before a fork and taken over after it.

Creating a loop writes to some 200 memory pages, which every sandbox would then have for itself. An inherited loop costs
only what is renewed here: its descriptors, which parent and child must not share.
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
        """Replace the epoll object by a new, empty one. The old one is closed in this process only."""
        self._selector.close()
        self._selector = select.epoll()


class InheritedLoop(asyncio.SelectorEventLoop):
    """A loop that is created once in the zygote, where it never runs. The child inherits its signal handlers."""

    def __init__(self) -> None:
        self._own = _Selector()
        super().__init__(self._own)

    def take_over(self) -> set[int]:
        """Renew the descriptors and return them. Called once, in the child, before anything is registered."""
        self._own.renew()
        # Signals and other threads wake the loop through these sockets. If shared, one sandbox could wake another.
        self._close_self_pipe()  # type: ignore[attr-defined]
        self._make_self_pipe()  # type: ignore[attr-defined]
        ssock, csock = self._ssock, self._csock  # type: ignore[attr-defined]
        signal.set_wakeup_fd(csock.fileno(), warn_on_full_buffer=False)
        return {self._own.fileno(), ssock.fileno(), csock.fileno()}
