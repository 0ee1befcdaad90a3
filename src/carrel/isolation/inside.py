"""Paths and numbers of a sandbox that other processes know too. Imports nothing, so that they load nothing else."""

from __future__ import annotations

WORKSPACE = "/workspace"
HOME = "/home/agent"
SECRETS = "/run/secrets"
ENVIRONMENTS = "/envs"
UV = "/etc/carrel/tools/uv"
PIP = "/etc/carrel/python/pip"
"""Paths of what the server shares with every sandbox: environments and package tools."""
BUNDLE = "/opt/carrel"
"""The path of the supervisor's bundle, in sandboxes whose supervisor is a program of its own."""
CONTROL = "/run/carrel"
"""The directory that such a supervisor shares with the server. The agent cannot list or change it."""
UNAVAILABLE = (
    "bin", "boot", "dev", "envs", "etc", "lib", "lib32", "lib64", "libx32", "proc", "run", "sbin", "sys", "usr",
)  # fmt: skip
"""First names of paths where nothing can be mounted: a sandbox has its own there."""
MOST_DESCRIPTORS = 64
"""The most descriptors of one message to the zygote or to a new sandbox."""
PROXY_PORT = 3128
"""The port of the proxy in every sandbox."""
