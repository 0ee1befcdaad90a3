"""The documents of `carrel here` as values: a profile, the configuration of the user, the configuration of a project.

All are TOML. An unknown key is an error that names the most similar key. The user may allow more than a profile does;
the document of a project has no key that could, because an agent or a stranger may have written it.
"""

from __future__ import annotations

import ipaddress
import re
import tomllib
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, Field

from carrel.errors import InvalidRequest
from carrel.policy.documents import documents
from carrel.policy.documents.documents import MAX_DOCUMENT, DocumentPart
from carrel.policy.documents.settings import SettingsDocument
from carrel.policy.documents.sources import MOST_DELETE_LIMIT, RequestRule, check_domain, check_narrow

MOST_PROJECT_RULES = 200
"""Rules of a project. A sandbox has a limited number of masks: more rules could push out those of the user."""
_SHARED = frozenset({"ac", "co", "com", "edu", "gov", "ne", "net", "or", "org"})
_WIDEST = {4: 8, 6: 16}
"""The shortest prefix of an allowed network, by IP version."""
_VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]{0,127}$"


def split_host(text: str) -> tuple[str, int | None]:
    """Return the host and the port of `host`, `host:port`, `[address]` or `[address]:port`."""
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(?::(\d{1,5}))?", text)
    if found is None:
        return text, None
    return found[1].strip("[]"), int(found[2]) if found[2] else None


def check_host(text: str) -> str:
    """Return a host of an allow list: a name, `*.` and a domain, an address or a network, each with an optional port.

    Raises `ValueError` with the reason for one that allows too much.
    """
    host, port = split_host(text)
    if port is not None and not 1 <= port <= 65_535:
        raise ValueError(f"'{text[:100]}' has no valid port")
    network = _network(host)
    if network is not None:
        if network.prefixlen < _WIDEST[network.version]:
            raise ValueError(f"'{text}' is too broad: it allows a large part of all addresses; name smaller networks")
        return text
    if host == "*":
        raise ValueError("'*' is too broad: it allows every host; name the hosts")
    check_domain(host)
    if host.startswith("*.") and "." not in host[2:]:
        raise ValueError(f"'{text}' is too broad: it allows a whole top-level domain; name the hosts")
    labels = host.lower().rstrip(".").split(".")
    if host.startswith("*.") and len(labels) == 3 and labels[1] in _SHARED and len(labels[2]) == 2:
        raise ValueError(f"'{text}' is too broad: everybody can register a name below {host[2:]}; name the hosts")
    return text.lower()


def check_blocked_host(text: str) -> str:
    """Return a host of a deny list, which may be as broad as it wants."""
    check_domain(text)
    return text.lower()


def check_path(text: str) -> str:
    """Return a path or pattern relative to the folder. Raises `ValueError` for one that is not inside of it."""
    if not text or text.startswith(("/", "~")) or re.search(r"(^|/)\.{0,2}(/|$)|[\x00-\x1f]", text.rstrip("/")):
        raise ValueError(f"'{text[:100]}' is not a path inside the folder; write it relative, without . and ..")
    return text.rstrip("/")


