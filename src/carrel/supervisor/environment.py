"""The environment variables of every command in a sandbox: the user, and the proxy for its tools. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

VENV = "/workspace/.venv"
"""The context's own virtual environment, when it has one."""

LAUNCHERS = "/etc/carrel/bin"
_DEFAULT = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_WRITABLE = ("/dev/", "/home/agent/", "/proc/", "/tmp/", "/var/tmp/", "/workspace/")
PATH = f"{LAUNCHERS}:{_DEFAULT}:{VENV}/bin"
"""Programs that were installed in the workspace come last, so none of them can replace a program of the host, which a
policy may allow. The directory is in the list even before it exists: a command can use what it has just installed.
Python is found by the launchers, which come first.
"""
NO_PROXY = "localhost,127.0.0.1,::1"
CERTIFICATES = "/run/secrets/carrel-ca.pem"
"""The certificates that tools trust where the proxy inspects connections. They are written with the secrets."""

NODE_PRELOAD = "/etc/carrel/node.cjs"
"""A script for Node in the root of the sandbox. Node does not start without it."""

_TRUSTING = (
    "SSL_CERT_FILE",  # OpenSSL and what is built on it: Python, httpx, aiohttp, uv, Go, Ruby
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "GIT_SSL_CAINFO",
    "PIP_CERT",
    "NODE_EXTRA_CA_CERTS",
    "NPM_CONFIG_CAFILE",  # an npmrc of the host may name another file, and then npm ignores the one for Node
    "AWS_CA_BUNDLE",
    "CARGO_HTTP_CAINFO",
    "DENO_CERT",
    "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
)

CURL_OFFLINE = "/etc/carrel/curl/offline"
CURL_GOVERNED = "/etc/carrel/curl/governed"
"""Directories of the sandbox's root with a `.curlrc`. `curl` does not print the answer of a proxy that refuses a
tunnel, so these files tell `curl` what to print.
"""
APT_CONFIG = "/etc/carrel/apt.conf"
"""A file of the sandbox's root that lets `apt-get update` and `apt-get download` work without root."""
BUILD_APT_CONFIG = "/etc/carrel/apt-build.conf"
"""The same for a RUN line of a build, which installs."""
_OFFLINE = {
    "CURL_HOME": CURL_OFFLINE,
    # git does not print the answer of a proxy that refuses a tunnel. It does print the name of a proxy it cannot find.
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "http.proxy",
    "GIT_CONFIG_VALUE_0": "http://this-sandbox-has-no-network.start-it-with.network-allowlist:3128",
}


def variables(
    *,
    workspace: str,
    home: str,
    path: str,
    proxy_port: int | None,
    offline: bool,
    trust: bool,
    given: Mapping[str, str],
    image: Mapping[str, str] = MappingProxyType({}),
    user: str = "agent",
) -> dict[str, str]:
    """Return all variables; those of the caller win, and those of an image lose, except for its language. `offline`
    means that the sandbox has no network and every request to `proxy_port` is refused.
    """
    return {
        "SHELL": "/bin/sh",
        "LANG": "C.UTF-8",
        **image,
        "PATH": path,
        "HOME": home,
        "USER": user,
        "LOGNAME": user,
        "WORKSPACE": workspace,
        **({} if proxy_port is None else proxy_variables(proxy_port)),
        **(_OFFLINE if offline else {}),
        **(dict.fromkeys(_TRUSTING, CERTIFICATES) if trust else {}),
        **given,
    }


def image_path(path: str, *, launchers: bool) -> str:
    """Return the PATH of a sandbox from an image with this PATH; empty means the default one.

    `launchers` says whether the image has what carrel's launchers need: a shell and Python. The directories that an
    agent can write come last, as in `PATH`.
    """
    folders = [folder for folder in (path or _DEFAULT).split(":") if folder.startswith("/")]
    writable = [folder for folder in folders if f"{folder}/".startswith(_WRITABLE)]
    fixed = [folder for folder in folders if folder not in writable]
    return ":".join((*([LAUNCHERS] if launchers else []), *fixed, *writable, f"{VENV}/bin"))


def proxy_variables(port: int) -> dict[str, str]:
    """Return the variables for the proxy on the sandbox's loopback, which speaks HTTP and SOCKS5 on one port.

    Most read the proxy variables: curl, git, pip, uv, npm, requests, httpx, urllib, cargo, Go, aiohttp with
    `trust_env`. Both cases, because curl takes `http_proxy` only in lower case and others look only for upper case.
    """
    proxy = f"http://127.0.0.1:{port}"
    proxies = {
        "HTTP_PROXY": proxy,
        "HTTPS_PROXY": proxy,
        # Not socks5h://, although it is spoken: httpx refuses to make any client at all when this names a SOCKS proxy
        # and the package `socksio` is not there, and requests and aiohttp need packages of their own too. What speaks
        # neither HTTP nor TLS is rare, and can be configured for SOCKS.
        "ALL_PROXY": proxy,
        "WS_PROXY": proxy,  # aiohttp looks up a proxy by the scheme of the address
        "WSS_PROXY": proxy,
        "NO_PROXY": NO_PROXY,
    }
    return {
        **proxies,
        **{name.lower(): value for name, value in proxies.items()},
        # The package front is the proxy itself, asked as a server and not as a proxy: the address is in NO_PROXY, and
        # pip takes loopback for safe without TLS.
        "PIP_INDEX_URL": f"{proxy}/simple/",
        "UV_DEFAULT_INDEX": f"{proxy}/simple/",
        # These would connect, unasked, to hosts that may not be allowed.
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "npm_config_update_notifier": "false",
        # npm reads the proxy variables by itself, Yarn from version 2 on only these.
        "YARN_HTTP_PROXY": proxy,
        "YARN_HTTPS_PROXY": proxy,
        # The first is for Node from 22.21 and 24 on; the second does the same for older versions.
        "NODE_USE_ENV_PROXY": "1",
        "NODE_OPTIONS": f"--require={NODE_PRELOAD}",
        "CURL_HOME": CURL_GOVERNED,
        "APT_CONFIG": APT_CONFIG,
    }
