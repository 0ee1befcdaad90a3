"""`sources.json`: what an agent may connect to and install: registries, git remotes, domains, languages, limits."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, field_validator

from carrel.policy.documents import documents
from carrel.policy.documents.documents import DocumentPart

NAME = "sources.json"
MOST_DELETE_LIMIT = 1_000_000


def check_domain(domain: str) -> None:
    """Raise `ValueError` for a text that is not a domain or every name below one."""
    if not re.fullmatch(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?|\*", domain):
        raise ValueError(f"'{domain[:100]}' is not a domain; write example.org or *.example.org")


def check_narrow(domain: str) -> None:
    """Raise `ValueError` for every domain, and for a whole top-level domain."""
    if "." not in domain.removeprefix("*.") and domain.startswith("*"):
        raise ValueError(f"'{domain}' is too broad; name the domains, or leave the key out")


class Registry(DocumentPart):
    """A package index."""

    name: str = Field(min_length=1, max_length=128, description="its name")
    url: str = Field(min_length=1, max_length=2048, description="its URL; all URLs below it belong to it")
    trusted: bool = Field(default=False, description="whether it may be used without a valid certificate")

    @field_validator("url")
    @classmethod
    def _url(cls, value: str) -> str:
        if not re.fullmatch(r"https?://[^/\s@]+(/\S*)?", value):
            raise ValueError("it must be a URL that starts with https:// or http://, without a user")
        return value


class PackageManager(DocumentPart):
    """One package manager."""

    enabled: bool = Field(default=True, description="whether it may be used at all")
    registries: tuple[Registry, ...] | None = Field(
        default=None, strict=False, description="the only indexes that it may use; without the key, its own default"
    )
    max_install_size_mb: int | None = Field(default=None, ge=1, description="largest size of one install")
    blocked_packages: tuple[str, ...] = Field(default=(), strict=False, description="packages that are refused")
    allowed_packages: tuple[str, ...] | None = Field(
        default=None, strict=False, description="the only packages that are allowed; without the key, every package"
    )

    @property
    def limited(self) -> bool:
        """Whether the packages or their size are limited."""
        limits = (self.allowed_packages, self.max_install_size_mb)
        return bool(self.blocked_packages) or any(each is not None for each in limits)


class PackageManagers(DocumentPart):
    """Package managers by name. An install with one that is not named asks."""

    pip: PackageManager | None = Field(default=None, description="pip, pipx, poetry, pipenv, pdm, hatch, easy_install")
    uv: PackageManager | None = Field(default=None, description="uv, uvx; without the key, `pip` applies")
    conda: PackageManager | None = Field(default=None, description="conda, mamba, micromamba")
    npm: PackageManager | None = Field(default=None, description="npm, npx, yarn, pnpm, bun")
    apt: PackageManager | None = Field(default=None, description="apt, apt-get, dpkg")
    cargo: PackageManager | None = Field(default=None, description="cargo")
    gem: PackageManager | None = Field(default=None, description="gem, bundle")
    go: PackageManager | None = Field(default=None, description="go get, go install")

    def named(self) -> dict[str, PackageManager]:
        """The package managers that the document names."""
        return {name: each for name in type(self).model_fields if (each := getattr(self, name)) is not None}


class Credential(DocumentPart):
    """A header that the egress proxy adds to requests to one host, so that its value is never in the sandbox."""

    host: str = Field(min_length=1, max_length=253, description="the host, exactly")
    secret: str = Field(min_length=1, max_length=128, description="the name of the secret with the value")
    header: str = Field(default="Authorization", pattern=r"^[A-Za-z0-9-]{1,64}$", description="the name of the header")
    format: str = Field(
        default="Bearer {secret}", max_length=256, description="the value of the header; `{secret}` is the secret"
    )
    methods: tuple[str, ...] | None = Field(
        default=None, strict=False, description="add it only for these methods; without the key, for all"
    )
    paths: tuple[str, ...] | None = Field(
        default=None, strict=False, description="add it only for these paths and all below; without the key, for all"
    )

    @field_validator("format")
    @classmethod
    def _one_place(cls, value: str) -> str:
        if value.count("{secret}") != 1 or not value.isascii() or not value.isprintable():
            raise ValueError("it must contain `{secret}` once and otherwise only printable ASCII characters")
        return value

    @field_validator("host")
    @classmethod
    def _host(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?", value):
            raise ValueError(f"'{value[:100]}' is not a host name; credentials are for one host, not for a pattern")
        return value.lower()


class RequestRule(DocumentPart):
    """Requests that are asked about or refused although their host is allowed, for example the upload of a git push."""

    host: str = Field(
        min_length=1, max_length=253, description="the host, or `*.example.org` for every name below example.org"
    )
    methods: tuple[str, ...] | None = Field(
        default=None, strict=False, description="only these methods; without the key, all"
    )
    paths: tuple[str, ...] | None = Field(
        default=None,
        strict=False,
        description="only paths, without their query, that match one of these; `*` matches any characters. Without the "
        "key, all",
    )
    verdict: Literal["ask", "deny"] = Field(default="ask", description="ask a person, or refuse")
    reason: str = Field(
        default="", max_length=200, description="what such a request does, for the person and the agent"
    )

    @field_validator("host")
    @classmethod
    def _host(cls, value: str) -> str:
        check_domain(value)
        check_narrow(value)
        return value.lower()


class WebAccess(DocumentPart):
    """Domains. Admission decides by them, and the egress proxy enforces them on connections."""

    enabled: bool = Field(default=True, description="whether connections to domains are allowed at all")
    allowed_domains: tuple[str, ...] | None = Field(
        default=None,
        strict=False,
        description="the only domains that are allowed; `*.example.org` is every name below example.org",
    )
    blocked_domains: tuple[str, ...] = Field(
        default=(), strict=False, description="domains that are refused even if they are allowed"
    )
    allowed_ports: tuple[Annotated[int, Field(ge=1, le=65_535)], ...] | None = Field(
        default=None, strict=False, description="the open ports of allowed domains; without the key, 80 and 443"
    )
    opaque_domains: tuple[str, ...] | None = Field(
        default=None,
        strict=False,
        description="domains whose connections need not name their host in TLS or HTTP",
    )
    inspected_domains: tuple[str, ...] | None = Field(
        default=None, strict=False, description="domains whose TLS is decrypted, so that each request is decided"
    )
    credentials: tuple[Credential, ...] = Field(
        default=(), strict=False, description="headers that the egress proxy adds; their hosts are inspected"
    )
    requests: tuple[RequestRule, ...] = Field(
        default=(),
        strict=False,
        max_length=1000,
        description="requests that ask or are refused although their host is allowed; their hosts are inspected",
    )
    unknown_domains: Literal["ask", "deny"] = Field(
        default="ask", description="what happens to domains that no rule allows or denies"
    )
    upstreams: tuple[str, ...] | None = Field(
        default=None,
        strict=False,
        description="names of the server's upstream proxies; the first that works is used. Without the key, the "
        "server's default",
    )
    max_connections: int | None = Field(default=None, ge=1, description="most connections open at once")
    max_connections_per_minute: int | None = Field(default=None, ge=1, description="most new connections per minute")
    max_download_mb: int | None = Field(default=None, ge=1, description="most data that a sandbox may receive")
    max_upload_mb: int | None = Field(default=None, ge=1, description="most data that a sandbox may send")

    @field_validator("allowed_domains", "blocked_domains", "opaque_domains", "inspected_domains")
    @classmethod
    def _domains(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for domain in value or ():
            check_domain(domain)
        return value

    @field_validator("allowed_domains", "opaque_domains", "inspected_domains")
    @classmethod
    def _narrow(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for domain in value or ():
            check_narrow(domain)
        return value


class Git(DocumentPart):
    """Git remotes."""

    enabled: bool = Field(default=True, description="whether remotes are allowed at all")
    allowed_remotes: tuple[str, ...] | None = Field(
        default=None, strict=False, description="the only remotes that are allowed, as URLs; `*` matches anything"
    )
    max_clone_size_mb: int | None = Field(default=None, ge=1, description="largest size of one clone")


class Runtime(DocumentPart):
    """Languages and limits."""

    languages: tuple[str, ...] | None = Field(
        default=None, strict=False, description="the only languages whose interpreters may run: `python3.11`, `bash`"
    )
    interpreters: dict[str, str] = Field(default_factory=dict, description="paths of interpreters")
    max_execution_time_seconds: int | None = Field(
        default=None, ge=1, description="most seconds that a command may run"
    )
    max_memory_mb: int | None = Field(default=None, ge=1, description="most memory that a sandbox may use")
    delete_limit: int | None = Field(
        default=None,
        ge=0,
        le=MOST_DELETE_LIMIT,
        description="in a folder of the host: files that a run may delete before a person is asked",
    )


class Sources(DocumentPart):
    """A sources document."""

    agent_type: str | None = Field(
        default=None, max_length=256, description="the kind of agent that the document is for"
    )
    package_managers: PackageManagers = Field(default_factory=PackageManagers, description="package managers")
    web_access: WebAccess | None = Field(default=None, description="domains")
    git: Git | None = Field(default=None, description="git remotes")
    runtime: Runtime = Field(default_factory=Runtime, description="languages and limits")


@dataclass(frozen=True, slots=True)
class LowestLimits:
    """The smallest number of all layers for each limit; None if no layer has the limit."""

    max_execution_time_seconds: int | None = None
    max_memory_mb: int | None = None
    max_install_size_mb: int | None = None
    max_clone_size_mb: int | None = None
    delete_limit: int | None = None


def limits(*sources: Sources) -> LowestLimits:
    """Return the smallest limits of these documents."""

    def least(*numbers: int | None) -> int | None:
        return min((number for number in numbers if number is not None), default=None)

    managers = [each.package_managers for each in sources]
    return LowestLimits(
        least(*(each.runtime.max_execution_time_seconds for each in sources)),
        least(*(each.runtime.max_memory_mb for each in sources)),
        least(*(part.max_install_size_mb for each in managers for part in (each.pip, each.uv) if part)),
        least(*(each.git.max_clone_size_mb for each in sources if each.git)),
        least(*(each.runtime.delete_limit for each in sources)),
    )


def load(text: str | bytes, source: str = NAME) -> Sources:
    """Read a sources document."""
    return documents.load(text, Sources, source)
