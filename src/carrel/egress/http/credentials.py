"""Credentials that stay outside: put into requests on the way out, taken out of what comes back.

The sandbox holds a placeholder. What is put in is in no error, no log and no access; errors name a credential by the
name of its secret. Knows no sockets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from urllib.parse import unquote_to_bytes

from carrel.egress.access import Refused
from carrel.egress.http.messages import Header, Response
from carrel.egress.plan import Injected
from carrel.errors import InvalidRequest
from carrel.redaction.redact import Redactor

_FIELD = re.compile(r"[\x21-\x7e\x80-\uffff](?:[\x20-\x7e\x80-\uffff]*[\x21-\x7e\x80-\uffff])?")
# Written so that two programs may read two paths: escapes of dots, slashes, semicolons, percent signs and controls,
# escapes that are none, empty segments, parameters, backslashes, steps up.
_ODD = re.compile(r"%(?![0-9A-Fa-f]{2})|%(?:2[EeFf5]|5[Cc]|3[Bb]|[01][0-9A-Fa-f]|7[Ff])|//|;|\\|/\.{1,2}(?:/|$)")
# A part of a response is a part of a secret, and what is encoded cannot be looked into.
_PARTIAL = frozenset((b"accept-encoding", b"range", b"if-range", b"sec-websocket-extensions"))
# Servers that heed these do something else than the method, the path and the host say.
_OVERRIDES = frozenset(
    b"x-http-method-override x-http-method x-method-override x-original-url x-rewrite-url x-forwarded-host "
    b"x-forwarded-prefix x-forwarded-uri x-host forwarded".split()
)


def placeholder(name: str) -> str:
    """What the sandbox gets in place of the value."""
    return f"carrel-placeholder-{name}"


class Credentials:
    """Those of one sandbox."""

    def __init__(self, injected: Sequence[Injected], former: Sequence[Injected] = ()):
        """`former` are put in no more, and kept from coming back all the same."""
        self._injected = tuple(injected)
        self.known = tuple(each for each in dict.fromkeys((*former, *injected)) if _can_be_kept(each))
        """Everything that is kept from coming back."""
        self.redactor = Redactor(_named(self.known), shapes=False, written=placeholder)
        """Takes all of it out of bytes, and puts placeholders there."""
        self._lower = [each.secret.lower().encode() for each in self.known]
        unfit = [each.name for each in injected if each not in self.known or not _FIELD.fullmatch(each.value)]
        self._fault = f"the credential '{unfit[0]}' is too short, or cannot be written in a header" if unfit else None

    def concern(self, host: str) -> bool:
        """Whether the host is given a credential in some requests. Then it may send it back in any of its responses."""
        return any(each.host == host for each in self.known)

    def cover(self, others: Credentials, host: str) -> bool:
        """Whether everything is kept from coming back that others keep from coming back from a host."""
        return all(each in self.known for each in others.known if each.host == host)

    def choose(self, host: str, method: str, target: str) -> tuple[Injected, ...]:
        """Those for a request, given in origin form. Raises `Refused` where it is not clear whether there is one."""
        known = [each for each in self._injected if each.host == host]
        if known and self._fault is not None:
            raise Refused(
                self._fault,
                code="credential_unusable",
                status=502,
                hint="the operator has to correct the secret",
            )
        return tuple(each for each in known if _methods_match(each, method) and _paths_match(each, target))

    def request_headers(self, headers: Iterable[Header], chosen: Sequence[Injected]) -> list[Header]:
        """The headers of a request to a host that credentials concern: those of the sandbox without what would keep
        the response from being looked at, and with what was chosen in place of what it sent itself.
        """
        dropped = _PARTIAL | (_OVERRIDES if chosen else frozenset()) | {_comparable(each.header) for each in chosen}
        kept = [header for header in headers if _comparable(header[0].decode("latin-1")) not in dropped]
        put: dict[bytes, Header] = {}
        for each in chosen:  # the first for a header holds
            put.setdefault(_comparable(each.header), (each.header.encode(), each.value.encode()))
        return [*kept, (b"Accept-Encoding", b"identity"), *put.values()]

    def response_headers(self, response: Response) -> tuple[bytes, list[Header]]:
        """The reason and the headers of a response of such a host without secrets. Raises `Refused` for a response
        whose body cannot be looked into.
        """
        if response.words(b"content-encoding") - {b"identity"} or response.status == 206:
            raise Refused(
                "the response is compressed or partial although it was not asked to be, so credentials in it could "
                "not be found",
                code="bad_response",
                status=502,
            )
        clean = self.redactor.data
        headers = [
            (name, clean(value))
            for name, value in response.forwarded()
            if clean(name) == name and not any(secret in name.lower() for secret in self._lower)
        ]
        return clean(response.reason), headers


def _can_be_kept(injected: Injected) -> bool:
    """Whether it can be told from ordinary text, so that it can be taken out of it."""
    try:
        Redactor({injected.name: injected.secret}, shapes=False)
    except InvalidRequest:
        return False
    return True


def _named(injected: Iterable[Injected]) -> dict[str, str]:
    """Every secret once, under its name; under one like it when there are two."""
    found: dict[str, str] = {}
    for each in injected:
        name = each.name
        while found.setdefault(name, each.secret) != each.secret:
            name += "-"
    return found


def _comparable(name: str) -> bytes:
    """Some servers take an underscore for a hyphen."""
    return name.lower().replace("_", "-").encode("latin-1")


def _methods_match(injected: Injected, method: str) -> bool:
    return injected.methods is None or method in {each.upper() for each in injected.methods}


def _paths_match(injected: Injected, target: str) -> bool:
    if injected.paths is None:
        return True
    path = target.partition("?")[0]
    if _ODD.search(path):
        raise Refused(
            "the path is written so that it could be read in two ways, and a credential depends on it",
            code="bad_request",
            status=400,
            hint="write the path without //, ;, \\, . and .. and without %2e, %2f, %5c, %3b and %25",
        )
    asked = _segments(path)
    return any(asked[: len(own)] == own for own in map(_segments, injected.paths))


def _segments(path: str) -> list[bytes]:
    return [unquote_to_bytes(segment) for segment in path.rstrip("/").split("/")]
