"""The certificate authority of one sandbox: the sandbox trusts it, and only the proxy has its key.

Makes the authority, the certificates for inspected hosts, and the file of trusted roots for the sandbox. Knows no
rules: the caller has decided that a host is inspected.
"""

from __future__ import annotations

import os
import ssl
from datetime import UTC, datetime, timedelta
from functools import cache
from ipaddress import ip_address

import certifi
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from carrel.primitives.cache import Cache

LIFE = timedelta(days=365)
"""How long an authority is valid. It cannot be limited to names that are not known yet, so it is short-lived."""

MOST_HOSTS = 256
"""How many certificates of hosts are cached."""

_EARLIER = timedelta(hours=1)  # for programs whose clock is behind
_LONGEST_NAME = 64  # of a subject


def make_authority(name: str) -> str:
    """Make the authority of the sandbox `name`: its key and certificate as PEM. Only the proxy may have the key."""
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
    """Signs certificates for hosts. Takes the result of `make_authority`; raises `ValueError` for anything else."""

    def __init__(self, pem: str):
        key = serialization.load_pem_private_key(pem.encode(), password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError("the key of an authority is an elliptic one")  # noqa: TRY004
        self._key = key
        self._issuer = x509.load_pem_x509_certificate(pem.encode())
        if self._issuer.public_key() != key.public_key():
            raise ValueError("the key of an authority belongs to its certificate")
        self.certificate = self._issuer.public_bytes(serialization.Encoding.PEM).decode()
        # One key for all hosts: nobody could do more with it than with a separate key for each.
        self._leaf_key = ec.generate_private_key(ec.SECP256R1())
        self._contexts: Cache[str, ssl.SSLContext] = Cache(MOST_HOSTS)

    def context(self, host: str) -> ssl.SSLContext:
        """Return the TLS context of a server for `host`, a name or an address, for HTTP/1.1."""
        context = self._contexts.get(host)
        if context is None:
            context = self._make_context(host)
            self._contexts.put(host, context)
        return context

    def _make_context(self, host: str) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        # `ssl` loads files only: this one is in memory.
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
    """Return the roots that a sandbox trusts: those of the host, those the operator adds, and its own authority."""
    own = x509.load_pem_x509_certificate(authority_pem.encode()).public_bytes(serialization.Encoding.PEM).decode()
    parts = (host_roots(), roots or "", own)
    return "".join(part if not part or part.endswith("\n") else part + "\n" for part in parts)


@cache
def host_roots() -> str:
    """Return the roots of this host as PEM, or those of the package `certifi` if the host has no such file."""
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
