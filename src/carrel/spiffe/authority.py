"""carrel's own certificate authority. Its key is derived from the key of the secrets, so every server that has that key
is the authority, and nothing is stored. Decides nothing: it issues what it is asked for.
"""

from __future__ import annotations

import hashlib
import time
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from carrel.primitives.spiffe import SpiffeId, Svid

BACKDATED_S = 60.0
"""How far the clocks of two machines may differ: a certificate is valid from this long before it was issued."""
_CURVE = ec.SECP256R1()
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_VALID = datetime(2025, 1, 1, tzinfo=UTC), datetime(2049, 1, 1, tzinfo=UTC)
"""The same on every server: all of them make the same certificate but for its signature."""


class CertificateAuthority:
    """Issues SVIDs of one trust domain. `seed` are 32 secret bytes."""

    def __init__(self, seed: bytes, trust_domain: str):
        # The scalar is the seed, stretched so that its remainder is uniform.
        wide = int.from_bytes(hashlib.sha512(b"carrel authority\0" + trust_domain.encode() + b"\0" + seed).digest())
        self._key = ec.derive_private_key(wide % (_ORDER - 1) + 1, _CURVE)
        self.trust_domain = trust_domain
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"carrel {trust_domain}"[:64])])
        public = self._key.public_key()
        self._identifier = x509.SubjectKeyIdentifier.from_public_key(public)
        usage = _usage(signs=True)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(self._name)
            .issuer_name(self._name)
            .public_key(public)
            .serial_number(int.from_bytes(self._identifier.digest[:16]) or 1)
            .not_valid_before(_VALID[0])
            .not_valid_after(_VALID[1])
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(self._identifier, critical=False)
            .add_extension(
                x509.SubjectAlternativeName([x509.UniformResourceIdentifier(f"spiffe://{trust_domain}")]),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        self.bundle = certificate.public_bytes(Encoding.PEM).decode()
        """The certificate by which everything that this authority issues is verified."""

    def issue(self, id: SpiffeId, lifetime_s: float, *, now: float | None = None) -> Svid:
        """Return a new SVID with a new key. `ValueError` for an ID of another trust domain."""
        if id.trust_domain != self.trust_domain:
            raise ValueError(f"{id} is not in the trust domain '{self.trust_domain}'")
        now = time.time() if now is None else now
        key = ec.generate_private_key(_CURVE)
        expires = datetime.fromtimestamp(now + lifetime_s, UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "carrel")]))
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(datetime.fromtimestamp(now, UTC) - timedelta(seconds=BACKDATED_S))
            .not_valid_after(expires)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(self._identifier), critical=False
            )
            .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(str(id))]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return Svid(
            id=str(id),
            chain=certificate.public_bytes(Encoding.PEM).decode(),
            key=key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode(),
            bundle=self.bundle,
            issued_at=now,
            expires_at=expires.timestamp(),
        )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )
