"""Starts the egress process: confined, and forked again by a keeper when it has died.

The process reads what strangers send, so it should hold little of value. It gives up every capability. With Landlock it
may read only its programs, certificates and what looking up names needs, and write only its cache and its journal.
Importing the modules takes most of a second and forking a few milliseconds, so the keeper imports them once.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import resource
import signal
import socket
import ssl
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NoReturn

import certifi
import uvloop

import carrel
from carrel.egress.access_log import AccessLog
from carrel.egress.http.inspection import Inspection
from carrel.egress.index.cache import PackageCache
from carrel.egress.index.host import host_index, host_proxy
from carrel.egress.outbound.resolver import Resolver, use_exact_names
from carrel.egress.process import EgressProxy
from carrel.errors import CarrelError
from carrel.isolation import landlock, linux
from carrel.primitives import libc

log = logging.getLogger("carrel.egress")

_SYSTEM = ("/usr", "/lib", "/lib64", "/opt/ssl", "/dev/null", "/dev/urandom", "/proc/sys", "/proc/self")
_NAMES = ("hosts", "resolv.conf", "nsswitch.conf", "host.conf", "gai.conf", "services", "protocols", "localtime")
_CERTIFICATES = ("/etc/ssl", "/etc/pki", "/etc/ca-certificates", "/usr/share/ca-certificates")
_LIBRARIES = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d")


def readable(more: Iterable[str] = ()) -> Iterator[str]:
    """List the paths that the process may read."""
    yield from _SYSTEM
    yield from _CERTIFICATES
    yield from _LIBRARIES
    for name in _NAMES:
        yield f"/etc/{name}"
        yield os.path.realpath(f"/etc/{name}")
    paths = ssl.get_default_verify_paths()
    yield from filter(None, (paths.cafile, paths.capath, paths.openssl_cafile, paths.openssl_capath))
    yield from (sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.dirname(os.path.abspath(carrel.__file__)))
    # Libraries load parts of themselves late, and may be installed elsewhere. The server's working directory can be on
    # the path too; the process needs nothing from there.
    elsewhere = {"", "/", os.getcwd()}
    yield from (place for place in map(os.path.abspath, filter(None, sys.path)) if place not in elsewhere)
    yield certifi.where()
    yield from more


def confine(writable: Sequence[str], more: Iterable[str] = ()) -> bool:
    """Confine this process and its children, irrevocably; return False if the kernel has no Landlock. They can write to
    `writable`, which must exist, and read `more`.
    """
    with suppress(PermissionError):  # an ordinary user has nothing to drop, and no exec can bring anything after this
        linux.drop_bounding_set()
    linux.drop_capabilities()
    libc.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    if landlock.abi() == 0:
        log.warning("this kernel has no Landlock: the egress process can read what its user can")
        return False
    places = [place for place in dict.fromkeys(readable(more)) if os.path.exists(place)]
    landlock.restrict(read=places, write=writable, missing_ok=True)
    return True


_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_AWAITED_SIGNALS = (*_ENDING_SIGNALS, signal.SIGCHLD)
_OFTEN = 20
_LATELY_S = 10.0
_PAUSE_S = 1.0

Work = Callable[[Callable[[], object]], None]
"""Runs until it is told to end. Calls its argument once it has begun."""


class Keeper:
    """Runs one child process at a time, and the next when it dies. Passes on the signals that end this process."""

    def __init__(self, work: Work):
        self._work = work
        self._ending = False
        self._deaths: deque[float] = deque(maxlen=_OFTEN)

    def run(self) -> int:
        """Run the child until it ends by itself, and return the exit status. A child that dies before it has begun is
        not started again: the next one would fail too.
        """
        # Taken by `sigwait`: a handler would not run for a signal that comes just before the wait for the child.
        signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED_SIGNALS)
        gc.collect()
        gc.freeze()  # keeps the memory that parent and child share
        while True:
            status, begun = self._once()
            if status == 0 or self._ending or not begun:
                return 0 if self._ending else status
            log.warning("the process died with status %d and is forked again", status)
            if len(self._deaths) == _OFTEN and self._deaths[0] > time.monotonic() - _LATELY_S:
                time.sleep(_PAUSE_S)
            self._deaths.append(time.monotonic())

    def _once(self) -> tuple[int, bool]:
        begun, report = os.pipe2(os.O_CLOEXEC)
        child = os.fork()
        if child == 0:
            self._in_child(report)
        os.close(report)
        try:
            return os.waitstatus_to_exitcode(self._wait(child)), os.read(begun, 1) == b"1"
        finally:
            os.close(begun)

    def _wait(self, child: int) -> int:
        """Wait for the end of the child, and pass on the signals that come meanwhile. Return its status."""
        while True:
            number = signal.sigwait(_AWAITED_SIGNALS)
            if number != signal.SIGCHLD:
                self._ending = True
                os.kill(child, number)
            elif (found := os.waitpid(child, os.WNOHANG))[0] == child:
                return found[1]

    def _in_child(self, report: int) -> NoReturn:
        status = 1
        try:
            for number in _ENDING_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED_SIGNALS)
            self._work(lambda: os.write(report, b"1"))
            status = 0
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        except BaseException:
            log.exception("the process failed")
        finally:
            logging.shutdown()
            os._exit(status)


def main(arguments: list[str] | None = None) -> None:
    """Run the egress process until it is told to end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen-fd", type=int, required=True, help="the socket to which control planes connect")
    parser.add_argument("--state", required=True, help="the directory of the journal")
    parser.add_argument("--cache", required=True, help="the directory of cached packages")
    parser.add_argument("--cache-mb", type=int, default=4096, help="the size limit of the cache")
    parser.add_argument("--nameserver", action="append", default=[], help="a name server to use instead of the system")
    parser.add_argument("--roots", help="a file of more certificate authorities for inspected hosts")
    given = parser.parse_args(arguments)
    use_exact_names()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    listener = socket.socket(fileno=given.listen_fd)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each connection needs two

    proxy, roots = host_proxy(), None if given.roots is None else _text(given.roots)
    os.makedirs(given.cache, mode=0o700, exist_ok=True)
    os.makedirs(given.state, mode=0o700, exist_ok=True)
    confine([given.cache, given.state], certificates())

    async def serve(begun: Callable[[], object]) -> None:
        cache = PackageCache(given.cache, most_bytes=given.cache_mb * 1024 * 1024)
        access_log = AccessLog(os.path.join(given.state, "journal"))
        egress = EgressProxy(cache, access_log, Resolver(given.nameserver), Inspection(roots=roots), proxy=proxy)
        await egress.run(listener, begun)

    sys.exit(Keeper(lambda begun: uvloop.run(serve(begun))).run())


def certificates() -> list[str]:
    """List the certificate files that this host configures, for itself or for the package index."""
    named = [os.environ.get(name) for name in ("PIP_CERT", "SSL_CERT_FILE", "SSL_CERT_DIR")]
    with suppress(CarrelError):
        named += [each.cert for each in host_index()]
    return [os.path.abspath(each) for each in named if each]


def _text(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()
