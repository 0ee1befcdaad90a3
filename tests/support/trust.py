"""The certificates of this host, read once for all HTTP clients of a run.

Every client of httpx reads them, in 30 ms, also one that speaks plain HTTP to this machine or to a socket, as nearly all
clients of the tests do: thousands.
"""

from __future__ import annotations

import functools
import os
import ssl

from httpx._transports import default

_create = default.create_ssl_context
_VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR")


@functools.cache
def _trusting_hosts(trust_env: bool, _variables: tuple[str | None, ...]) -> ssl.SSLContext:
    return _create(trust_env=trust_env)


def _context(verify: ssl.SSLContext | str | bool = True, cert: object = None, trust_env: bool = True) -> ssl.SSLContext:
    if verify is True and cert is None:
        return _trusting_hosts(trust_env, tuple(map(os.environ.get, _VARIABLES)))
    return _create(verify=verify, cert=cert, trust_env=trust_env)


def read_certificates_once() -> None:
    """From now on clients that trust what this host trusts share one context."""
    default.create_ssl_context = _context
