"""The authority of a sandbox: what it makes is accepted by real TLS, for the host alone."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from carrel.egress.http.authority import LIFE, MOST_HOSTS, Authority, bundle, host_roots, make_authority

PEM = make_authority("sbx-1")


def shaken(server: ssl.SSLContext, roots: str, host: str, protocols: list[str] | None = None) -> ssl.SSLObject:
    """The client's end of a handshake in memory. Raises `ssl.SSLError`."""
    context = ssl.create_default_context(cadata=roots)
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    if protocols:
        context.set_alpn_protocols(protocols)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(to_client, to_server, server_hostname=host)
    answering = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(10):
        for end in (client, answering):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass
    return client


def test_an_authority_is_short_lived_and_can_make_no_further_ones() -> None:
    authority = x509.load_pem_x509_certificate(PEM.encode())
    assert "sbx-1" in authority.subject.rfc4514_string()
    constraints = authority.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert (constraints.value.ca, constraints.value.path_length) == (True, 0)
    now = datetime.now(UTC)
    assert authority.not_valid_before_utc < now < authority.not_valid_after_utc <= now + LIFE
    assert timedelta(days=1) < LIFE <= timedelta(days=366)
    key = serialization.load_pem_private_key(PEM.encode(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert isinstance(key.curve, ec.SECP256R1)


def test_each_sandbox_has_its_own() -> None:
    other = make_authority("sbx-1")
    assert other != PEM
    with pytest.raises(ssl.SSLCertVerificationError):
        shaken(Authority(other).context("a.test"), Authority(PEM).certificate, "a.test")


def test_names_can_be_long() -> None:
    long = ".".join(["x" * 60] * 4)
    authority = Authority(make_authority("s" * 500))
    assert shaken(authority.context(long), authority.certificate, long).version() == "TLSv1.3"


@pytest.mark.parametrize("host", ["a.test", "xn--bcher-kva.test", "under_score.test", "127.0.0.1", "::1"])
def test_a_host_is_accepted_as_itself_alone(host: str) -> None:
    authority = Authority(PEM)
    client = shaken(authority.context(host), authority.certificate, host, ["h2", "http/1.1"])
    assert client.selected_alpn_protocol() == "http/1.1"
    for other in ("b.test", "sub.a.test", "127.0.0.2"):
        with pytest.raises(ssl.SSLCertVerificationError):
            shaken(authority.context(host), authority.certificate, other)


def test_old_tls_is_refused() -> None:
    assert Authority(PEM).context("a.test").minimum_version == ssl.TLSVersion.TLSv1_2


def test_contexts_are_kept_within_bounds() -> None:
    authority = Authority(PEM)
    first = authority.context("h0.test")
    second = authority.context("h1.test")
    for number in range(2, MOST_HOSTS):
        authority.context(f"h{number}.test")
    assert authority.context("h0.test") is first
    authority.context("one-more.test")
    assert authority.context("h0.test") is first
    assert authority.context("h1.test") is not second


def test_the_public_part_holds_no_key() -> None:
    assert "PRIVATE" not in Authority(PEM).certificate
    assert "PRIVATE" not in bundle(PEM)
    for odd in (PEM.partition("-----END PRIVATE KEY-----\n")[2], "", "nonsense"):
        with pytest.raises(ValueError, match=r".*"):
            Authority(odd)
    mixed = make_authority("x").partition("-----BEGIN CERTIFICATE")[0] + Authority(PEM).certificate
    with pytest.raises(ValueError, match="belongs"):
        Authority(mixed)


def test_inside_the_roots_of_the_host_hold_too() -> None:
    public = Authority(make_authority("public"))
    text = bundle(PEM, public.certificate.rstrip("\n"))
    assert text.startswith(host_roots()[:1000])
    assert text.count("-----BEGIN CERTIFICATE-----") == host_roots().count("-----BEGIN CERTIFICATE-----") + 2
    for authority in (public, Authority(PEM)):
        shaken(authority.context("a.test"), text, "a.test")


def test_an_address_is_named_as_one() -> None:
    authority = Authority(PEM)
    leaf = x509.load_pem_x509_certificate(authority._leaf("127.0.0.1").encode())
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert list(names) == [x509.IPAddress(IPv4Address("127.0.0.1"))]
