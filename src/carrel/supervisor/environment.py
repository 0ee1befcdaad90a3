"""The variables that every command of a sandbox starts with: who it is, and how its tools find the way out.

Pure: it knows names and values that tools read, not whether anybody listens.
"""

from __future__ import annotations

from collections.abc import Mapping

VENV = "/workspace/.venv"
"""The context's own virtual environment, when it has one."""

PATH = f"/etc/carrel/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:{VENV}/bin"
"""Programs that a workspace has installed come last: none of them can take the name of one of the host, which a policy
may allow. Their place is in it whether it exists yet or not, so that what is installed in the middle of a command is
found by the rest of it. Python itself is found by the launchers that come first.
"""
NO_PROXY = "localhost,127.0.0.1,::1"
CERTIFICATES = "/run/secrets/carrel-ca.pem"
"""The certificates that tools trust where connections are looked into. Whoever can write secrets puts them there."""

NODE_PRELOAD = "/etc/carrel/node.cjs"
"""A program for Node that whoever builds the sandbox's root puts there: without it, no Node would start."""

_TRUSTING = (
    "SSL_CERT_FILE",  # OpenSSL and what is built on it: Python, httpx, aiohttp, uv, Go, Ruby
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "GIT_SSL_CAINFO",
    "PIP_CERT",
    "NODE_EXTRA_CA_CERTS",
    "AWS_CA_BUNDLE",
    "CARGO_HTTP_CAINFO",
    "DENO_CERT",
    "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
)

CURL_OFFLINE = "/etc/carrel/curl/offline"
CURL_GOVERNED = "/etc/carrel/curl/governed"
"""Folders with a `.curlrc`, which whoever builds the sandbox's root puts there: `curl` does not show what a proxy says
when it refuses a tunnel, so these tell `curl` what to say.
"""
APT_CONFIG = "/etc/carrel/apt.conf"
"""Lets `apt-get update` and `apt-get download` work for who is not root; in the sandbox's root too."""
_OFFLINE = {
    "CURL_HOME": CURL_OFFLINE,
    # git does not show what a proxy says when it refuses a tunnel. It does show the name of a proxy it cannot find.
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "http.proxy",
    "GIT_CONFIG_VALUE_0": "http://this-sandbox-has-no-network.start-it-with.network-allowlist:3128",
}


def variables(
    *,
    workspace: str,
    home: str,
    path: str,
    way_out_port: int | None,
    offline: bool,
    trust: bool,
    given: Mapping[str, str],
) -> dict[str, str]:
    """All of them; what the caller gives wins. `offline`: the sandbox has no network, and at `way_out_port` everything
    is refused.
    """
    return {
        "PATH": path,
        "HOME": home,
        "USER": "agent",
        "LOGNAME": "agent",
        "SHELL": "/bin/sh",
        "LANG": "C.UTF-8",
        "WORKSPACE": workspace,
        **({} if way_out_port is None else way_out(way_out_port)),
        **(_OFFLINE if offline else {}),
        **(dict.fromkeys(_TRUSTING, CERTIFICATES) if trust else {}),
        **given,
    }


def way_out(port: int) -> dict[str, str]:
    """What tools need to know of the proxy on the sandbox's loopback. It speaks HTTP and SOCKS5 on one port.

    Most read the proxy variables: curl, git, pip, uv, npm, requests, httpx, urllib, cargo, Go, aiohttp with
    `trust_env`. Both cases, because curl takes `http_proxy` only in lower case and others look only for upper case.
    """
    proxy = f"http://127.0.0.1:{port}"
    proxies = {
        "HTTP_PROXY": proxy,
        "HTTPS_PROXY": proxy,
        # Not socks5h://, although it is spoken: httpx refuses to make any client at all when this names a SOCKS proxy
        # and the package `socksio` is not there, and requests and aiohttp need packages of their own too. What speaks
        # neither HTTP nor TLS is rare, and can be told of SOCKS by whoever runs it.
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
        # Questions nobody asked, to a host that may not be allowed.
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "npm_config_update_notifier": "false",
        # npm reads the proxy variables by itself, Yarn from version 2 on only these.
        "YARN_HTTP_PROXY": proxy,
        "YARN_HTTPS_PROXY": proxy,
        # Node from 22.21 and 24 on is told by the first; the second does the same for an older one.
        "NODE_USE_ENV_PROXY": "1",
        "NODE_OPTIONS": f"--require={NODE_PRELOAD}",
        "CURL_HOME": CURL_GOVERNED,
        "APT_CONFIG": APT_CONFIG,
    }
