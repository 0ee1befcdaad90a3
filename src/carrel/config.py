"""Every setting of carrel, declared once. Values come from the defaults, `carrel.toml`, `CARREL_*` variables and flags;
the later source wins.
"""

import base64
import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from carrel.errors import InvalidRequest, UnknownSetting
from carrel.models import Network, TemplateName
from carrel.models.images import ImageName
from carrel.models.sandboxes import Cpus, DiskMb, LifetimeS, MemoryMb, Processes, TimeoutS

PREFIX = "CARREL_"
CONFIG_ENV = "CARREL_CONFIG"
CLIENT_ENV = frozenset({"CARREL_URL", "CARREL_TOKEN", CONFIG_ENV})
"""Variables with this prefix that are not settings: those of the client and of this module."""
PROVIDER_ENV = "CARREL_PROVIDER_"
"""Variables with this prefix belong to third-party providers, which check them."""

DATABASES = ("postgresql", "postgres", "sqlite")
"""The schemes of database URLs."""
FLEET_DATABASES = ("postgresql://", "postgres://")
"""URLs of databases that several servers can share begin with one of these."""
MOST_WORKERS = 64
MAX_DAYS = 36_500
FLEET_TTL_DAYS = 7.0
"""Days without use until a workspace is deleted, if several servers share a database."""


def default_data_dir() -> str:
    """Return `$XDG_DATA_HOME/carrel` or `~/.local/share/carrel`."""
    base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return str(Path(base).expanduser().absolute() / "carrel")


def _number_of_workers(value: object) -> int:
    if value == "auto":
        return min(MOST_WORKERS, len(os.sched_getaffinity(0)))
    text = str(value)
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) <= MOST_WORKERS:
        raise ValueError(f"it must be a number from 1 to {MOST_WORKERS}, or auto")
    return int(text)


class _Group(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, hide_input_in_errors=True, defer_build=True
    )


class SandboxSettings(_Group):
    """Defaults and switches of sandboxes."""

    provider: str = Field(
        default="auto",
        min_length=1,
        max_length=64,
        description="where sandboxes run; `auto` is the strongest available",
    )
    network: Network = Field(
        default=Network.NONE,
        description="network access of a sandbox of trust `high` or `medium`, unless requested otherwise",
    )
    low_trust_network: Network | None = Field(
        default=None,
        description="network access of a sandbox of trust `low`, unless requested otherwise; by default none, whatever "
        "`sandbox.network` says",
    )
    cpu_limit: Cpus = Field(default=2.0, description="CPU cores of a sandbox")
    memory_mb: MemoryMb = Field(default=2048, description="memory of a sandbox")
    timeout: TimeoutS = Field(default=300.0, description="deadline of a command, in seconds")
    disk_mb: DiskMb = Field(default=1024, description="size of a workspace")
    processes: Processes = Field(default=512, description="processes and threads of a sandbox")
    idle_stop_s: float = Field(
        default=3600.0, gt=0, description="seconds without an operation or a running command until a sandbox is stopped"
    )
    lifetime_s: LifetimeS | None = Field(
        default=None,
        description="longest time from the start of a sandbox until it ends, whatever runs in it; its files are saved "
        "as after any stop. By default a sandbox may run for ever",
    )
    survive_stop: bool = Field(
        default=False,
        description="leave sandboxes running when the server is stopped, where the provider can: the next start finds "
        "them again, as after a kill. For servers that are soon started again, such as in a rolling update",
    )
    workspace_ttl_days: Annotated[float, Field(ge=0, le=MAX_DAYS)] | None = Field(
        default=None,
        description="days without use until the workspace of a stopped or terminated sandbox is deleted, with the "
        "snapshots that carrel took by itself; 0 keeps it for ever. By default workspaces are kept on a single "
        "machine, and deleted after 7 days if servers share a PostgreSQL `database`",
    )
    checkpoint_s: float = Field(
        default=300.0, gt=0, description="seconds between checkpoints of a changing workspace to the archive"
    )
    filespace: bool = Field(
        default=False, description="sync workspaces with the filespace of their context, unless requested otherwise"
    )
    template: TemplateName | None = Field(default=None, description="the template of sandboxes that request none")
    image: ImageName | None = Field(
        default=None,
        description="the OCI image of sandboxes that request none, such as `debian:12`; by default they have the "
        "host's own root",
    )
    allow_process: bool = Field(
        default=False, description="let callers choose the `process` provider, which does not isolate"
    )
    third_party: str = Field(
        default="",
        description="names of third-party providers, separated by `,`, whose own statement about their isolation you "
        "believe. `auto` may choose these; any other third-party provider counts as no isolation, and only a request "
        "of trust `high` that names it gets it",
    )
    folder_roots: str = Field(
        default="",
        description="directories of this host, separated by `:`, below which callers may choose a folder as their "
        "workspace (`workspace_path`) and show files to sandboxes (`host_paths`); by default none",
    )

    home_mb: DiskMb = Field(
        default=10_240,
        description="size of the home directory that a context with a folder keeps; a sandbox whose home is larger is "
        "stopped within seconds",
    )

    @field_validator("folder_roots")
    @classmethod
    def _absolute_roots(cls, value: str) -> str:
        for root in filter(None, value.split(os.pathsep)):
            if not root.startswith("/") or "\0" in root:
                raise ValueError(f"{root[:200]!r} is not an absolute path")
        return value

    @property
    def third_party_names(self) -> tuple[str, ...]:
        """The third-party providers that the operator lists."""
        return tuple(name.strip() for name in self.third_party.split(",") if name.strip())

    @property
    def folder_root_paths(self) -> tuple[str, ...]:
        """The folder roots, with links resolved."""
        return tuple(os.path.realpath(root) for root in self.folder_roots.split(os.pathsep) if root)


