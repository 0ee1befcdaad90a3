"""The request for an environment: requirements, interpreter, registries; and the lock that it resolves to. Pure, except
for reading which interpreters the host has.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from carrel.egress.plan import PackageIndex
from carrel.errors import InvalidRequest, PlatformError
from carrel.models import Limits, Trust
from carrel.policy.rules.layers import Policy
from carrel.store import SessionRecord

PLACES = ("/usr/bin", "/usr/local/bin")
MOST_LOCK = 4 * 1024 * 1024
_INTERPRETER = re.compile(r"python(3\.\d{1,2})")
_PINNED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9.!+_-]+)( ; [^\\\n#]{1,500})?( \\)?")
_HASH = re.compile(r"    --hash=(sha(?:256|384|512):[0-9a-f]{64,128})( \\)?")


@dataclass(frozen=True, slots=True)
class Requester:
    """The requester of an environment, whose policy and limits apply to the build."""

    context_id: str | None = None
    template: str | None = None
    sandbox_id: str = ""
    provider: str = "auto"
    trust: Trust = Trust.MEDIUM
    limits: Limits = field(default_factory=Limits)

    @classmethod
    def of(cls, record: SessionRecord) -> Requester:
        """Return the requester for a session."""
        kept = {"cpus", "memory_mb", "processes"}
        limits = Limits.model_validate(record.limits.model_dump(include=kept, exclude_none=True))
        return cls(record.context_id, record.template, record.id, record.provider, record.trust, limits)

    @property
    def name(self) -> str | None:
        """The name under which its secrets are found."""
        return self.context_id or self.sandbox_id or None


@dataclass(frozen=True, slots=True)
class Lock:
    """The exact packages, with the hashes of their files."""

    text: str
    packages: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class ResolvableRequest:
    """A request that is ready to be resolved."""

    requirements: tuple[str, ...]
    version: str
    interpreter: str
    registries: tuple[str, ...]
    rules: str
    index: str | None = None

    @property
    def key(self) -> str:
        """Equal for requests that resolve alike as long as the indexes do not change."""
        said = [self.requirements, self.version, self.interpreter, self.registries, self.rules, self.index]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()

    def hash(self, lock: Lock) -> str:
        """Return a hash of everything that decides the content. It includes the registries, because source packages are
        built with packages from them: requesters with other registries must not share the result.
        """
        said = [lock.text, self.version, self.interpreter, self.registries, platform.machine()]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def name_of(key: bytes, hash: str) -> str:
    """Return the name of an environment: nobody without the key can compute it from the hash of a lock."""
    return hmac.new(key, hash.encode(), hashlib.sha256).hexdigest()[:40]


def requirements_of(given: Iterable[str]) -> tuple[str, ...]:
    """Normalize requirements; `InvalidRequest` for one that is not valid, or names a URL."""
    from packaging.requirements import InvalidRequirement, Requirement  # not at the top: it takes long
    from packaging.utils import canonicalize_name

    found = set()
    for text in given:
        try:
            parsed = Requirement(text)
        except InvalidRequirement as error:
            raise InvalidRequest(
                f"'{text[:200]}' is not a requirement: {str(error).splitlines()[0]}",
                field="requirements",
                hint="write it like pandas>=2",
            ) from None
        if parsed.url is not None:
            raise InvalidRequest(
                f"'{text[:200]}' names a URL: an environment is built only from the registries of the policy",
                field="requirements",
                hint="install it into the workspace's own virtual environment with pip",
            )
        parsed.name = canonicalize_name(parsed.name)
        found.add(str(parsed))
    return tuple(sorted(found))


def interpreters(places: Sequence[str] = PLACES) -> dict[str, str]:
    """Return the interpreters of sandboxes by version: `3.11` to its path. Blocking."""
    found: dict[str, str] = {}
    for place in places:
        try:
            names = os.listdir(place)
        except OSError:
            continue
        for name in names:
            match = _INTERPRETER.fullmatch(name)
            if match and os.access(f"{place}/{name}", os.X_OK):
                found.setdefault(match[1], f"{place}/{name}")
    return found


def interpreter_of(version: str | None) -> tuple[str, str]:
    """Return the version and the path of the interpreter to use; an error lists the available ones. Blocking."""
    found = interpreters()
    if version is None:
        match = _INTERPRETER.fullmatch(os.path.basename(os.path.realpath("/usr/bin/python3")))
        version = match[1] if match else None
        if version is None or version not in found:
            raise PlatformError("the sandboxes of this host have no python3", field="python")
    if version not in found:
        raise InvalidRequest(
            f"there is no Python {version} here", field="python", hint=f"there is: {', '.join(sorted(found)) or 'none'}"
        )
    return version, found[version]


def wanted(
    requirements: tuple[str, ...],
    python: tuple[str, str],
    policy: Policy,
    host: Sequence[PackageIndex],
    index: str | None,
) -> ResolvableRequest:
    """Return a request under a policy; `host` are the indexes if the policy names none. Refuses an unknown index."""
    from carrel.egress.outbound.rules import EgressRules

    rules = EgressRules(policy, indexes=host).packages
    if not rules.enabled:
        raise InvalidRequest("this agent may not install packages", field="requirements")
    places = [(each.name, each.url) for each in (host if rules.registries is None else rules.registries)]
    if index is not None:
        if rules.registries is None and len(host) > 1:
            raise InvalidRequest(
                "the policy names no registries to choose from", field="index", hint="leave the index out"
            )
        if index not in {name for name, _ in places}:
            raise InvalidRequest(
                f"the policy has no registry '{index[:100]}'",
                field="index",
                hint=f"there is: {', '.join(name for name, _ in places) or 'none'}",
            )
        places = [each for each in places if each[0] == index]
    said = [sorted(rules.blocked), rules.allowed and sorted(rules.allowed), rules.max_install_bytes]
    return ResolvableRequest(requirements, *python, tuple(url for _, url in places), json.dumps(said), index)


def lock_of(text: str) -> Lock:
    """Normalize the lock that a resolver wrote. It comes from inside a sandbox: only pinned packages with hashes are
    accepted.
    """
    if len(text) > MOST_LOCK:
        raise InvalidRequest("the requirements need too many packages", field="requirements", hint="ask for less")
    from packaging.utils import canonicalize_name

    entries: list[tuple[str, str, str, list[str]]] = []
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if match := _PINNED.fullmatch(line):
            entries.append((canonicalize_name(match[1]), match[2], match[3] or "", []))
        elif (match := _HASH.fullmatch(line)) and entries:
            entries[-1][3].append(match[1])
        else:
            raise InvalidRequest(
                f"the resolver wrote a line that is not part of a lock: {line[:200]!r}", field="requirements"
            )
    if not entries or not all(each[3] for each in entries):
        raise InvalidRequest("the resolver gave no hashes", field="requirements", hint="choose another index")
    entries.sort()
    lines = [
        " \\\n".join([f"{name}=={version}{marker}", *(f"    --hash={each}" for each in sorted(set(hashes)))])
        for name, version, marker, hashes in entries
    ]
    return Lock("\n".join(lines) + "\n", tuple((name, version) for name, version, _, _ in entries))
