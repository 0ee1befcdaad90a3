"""What the environment says about reaching a server elsewhere: through which proxy, and whose certificates to trust."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

import certifi

from carrel.errors import InvalidRequest


@dataclass(frozen=True)
class Proxy:
    """A proxy of the environment."""

    url: str
    login: tuple[str, str] | None = field(default=None, repr=False)


def proxy_for(scheme: str, host: str) -> Proxy | None:
    """The proxy that leads to a host, by `HTTPS_PROXY`, `ALL_PROXY`, `NO_PROXY` and the like; None when none does."""
    # Who talks to a server on this machine does not wait for it.
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
    """The authorities of this machine, and of `SSL_CERT_FILE`; the usual ones where the machine has none."""
    context = ssl.create_default_context()
    if not context.cert_store_stats()["x509_ca"] and "SSL_CERT_FILE" not in os.environ:
        context.load_verify_locations(certifi.where())
    return context
