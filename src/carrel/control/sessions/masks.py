"""Masks: the part of a policy that is enforced inside a sandbox, whatever runs there: programs that cannot be run,
files that cannot be read, the only places that can be written. Pure: computes the value that a provider gets.

The rest of a policy is decided by admission alone. `unmasked` lists the rules that are not masked, or only in part.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from carrel.control.operations.call import refusal
from carrel.errors import InvalidRequest, Unsupported
from carrel.isolation.inside import WORKSPACE
from carrel.isolation.masks import MOST, Part, check_program, is_possible, split, unmaskable
from carrel.policy.rules.layers import Policy
from carrel.policy.rules.patterns import Pattern
from carrel.policy.rules.rules import Rule
from carrel.policy.verdict import Verdict
from carrel.providers import Masks

_NOT_HELD = "programs inside are not bound by it: {}"
_TOO_MANY = _NOT_HELD.format(f"there are more than {MOST} programs and paths to mask")
_AT_THE_START = (
    "programs inside are bound by it for files that exist when the sandbox starts; "
    "they may change files that they make later until it starts again"
)


def masks_of(policy: Policy, own_path: str | None = None) -> Masks | None:
    """Return the masks of a policy; None when it needs none. `own_path` is the second path of the workspace: rules
    about it are about the workspace.
    """
    programs = {name: rule for name, rule in _outright(policy) if _unmaskable_program(name) is None}
    denied = {
        name: [each for rule in policy.deny.files_of(name) for each in _spelled(rule, own_path)]
        for name in ("read", "write")
    }
    hidden = [text for rule in denied["read"] if unmaskable(text := _path(rule)) is None]
    hidden = [text for text in hidden if is_possible(text)]
    readonly = [place for rule in denied["write"] for place in _inside(rule)]
    writable = () if f"{WORKSPACE}/**" in readonly else _writable(policy, own_path)
    if writable == ():
        readonly = []
    if not programs and not hidden and not readonly and writable is None:
        return None
    left = max(MOST - len(writable or ()), 0)
    fitting: list[tuple[str, ...]] = []
    for wanted in (list(programs), hidden, readonly):
        fitting.append(tuple(dict.fromkeys(wanted))[:left])
        left -= len(fitting[-1])
    names, hiding, keeping = fitting
    refusals = {name: _words(programs[name]) for name in names}
    return Masks(names, hiding, writable, refusals, keeping)


def _spelled(rule: Rule, own_path: str | None) -> list[Rule]:
    """Return a file rule, and what it says about the second path of the workspace as rules about the first."""
    if own_path is None or rule.path is None:
        return [rule]
    return [rule, *(replace(rule, path=path) for path in rule.path.moved(own_path, WORKSPACE))]


def hides(masks: Masks | None) -> Callable[[str], bool] | None:
    """Return a test for paths of the workspace that masks hide or make read-only, with all below them; None without
    masks.
    """
    if masks is None:
        return None
    patterns = [(split(text), True) for text in masks.hidden]
    patterns += [(split(text), _whole(text)) for text in masks.readonly]
    patterns = [each for each in patterns if not isinstance(each[0][0], str) or each[0][0] == WORKSPACE[1:]]
    if not patterns:
        return None
    return lambda path: any(
        _matches(parts, [WORKSPACE[1:], *path.split("/")], all_in_it) for parts, all_in_it in patterns
    )


def _matches(parts: tuple[Part, ...], names: list[str], all_in_it: bool) -> bool:
    """Whether a pattern matches a path or, with `all_in_it`, a directory above it."""
    states = _past(parts, {0})
    for name in names:
        if all_in_it and len(parts) in states:
            return True
        ahead: set[int] = set()
        for at in states:
            part = parts[at] if at < len(parts) else ""
            if part is None:
                ahead.add(at)
            elif part == name if isinstance(part, str) else part(name):
                ahead.add(at + 1)
        states = _past(parts, ahead)
    return len(parts) in states


def _past(parts: tuple[Part, ...], states: set[int]) -> set[int]:
    """Return the states, and those after a `**` that may match no name."""
    return states | {at + 1 for at in states if at < len(parts) and parts[at] is None}


def unmasked(policy: Policy) -> list[tuple[Rule, str]]:
    """Return the deny rules that masks do not enforce, or only in part; each with the reason."""
    masks = masks_of(policy) or Masks()
    masked = {*masks.programs, *masks.hidden, *masks.readonly}
    found: list[tuple[Rule, str]] = []
    rules = [(rule, name, _unmaskable_program(name)) for name, rule in _outright(policy)]
    paths = [(rule, _path(rule)) for rule in policy.deny.files_of("read")]
    rules += [(rule, path, unmaskable(path)) for rule, path in paths if is_possible(path)]
    for rule, text, why in rules:
        if why is not None:
            found.append((rule, _NOT_HELD.format(why)))
        elif text not in masked:
            found.append((rule, _TOO_MANY))
    open_places = [WORKSPACE] if masks.writable is None else [place.removesuffix("/**") for place in masks.writable]
    kept = [folder for place in masks.readonly if (folder := _folder(place)) is not None]
    for rule in (*policy.deny.files_of("write"), *policy.deny.files_of("delete")):
        assert rule.path is not None
        fixed, places = rule.path.fixed, _inside(rule)
        if not places or not any(_meet(fixed, place) for place in open_places):
            continue
        if any(fixed == place or fixed.startswith(f"{place}/") for place in kept):
            found.append((rule, _AT_THE_START))
        elif rule.operation == "delete":
            found.append((rule, _NOT_HELD.format("who may write can delete; deny to write it too")))
        else:
            found.append((rule, _AT_THE_START if masked.issuperset(places) else _TOO_MANY))
    return found


def _inside(rule: Rule) -> list[str]:
    """Return the patterns of a write or delete rule inside the workspace, in the form of masks.

    A deny rule for writing a folder includes everything in it.
    """
    assert rule.path is not None
    if not rule.path.parts:
        return []
    first, *rest = rule.path.parts
    rests = []
    if first is None:
        rests.append((None, *rest))
        first, *rest = rest or (None,)
    if first is not None and first.matches(WORKSPACE[1:]):
        rests.append(tuple(rest))
    named = rule.operation == "write" and (last := rule.path.parts[-1]) is not None and last.literal is not None
    places = [f"{WORKSPACE}/{_written(rest)}" + ("/**" if named else "") for rest in rests if rest]
    return [place for place in places if is_possible(place)]


def _whole(place: str) -> bool:
    """Whether a pattern includes everything below a folder."""
    return place.endswith("/**")


def _folder(place: str) -> str | None:
    """Return the folder of a pattern that includes everything below it; None when the folder itself is a pattern."""
    *names, last = split(place)
    fixed = [name for name in names if isinstance(name, str)]
    return "/" + "/".join(fixed) if last is None and len(fixed) == len(names) else None


def _meet(path: str, other: str) -> bool:
    """Whether two paths are equal or one is below the other."""
    first, second = f"{path.rstrip('/')}/", f"{other.rstrip('/')}/"
    return first.startswith(second) or second.startswith(first)


def _outright(policy: Policy) -> Iterator[tuple[str, Rule]]:
    """Yield the programs that are denied with any arguments, and the rules that deny them."""
    for rules in policy.deny.firsts.values():
        for rule in rules:
            if rule.open and len(rule.words) == 1 and (name := rule.words[0].literal):
                yield name, rule


def _unmaskable_program(name: str) -> str | None:
    """Return why a program cannot be masked; None when it can."""
    try:
        check_program(name)
    except (InvalidRequest, Unsupported) as error:
        return error.detail
    return None


def _path(rule: Rule) -> str:
    """Return the path of a file rule in the form of masks."""
    assert rule.path is not None
    parts = rule.path.parts
    whole = parts[-1:] == (None,) and all(part is not None for part in parts[:-1])
    return "/" + _written(parts[:-1] if whole else parts)  # all below a folder is the folder


def _written(parts: Sequence[Pattern | None]) -> str:
    names = []
    for part in parts:
        if part is None:
            names.append("**")
        elif part.literal is not None:
            names.append(_plain(part.literal))
        else:
            names.append("".join("*?"[each] if isinstance(each, int) else _plain(each) for each in part.tokens))
    return "/".join(names)


def _plain(text: str) -> str:
    """Escape text so that it matches only itself."""
    return re.sub(r"([*?\\])", r"\\\1", text)


def _writable(policy: Policy, own_path: str | None) -> tuple[str, ...] | None:
    """Return the only places of the workspace that may be written; None when all of it may, or no rule is about it."""
    allowed = [each for rule in policy.allow.files_of("write") for each in _spelled(rule, own_path)]
    if not allowed:
        return None
    places: list[str] = []
    for rule in allowed:
        assert rule.path is not None
        fixed = rule.path.fixed
        if fixed in {"/", WORKSPACE}:
            return None
        if fixed.startswith(WORKSPACE + "/") and not set("*?") & set(fixed) and is_possible(fixed):
            # Admission decides a pattern in the middle of a path; a mask can only open the folder before it.
            exact = all(part is not None and part.literal is not None for part in rule.path.parts)
            places.append(fixed if exact else f"{fixed}/**")
    return tuple(dict.fromkeys(places))


def _words(rule: Rule) -> str:
    name = rule.words[0].literal or ""
    reason = f"{name} is denied for this agent"
    problem = refusal("shell", Verdict("deny", reason, rule.text, rule.source)).problem()
    kept = ("code", "operation", "rule", "source", "reason", "retry", "approval", "hint")
    return json.dumps({key: problem.get(key) for key in kept})
