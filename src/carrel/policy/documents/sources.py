"""`sources.json`: what an agent may reach and install: registries, git remotes, domains, languages, limits."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, field_validator

from carrel.policy.documents import documents
from carrel.policy.documents.documents import Part

NAME = "sources.json"


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
    allowed_packages: tuple[str, ...] | None = Field(
        default=None, strict=False, description="the only packages; without the key, every package"
    )

    @property
    def limited(self) -> bool:
        """Whether only some packages, or only so many, may be installed."""
        limits = (self.allowed_packages, self.max_install_size_mb)
        return bool(self.blocked_packages) or any(each is not None for each in limits)


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

    def named(self) -> dict[str, PackageManager]:
        """Those that are named, by name."""
        return {name: each for name in type(self).model_fields if (each := getattr(self, name)) is not None}


class Credential(Part):
    """A header that the egress puts into requests to one host, so that its value is never in the sandbox."""

    host: str = Field(min_length=1, max_length=253, description="the host, exactly")
    secret: str = Field(min_length=1, max_length=128, description="the name of the secret whose value is put in")
    header: str = Field(default="Authorization", pattern=r"^[A-Za-z0-9-]{1,64}$", description="the header it is put in")
    format: str = Field(
        default="Bearer {secret}", max_length=256, description="what the header says; `{secret}` stands for the value"
    )
    methods: tuple[str, ...] | None = Field(
        default=None, strict=False, description="the only methods; without the key, every method"
    )
    paths: tuple[str, ...] | None = Field(
        default=None, strict=False, description="the only paths, each with all below it; without the key, every path"
    )

    @field_validator("format")
    @classmethod
    def _one_place(cls, value: str) -> str:
        if value.count("{secret}") != 1 or not value.isascii() or not value.isprintable():
            raise ValueError("it must hold `{secret}` once and be plain text otherwise")
        return value

    @field_validator("host")
    @classmethod
    def _host(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?", value):
            raise ValueError(f"'{value[:100]}' is not a host; credentials are for one host, not for a pattern")
        return value.lower()


class WebAccess(Part):
    """Domains, decided here and enforced on the wire by the egress."""

    enabled: bool = Field(default=True, description="whether any domain may be reached")
    allowed_domains: tuple[str, ...] | None = Field(
        default=None, strict=False, description="the only domains; `*.example.org` is every name below example.org"
    )
    blocked_domains: tuple[str, ...] = Field(default=(), strict=False, description="refused even when allowed")
    allowed_ports: tuple[Annotated[int, Field(ge=1, le=65_535)], ...] | None = Field(
        default=None, strict=False, description="the only ports of allowed domains; without the key, 80 and 443"
    )
    opaque_domains: tuple[str, ...] | None = Field(
        default=None,
        strict=False,
        description="domains whose connections need not say in TLS or HTTP whom they are for",
    )
    inspected_domains: tuple[str, ...] | None = Field(
        default=None, strict=False, description="domains whose TLS is opened, so that each request is decided"
    )
    credentials: tuple[Credential, ...] = Field(
        default=(), strict=False, description="headers put in on the way out; their hosts are inspected"
    )
    upstreams: tuple[str, ...] | None = Field(
        default=None,
        strict=False,
        description="names of the server's upstream proxies to go through, the first that works; without the key, "
        "what the server does",
    )
    max_connections: int | None = Field(default=None, ge=1, description="connections open at once")
    max_connections_per_minute: int | None = Field(default=None, ge=1, description="new connections in a minute")
    max_download_mb: int | None = Field(default=None, ge=1, description="the most a sandbox may receive")
    max_upload_mb: int | None = Field(default=None, ge=1, description="the most a sandbox may send")

    @field_validator("allowed_domains", "blocked_domains", "opaque_domains", "inspected_domains")
    @classmethod
    def _domains(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for domain in value or ():
            if not re.fullmatch(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?|\*", domain):
                raise ValueError(f"'{domain[:100]}' is not a domain; write example.org or *.example.org")
        return value

    @field_validator("allowed_domains", "opaque_domains", "inspected_domains")
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


def load(text: str | bytes, source: str = NAME) -> Sources:
    """Read a sources document."""
    return documents.load(text, Sources, source)
