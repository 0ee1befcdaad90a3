"""Where a cluster is found, and what is refused."""

from __future__ import annotations

import base64
import datetime
import ssl

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from carrel.errors import ProviderUnavailable
from carrel.providers.kubernetes.access import find_access


@pytest.fixture(scope="module")
def pems():
    """A certificate and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    return made.public_bytes(serialization.Encoding.PEM), private


@pytest.fixture(autouse=True)
def nowhere(monkeypatch, tmp_path):
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def config(tmp_path, cluster=None, user=None):
    document = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": "https://10.0.0.1:6443"} | (cluster or {})}],
        "users": [{"name": "u", "user": user or {}}],
    }
    path = tmp_path / "config"
    path.write_text(yaml.safe_dump(document))
    return str(path)


def test_certificates_come_as_files_and_in_the_document(tmp_path, pems):
    certificate, key = pems
    (tmp_path / "ca.pem").write_bytes(certificate)
    user = {
        "client-certificate-data": base64.b64encode(certificate).decode(),
        "client-key-data": base64.b64encode(key).decode(),
    }
    found = find_access(config(tmp_path, {"certificate-authority": "ca.pem"}, user))
    assert found.server == "https://10.0.0.1:6443"
    assert found.headers() == {}
    assert found.tls.verify_mode is ssl.CERT_REQUIRED and found.tls.check_hostname
    assert [each["subject"] for each in found.tls.get_ca_certs()] == [((("commonName", "test"),),)]


def test_a_token_file_is_read_for_every_request(tmp_path):
    (tmp_path / "token").write_text("first\n")
    found = find_access(config(tmp_path, user={"tokenFile": "token"}))
    assert found.headers() == {"authorization": "Bearer first"}
    (tmp_path / "token").write_text("second\n")
    assert found.headers() == {"authorization": "Bearer second"}


@pytest.mark.parametrize(
    ("cluster", "user", "words"),
    [
        ({"server": "http://10.0.0.1"}, {}, "not an https URL"),
        ({"insecure-skip-tls-verify": True}, {}, "insecure-skip-tls-verify"),
        ({"proxy-url": "http://p"}, {}, "proxy-url"),
        ({}, {"exec": {"command": "aws"}}, "token of a service account"),
        ({}, {"username": "me", "password": "no"}, "username"),
        ({"certificate-authority": "missing.pem"}, {}, "missing.pem"),
        ({"certificate-authority-data": "%%%"}, {}, "cannot be used"),
    ],
)
def test_what_is_not_understood_is_refused(tmp_path, cluster, user, words):
    with pytest.raises(ProviderUnavailable, match=words):
        find_access(config(tmp_path, cluster, user))


@pytest.mark.parametrize("text", ["", "[]", "a: b", "{", "current-context: x\ncontexts: []\n", "a: &x [*x]"])
def test_other_documents_are_refused(tmp_path, text):
    (tmp_path / "config").write_text(text)
    with pytest.raises(ProviderUnavailable, match="cannot be used as a kubeconfig file"):
        find_access(str(tmp_path / "config"))


def test_a_pod_finds_its_service_account(tmp_path, monkeypatch, pems):
    (tmp_path / "ca.crt").write_bytes(pems[0])
    (tmp_path / "token").write_text("mine")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    found = find_access(account=str(tmp_path))
    assert (found.server, found.headers()) == ("https://[fd00::1]:443", {"authorization": "Bearer mine"})


def test_without_a_cluster_it_says_what_to_do(tmp_path):
    with pytest.raises(ProviderUnavailable, match="no cluster is known here") as raised:
        find_access(account=str(tmp_path))
    assert "CARREL_KUBERNETES_KUBECONFIG" in str(raised.value.hint)
