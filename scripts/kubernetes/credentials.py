"""The certificates and kubeconfig files of a cluster of one node. They live as long as the cluster."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_DAYS = 7
_SERVICES = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local")


def write(folder: Path, node: str, addresses: list[str]) -> None:
    """Write a CA, and for each component a key, a certificate and a kubeconfig file."""
    folder.mkdir(mode=0o700)
    root_key = ec.generate_private_key(ec.SECP256R1())
    root = _certificate("cluster-ca", "", root_key, None)
    _write(folder, "ca", root_key, root)
    holders = {
        "apiserver": ("kube-apiserver", "", [*addresses, "localhost", *_SERVICES]),
        "kubelet-client": ("kube-apiserver-kubelet-client", "system:masters", []),
        "admin": ("admin", "system:masters", []),
        "controller-manager": ("system:kube-controller-manager", "", []),
        "scheduler": ("system:kube-scheduler", "", []),
        "kubelet": (f"system:node:{node}", "system:nodes", [*addresses, node]),
        "proxy": ("system:kube-proxy", "", []),
    }
    for name, (common, organization, names) in holders.items():
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _certificate(common, organization, key, (root, root_key), names)
        _write(folder, name, key, certificate)
        (folder / f"{name}.kubeconfig").write_text(json.dumps(_kubeconfig(folder, name)))
    accounts = rsa.generate_private_key(65537, 2048)
    (folder / "accounts.key").write_bytes(_private(accounts))
    public = accounts.public_key()
    spki = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / "accounts.pub").write_bytes(spki)


def _certificate(
    common: str,
    organization: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: tuple[x509.Certificate, ec.EllipticCurvePrivateKey] | None,
    names: list[str] | None = None,
) -> x509.Certificate:
    words = [x509.NameAttribute(NameOID.COMMON_NAME, common)]
    if organization:
        words.insert(0, x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization))
    subject = x509.Name(words)
    now = datetime.datetime.now(datetime.UTC)
    signer = key if issuer is None else issuer[1]
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer[0].subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=_DAYS))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if issuer is not None:
        both = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(both), critical=False)
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName([_name(each) for each in names]), critical=False)
    return builder.sign(signer, hashes.SHA256())


def _name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _private(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    plain = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)


def _write(folder: Path, name: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
    (folder / f"{name}.key").write_bytes(_private(key))
    (folder / f"{name}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def _kubeconfig(folder: Path, name: str) -> object:
    def data(file: str) -> str:
        return base64.b64encode((folder / file).read_bytes()).decode()

    server = {"server": "https://127.0.0.1:6443", "certificate-authority-data": data("ca.crt")}
    user = {"client-certificate-data": data(f"{name}.crt"), "client-key-data": data(f"{name}.key")}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": server}],
        "users": [{"name": name, "user": user}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": name}}],
        "current-context": "test",
    }
