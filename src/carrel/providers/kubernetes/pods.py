"""What the status of a pod says about the sandbox in it. Pure: no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from carrel.providers.kubernetes.manifests import CONTAINER

_HOPELESS = {
    "CreateContainerConfigError",
    "CreateContainerError",
    "ErrImageNeverPull",
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "RunContainerError",
}
"""Why a container waits, where waiting longer is of no use."""
_LONGEST = 800


@dataclass(frozen=True)
class StartedPod:
    """A pod whose containers are being started, or run: it has an address."""

    name: str
    uid: str
    node: str
    address: str


def started(pod: dict[str, Any]) -> StartedPod | None:
    """Return a pod that has an address; None for one that has not started yet, or is to end."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    address = status.get("podIP")
    if not address or "deletionTimestamp" in metadata:
        return None
    node = (pod.get("spec") or {}).get("nodeName") or ""
    return StartedPod(str(metadata["name"]), str(metadata["uid"]), str(node), str(address))


def failure(pod: dict[str, Any]) -> str | None:
    """Return why the sandbox of a pod does not run any more, or never will; None if it runs or starts."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    if "deletionTimestamp" in metadata:
        return "its pod is being deleted"
    for each in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        name, state = each.get("name"), each.get("state") or {}
        waiting, ended = state.get("waiting"), state.get("terminated")
        if waiting and waiting.get("reason") in _HOPELESS:
            return _words(f"container {name} waits: {waiting['reason']}", waiting.get("message"))
        if ended and (name == CONTAINER or ended.get("exitCode") != 0):
            why = f"container {name} ended with exit code {ended.get('exitCode')} ({ended.get('reason')})"
            return _words(why, ended.get("message"))
    if status.get("phase") in {"Failed", "Succeeded"}:
        return _words(f"its pod has ended ({status.get('reason') or status['phase']})", status.get("message"))
    return None


def obstacle(pod: dict[str, Any]) -> str:
    """Return what a pod waits for, in the words of the cluster; empty if it says nothing."""
    for each in (pod.get("status") or {}).get("conditions", ()):
        if each.get("status") == "False" and each.get("message"):
            return _words(str(each.get("type")), each["message"])
    return ""


def _words(what: str, message: object) -> str:
    text = " ".join(str(message or "").split())
    return f"{what}: {text}"[:_LONGEST] if text else what