def _network(host: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(host, strict=False)
    except ValueError:
        return None


Host = Annotated[str, Field(min_length=1, max_length=300), AfterValidator(check_host)]
BlockedHost = Annotated[str, Field(min_length=1, max_length=253), AfterValidator(check_blocked_host)]
FolderPath = Annotated[str, Field(max_length=1024), AfterValidator(check_path)]
GitHost = Annotated[str, AfterValidator(check_blocked_host), AfterValidator(lambda host: check_narrow(host) or host)]
RegistryHost = Annotated[str, AfterValidator(check_host), AfterValidator(check_blocked_host)]
Variable = Annotated[str, Field(pattern=_VARIABLE)]
HomeFile = Annotated[str, Field(min_length=1, max_length=1024)]
DeleteLimit = Annotated[int, Field(ge=0, le=MOST_DELETE_LIMIT)]
Choice = Literal["allow", "ask", "deny"]
Strictness = Literal["ask", "deny"]


class AgentKey(DocumentPart):
    """A key that the egress proxy puts into requests; the program inside gets a placeholder."""

    variable: Variable = Field(description="the variable of the user's environment that holds the key")
    host: str = Field(min_length=1, max_length=253, description="the host that gets the key, exactly")
    header: str = Field(default="Authorization", description="the name of the header")
    format: str = Field(default="Bearer {secret}", description="the value of the header; `{secret}` is the key")
    base_url: Variable | None = Field(
        default=None, description="the variable that names another server in place of the host; https only"
    )
    inside: tuple[Variable, ...] | None = Field(
        default=None,
        strict=False,
        description="the variables that hold the placeholder inside; without the key, `variable`",
    )
    arguments: tuple[str, ...] = Field(
        default=(), strict=False, description="arguments that are put before those of the user where the key is used"
    )


class PublishRule(DocumentPart):
    """A request that publishes a package, at any registry."""

    methods: tuple[str, ...] = Field(strict=False, description="the methods")
    paths: tuple[str, ...] | None = Field(
        default=None, strict=False, description="the paths; `*` matches any characters. Without the key, all"
    )
    reason: str = Field(max_length=200, description="what such a request does")


class Profile(DocumentPart):
    """What one agent may reach, and how it runs in a sandbox."""

    description: str = Field(max_length=200, description="the agent, in words")
    programs: tuple[str, ...] = Field(default=(), strict=False, description="names of programs that choose it")
    hosts: tuple[Host, ...] = Field(default=(), strict=False, description="hosts that it may connect to")
    credentials: tuple[AgentKey, ...] = Field(default=(), strict=False, description="keys that it uses")
    env: dict[Variable, str] = Field(default_factory=dict, description="variables of the program")
    arguments: tuple[str, ...] = Field(
        default=(), strict=False, description="arguments that are put before those of the user"
    )
    home_files: tuple[HomeFile, ...] = Field(
        default=(), strict=False, description="files of the home directory that it can use, if the user says so"
    )
    protect: tuple[FolderPath, ...] = Field(default=(), strict=False, description="paths that are read-only")
    git_hosts: tuple[GitHost, ...] = Field(default=(), strict=False, description="hosts whose pushes are decided")
    publishing: tuple[PublishRule, ...] = Field(
        default=(), strict=False, description="requests to the user's registries that ask"
    )
    delete_limit: DeleteLimit | None = Field(
        default=None, description="files that a run may delete before a person is asked"
    )


class UserConfig(DocumentPart):
    """`~/.config/carrel/here.toml`, and the options of the command line. It may allow more than the profile."""

    allow_hosts: tuple[Host, ...] = Field(default=(), strict=False, description="more hosts to connect to")
    deny_hosts: tuple[BlockedHost, ...] = Field(default=(), strict=False, description="hosts that are refused")
    unknown_hosts: Strictness | None = Field(
        default=None, description="hosts that no list names: ask a person, or refuse them (the default)"
    )
    network: Literal["allowlist", "none"] | None = Field(default=None, description="`none`: no network at all")
    push: Choice | None = Field(default=None, description="`git push`: allow it, ask (the default), or refuse it")
    git_credentials: bool | None = Field(
        default=None,
        description="use the git credential helper outside for the https remotes of the folder; without the key, yes",
    )
    protect: tuple[FolderPath, ...] = Field(default=(), strict=False, description="more paths that are read-only")
    unprotect: tuple[FolderPath, ...] = Field(
        default=(), strict=False, description="paths of the default list that may be written, as they are written there"
    )
    allow: tuple[str, ...] = Field(default=(), strict=False, description="rules of settings.json that allow")
    deny: tuple[str, ...] = Field(default=(), strict=False, description="rules of settings.json that deny")
    requests: tuple[RequestRule, ...] = Field(
        default=(), strict=False, description="requests that are decided although their host is allowed"
    )
    registries: tuple[RegistryHost, ...] = Field(
        default=(),
        strict=False,
        description="package registries to connect to; their TLS is decrypted, and publishing asks",
    )
    credentials: tuple[AgentKey, ...] = Field(
        default=(), strict=False, description="more keys that are put into requests, for example that of a registry"
    )
    delete_limit: DeleteLimit | None = Field(
        default=None, description="files that a run may delete before a person is asked; without the key, 200"
    )
    home_files: tuple[HomeFile, ...] = Field(
        default=(),
        strict=False,
        description="files of the home directory to show inside, read-only; `profile` means those of the profile",
    )
    env: dict[Variable, str] = Field(default_factory=dict, description="more variables of the program")


class UserDocument(UserConfig):
    """The whole file of the user: for all agents, and for single ones."""

    profiles: dict[str, UserConfig] = Field(default_factory=dict, description="additions for single profiles, by name")


class ProjectConfig(DocumentPart):
    """`.carrel/here.toml` of a folder. Every key only takes away."""

    only_hosts: tuple[Host, ...] | None = Field(
        default=None, strict=False, description="of all hosts that the user allows, only these"
    )
    deny_hosts: tuple[BlockedHost, ...] = Field(
        default=(), strict=False, max_length=MOST_PROJECT_RULES, description="hosts that are refused"
    )
    unknown_hosts: Literal["deny"] | None = Field(default=None, description="`deny`: refuse hosts that no list names")
    network: Literal["none"] | None = Field(default=None, description="`none`: no network at all")
    push: Strictness | None = Field(default=None, description="`git push`: ask at least, or refuse it")
    git_credentials: Literal[False] | None = Field(default=None, description="false: no git credentials")
    home_files: Literal[False] | None = Field(default=None, description="false: no files of the home directory")
    protect: tuple[FolderPath, ...] = Field(
        default=(), strict=False, max_length=MOST_PROJECT_RULES, description="more paths that are read-only"
    )
    deny: tuple[str, ...] = Field(
        default=(), strict=False, max_length=MOST_PROJECT_RULES, description="rules of settings.json that deny"
    )
    delete_limit: DeleteLimit | None = Field(
        default=None, description="ask after so many deleted files, if that is less than the user's number"
    )


Document = TypeVar("Document", bound=DocumentPart)


def read_toml(text: str | bytes, model: type[Document], source: str) -> Document:
    """Read a TOML document. Raises `UnknownSetting` or `InvalidRequest`; their `field` is the position."""
    if len(text) > MAX_DOCUMENT:
        raise InvalidRequest(f"{source} is larger than {MAX_DOCUMENT} bytes", field=source, hint="shorten it")
    try:
        value = tomllib.loads(text.decode() if isinstance(text, bytes) else text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{source} is not TOML: {error}", field=source, hint="correct the file") from None
    return documents.build(value, model, source)


def read_project_settings(text: str | bytes, source: str) -> SettingsDocument | None:
    """Read the `settings.json` of a folder; None if it is the settings of another program, without `permissions`."""
    value = documents.parse(text, source)
    if not isinstance(value, dict) or "permissions" not in value:
        return None
    settings = documents.build(value, SettingsDocument, source)
    if len(settings.permissions.deny) > MOST_PROJECT_RULES:
        raise InvalidRequest(
            f"{source} has more than {MOST_PROJECT_RULES} deny rules",
            field="permissions.deny",
            hint="use patterns, or put the rules into the configuration of the user",
        )
    return settings
