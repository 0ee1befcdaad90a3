"""What of a policy holds inside a sandbox, whatever runs there: programs that cannot be run, files that cannot be read,
places that alone can be written. Pure: makes the value that a provider is given.

The rest of a policy is decided at the door alone. What cannot be masked is named by `unmasked`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

from carrel.control.door import Decision, Operation, refusal
from carrel.isolation.masks import MOST, Part, split, unmaskable
from carrel.isolation.rootfs import WORKSPACE
from carrel.policy.layers import Policy
from carrel.policy.rules import Rule
from carrel.providers import Masks


def masks_of(policy: Policy, context_id: str | None) -> Masks | None:
    """The masks of a policy; None when it has nothing that needs one."""
    programs = {rule.words[0].literal: rule for rule in _outright(policy)}
    hidden = [text for rule in _files(policy, "read") if unmaskable(text := _path(rule)) is None]
    writable = _writable(policy)
    if not programs and not hidden and writable is None:
        return None
    names = [name for name in programs if name is not None][:MOST]
    return Masks(
        programs=tuple(names),
        hidden=tuple(dict.fromkeys(hidden))[: MOST - len(names)],
        writable=writable,
        refusal={name: _words(programs[name], context_id) for name in names},
    )


def hides(masks: Masks | None) -> Callable[[str], bool] | None:
    """Whether a path of the workspace is one that masks hide, or lies below one; None when they hide none there."""
    patterns = [] if masks is None else [split(text) for text in masks.hidden]
    patterns = [parts for parts in patterns if not isinstance(parts[0], str) or parts[0] == WORKSPACE[1:]]
    if not patterns:
        return None
    return lambda path: any(_matches(parts, [WORKSPACE[1:], *path.split("/")]) for parts in patterns)


def _matches(parts: tuple[Part, ...], names: list[str]) -> bool:
    """Whether a pattern means a path or something above it."""
    states = {0}
    for name in names:
        states |= {at + 1 for at in states if parts[at] is None}
        if len(parts) in states:
            return True
        ahead: set[int] = set()
        for at in states:
            part = parts[at]
            if part is None:
                ahead.add(at)
            elif part == name if isinstance(part, str) else part(name):
                ahead.add(at + 1)
        if len(parts) in ahead:
            return True
        states = ahead
    return False


def unmasked(policy: Policy) -> list[str]:
    """The rules that hold at the door and not inside."""
    return [rule.text for rule in _files(policy, "read") if unmaskable(_path(rule)) is not None]


def _outright(policy: Policy) -> Iterator[Rule]:
    """The rules that deny a program whatever its arguments."""
    for rules in policy.deny.firsts.values():
        for rule in rules:
            if rule.open and len(rule.words) == 1 and rule.words[0].literal:
                yield rule


def _files(policy: Policy, operation: str) -> Iterator[Rule]:
    for (name, _), rules in policy.deny.files.items():
        if name == operation:
            yield from rules


def _path(rule: Rule) -> str:
    """The path of a file rule, in the way masks write it."""
    assert rule.path is not None
    names = []
    parts = rule.path.parts
    whole = parts[-1:] == (None,) and all(part is not None for part in parts[:-1])
    for part in parts[:-1] if whole else parts:  # all below a folder is the folder
        if part is None:
            names.append("**")
        elif part.literal is not None:
            names.append(re.sub(r"([*?\\])", r"\\\1", part.literal))
        else:
            names.append(part.text)
    return "/" + "/".join(names)


def _writable(policy: Policy) -> tuple[str, ...] | None:
    """The only places of the workspace that may be written; None when all of it may, or no rule says anything."""
    allowed = [rule for (name, _), rules in policy.allow.files.items() if name == "write" for rule in rules]
    if not allowed:
        return None
    places: list[str] = []
    for rule in allowed:
        assert rule.path is not None
        fixed = rule.path.fixed
        if fixed in {"/", WORKSPACE}:
            return None
        if fixed.startswith(WORKSPACE + "/") and not set("*?") & set(fixed):
            # A pattern in the middle of a path is decided at the door; here the folder before it has to do.
            exact = all(part is not None and part.literal is not None for part in rule.path.parts)
            places.append(fixed if exact else f"{fixed}/**")
    return tuple(dict.fromkeys(places))


def _words(rule: Rule, context_id: str | None) -> str:
    name = rule.words[0].literal or ""
    operation = Operation("shell", "run_command", {"command": name}, "", "", context_id)
    reason = f"{name} is denied for this agent"
    problem = refusal(operation, Decision("deny", rule.text, rule.source, reason)).problem()
    kept = ("code", "operation", "rule", "source", "reason", "retry", "approval", "hint")
    return json.dumps({key: problem.get(key) for key in kept})
