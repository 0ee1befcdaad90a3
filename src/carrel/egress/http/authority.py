"""The certificate authority of one sandbox: the sandbox trusts it, and only the proxy has its key.

Makes the authority, certificates for hosts whose TLS the proxy opens, and the file of roots for inside. Knows no rules:
who asks for a host has decided that it is inspected.
"""

from __future__ import annotations

import os
import ssl
from collections import OrderedDict
from datetime import UTC, datetime, timedelta
from functools import cache
from ipaddress import ip_address

import certifi
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFE = timedelta(days=365)
"""How long an authority is good for. It cannot be bound to names that are not known yet, so it is short-lived."""

MOST_HOSTS = 256
"""Hosts whose certificates are kept at once."""

_EARLIER = timedelta(hours=1)  # clocks of sandbox and host are one, but those of tests and people are not
_LONGEST_NAME = 64  # of a subject


def make_authority(name: str) -> str:
    """A new authority for the sandbox `name`: its key and its certificate as PEM. The key is for the proxy alone."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    subject = _name(f"carrel sandbox {name}")
    usage = _usage(key_cert_sign=True, crl_sign=True)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(now + LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(identifier, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
        .sign(key, hashes.SHA256())
    )
    return _pem(key) + certificate.public_bytes(serialization.Encoding.PEM).decode()


class Authority:
    """Answers for hosts. Made of what `make_authority` gave; raises `ValueError` for anything else."""

    def __init__(self, pem: str):
        key = serialization.load_pem_private_key(pem.encode(), password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError("the key of an authority is an elliptic one")  # noqa: TRY004
        self._key = key
        self._issuer = x509.load_pem_x509_certificate(pem.encode())
        if self._issuer.public_key() != key.public_key():
            raise ValueError("the key of an authority belongs to its certificate")
        self.certificate = self._issuer.public_bytes(serialization.Encoding.PEM).decode()
        """The public part."""
        # One key for all hosts: whoever had it could not do more with it than with one of each.
        self._leaf_key = ec.generate_private_key(ec.SECP256R1())
        self._contexts: OrderedDict[str, ssl.SSLContext] = OrderedDict()

    def context(self, host: str) -> ssl.SSLContext:
        """TLS as `host`, a name or an address, for HTTP/1.1."""
        known = self._contexts.get(host)
        if known is None:
            known = self._contexts[host] = self._make_context(host)
            if len(self._contexts) > MOST_HOSTS:
                self._contexts.popitem(last=False)
        self._contexts.move_to_end(host)
        return known

    def _make_context(self, host: str) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        # Only files can be loaded: this one is nowhere but in memory.
        file = os.memfd_create("leaf", os.MFD_CLOEXEC)
        try:
            with os.fdopen(os.dup(file), "w") as writer:
                writer.write(_pem(self._leaf_key) + self._leaf(host) + self.certificate)
            context.load_cert_chain(f"/proc/self/fd/{file}")
        finally:
            os.close(file)
        return context

    def _leaf(self, host: str) -> str:
        names: list[x509.GeneralName]
        try:
            names = [x509.IPAddress(ip_address(host))]
        except ValueError:
            names = [x509.DNSName(host)]
        key = self._leaf_key.public_key()
        usage = _usage(digital_signature=True)
        issuer = self._issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        leaf = (
            x509.CertificateBuilder()
            .subject_name(_name(host if len(host) <= _LONGEST_NAME else "a host"))
            .issuer_name(self._issuer.subject)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._issuer.not_valid_before_utc)
            .not_valid_after(self._issuer.not_valid_after_utc)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return leaf.public_bytes(serialization.Encoding.PEM).decode()


def bundle(authority_pem: str, roots: str | None = None) -> str:
    """The roots that a sandbox trusts: those of the host, more of the operator's, and its own authority."""
    own = x509.load_pem_x509_certificate(authority_pem.encode()).public_bytes(serialization.Encoding.PEM).decode()
    parts = (host_roots(), roots or "", own)
    return "".join(part if not part or part.endswith("\n") else part + "\n" for part in parts)


@cache
def host_roots() -> str:
    """The roots of this host as PEM; those of the package `certifi` on a host that has none in a file."""
    for path in (ssl.get_default_verify_paths().cafile, "/etc/ssl/certs/ca-certificates.crt", certifi.where()):
        if os.path.isfile(path or ""):
            with open(path, encoding="utf-8", errors="replace") as file:
                text = file.read()
            if "-----BEGIN CERTIFICATE-----" in text:
                return text
    raise FileNotFoundError("this host has no certificate authorities")


def _usage(*, key_cert_sign: bool = False, crl_sign: bool = False, digital_signature: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "carrel"),
            x509.NameAttribute(NameOID.COMMON_NAME, text[:_LONGEST_NAME]),
        ]
    )


def _pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
