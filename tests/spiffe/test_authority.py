from __future__ import annotations

import time

import pytest
from cryptography import x509

from carrel.primitives.spiffe import SpiffeId
from carrel.spiffe.authority import CertificateAuthority


def test_servers_with_one_key_are_one_authority() -> None:
    one, two = (CertificateAuthority(b"k" * 32, "a.test") for _ in range(2))
    certificate = x509.load_pem_x509_certificate(one.issue(SpiffeId.node("a.test", "n"), 60).chain.encode())
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(two.bundle.encode()))
    for other in (CertificateAuthority(b"j" * 32, "a.test"), CertificateAuthority(b"k" * 32, "b.test")):
        with pytest.raises(Exception, match=r".*"):  # another key, or another name
            certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(other.bundle.encode()))


def test_what_an_svid_says() -> None:
    id, now = SpiffeId.sandbox("a.test", "s"), time.time()
    authority = CertificateAuthority(b"k" * 32, "a.test")
    one, two = authority.issue(id, 60, now=now), authority.issue(id, 60, now=now)
    assert one.key != two.key and one.id == str(id)
    certificate = x509.load_pem_x509_certificate(one.chain.encode())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert list(names) == [x509.UniformResourceIdentifier(str(id))]
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert abs(certificate.not_valid_after_utc.timestamp() - now - 60) < 1
    assert abs(one.expires_at - now - 60) < 1
    with pytest.raises(ValueError, match="not in the trust domain"):
        authority.issue(SpiffeId.sandbox("b.test", "s"), 60)


def test_an_authority_issues_no_authority() -> None:
    bundle = x509.load_pem_x509_certificate(CertificateAuthority(b"k" * 32, "a.test").bundle.encode())
    constraints = bundle.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert constraints.ca and constraints.path_length == 0
