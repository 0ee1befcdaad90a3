"""Credentials that stay outside the sandbox: injected into requests, and redacted from responses.

The sandbox holds a placeholder. No error, log or access record contains a value; errors name a credential by the name
of its secret. Knows no sockets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from urllib.parse import unquote_to_bytes

from carrel.egress.access import AccessRefused, BadRequest, BadResponse
from carrel.egress.http.messages import Header, ResponseHead
from carrel.egress.plan import Injected, placeholder
from carrel.errors import InvalidRequest
from carrel.redaction.redact import Redactor

_FIELD = re.compile(r"[\x21-\x7e\x80-\uffff](?:[\x20-\x7e\x80-\uffff]*[\x21-\x7e\x80-\uffff])?")
# Paths that two programs may read differently: escaped dots, slashes, semicolons, percent signs and control characters,
# invalid escapes, empty segments, parameters, backslashes, `.` and `..`.
_ODD = re.compile(r"%(?![0-9A-Fa-f]{2})|%(?:2[EeFf5]|5[Cc]|3[Bb]|[01][0-9A-Fa-f]|7[Ff])|//|;|\\|/\.{1,2}(?:/|$)")
# A partial response may hold a part of a secret, and an encoded one cannot be searched.
_PARTIAL = frozenset((b"accept-encoding", b"range", b"if-range", b"sec-websocket-extensions"))
# With these, some servers ignore the method, the path or the host of the request.
_OVERRIDES = frozenset(
    b"x-http-method-override x-http-method x-method-override x-original-url x-rewrite-url x-forwarded-host "
    b"x-forwarded-prefix x-forwarded-uri x-host forwarded".split()
)


class Credentials:
    """The credentials of one sandbox."""

    def __init__(self, injected: Sequence[Injected], former: Sequence[Injected] = ()):
        """`former` are no longer injected, but still redacted."""
        self._injected = tuple(injected)
        self.known = tuple(each for each in dict.fromkeys((*former, *injected)) if _is_redactable(each))
        """All credentials that are redacted."""
        self.redactor = Redactor(_named(self.known), shapes=False, written=placeholder)
        """Replaces all values by placeholders."""
        self._lower = [each.secret.lower().encode() for each in self.known]
        unfit = [each.name for each in injected if each not in self.known or not _FIELD.fullmatch(each.value)]
        self._fault = f"the credential '{unfit[0]}' is too short, or cannot be written in a header" if unfit else None

    def concern(self, host: str) -> bool:
        """Whether the host gets a credential in some requests. Then any of its responses may hold it."""
        return any(each.host == host for each in self.known)

    def cover(self, others: Credentials, host: str) -> bool:
        """Whether these redact everything that `others` redact in responses of a host."""
        return all(each in self.known for each in others.known if each.host == host)

    def choose(self, host: str, method: str, target: str) -> tuple[Injected, ...]:
        """Return the credentials for a request in origin form. Raises `AccessRefused` if that is not clear."""
        known = [each for each in self._injected if each.host == host]
        if known and self._fault is not None:
            raise AccessRefused(
                self._fault, code="credential_unusable", status=502, hint="the operator has to correct the secret"
            )
        return tuple(each for each in known if _methods_match(each, method) and _paths_match(each, target))

    def request_headers(self, headers: Iterable[Header], chosen: Sequence[Injected]) -> list[Header]:
        """Return the request headers for a host that gets credentials: the sandbox's own, without those that would
        prevent redaction, and with the chosen credentials in place of what the sandbox sent.
        """
        dropped = _PARTIAL | (_OVERRIDES if chosen else frozenset()) | {_comparable(each.header) for each in chosen}
        kept = [header for header in headers if _comparable(header[0].decode("latin-1")) not in dropped]
        put: dict[bytes, Header] = {}
        for each in chosen:  # the first one for a header is used
            put.setdefault(_comparable(each.header), (each.header.encode(), each.value.encode()))
        return [*kept, (b"Accept-Encoding", b"identity"), *put.values()]

    def response_headers(self, response: ResponseHead) -> tuple[bytes, list[Header]]:
        """Return the reason and headers of a response without secrets. Raises `AccessRefused` for a response whose body
        cannot be searched.
        """
        if response.words(b"content-encoding") - {b"identity"} or response.status == 206:
            raise BadResponse("the response is compressed or partial, so it cannot be searched for credentials")
        clean = self.redactor.data
        headers = [
            (name, clean(value))
            for name, value in response.forwarded()
            if clean(name) == name and not any(secret in name.lower() for secret in self._lower)
        ]
        return clean(response.reason), headers


def refuse_ambiguous(path: str, dependent: str) -> None:
    """Raise `BadRequest` for a path that two programs may read differently, if something depends on it."""
    if _ODD.search(path):
        raise BadRequest(
            f"the path could be read in two ways, and {dependent} depends on it",
            hint="write the path without //, ;, \\, . and .. and without %2e, %2f, %5c, %3b and %25",
        )


def _is_redactable(injected: Injected) -> bool:
    """Whether the value differs enough from ordinary text to be redacted."""
    try:
        Redactor({injected.name: injected.secret}, shapes=False)
    except InvalidRequest:
        return False
    return True


def _named(injected: Iterable[Injected]) -> dict[str, str]:
    """Return every secret once, by name; two secrets of one name get different names."""
    found: dict[str, str] = {}
    for each in injected:
        name = each.name
        while found.setdefault(name, each.secret) != each.secret:
            name += "-"
    return found


def _comparable(name: str) -> bytes:
    """Normalise a header name: some servers treat an underscore as a hyphen."""
    return name.lower().replace("_", "-").encode("latin-1")


def _methods_match(injected: Injected, method: str) -> bool:
    return injected.methods is None or method in {each.upper() for each in injected.methods}


def _paths_match(injected: Injected, target: str) -> bool:
    if injected.paths is None:
        return True
    path = target.partition("?")[0]
    refuse_ambiguous(path, "a credential")
    asked = _segments(path)
    return any(asked[: len(own)] == own for own in map(_segments, injected.paths))


def _segments(path: str) -> list[bytes]:
    return [unquote_to_bytes(segment) for segment in path.rstrip("/").split("/")]