class CheckpointSettings(_Group):
    """Checkpoints of folders that are workspaces, for `carrel diff` and `carrel undo`."""

    enabled: bool = Field(
        default=True,
        description="record a folder before a sandbox starts on it and when the sandbox has ended; otherwise an "
        "agent's changes cannot be undone",
    )
    keep_runs: int = Field(default=20, ge=1, le=10_000, description="runs of a context whose checkpoints are kept")
    max_mb: int = Field(
        default=20_480,
        ge=1,
        description="disk space for checkpoints; beyond it the oldest runs are removed, and a folder with more new "
        "content is refused",
    )
    ignore: str = Field(
        default="",
        pattern=r"^[^/]*$",
        description="names of directories, separated by `,`, that are not recorded, besides the usual build folders "
        "such as `node_modules`",
    )

    @property
    def ignored_names(self) -> tuple[str, ...]:
        """The names of directories that are not recorded, besides the usual ones."""
        return tuple(name.strip() for name in self.ignore.split(",") if name.strip() and name.strip() != ".git")


class PolicySettings(_Group):
    """The policy for every context of the server. A context's own policy cannot allow what this one denies."""

    settings_file: str | None = Field(default=None, description="a `settings.json`: allowed and denied operations")
    sources_file: str | None = Field(
        default=None, description="a `sources.json`: what sandboxes may connect to and install"
    )


class ApprovalSettings(_Group):
    """Operations that a person has to decide."""

    ttl_s: float = Field(
        default=3600.0, gt=0, le=30 * 86_400, description="seconds until an undecided approval expires"
    )
    keep_days: float = Field(
        default=30.0,
        ge=1,
        le=MAX_DAYS,
        description="days until decided, used and expired approvals are removed; pending approvals and those for a "
        "context are kept",
    )
    webhook: SecretStr | None = Field(default=None, description="a URL that receives each new approval")
    webhook_secret: SecretStr | None = Field(
        default=None, description="the key that signs requests to the webhook (HMAC-SHA-256)"
    )


class AuditSettings(_Group):
    """The audit log."""

    strict: bool = Field(
        default=True,
        description="write each operation to the log before it runs; otherwise the last ones before a crash may be "
        "missing",
    )
    keep_days: Annotated[float, Field(ge=1, le=MAX_DAYS)] | None = Field(
        default=None,
        description="days until records are removed, up to a signed head; by default they are kept for ever",
    )


class MetricsSettings(_Group):
    """Metrics and what is shown of running sandboxes."""

    sandboxes: int = Field(
        default=100,
        ge=0,
        le=1000,
        description="running sandboxes whose processor time and memory are measured when somebody asks: those that "
        "were used last. Each has three metrics of its own; 0 for none",
    )


class TracingSettings(_Group):
    """Traces for an OpenTelemetry collector."""

    enabled: bool = Field(
        default=False,
        description="send traces (extra `otel`); where to say the variables of OpenTelemetry, such as "
        "`OTEL_EXPORTER_OTLP_ENDPOINT`",
    )
    commands: bool = Field(
        default=False, description="put the text of commands into traces, without the secrets of their context"
    )


class EventSettings(_Group):
    """The event log."""

    keep_days: float = Field(default=7.0, gt=0, le=MAX_DAYS, description="days until events are removed")
    keep_mb: int = Field(
        default=256, ge=1, description="size of the event log; beyond it the oldest events are removed"
    )


