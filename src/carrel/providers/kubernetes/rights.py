"""The rights that a server needs in a cluster: one table for the program, the chart and the documentation. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from carrel.providers.kubernetes.manifests import CORE, EXTENSIONS

Need = Literal["always", "agent-sandbox", "warm pools", "growing volume"]


@dataclass(frozen=True)
class Right:
    """What may be done with some kinds of objects, in the namespace of the sandboxes or, with a `name`, to one object
    in the namespace `default`.
    """

    group: str
    resources: tuple[str, ...]
    verbs: tuple[str, ...]
    need: Need = "always"
    name: str = ""


RIGHTS = (
    Right("", ("pods",), ("get", "list", "watch", "create", "delete")),
    Right("", ("secrets",), ("create", "patch")),
    Right("networking.k8s.io", ("networkpolicies",), ("create", "patch")),
    Right(CORE, ("sandboxes",), ("list", "create", "delete"), "agent-sandbox"),
    Right(EXTENSIONS, ("sandboxtemplates", "sandboxwarmpools"), ("list", "create", "patch", "delete"), "warm pools"),
    Right(EXTENSIONS, ("sandboxclaims",), ("get", "list", "watch", "create", "delete"), "warm pools"),
    Right("", ("persistentvolumeclaims",), ("get", "patch"), "growing volume"),
    Right("", ("services",), ("get",), name="kubernetes"),
)


def rules(rights: tuple[Right, ...]) -> list[dict[str, list[str]]]:
    """Return rights as the rules of a Role."""
    return [
        {"apiGroups": [each.group], "resources": list(each.resources), "verbs": list(each.verbs)}
        | ({"resourceNames": [each.name]} if each.name else {})
        for each in rights
    ]
