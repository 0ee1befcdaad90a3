"""Proxies and certificates of the environment."""

from __future__ import annotations

import ssl

import pytest

from carrel.client.proxies import Proxy, proxy_for, trust
from carrel.errors import InvalidRequest

NAMES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@pytest.fixture(autouse=True)
def none_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.mark.parametrize(
    ("named", "wanted"),
    [
        ({}, None),
        ({"https_proxy": "http://proxy.example:8080"}, Proxy("http://proxy.example:8080")),
        ({"HTTPS_PROXY": "proxy.example"}, Proxy("http://proxy.example:80")),
        ({"ALL_PROXY": "https://u%40x:p%3A@proxy.example"}, Proxy("https://proxy.example:443", ("u@x", "p:"))),
        ({"https_proxy": "http://[::1]:3128"}, Proxy("http://[::1]:3128")),
        ({"http_proxy": "http://proxy.example"}, None),
        ({"https_proxy": "http://proxy.example", "no_proxy": "localhost,.carrel.example"}, None),
        ({"https_proxy": "http://proxy.example", "no_proxy": "*"}, None),
    ],
)
def test_the_proxy_of_the_environment(
    named: dict[str, str], wanted: Proxy | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    assert proxy_for("https", "box.carrel.example") == wanted


@pytest.mark.parametrize("url", ["socks5://proxy.example", "http://", "ftp://x"])
def test_a_proxy_that_cannot_be_used_is_told(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", url)
    with pytest.raises(InvalidRequest) as failed:
        proxy_for("https", "carrel.example")
    assert "NO_PROXY" in str(failed.value.hint)


def test_somebody_is_trusted() -> None:
    context = trust()
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
    assert context.cert_store_stats()["x509_ca"]