class JobSettings(_Group):
    """Jobs."""

    at_once: int = Field(default=32, ge=1, le=1000, description="jobs that run at once on this server")
    per_namespace: Annotated[int, Field(ge=1, le=100_000)] | None = Field(
        default=None, description="jobs of one namespace that run at once on all servers; by default no limit"
    )
    starts_per_minute: Annotated[int, Field(ge=1, le=1_000_000)] | None = Field(
        default=None, description="jobs of one namespace that start in a minute on all servers; by default no limit"
    )
    most_queued: int = Field(
        default=10_000, ge=1, le=1_000_000, description="jobs of one namespace that may wait to start"
    )
    grace_s: float = Field(default=10.0, ge=0, le=600, description="seconds between TERM and KILL when a job is ended")
    ttl_s: float = Field(
        default=7 * 86_400.0,
        ge=1,
        le=MAX_DAYS * 86_400.0,
        description="seconds until the record and the output of an ended job are removed, unless it says so itself",
    )
    webhook_hosts: str = Field(
        default="",
        max_length=4096,
        description="hosts or `host:port` that webhooks of jobs may name, separated by commas; by default none",
    )
    webhook_secret: SecretStr | None = Field(
        default=None, description="the key that signs these requests (HMAC-SHA-256)"
    )

    @property
    def webhook_host_names(self) -> frozenset[str]:
        """`webhook_hosts` as a set."""
        return frozenset(filter(None, (each.strip().lower() for each in self.webhook_hosts.split(","))))


class EgressSettings(_Group):
    """Outbound network (egress)."""

    ask_wait_s: float = Field(
        default=30.0, ge=0, le=600, description="seconds a connection to an unknown host waits for a person's decision"
    )
    upstreams_file: str | None = Field(
        default=None,
        description="a JSON list of proxies for all outbound connections; the first that works is used: "
        '`[{"name": "eu", "url": "http://user:password@host:3128"}]`, or `socks5://`',
    )
    nameservers: str = Field(
        default="",
        pattern=r"^$|^[0-9A-Fa-f:.\[\]]+(,[0-9A-Fa-f:.\[\]]+)*$",
        description="addresses of DNS servers, `1.2.3.4,1.2.3.5:5353`; by default those of the host",
    )
    roots_file: str | None = Field(
        default=None,
        description="additional root certificates, as PEM, for the servers of inspected connections",
    )
    cache_mb: int = Field(default=4096, ge=16, description="disk space for packages that sandboxes have installed")
    allow_internet: bool = Field(
        default=False,
        description="let callers choose the network `internet`, which allows every public host through the proxy; "
        "also allowed if it is `sandbox.network`",
    )
    allow_bridge: bool = Field(
        default=False, description="let callers choose the network `bridge`, which bypasses the proxy"
    )
    allow_host: bool = Field(
        default=False, description="let callers choose the network `host`, which is the network of the host"
    )


class PortSettings(_Group):
    """Ports of sandboxes from outside: URLs for the servers that run in them."""

    domain: str | None = Field(
        default=None,
        max_length=200,
        description="the domain below which every port has a host of its own, `8000-ID.DOMAIN`; `preview.example`, or "
        "with a scheme and a port where they are not https and 443: `http://preview.localhost:7070`. The names below "
        "it must lead to this server, and nothing else may use them",
    )
    allow_public: bool = Field(
        default=False, description="let callers make ports public, which everybody reaches without a token"
    )
    longest_url_s: float = Field(
        default=7 * 86_400.0, gt=0, le=30 * 86_400.0, description="most seconds until a URL of a port expires"
    )
    listen: str | None = Field(
        default=None,
        pattern=r"^[^/\s]*:[0-9]{1,5}$",
        description="address and port for HTTPS requests, `0.0.0.0:443`; needs a certificate",
    )
    certificate_file: str | None = Field(
        default=None, min_length=1, description="a PEM file with the certificate for `*.DOMAIN` and its chain"
    )
    key_file: str | None = Field(default=None, min_length=1, description="a PEM file with its key")

    @field_validator("domain")
    @classmethod
    def _a_domain(cls, value: str | None) -> str | None:
        label = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
        if value is not None and not re.fullmatch(rf"(https?://)?({label}\.)*{label}(:[0-9]{{1,5}})?", value):
            raise ValueError("it must be a domain in lower case, such as preview.example")
        return value

    @property
    def scheme(self) -> str:
        """The scheme of URLs with a host of a port."""
        return "http" if (self.domain or "").startswith("http://") else "https"

    @property
    def authority(self) -> str:
        """The domain, with its port if that is not the usual one."""
        return (self.domain or "").rpartition("//")[2]

    @property
    def domain_name(self) -> str | None:
        """The domain without a port."""
        return None if self.domain is None else self.authority.partition(":")[0]


