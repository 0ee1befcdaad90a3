"""Proxy and certificate settings of the environment, for a server on another machine."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

import certifi

from carrel.errors import InvalidRequest


@dataclass(frozen=True)
class Proxy:
    """A proxy that the environment names. Its login is left out of the printed form."""

    url: str
    login: tuple[str, str] | None = field(default=None, repr=False)


def proxy_for(scheme: str, host: str) -> Proxy | None:
    """Return the proxy for a host by `HTTPS_PROXY`, `ALL_PROXY`, `NO_PROXY` and the like, or None."""
    # Imported here, because a client of a local server does not need it.
    from urllib.request import getproxies, proxy_bypass

    named = getproxies()
    url = named.get(scheme) or named.get("all")
    if not url or proxy_bypass(host):
        return None
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidRequest(
            f"the proxy of the environment for {scheme} is not http:// or https://",
            field="proxy",
            hint=f"correct {scheme.upper()}_PROXY or ALL_PROXY, or name {host} in NO_PROXY",
        )
    login = None
    if parts.username is not None:
        login = unquote(parts.username), unquote(parts.password or "")
    own = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return Proxy(f"{parts.scheme}://{own}:{parts.port or (443 if parts.scheme == 'https' else 80)}", login)


def trust() -> ssl.SSLContext:
    """Trust the certificate authorities of this machine or of `SSL_CERT_FILE`, else those of certifi."""
    context = ssl.create_default_context()
    if not context.cert_store_stats()["x509_ca"] and "SSL_CERT_FILE" not in os.environ:
        context.load_verify_locations(certifi.where())
    return context
