from __future__ import annotations

import json
import ssl
from dataclasses import asdict, replace

import pytest

from carrel.primitives.spiffe import LONGEST_PEM, SpiffeId, Svid, client_context, server_context
from carrel.spiffe.authority import CertificateAuthority


def test_ids() -> None:
    id = SpiffeId.parse("spiffe://a.test/carrel/node/b-1_2.3")
    assert str(id) == "spiffe://a.test/carrel/node/b-1_2.3" and id == SpiffeId.node("a.test", "b-1_2.3")
    assert id.node_name == "b-1_2.3"
    for other in (SpiffeId.sandbox("a.test", "b"), SpiffeId.slot("a.test", "b"), SpiffeId.of("a.test", "/carrel/node")):
        assert other.node_name is None
    assert SpiffeId.of("a.test", "/carrel/node/a/b").node_name is None


@pytest.mark.parametrize(
    "text",
    [
        "", "spiffe://", "spiffe://a.test", "spiffe://a.test/", "spiffe:///a", "https://a.test/b", "spiffe://A.test/b",
        "spiffe://a.test//b", "spiffe://a.test/b/", "spiffe://a.test/..", "spiffe://a.test/./b", "spiffe://a.test/b?c",
        "spiffe://a.test/b#c", "spiffe://a.test/b%20", "spiffe://a.test:1/b", "spiffe://u@a.test/b", "SPIFFE://a.test/b",
        "spiffe://a.test/b\n", "spiffe://a.test/ü", f"spiffe://{'a' * 256}/b", f"spiffe://a.test/{'b' * 2048}",
    ],
)  # fmt: skip
def test_what_is_no_id(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a|is not the"):
        SpiffeId.parse(text)


def svid() -> Svid:
    return CertificateAuthority(b"k" * 32, "a.test").issue(SpiffeId.node("a.test", "n"), 60)


def test_an_svid_can_be_written_and_read() -> None:
    one = svid()
    assert Svid.from_json(one.to_json()) == one
    assert "PRIVATE KEY" not in repr(one)


@pytest.mark.parametrize(
    "change",
    [{"id": "x"}, {"id": 1}, {"chain": "x" * (LONGEST_PEM + 1)}, {"expires_at": True}, {"more": 1}, {"key": None}],
)
def test_what_is_no_svid(change: dict[str, object]) -> None:
    with pytest.raises(ValueError) as caught:
        Svid.of({**asdict(svid()), **change})
    assert "PRIVATE" not in str(caught.value)
    for text in ("", "[]", "{}", "[" * 100_000):
        with pytest.raises(ValueError):
            Svid.from_json(text)
    with pytest.raises(ValueError):
        Svid.from_json(json.dumps({**asdict(svid()), **change}))


def test_contexts_are_strict() -> None:
    for context in (server_context(svid()), client_context(svid())):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
        assert context.verify_mode is ssl.CERT_REQUIRED
    assert server_context(svid()).num_tickets == 0
    other = svid()
    for wrong in ({"key": other.key}, {"chain": "nothing"}, {"bundle": "nothing"}, {"bundle": ""}):
        with pytest.raises(ValueError, match="cannot be used") as caught:
            server_context(replace(svid(), **wrong))
        assert "PRIVATE" not in str(caught.value)
