"""The Docker provider: sandboxes as containers of a Docker daemon, or of podman's compatible service."""

from __future__ import annotations

from carrel.providers.docker.provider import DockerProvider

__all__ = ["DockerProvider"]
