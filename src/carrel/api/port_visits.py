"""Recognizes requests to ports of sandboxes, by path and by host, before anything else looks at them.

By path, `/v1/sandboxes/ID/ports/8000/…`; an access may be the next segment, `~ACCESS`. By host, `8000-ID.DOMAIN`; such
a request never reaches another route of the API. Afterwards the path of the scope is that of the route, its raw path is
what another server needs, and its headers have no credentials any more. Decides nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from urllib.parse import parse_qsl, quote, unquote

from starlette.types import Scope, Send

from carrel.control.ports import access, headers
from carrel.errors import CarrelError, InvalidRequest, NotFound

VISIT = "carrel.visit"
"""The key in the ASGI scope."""
FACTS = b"carrel-port-visit"
"""The header with which a server tells the next one about a visit. Callers cannot send it."""
_PATH = re.compile(rb"/v1/sandboxes/([^/?]{1,400})/ports/([1-9]\d{0,4})(/.*)", re.DOTALL)
_LABEL = re.compile(r"([1-9]\d{0,4})-([a-z0-9](?:[a-z0-9-]{0,55}[a-z0-9])?)")
_TOKEN = b"carrel_"
_KEPT_ALWAYS = frozenset({b"host", b"content-length", b"transfer-encoding", b"upgrade", b"authorization", b"cookie"})
_NOT_OF_VISITORS = frozenset({b"carrel-approval", b"carrel-wait", b"idempotency-key"})


@dataclass(slots=True)
class PortVisit:
    """A request to a port. `target` is the path and query for the server; `public` the host that was asked for."""

    sandbox: str
    port: int
    target: bytes
    by_host: bool
    public: str
    scheme: str
    prefix: str
    """What comes before the path of the server in the visitor's; empty by host."""
    shown: str | None = None
    """The access or token that the visitor shows."""
    in_query: bool = False
    """Whether it was in the query: then a browser gets a cookie for the next requests."""
    by: str = "token"
    expires_at: float | None = None
    wake: bool = False

    def facts(self) -> bytes:
        """Return what another server has to know."""
        said = [self.by_host, self.public, self.scheme, self.prefix, self.by, self.expires_at, self.wake]
        return json.dumps(said, separators=(",", ":")).encode()


class PortVisits:
    """Recognizes visits. `domains` are the domains whose hosts are ports, with the schemes of their URLs: a proxy in
    front of this server may speak TLS for them. `others` are labels below them that are no ports.
    """

    def __init__(self, domains: Mapping[str, str], others: frozenset[str]):
        self._domains = domains
        self._others = others

    def recognize(self, scope: Scope, *, forwarded: bool) -> PortVisit | None:
        """Return the visit of a request, and change its scope; None for any other request. `forwarded`: another server
        claims to have recognized it.
        """
        raw: bytes = scope.get("raw_path") or scope["path"].encode()
        given: list[tuple[bytes, bytes]] = scope["headers"]
        host = next((value for name, value in given if name == b"host"), b"").decode("latin-1").strip().lower()
        label, _, domain = _name(host).partition(".")
        if not forwarded and self._is_below(_name(host)) and not (domain in self._domains and label in self._others):
            visit = self._by_host(scope, raw, host, label, domain)
        elif (found := _PATH.fullmatch(raw)) is not None:
            visit = _by_path(scope, found, host)
        else:
            return None
        if forwarded:
            _told(visit, given)
        else:
            _strip(visit, scope, given)
        if scope["type"] == "websocket":
            scope["headers"] = [pair for pair in scope["headers"] if pair[1].isascii()]
        named = quote(visit.sandbox, safe="")
        scope["path"] = f"/v1/sandboxes/{visit.sandbox}/ports/{visit.port}/"
        path, _, query = visit.target.partition(b"?")
        scope["raw_path"] = f"/v1/sandboxes/{named}/ports/{visit.port}".encode() + path
        scope["query_string"] = query
        scope[VISIT] = visit
        return visit

    def _is_below(self, name: str) -> bool:
        return any(name.endswith(f".{domain}") for domain in self._domains)

    def _by_host(self, scope: Scope, raw: bytes, host: str, label: str, domain: str) -> PortVisit:
        found = _LABEL.fullmatch(label) if domain in self._domains else None
        if found is None or int(found[1]) > 65_535:
            raise InvalidRequest(
                "this host names no port of a sandbox", field="Host", hint="it has the form 8000-ID.DOMAIN"
            )
        target = raw if raw.startswith(b"/") else b"/"
        return PortVisit(found[2], int(found[1]), _with_query(target, scope), True, host, self._domains[domain], "")


def _by_path(scope: Scope, found: re.Match[bytes], host: str) -> PortVisit:
    sandbox, port, rest = unquote(found[1].decode("latin-1")), int(found[2]), found[3]
    if "/" in sandbox or len(sandbox) > 128 or port > 65_535:
        raise NotFound("there is no such port of a sandbox", field="id")
    prefix = f"/v1/sandboxes/{found[1].decode('latin-1')}/ports/{port}"
    shown = None
    if rest.startswith(b"/~"):
        segment, _, more = rest[2:].partition(b"/")
        if access.looks_like_one(text := segment.decode("latin-1")):
            shown, rest, prefix = text, b"/" + more, f"{prefix}/~{text}"
    return PortVisit(sandbox, port, _with_query(rest, scope), False, host, _scheme(scope), prefix, shown)


