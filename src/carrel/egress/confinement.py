"""Puts the egress process behind walls of its own: it reads what strangers send, so it should hold little that is worth
having.

It gives up every capability, and with Landlock it may read only what its programs, certificates and the look-up of
names need, and write only its cache. Whatever it must have otherwise, it has opened before.
"""

from __future__ import annotations

import logging
import os
import ssl
import sys
from collections.abc import Iterable, Iterator, Sequence

import certifi

import carrel
from carrel.isolation import landlock, linux
from carrel.primitives import libc

log = logging.getLogger("carrel.egress")

_SYSTEM = ("/usr", "/lib", "/lib64", "/opt/ssl", "/dev/null", "/dev/urandom", "/proc/sys", "/proc/self")
_NAMES = ("hosts", "resolv.conf", "nsswitch.conf", "host.conf", "gai.conf", "services", "protocols", "localtime")
_CERTIFICATES = ("/etc/ssl", "/etc/pki", "/etc/ca-certificates", "/usr/share/ca-certificates")
_LIBRARIES = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d")


def readable(more: Iterable[str] = ()) -> Iterator[str]:
    """What the process may read."""
    yield from _SYSTEM
    yield from _CERTIFICATES
    yield from _LIBRARIES
    for name in _NAMES:
        yield f"/etc/{name}"
        yield os.path.realpath(f"/etc/{name}")
    paths = ssl.get_default_verify_paths()
    yield from filter(None, (paths.cafile, paths.capath, paths.openssl_cafile, paths.openssl_capath))
    yield from (sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.dirname(os.path.abspath(carrel.__file__)))
    # Libraries load parts of themselves when they first need them; they need not lie below the interpreter. The first
    # place may be wherever the server was started, which is none of their business.
    elsewhere = {"", "/", os.getcwd()}
    yield from (place for place in map(os.path.abspath, filter(None, sys.path)) if place not in elsewhere)
    yield certifi.where()
    yield from more


def confine(writable: Sequence[str], more: Iterable[str] = ()) -> bool:
    """Confine this process and all it starts, for good; False where the kernel has no Landlock. It may write to
    `writable`, which exists, and read `more`.
    """
    linux.drop_bounding_set()
    linux.drop_capabilities()
    libc.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    if landlock.abi() == 0:
        log.warning("this kernel has no Landlock: the egress process can read what its user can")
        return False
    places = [place for place in dict.fromkeys(readable(more)) if os.path.exists(place)]
    landlock.restrict(read=places, write=writable, missing_ok=True)
    return True