class EnvironmentSettings(_Group):
    """Python environments that sandboxes share."""

    max_mb: int = Field(
        default=20_480, ge=1, description="disk space for environments; beyond it the least recently used are removed"
    )
    ttl_days: float = Field(default=30.0, gt=0, description="days without use until an environment is removed")
    largest_mb: DiskMb = Field(default=4096, description="largest size of one environment")
    keep_free_percent: float = Field(
        default=5.0, ge=0, le=50, description="free disk space below which unused environments are removed"
    )
    build_timeout_s: TimeoutS = Field(default=1800.0, description="most seconds for resolving, and for building")


class ImageSettings(_Group):
    """OCI images: the root file systems of sandboxes. Lists of registries are separated by `,`."""

    registry: str = Field(
        default="docker.io", min_length=1, max_length=255, description="the registry of images that name none"
    )
    directory: str | None = Field(
        default=None, min_length=1, description="where images are stored; by default `images` in `data_dir`"
    )
    registries: str = Field(
        default="",
        description="the registries that images may come from, for example `docker.io,ghcr.io`; by default all for "
        "administrators, and `images.registry` for others",
    )
    plain_http: str = Field(
        default="", description="registries that are reached without TLS, for example `localhost:5000`"
    )
    unverified: str = Field(default="", description="registries whose certificate is not checked")
    ca_file: str | None = Field(
        default=None, min_length=1, description="a PEM file with certificates to trust besides those of the system"
    )
    docker_config: str | None = Field(
        default=None,
        min_length=1,
        description="the Docker configuration file with the credentials of registries; by default "
        "`$DOCKER_CONFIG/config.json` or `~/.docker/config.json`",
    )
    platform: str = Field(
        default="",
        pattern=r"^([a-z0-9]+/[a-z0-9_]+(/[a-z0-9]+)?)?$",
        description="the platform of images that have several, for example `linux/arm64`; by default that of this host",
    )
    downloads: int = Field(default=4, ge=1, le=64, description="layers that are downloaded at once from one registry")
    timeout_s: TimeoutS = Field(default=60.0, description="seconds without a byte until a registry has failed")
    max_mb: int = Field(
        default=51_200, ge=1, description="disk space for images; beyond it the least recently used are removed"
    )
    ttl_days: float = Field(default=30.0, gt=0, description="days without use until an image is removed")
    build_timeout_s: TimeoutS = Field(default=1800.0, description="seconds that one RUN line of a build may take")
    largest_mb: int = Field(default=32_768, ge=1, description="largest size of one unpacked image")
    layer_max_mb: int = Field(default=16_384, ge=1, description="largest size of one unpacked layer")
    layer_max_entries: int = Field(
        default=1_000_000, ge=1, description="most files, directories and links in one layer"
    )
    layer_max_ratio: int = Field(
        default=200,
        ge=1,
        description="how many times larger than its compressed form a layer may be; a layer of less than 64 MB may "
        "always be unpacked",
    )

    @property
    def registry_names(self) -> frozenset[str]:
        """The registries that images may come from; empty for all."""
        return _names(self.registries)

    @property
    def plain_http_names(self) -> frozenset[str]:
        """The registries that are reached without TLS."""
        return _names(self.plain_http)

    @property
    def unverified_names(self) -> frozenset[str]:
        """The registries whose certificate is not checked."""
        return _names(self.unverified)


def _names(text: str) -> frozenset[str]:
    return frozenset(name.strip().lower() for name in text.split(",") if name.strip())


class DockerSettings(_Group):
    """The provider `docker`: sandboxes as containers of a Docker daemon, or of podman's compatible service."""

    socket: str = Field(
        default="/var/run/docker.sock",
        pattern=r"^/",
        max_length=107,
        description="the Unix socket of the daemon, for example `/run/podman/podman.sock`",
    )


