"""`sources.json`: what an agent may reach and install: registries, git remotes, domains, languages, limits."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, field_validator

from carrel.policy import documents
from carrel.policy.documents import Part

NAME = "sources.json"
Verdict = Literal["allow", "deny"]


class Registry(Part):
    """A package index."""

    name: str = Field(min_length=1, max_length=128, description="what it is called")
    url: str = Field(min_length=1, max_length=2048, description="its URL; everything below it belongs to it")
    trusted: bool = Field(default=False, description="whether it may be used without a valid certificate")

    @field_validator("url")
    @classmethod
    def _url(cls, value: str) -> str:
        if not re.fullmatch(r"https?://[^/\s@]+(/\S*)?", value):
            raise ValueError("it must be a URL that starts with https:// or http:// and holds no user")
        return value


class PackageManager(Part):
    """One package manager."""

    enabled: bool = Field(default=True, description="whether it may be used at all")
    registries: tuple[Registry, ...] | None = Field(
        default=None, strict=False, description="the only indexes it may use; without the key, its own default"
    )
    max_install_size_mb: int | None = Field(default=None, ge=1, description="the most one install may add")
    blocked_packages: tuple[str, ...] = Field(default=(), strict=False, description="packages that are refused")


class PackageManagers(Part):
    """Package managers by name; one that is not named asks."""

    pip: PackageManager | None = Field(default=None, description="pip, and every tool that installs as pip does")
    uv: PackageManager | None = Field(default=None, description="uv; without the key, what pip says holds")
    conda: PackageManager | None = Field(default=None, description="conda, mamba, micromamba")
    npm: PackageManager | None = Field(default=None, description="npm, npx, yarn, pnpm, bun")
    apt: PackageManager | None = Field(default=None, description="apt, apt-get, dpkg")
    cargo: PackageManager | None = Field(default=None, description="cargo")
    gem: PackageManager | None = Field(default=None, description="gem, bundle")
    go: PackageManager | None = Field(default=None, description="go get, go install")


class WebAccess(Part):
    """Domains, decided here and enforced on the wire by the egress."""

    enabled: bool = Field(default=True, description="whether any domain may be reached")
    allowed_domains: tuple[str, ...] | None = Field(
        default=None, strict=False, description="the only domains; `*.example.org` is every name below example.org"
    )
    blocked_domains: tuple[str, ...] = Field(default=(), strict=False, description="refused even when allowed")

    @field_validator("allowed_domains", "blocked_domains")
    @classmethod
    def _domains(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for domain in value or ():
            if not re.fullmatch(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?|\*", domain):
                raise ValueError(f"'{domain[:100]}' is not a domain; write example.org or *.example.org")
        return value

    @field_validator("allowed_domains")
    @classmethod
    def _narrow(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for domain in value or ():
            if "." not in domain.removeprefix("*.") and domain.startswith("*"):
                raise ValueError(f"'{domain}' allows far too much; name the domains, or leave the key out")
        return value


class Git(Part):
    """Git remotes."""

    enabled: bool = Field(default=True, description="whether remotes may be used at all")
    allowed_remotes: tuple[str, ...] | None = Field(
        default=None, strict=False, description="the only remotes, as URLs in which `*` stands for anything"
    )
    max_clone_size_mb: int | None = Field(default=None, ge=1, description="the most one clone may add")


class Runtime(Part):
    """Languages and limits."""

    languages: tuple[str, ...] | None = Field(
        default=None, strict=False, description="the only languages whose interpreters may be run: `python3.11`, `bash`"
    )
    interpreters: dict[str, str] = Field(default_factory=dict, description="where interpreters lie")
    max_execution_time_seconds: int | None = Field(default=None, ge=1, description="the longest a command may take")
    max_memory_mb: int | None = Field(default=None, ge=1, description="the most memory a sandbox may use")


class Sources(Part):
    """A sources document."""

    agent_type: str | None = Field(default=None, max_length=256, description="which kind of agent it is for")
    package_managers: PackageManagers = Field(default_factory=PackageManagers, description="package managers")
    web_access: WebAccess | None = Field(default=None, description="domains")
    git: Git | None = Field(default=None, description="git remotes")
    runtime: Runtime = Field(default_factory=Runtime, description="languages and limits")


@dataclass(frozen=True, slots=True)
class Limits:
    """The numbers of all layers together: the smallest of each, None where nobody says any."""

    max_execution_time_seconds: int | None = None
    max_memory_mb: int | None = None
    max_install_size_mb: int | None = None
    max_clone_size_mb: int | None = None


def limits(*sources: Sources) -> Limits:
    """The limits that hold when all of these do."""

    def least(*numbers: int | None) -> int | None:
        return min((number for number in numbers if number is not None), default=None)

    managers = [each.package_managers for each in sources]
    return Limits(
        least(*(each.runtime.max_execution_time_seconds for each in sources)),
        least(*(each.runtime.max_memory_mb for each in sources)),
        least(*(part.max_install_size_mb for each in managers for part in (each.pip, each.uv) if part)),
        least(*(each.git.max_clone_size_mb for each in sources if each.git)),
    )


def decide_domain(web: WebAccess | None, host: str) -> tuple[Verdict, str] | None:
    """What is said of a host, and by which key; None when nothing is."""
    if web is None:
        return None
    name = host.strip("[]").rstrip(".").lower()
    if not web.enabled:
        return "deny", "web_access.enabled: false"
    for domain in web.blocked_domains:
        if domain_matches(domain, name):
            return "deny", f"web_access.blocked_domains: {domain}"
    if web.allowed_domains is None:
        return None
    for domain in web.allowed_domains:
        if domain_matches(domain, name):
            return "allow", f"web_access.allowed_domains: {domain}"
    return "deny", "web_access.allowed_domains"


def domain_matches(pattern: str, host: str) -> bool:
    """Whether a host is the domain, or below it when the pattern begins with `*.`. `*` is every host."""
    pattern, host = pattern.rstrip(".").lower(), host.rstrip(".").lower()
    if pattern == "*":
        return True
    if pattern.startswith("*."):
        return host.endswith(pattern[1:]) and len(host) > len(pattern) - 1
    return host == pattern


def load(text: str | bytes, source: str = NAME) -> Sources:
    """Read a sources document."""
    return documents.load(text, Sources, source)
