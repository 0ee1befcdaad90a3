"""Where the API server is, and how this process proves who it is: from a kubeconfig file, or inside a pod."""

from __future__ import annotations

import base64
import binascii
import os
import ssl
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carrel.errors import ProviderUnavailable
from carrel.extras import ExtraMissing, using

SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Where a pod finds the credentials of its service account."""
_MOST_FILE = 1024 * 1024


@dataclass(frozen=True)
class ClusterAccess:
    """The address of an API server, how to trust it, and the file of a token. The file may be replaced at any time."""

    server: str
    tls: ssl.SSLContext
    token_file: str = ""
    token: str = ""

    def headers(self) -> dict[str, str]:
        """Return the headers that prove who this is. Reads a small file; cheap."""
        token = Path(self.token_file).read_text().strip() if self.token_file else self.token
        return {"authorization": f"Bearer {token}"} if token else {}


def find_access(kubeconfig: str = "", *, account: str = SERVICE_ACCOUNT) -> ClusterAccess:
    """Return the access of this process. Without a path, the variable `KUBECONFIG`, a pod's own service account and
    `~/.kube/config` are looked at in this order. Raises `ProviderUnavailable`. Blocking.
    """
    path = kubeconfig or os.environ.get("KUBECONFIG", "").split(os.pathsep)[0]
    if path:
        return _from_file(path)
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if host and os.path.exists(f"{account}/token"):
        try:
            tls = ssl.create_default_context(cafile=f"{account}/ca.crt")
        except (OSError, ssl.SSLError) as error:
            raise _refusal(f"{account}/ca.crt", str(error)) from error
        name = f"[{host}]" if ":" in host else host
        return ClusterAccess(f"https://{name}:{port}", tls, token_file=f"{account}/token")
    home = os.path.expanduser("~/.kube/config")
    if os.path.exists(home):
        return _from_file(home)
    raise ProviderUnavailable(
        "no cluster is known here",
        hint="set CARREL_KUBERNETES_KUBECONFIG to a kubeconfig file, or run the server in a pod with a service account",
    )


def _from_file(path: str) -> ClusterAccess:
    try:
        with using("kubernetes"):
            import yaml
    except ExtraMissing as error:
        raise ProviderUnavailable(error.detail, hint=error.hint) from error
    try:
        if os.path.getsize(path) > _MOST_FILE:
            raise _refusal(path, "it is too large")
        document = yaml.safe_load(Path(path).read_bytes())
        context = _named(document, "contexts", "context", document["current-context"])
        cluster = _named(document, "clusters", "cluster", context["cluster"])
        user = _named(document, "users", "user", context["user"])
        return _access(os.path.dirname(os.path.abspath(path)), cluster, user)
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, binascii.Error) as error:
        raise _refusal(path, f"{type(error).__name__}: {error}") from error


def _named(document: Any, kind: str, inner: str, name: str) -> Mapping[str, Any]:
    for each in document[kind]:
        if each["name"] == name:
            found: Mapping[str, Any] = each[inner]
            return found
    raise ValueError(f"it has no entry {name!r:.100} in `{kind}`")


def _access(folder: str, cluster: Mapping[str, Any], user: Mapping[str, Any]) -> ClusterAccess:
    server = cluster["server"]
    if not isinstance(server, str) or not server.startswith("https://"):
        raise ValueError("`server` is not an https URL")
    for refused in ("insecure-skip-tls-verify", "proxy-url"):
        if cluster.get(refused):
            raise ValueError(f"`{refused}` is not supported")
    for refused in ("exec", "auth-provider", "username"):
        if user.get(refused):
            raise ValueError(f"users with `{refused}` are not supported; use the token of a service account")
    authority = _content(folder, cluster, "certificate-authority")
    tls = ssl.create_default_context(cadata=authority.decode()) if authority else ssl.create_default_context()
    certificate, key = _content(folder, user, "client-certificate"), _content(folder, user, "client-key")
    if certificate and key:
        with tempfile.NamedTemporaryFile(prefix="carrel-") as file:  # only this user can read it
            file.write(certificate + b"\n" + key)
            file.flush()
            tls.load_cert_chain(file.name)
    token_file = user.get("tokenFile", "")
    return ClusterAccess(
        server.rstrip("/"),
        tls,
        token_file=os.path.join(folder, token_file) if token_file else "",
        token=user.get("token", ""),
    )


def _content(folder: str, entry: Mapping[str, Any], key: str) -> bytes:
    if inline := entry.get(f"{key}-data"):
        return base64.b64decode(inline, validate=True)
    return Path(folder, entry[key]).read_bytes() if entry.get(key) else b""


def _refusal(path: str, words: str) -> ProviderUnavailable:
    return ProviderUnavailable(f"{path} cannot be used as a kubeconfig file: {words}"[:1000])