class KubernetesSettings(_Group):
    """The providers `kubernetes` and `kubernetes-gvisor`: sandboxes as pods of a cluster. They need SPIFFE IDs
    (`spiffe.source`).
    """

    enabled: bool = Field(default=False, description="offer the provider `kubernetes`")
    kubeconfig: str | None = Field(
        default=None,
        min_length=1,
        description="a kubeconfig file; by default `$KUBECONFIG`, the service account of the pod that the server runs "
        "in, or `~/.kube/config`",
    )
    namespace: str = Field(
        default="carrel-sandboxes",
        pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$",
        description="the namespace of the pods; nothing else should be in it",
    )
    image: str = Field(
        default="debian:12", min_length=1, max_length=512, description="the image of the sandboxes; any image will do"
    )
    bundle_image: str = Field(
        default="localhost/carrel-bundle:latest",
        min_length=1,
        max_length=512,
        description="the image with the supervisor's bundle, which `carrel bundle --image` makes",
    )
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(
        default="IfNotPresent", description="when nodes pull these two images"
    )
    volume_claim: str = Field(
        default="carrel-workspaces",
        pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$",
        description="the claim, in the namespace of the pods, of the shared volume (ReadWriteMany) with the workspaces",
    )
    volume_directory: str | None = Field(
        default=None,
        pattern=r"^/",
        description="where this server has the root of that volume mounted; workspaces must be below it. By default "
        "`data_dir`",
    )
    volume_max_gb: int = Field(
        default=0,
        ge=0,
        le=1 << 20,
        description="how many GiB the claim of the shared volume may come to ask for: it doubles when more than 80 % "
        "are used. Its storage class has to allow that. 0 leaves its size to you",
    )
    gvisor_class: str = Field(
        default="",
        pattern=r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)?$",
        description="the RuntimeClass of gVisor, for example `gvisor`. With it there is the provider "
        "`kubernetes-gvisor`, which sandboxes of trust `low` can use",
    )
    user_namespaces: bool = Field(
        default=False, description="give every pod users of its own (`hostUsers: false`); the cluster has to be able to"
    )
    agent_sandbox: bool = Field(
        default=True, description="make pods through agent-sandbox where it is installed; else they are plain pods"
    )
    warm_pool: int = Field(
        default=0,
        ge=0,
        le=10_000,
        description="pods that agent-sandbox keeps ready for each kind of new sandbox: a warm pool, from which slots "
        "and cold starts are claimed. 0 for none",
    )


class McpSettings(_Group):
    """MCP servers of contexts."""

    start_timeout_s: float = Field(
        default=60.0, gt=0, le=600, description="most seconds for the start and the handshake of an MCP server"
    )
    discovery_timeout_s: float = Field(
        default=120.0, gt=0, le=600, description="most seconds for the discovery of an MCP server's tools"
    )
    install_timeout_s: TimeoutS = Field(default=600.0, description="most seconds for npm to install an MCP server")
    platform_file: str | None = Field(
        default=None,
        description="a JSON list of MCP servers outside of sandboxes, for every context: "
        '`[{"name": "search", "url": "https://host/mcp", "headers": {"Authorization": {"env": "SEARCH_TOKEN"}}}]`; '
        "a header is a text, or names a variable (`env`) or a `file`",
    )


class GvisorSettings(_Group):
    """gVisor, the provider for code that is believed to be hostile."""

    runsc: str = Field(default="", description="path of gVisor's program `runsc`; by default the one on `PATH`")
    platform: Literal["systrap", "kvm"] = Field(
        default="systrap",
        description="how gVisor intercepts system calls: `systrap` works everywhere, `kvm` needs a usable `/dev/kvm`",
    )


class PoolSettings(_Group):
    """Warm sandboxes of slow providers (Docker, gVisor), which wait for their owner."""

    size: int = Field(
        default=2,
        ge=0,
        le=10_000,
        description="warm sandboxes of each kind (provider, template, image) that are kept ready once a sandbox of it "
        "was asked for; 0 for none. A template may name another size",
    )
    max: int = Field(
        default=8,
        ge=0,
        le=10_000,
        description="warm sandboxes of this server in all; a pool that has run dry grows up to this. They count as "
        "sandboxes of `max_sandboxes`, and give way to those that are asked for",
    )
    idle_s: float = Field(
        default=900.0,
        ge=0,
        description="seconds without a new sandbox of its kind until a pool ends its warm sandboxes; 0 keeps them",
    )


class MicrovmSettings(_Group):
    """Virtual machines, the strongest provider. A start takes longer than with others, so they are made on request."""

    enabled: bool = Field(
        default=False, description="offer the provider `microvm`; `auto` takes it before all others, as the strongest"
    )
    qemu: str = Field(default="", description="path of `qemu-system-x86_64`; by default the one on `PATH`")
    virtiofsd: str = Field(
        default="", description="path of `virtiofsd`, which serves the files; by default the one of the distribution"
    )
    kernel: str = Field(
        default="", description="path of the machines' kernel; by default the newest of the host's distribution"
    )
    modules: str = Field(
        default="", description="directory of that kernel's modules; by default the one with its release"
    )
    allow_emulation: bool = Field(
        default=False,
        description="make virtual machines where KVM does not work: QEMU then emulates them, which is slow",
    )
    memory_mb: int = Field(
        default=1024,
        ge=128,
        le=1_048_576,
        description="MB of memory of a machine whose sandbox has no limit of it",
    )


