"""The certificate of the listener for HTTPS: read again when its files change, as renewals replace them."""

from __future__ import annotations

import logging
import os
import ssl

from carrel.errors import InvalidRequest

log = logging.getLogger("carrel.api")


class Certificate:
    """A certificate with its key, in two PEM files."""

    def __init__(self, certificate: str, key: str):
        self._files = certificate, key
        self._seen: tuple[int, ...] = ()
        try:
            self._context = self._load()
        except (OSError, ssl.SSLError) as error:
            raise InvalidRequest(
                f"the certificate {certificate} with the key {key} cannot be used: {error}",
                field="ports.certificate_file",
                hint="give a PEM file with the certificate for *.DOMAIN and its chain, and one with its key",
            ) from None

    def _load(self) -> ssl.SSLContext:
        seen = tuple(os.stat(path).st_mtime_ns for path in self._files)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(*self._files)
        self._seen = seen
        return context

    def context(self) -> ssl.SSLContext:
        """Return the context for a new connection."""
        try:
            if tuple(os.stat(path).st_mtime_ns for path in self._files) != self._seen:
                self._context = self._load()
        except (OSError, ssl.SSLError) as error:  # it is being replaced
            log.warning("the certificate for ports cannot be read again: %s", error)
        return self._context