def _told(visit: PortVisit, given: list[tuple[bytes, bytes]]) -> None:
    """Take over what the other server has found out. Its signature is checked before the visit is used."""
    try:
        value = json.loads(next(value for name, value in given if name == FACTS))
        visit.by_host, visit.public, visit.scheme, visit.prefix, visit.by, visit.expires_at, visit.wake = value
    except (StopIteration, ValueError, TypeError):
        raise InvalidRequest("the forwarded request is malformed", field="Carrel-Forwarded") from None


def _strip(visit: PortVisit, scope: Scope, given: list[tuple[bytes, bytes]]) -> None:
    """Take the credentials out of the headers and the query."""
    kept: headers.Headers = []
    secure = visit.scheme == "https"
    bearer, trusted = False, _is_own_page(scope, given, visit.public)
    named = {each.strip().lower() for name, value in given if name == b"connection" for each in value.split(b",")}
    for name, value in given:
        if name in named and name not in _KEPT_ALWAYS:
            continue
        if name == b"authorization":
            scheme, _, token = value.partition(b" ")
            own = scheme.lower() == b"bearer" and (not visit.by_host or token.strip().startswith(_TOKEN))
            if own and visit.shown is None:
                visit.shown, bearer = token.strip().decode("latin-1"), True
            if visit.by_host and not own:
                kept.append((name, value))
        elif name == b"carrel-access":
            visit.shown = visit.shown or value.decode("latin-1").strip()
        elif name == b"sec-websocket-protocol":
            offers = [each.strip() for each in value.split(b",")]
            token_offers = [each for each in offers if each.startswith(b"carrel.token.")]
            if token_offers and visit.shown is None:
                visit.shown, bearer = token_offers[0][len(b"carrel.token.") :].decode("latin-1"), True
            kept.append((name, value))
        elif name == b"cookie":
            if visit.by_host:
                if visit.shown is None and trusted:
                    visit.shown = headers.access_cookie(value, secure=secure)
                if others := headers.without_cookie(value):
                    kept.append((name, others))
        elif name == FACTS or (name == b"origin" and not visit.by_host and value == b"null"):
            continue
        else:
            kept.append((name, value))
    _take_query(visit)
    if not bearer:
        kept = [pair for pair in kept if pair[0] not in _NOT_OF_VISITORS]
    scope["headers"] = kept
    if "subprotocols" in scope:
        scope["subprotocols"] = [each for each in scope["subprotocols"] if not each.startswith("carrel.token.")]


def _is_own_page(scope: Scope, given: list[tuple[bytes, bytes]], public: str) -> bool:
    """Whether the cookie of a visitor counts: not for a request that a page of another host makes, also of another
    sandbox below the same domain. Following a link is no such request.
    """
    known = {name: value for name, value in given if name in {b"origin", b"sec-fetch-site", b"sec-fetch-mode"}}
    origin = known.get(b"origin")
    if origin is not None and origin.decode("latin-1").lower().rpartition("//")[2] != public:
        return False
    if known.get(b"sec-fetch-site", b"none") in {b"none", b"same-origin"}:
        return True
    return known.get(b"sec-fetch-mode") == b"navigate" and scope.get("method") in {"GET", "HEAD"}


def _take_query(visit: PortVisit) -> None:
    path, _, query = visit.target.partition(b"?")
    if headers.ACCESS.encode() not in query:
        return
    parts = query.split(b"&")
    left = [each for each in parts if each.partition(b"=")[0] != headers.ACCESS.encode()]
    if len(left) < len(parts):
        given = dict(parse_qsl(query.decode("latin-1"))).get(headers.ACCESS) or ""
        visit.shown, visit.in_query = given, True
        visit.target = path + (b"?" + b"&".join(left) if left else b"")


def _with_query(path: bytes, scope: Scope) -> bytes:
    query: bytes = scope["query_string"]
    return path + b"?" + query if query else path


def _scheme(scope: Scope) -> str:
    return "https" if scope["scheme"] in {"https", "wss"} else "http"


def _name(host: str) -> str:
    return host.partition(":")[0].rstrip(".")


def wants_page(scope: Scope) -> bool:
    """Whether a browser shows the answer to a person."""
    accepts = next((value for name, value in scope["headers"] if name == b"accept"), b"")
    return scope["type"] == "http" and scope["method"] in {"GET", "HEAD"} and b"text/html" in accepts


def _page(error: CarrelError) -> bytes:
    lines = [f"<h1>{error.status} {escape(error.title)}</h1>", f"<p>{escape(error.detail)}</p>"]
    if error.hint:
        lines.append(f"<p>{escape(error.hint)}</p>")
    style = "font:16px/1.5 system-ui,sans-serif;max-width:40rem;margin:4rem auto;padding:0 1rem"
    title = escape(error.title)
    return f'<!doctype html><meta charset="utf-8"><title>{title}</title><body style="{style}">{"".join(lines)}'.encode()


async def send_page(error: CarrelError, send: Send) -> None:
    """Answer with an error as a page for a person."""
    body = _page(error)
    told = [
        (b"content-type", b"text/html; charset=utf-8"),
        (b"content-length", b"%d" % len(body)),
        (b"cache-control", b"no-store"),
        (b"referrer-policy", b"no-referrer"),
        (b"content-security-policy", b"default-src 'none'; style-src 'unsafe-inline'"),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": told})
    await send({"type": "http.response.body", "body": body})