class RouterSettings(_Group):
    """Sandboxes for calls of Python without a context."""

    max_sandboxes: int = Field(default=16, ge=1, le=10_000, description="sandboxes for calls without a context")
    spares: int = Field(default=1, ge=0, le=100, description="sandboxes kept ready per template that is in use")
    idle_s: TimeoutS = Field(default=300.0, description="seconds until an unused sandbox is terminated")
    queue: int = Field(default=64, ge=0, le=10_000, description="calls that may wait for a sandbox at once")
    wait_s: float = Field(default=10.0, gt=0, le=600, description="most seconds that a call waits for a sandbox")


class SpiffeSettings(_Group):
    """SPIFFE IDs of servers and sandboxes, and mutual TLS by them."""

    source: Literal["none", "carrel", "spire"] = Field(
        default="none",
        description="where this server gets its SVID: `carrel` is carrel's own certificate authority, whose key comes "
        "from `secret_key`; `spire` is the SPIRE agent of this machine. With either, servers forward requests with "
        "mutual TLS only. `none`: servers have no SPIFFE IDs, and sandboxes on other machines cannot be reached",
    )
    trust_domain: str = Field(
        default="carrel.internal",
        pattern=r"^[a-z0-9._-]{1,255}$",
        description="the trust domain; the same for all servers on one database, and that of SPIRE",
    )
    agent_socket: str = Field(
        default="/tmp/spire-agent/public/api.sock",
        pattern=r"^/[^\x00]{1,106}$",
        description="the socket of the SPIRE agent's Workload API, for `spire`",
    )
    lifetime_s: float = Field(
        default=3600.0,
        ge=2,
        le=86_400,
        description="seconds that an SVID of carrel's own authority is valid; it is renewed after half of them. A "
        "sandbox on another machine is lost if no server renews its SVID in time",
    )
    listen: str | None = Field(
        default=None,
        max_length=255,
        pattern=r"^([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}$",
        description="where this server listens for other servers with mutual TLS, as `host:port`; by default `host` "
        "and a free port. Of several workers, each takes the next port",
    )


