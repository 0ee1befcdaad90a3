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
    hidden = [text for rule in policy.deny.files_of("read") if unmaskable(text := _path(rule)) is None]
    readonly = [place for rule in policy.deny.files_of("write") if (place := _place(rule)) is not None]
    writable = () if WORKSPACE in readonly else _writable(policy)
    if writable == ():
        readonly = []
    if not programs and not hidden and not readonly and writable is None:
        return None
    names = [name for name in programs if name is not None][:MOST]
    hidden = list(dict.fromkeys(hidden))[: MOST - len(names)]
    return Masks(
        programs=tuple(names),
        hidden=tuple(hidden),
        writable=writable,
        refusal={name: _words(programs[name], context_id) for name in names},
        readonly=tuple(dict.fromkeys(readonly))[: MOST - len(names) - len(hidden) - len(writable or ())],
    )


def hides(masks: Masks | None) -> Callable[[str], bool] | None:
    """Whether a path of the workspace is one that masks hide or keep as it is, or lies below one; None when none is."""
    patterns = [] if masks is None else [split(text) for text in masks.hidden]
    patterns += [] if masks is None else [tuple(place[1:].split("/")) for place in masks.readonly]
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


def unmasked(policy: Policy) -> list[tuple[Rule, str]]:
    """The deny rules for files that hold at the door and not inside, each with the reason."""
    found = [(rule, why) for rule in policy.deny.files_of("read") if (why := unmaskable(_path(rule))) is not None]
    places = _writable(policy)
    open_places = [WORKSPACE] if places is None else [place.removesuffix("/**") for place in places]
    kept = {_place(rule) for rule in policy.deny.files_of("write")} - {None}
    if WORKSPACE in kept:
        return found
    for rule in (*policy.deny.files_of("write"), *policy.deny.files_of("delete")):
        fixed = "" if rule.path is None else rule.path.fixed
        held = any(fixed == place or fixed.startswith(f"{place}/") for place in kept)
        if not held and any(_meet(fixed, place) for place in open_places):
            found.append(
                (rule, "it lies where they may write; name paths without patterns, or allow writing only elsewhere")
            )
    return found


def _place(rule: Rule) -> str | None:
    """The file or folder of the workspace, or the workspace, that a rule means with all that is in it; None of others.

    One that has a pattern in its path is decided at the door: what it means changes from one moment to the next.
    """
    assert rule.path is not None
    parts = rule.path.parts
    whole = parts[-1:] == (None,)
    if not all(part is not None and part.literal is not None for part in (parts[:-1] if whole else parts)):
        return None
    if whole and rule.path.fixed in {"/", WORKSPACE}:
        return WORKSPACE
    return rule.path.fixed if rule.path.fixed.startswith(f"{WORKSPACE}/") else None


def _meet(path: str, other: str) -> bool:
    """Whether one of two paths is the other, or lies below it."""
    first, second = f"{path.rstrip('/')}/", f"{other.rstrip('/')}/"
    return first.startswith(second) or second.startswith(first)


def _outright(policy: Policy) -> Iterator[Rule]:
    """The rules that deny a program whatever its arguments."""
    for rules in policy.deny.firsts.values():
        for rule in rules:
            if rule.open and len(rule.words) == 1 and rule.words[0].literal:
                yield rule


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
    allowed = list(policy.allow.files_of("write"))
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
