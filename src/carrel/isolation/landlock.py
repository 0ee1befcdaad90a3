"""Landlock: a second, path-based restriction of a sandbox. A process applies it to itself; its children inherit it."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Sequence

from carrel.errors import PlatformError
from carrel.isolation import linux
from carrel.primitives import libc

# The numbers are the same on every architecture.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_FIRST_RIGHTS = (1 << 13) - 1
_READ = _EXECUTE | _READ_FILE | _READ_DIR | _IOCTL_DEV  # a terminal that may be read must also be askable
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_SCOPE_ABSTRACT_UNIX_SOCKET, _SCOPE_SIGNAL = 1 << 0, 1 << 1
_SCOPED_SINCE = 6


# An older kernel accepts the longer structure as long as what it does not know is zero.
_RULESET = struct.Struct("=QQQ")  # handled file system rights, handled network rights, scopes
_PATH_BENEATH = struct.Struct("=Qi")  # allowed rights, descriptor


def abi() -> int:
    """Return the version of Landlock that this kernel enforces; 0 when it has none or has it switched off.

    With version 1 no file can be moved to another directory, whatever the rules say.
    """
    try:
        return libc.system_call("landlock_create_ruleset", _CREATE_RULESET, None, 0, _CREATE_RULESET_VERSION)
    except OSError:
        return 0


def rights(version: int) -> int:
    """Return every file system right, of those known here, that a version handles."""
    known = _FIRST_RIGHTS
    for since, right in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEV)):
        if version >= since:
            known |= right
    return known


def restrict(
    read: Sequence[str | int], write: Sequence[str | int], *, scope: bool = True, missing_ok: bool = False
) -> None:
    """Restrict the calling thread and all it will start: it may read and execute beneath `read`, do anything
    beneath `write`, and nothing elsewhere.

    A path that does not exist raises an error, or is ignored with `missing_ok`. Descriptors stay the caller's.
    `scope` also hides abstract sockets and processes outside, from version 6 on; before that only namespaces do.
    Sets no_new_privs. Raises `PlatformError`, also without Landlock, so call `abi` first.
    """
    version = abi()
    if version == 0:
        raise PlatformError("this kernel does not enforce Landlock", hint="boot with landlock in the lsm= list")
    handled = rights(version)
    scoped = _SCOPE_ABSTRACT_UNIX_SOCKET | _SCOPE_SIGNAL if scope and version >= _SCOPED_SINCE else 0
    asked = _RULESET.pack(handled, 0, scoped)
    try:
        ruleset = libc.system_call("landlock_create_ruleset", _CREATE_RULESET, asked, len(asked), 0)
        try:
            for places, allowed in ((read, _READ & handled), (write, handled)):
                for place in places:
                    _allow(ruleset, place, allowed, missing_ok)
            libc.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
            libc.system_call("landlock_restrict_self", _RESTRICT_SELF, ruleset, 0)
        finally:
            os.close(ruleset)
    except OSError as error:
        raise PlatformError(f"the kernel refused {error.strerror}") from error


def _allow(ruleset: int, place: str | int, allowed: int, missing_ok: bool) -> None:
    try:
        parent = place if isinstance(place, int) else os.open(place, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError as error:
        if missing_ok:
            return
        raise PlatformError(f"no Landlock rule for {place}: it does not exist", field="path") from error
    except (OSError, ValueError) as error:
        raise PlatformError(f"no Landlock rule for {place!r}: {error}", field="path") from error
    try:
        if not _add(ruleset, parent, allowed) and not _add(ruleset, parent, allowed & _FILE_RIGHTS):
            raise PlatformError(f"the kernel refused the Landlock rule for {place}", field="path")
    finally:
        if parent is not place:
            os.close(parent)


def _add(ruleset: int, parent: int, allowed: int) -> bool:
    # False for rights of directories on a file. Asking the kernel is cheaper than calling fstat first.
    rule = _PATH_BENEATH.pack(allowed, parent)
    try:
        libc.system_call("landlock_add_rule", _ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    return True