class Settings(_Group):
    """The settings of a server."""

    host: str = Field(default="127.0.0.1", min_length=1, max_length=255, description="address to listen on")
    port: int = Field(default=7070, ge=0, le=65_535, description="port to listen on; 0 picks a free one")
    workers: Annotated[int, BeforeValidator(_number_of_workers)] = Field(
        default=1,
        description="processes that answer requests, on one port and one data directory; `auto` is one for each "
        "processor",
    )
    data_dir: str = Field(
        default_factory=default_data_dir,
        min_length=1,
        description="directory of workspaces, records and the token",
    )
    bus: SecretStr | None = Field(
        default=None,
        description="where events are delivered, besides the event log: `nats://user:password@host:4222` for NATS "
        "JetStream; by default nowhere. The value is never shown",
    )
    database: SecretStr | None = Field(
        default=None,
        min_length=1,
        description="the database: `postgresql://user:password@host/name` or `sqlite:////path`; "
        "by default `carrel.db` in `data_dir`",
    )
    archive: SecretStr | None = Field(
        default=None,
        min_length=1,
        description="storage for snapshots beyond this machine: `/path`, or "
        "`s3://bucket/prefix?endpoint=https://host&region=name` (keys from the usual AWS variables); "
        "by default `archive` in `data_dir`",
    )
    volumes: Literal["auto", "directory", "btrfs"] = Field(
        default="auto",
        description="storage of workspaces: `btrfs` has kernel quotas and instant snapshots and needs root; "
        "`auto` uses it if possible",
    )
    volumes_mb: DiskMb = Field(
        default=8192,
        description="first size of the `btrfs` volume, a sparse file; it doubles whenever it is more than 80 % full",
    )
    volumes_max_mb: Annotated[int, Field(ge=128, le=1 << 30)] = Field(
        default=1_048_576, description="largest size of the `btrfs` volume; an existing one is never made smaller"
    )
    templates_dir: str | None = Field(
        default=None,
        min_length=1,
        description="directory of templates, one folder each; the same for all servers on one database; "
        "by default `templates` in `data_dir`",
    )
    search_url: str | None = Field(
        default=None,
        max_length=2000,
        pattern=r"^https?://[A-Za-z0-9.-]+(:80|:443)?/[!#-\[\]-~]*\{query\}[!#-\[\]-~]*$",
        description="the search endpoint of the template `web-search`: a URL with `{query}` that answers JSON, for "
        "example `https://HOST/search?format=json&q={query}`",
    )
    node: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$",
        description="the name of this server among those on one database; by default a generated name",
    )
    node_url: str | None = Field(
        default=None,
        max_length=255,
        pattern=r"^(https?|https\+spiffe)://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?$",
        description="where the other servers on the database reach this one, such as `http://10.0.0.5:7070`; with "
        "SPIFFE IDs such as `https+spiffe://10.0.0.5:7071`. By default the address that it listens on",
    )
    lease_s: float = Field(
        default=30.0, ge=1, le=3600, description="seconds without a sign of life until a server loses its sessions"
    )
    token: str | None = Field(
        default=None,
        min_length=8,
        max_length=512,
        pattern=r"^[\x21-\x7e]+$",
        description="the administrator's token; by default a generated token in `data_dir`",
    )
    secret_key: SecretStr | None = Field(
        default=None,
        description="the key that encrypts stored secrets, 32 bytes in base64; the same for all servers on one "
        "database; by default a generated key in `data_dir`",
    )
    auth: bool = Field(default=True, description="require a token; only a loopback address may do without")
    max_body_mb: int = Field(default=32, ge=1, le=4096, description="largest request body, except for file uploads")
    max_sandboxes: int = Field(default=1000, ge=1, le=1_000_000, description="sandboxes that may run at once")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="the least severe messages that the server logs"
    )
    sandbox: SandboxSettings = Field(default_factory=SandboxSettings)
    policy: PolicySettings = Field(default_factory=PolicySettings)
    approvals: ApprovalSettings = Field(default_factory=ApprovalSettings)
    audit: AuditSettings = Field(default_factory=AuditSettings)
    events: EventSettings = Field(default_factory=EventSettings)
    jobs: JobSettings = Field(default_factory=JobSettings)
    metrics: MetricsSettings = Field(default_factory=MetricsSettings)
    tracing: TracingSettings = Field(default_factory=TracingSettings)
    egress: EgressSettings = Field(default_factory=EgressSettings)
    ports: PortSettings = Field(default_factory=PortSettings)
    envs: EnvironmentSettings = Field(default_factory=EnvironmentSettings)
    images: ImageSettings = Field(default_factory=ImageSettings)
    docker: DockerSettings = Field(default_factory=DockerSettings)
    gvisor: GvisorSettings = Field(default_factory=GvisorSettings)
    kubernetes: KubernetesSettings = Field(default_factory=KubernetesSettings)
    pool: PoolSettings = Field(default_factory=PoolSettings)
    microvm: MicrovmSettings = Field(default_factory=MicrovmSettings)
    router: RouterSettings = Field(default_factory=RouterSettings)
    mcp: McpSettings = Field(default_factory=McpSettings)
    checkpoints: CheckpointSettings = Field(default_factory=CheckpointSettings)
    spiffe: SpiffeSettings = Field(default_factory=SpiffeSettings)

    @field_validator("bus")
    @classmethod
    def _nats(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not re.fullmatch(r"(nats|tls)://[^/\s]+/?", value.get_secret_value()):
            raise ValueError("a bus is nats://host:port or tls://host:port, with user:password@ if it needs one")
        return value

    @field_validator("volumes_max_mb")
    @classmethod
    def _not_below_the_first_size(cls, value: int, info: ValidationInfo) -> int:
        if value < info.data.get("volumes_mb", 0):
            raise ValueError(f"it is below the first size, volumes_mb = {info.data['volumes_mb']}")
        return value

    @field_validator("data_dir")
    @classmethod
    def _absolute(cls, value: str) -> str:
        if "\0" in value:
            raise ValueError("a path cannot contain a NUL character")
        try:
            return str(Path(value).expanduser().absolute())
        except RuntimeError:
            raise ValueError("the home directory at its beginning is unknown") from None

    @field_validator("database")
    @classmethod
    def _known_database(cls, value: SecretStr | None) -> SecretStr | None:
        # The message does not quote the value, which may contain a password.
        if value is not None and value.get_secret_value().partition("://")[0] not in DATABASES:
            raise ValueError(f"it must be a URL that starts with one of {', '.join(DATABASES)} and ://")
        if value is not None and "\0" in value.get_secret_value():
            raise ValueError("a URL cannot contain a NUL character")
        return value

    @field_validator("archive")
    @classmethod
    def _known_archive(cls, value: SecretStr | None) -> SecretStr | None:
        text = "" if value is None else value.get_secret_value()
        if value is not None and ("\0" in text or not text.startswith(("/", "s3://"))):
            raise ValueError("it must be an absolute path or a URL that starts with s3://")
        return value

    @field_validator("secret_key")
    @classmethod
    def _key_of_32_bytes(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            try:
                size = len(base64.b64decode(value.get_secret_value().strip(), validate=True))
            except ValueError:
                size = 0
            if size != 32:
                raise ValueError("it must be 32 bytes in base64, as `head -c 32 /dev/urandom | base64` makes them")
        return value

    @property
    def database_url(self) -> str:
        """The URL of the database or the path of its file. It may contain a password: never show it."""
        if self.database is None:
            return str(Path(self.data_dir) / "carrel.db")
        return self.database.get_secret_value()

    @property
    def workspace_ttl_days(self) -> float | None:
        """Days without use until a workspace is deleted; None if workspaces are kept for ever."""
        chosen = self.sandbox.workspace_ttl_days
        if chosen is None:
            fleet = self.database_url.startswith(FLEET_DATABASES)
            return FLEET_TTL_DAYS if fleet else None
        return chosen or None

    @property
    def archive_url(self) -> str:
        """The directory or the URL of the archive. It may contain a password: never show it."""
        if self.archive is None:
            return str(Path(self.data_dir) / "archive")
        return self.archive.get_secret_value()

    @property
    def max_body(self) -> int:
        """The largest request body in bytes."""
        return self.max_body_mb * 1024 * 1024


@dataclass(frozen=True)
class SettingDeclaration:
    """One setting, for the documentation."""

    name: str
    env: str
    default: str
    description: str


def _show(value: object) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _declare(group: type[BaseModel], prefix: str = "") -> Iterator[SettingDeclaration]:
    for key, info in group.model_fields.items():
        name = prefix + key
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from _declare(info.annotation, name + ".")
            continue
        if key == "data_dir":
            default = "$XDG_DATA_HOME/carrel or ~/.local/share/carrel"
        elif key == "workspace_ttl_days":
            default = f"none; {FLEET_TTL_DAYS} with PostgreSQL"
        else:
            default = _show(info.default)
        yield SettingDeclaration(name, PREFIX + name.upper().replace(".", "_"), default, info.description or "")


def declarations() -> list[SettingDeclaration]:
    """Return every setting: name in `carrel.toml`, environment variable, default, meaning."""
    return list(_declare(Settings))


def _unknown(name: str, known: list[str], where: str) -> UnknownSetting:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"did you mean '{near[0]}'?" if near else f"the settings are: {', '.join(sorted(known))}"
    return UnknownSetting(f"{where} has no setting '{name[:100]}'", field=name[:100], hint=hint)


def _flatten(
    table: Mapping[str, object], names: list[str], where: str, prefix: str = ""
) -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        name = f"{prefix}{key}"
        group = any(known.startswith(name + ".") for known in names)
        if group and isinstance(value, Mapping):
            yield from _flatten(value, names, where, name + ".")
        elif name in names:
            yield name, value
        elif group:
            raise InvalidRequest(f"'{name}' in {where} must be a table", field=name, hint=f"write [{name}]")
        else:
            raise _unknown(name, names, where)


def _from_file(path: Path, names: list[str]) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise InvalidRequest(
            f"cannot read the settings file {path}: {error.strerror}",
            field="config",
            hint="check the path and its mode",
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} is not TOML: {error}", field="config", hint="correct the file") from None
    return dict(_flatten(table, names, str(path)))


def load(
    flags: Mapping[str, object] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    config: str | os.PathLike[str] | None = None,
) -> Settings:
    """Read the settings from all sources. `flags` maps dotted names to values; None means that the flag was not given.

    Raises `UnknownSetting` for an unknown name and `InvalidRequest` with the field for an invalid value.
    """
    environ = os.environ if environ is None else environ
    declared = declarations()
    names = [each.name for each in declared]
    values: dict[str, object] = {}
    chosen = config or environ.get(CONFIG_ENV)
    if chosen:
        values.update(_from_file(Path(chosen), names))
    elif Path("carrel.toml").is_file():
        values.update(_from_file(Path("carrel.toml"), names))
    by_env = {each.env: each.name for each in declared}
    for key, text in environ.items():
        if key in by_env:
            values[by_env[key]] = text
        elif key.startswith(PREFIX) and key not in CLIENT_ENV and not key.startswith(PROVIDER_ENV):
            raise _unknown(key, [*by_env, *CLIENT_ENV], "the environment")
    for key, value in (flags or {}).items():
        if key not in names:
            raise _unknown(key, names, "the command line")
        if value is not None:
            values[key] = value
    return _build(values)


def _build(values: Mapping[str, object]) -> Settings:
    tree: dict[str, object] = {}
    for name, value in values.items():
        group, _, key = name.rpartition(".")
        target = tree
        if group:
            nested = tree.setdefault(group, {})
            assert isinstance(nested, dict)
            target = nested
        target[key] = value
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        declared = {each.name: each for each in declarations()}.get(field)
        hint = f"its meaning: {declared.description}; set it in carrel.toml or as {declared.env}" if declared else None
        raise InvalidRequest(f"setting '{field}': {first['msg']}", field=field, hint=hint) from None
