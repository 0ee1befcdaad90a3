"""The name of an image: registry, repository, tag and digest, as Docker writes them. Pure: no I/O."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from carrel.errors import InvalidRequest

DEFAULT_REGISTRY = "docker.io"
LONGEST_REFERENCE = 512
_LONGEST_REPOSITORY = 255
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_PART = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*")
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_REGISTRY = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9a-fA-F:.]{{2,45}}\])(?::[0-9]{{1,5}})?")
_HINT = "write [registry/]repository[:tag][@sha256:digest], for example python:3.13-slim"


@dataclass(frozen=True)
class ImageReference:
    """Where an image is, and which one of that place. With a digest, exactly that image and no other."""

    registry: str
    repository: str
    tag: str | None = None
    digest: str | None = None

    @classmethod
    def parse(cls, text: str, default_registry: str = DEFAULT_REGISTRY) -> ImageReference:
        """Read a reference. Without tag and digest, the tag is `latest`. Raises `InvalidRequest`."""
        shown = text[:100]
        if len(text) > LONGEST_REFERENCE:
            raise _invalid(shown, f"it has more than {LONGEST_REFERENCE} characters")
        rest, at, digest = text.partition("@")
        if at and not is_digest(digest):
            raise _invalid(shown, "what follows @ is not sha256: and 64 hexadecimal digits")
        folders, slash, last = rest.rpartition("/")
        last, colon, tag = last.partition(":")
        if colon and not _TAG.fullmatch(tag):
            raise _invalid(shown, "the tag is not valid")
        registry, repository = default_registry, folders + slash + last
        first, slash, path = repository.partition("/")
        if slash and (first == "localhost" or not first.islower() or re.search(r"[.:\[]", first)):
            registry, repository = first, path
        registry = registry.lower()
        if not is_registry(registry):
            raise _invalid(shown, "the registry is not a host name with an optional port")
        if registry in {"index.docker.io", "registry-1.docker.io"}:
            registry = DEFAULT_REGISTRY
        if registry == DEFAULT_REGISTRY and "/" not in repository:
            repository = f"library/{repository}"
        if len(repository) > _LONGEST_REPOSITORY or not all(map(_PART.fullmatch, repository.split("/"))):
            raise _invalid(shown, "the repository is not valid: lower-case letters, digits and single separators")
        return cls(registry, repository, tag if colon else None if at else "latest", digest if at else None)

    def __str__(self) -> str:
        """The whole reference, which `parse` reads back as this value."""
        tag = f":{self.tag}" if self.tag else ""
        digest = f"@{self.digest}" if self.digest else ""
        return f"{self.registry}/{self.repository}{tag}{digest}"

    @property
    def familiar(self) -> str:
        """The reference as people write it: without the default registry and its `library/`."""
        return str(self).removeprefix(f"{DEFAULT_REGISTRY}/").removeprefix("library/")

    def pinned(self, digest: str) -> ImageReference:
        """Return the same image by its digest, without the tag, which may move."""
        return replace(self, tag=None, digest=digest)


def is_digest(text: str) -> bool:
    """Return whether a text is a SHA-256 digest as OCI writes it. Other algorithms are not used by registries."""
    return _DIGEST.fullmatch(text) is not None


def is_registry(text: str) -> bool:
    """Return whether a text is the host of a registry, with or without a port."""
    port = re.search(r":([0-9]+)$", text)
    return _REGISTRY.fullmatch(text) is not None and (port is None or 0 < int(port[1]) <= 65_535)


def _invalid(shown: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{shown!r} is not a reference of an image: {why}", field="image", hint=_HINT)
