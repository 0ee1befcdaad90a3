"""Combines the layers of a policy: the built-in defaults, the template's and the context's.

A deny rule of any layer counts: a lower layer may allow what a higher one leaves open, never what it denies. Rules that
allow everything are refused. Rules that do less or more than they seem to give a warning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from carrel.errors import InvalidRequest
from carrel.models import PolicyWarning
from carrel.policy.documents.settings import Permissions, SettingsDocument
from carrel.policy.documents.sources import LowestLimits, Sources, limits
from carrel.policy.rules.rules import Rule, RuleIndex, match_words, parse
from carrel.policy.shell import RUNNERS, Argument, Unknown

BUILT_IN = "built-in"
_OWN_WORDS = (
    ": true false cd pwd pushd popd dirs exit return break continue shift test [ set unset export local declare "
    "typeset readonly read wait let getopts trap eval type hash shopt command builtin exec jobs times mapfile "
    "readarray echo printf umask"
)
DEFAULTS = SettingsDocument(permissions=Permissions(allow=tuple(f"shell({word}:*)" for word in _OWN_WORDS.split())))
"""Builtins of the shell: they start no program, and what `eval`, `exec` and `command` run is decided separately."""

INTERPRETERS = frozenset(
    {"python", "python2", "python3", "node", "perl", "ruby", "php", "lua", "awk", "gawk", "mawk", "java", "Rscript"}
    | {"deno", "bun", "tclsh", "expect", "make", "ssh", "vi", "vim", "emacs", "gdb", "docker", "podman", "kubectl"}
    | {"crontab"}
)
"""Programs that can run anything."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer. `name` and `sources_name` are the sources that verdicts name."""

    name: str
    settings: SettingsDocument | None = None
    sources: Sources | None = None
    sources_name: str = "sources.json"


@dataclass(frozen=True, slots=True)
class Policy:
    """Layers with their rules parsed and indexed. Make one with `Policy.of` or `Policy.open`; it never changes."""

    layers: tuple[Layer, ...] = ()
    allow: RuleIndex = field(default_factory=RuleIndex)
    deny: RuleIndex = field(default_factory=RuleIndex)
    warnings: tuple[PolicyWarning, ...] = ()
    workspace: str | None = None
    governed: bool = False
    """Whether any layer has settings. Without settings, everything is allowed that the sources do not refuse."""
    size: int = 0
    """The number of rules."""
    also_at: str | None = None
    """A second path of the workspace. A rule about one of the two paths is also about the other."""

    @classmethod
    def open(cls) -> Policy:
        """The policy of a server without policy documents: everything is allowed."""
        return cls()

    @classmethod
    def of(cls, layers: Sequence[Layer], *, context_id: str | None = None, workspace: str | None = None) -> Policy:
        """Build a policy from layers, the highest first.

        `workspace` is the path of the workspace, by default the one in the settings. Raises `InvalidRequest`, with the
        position of the rule, for a rule that cannot be parsed or that allows everything.
        """
        governed = any(layer.settings for layer in layers)
        every = (Layer(BUILT_IN, DEFAULTS), *layers) if governed else tuple(layers)
        place = workspace or _workspace(layers, context_id)
        variables = {"CONTEXT_ID": context_id or "", "WORKSPACE": place or ""}
        allow, deny = RuleIndex(), RuleIndex()
        allowed: list[Rule] = []
        denied: list[Rule] = []
        for layer in every:
            if layer.settings is None:
                continue
            for name, texts in zip(("deny", "allow"), _lists(layer.settings), strict=True):
                for number, text in enumerate(texts):
                    at, order = f"permissions.{name}[{number}]", len(allowed) + len(denied)
                    rule = parse(text, layer.name, order, _known(text, variables, layer.name, at), at)
                    if layer.name != BUILT_IN and name == "allow":
                        _refuse_too_broad(rule, at)
                    (allow if name == "allow" else deny).add(rule)
                    (allowed if name == "allow" else denied).append(rule)
        warnings = tuple(_warnings(denied, allowed, deny))
        return cls(tuple(layers), allow, deny, warnings, place, governed, len(allowed) + len(denied))

    def spellings(self, path: str) -> tuple[str, ...]:
        """Return the absolute paths that name the same file as this one."""
        first, second = self.workspace, self.also_at
        if first is not None and second is not None and first != second:
            for here, there in ((first, second), (second, first)):
                if path == here or path.startswith(f"{here}/"):
                    return path, there + path[len(here) :]
        return (path,)

    @property
    def sources(self) -> tuple[tuple[str, Sources], ...]:
        """The sources of all layers, each with the name that verdicts give it."""
        return tuple((layer.sources_name, layer.sources) for layer in self.layers if layer.sources is not None)

    def layer_of(self, rule: Rule) -> Layer | None:
        """Return the layer that contains a rule; None for a built-in rule."""
        end = sum(map(len, _lists(DEFAULTS)))
        for layer in self.layers:
            if rule.order < end:
                break
            end += 0 if layer.settings is None else sum(map(len, _lists(layer.settings)))
            if rule.order < end:
                return layer
        return None

    @property
    def limits(self) -> LowestLimits:
        """The smallest limits of all layers."""
        return limits(*(each for _, each in self.sources))


def _lists(settings: SettingsDocument) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return settings.permissions.deny, settings.permissions.allow


def _workspace(layers: Iterable[Layer], context_id: str | None) -> str | None:
    given = [layer.settings for layer in layers if layer.settings is not None]
    if not given:
        return None
    written = next((each for each in reversed(given) if "context_workspace" in each.model_fields_set), given[-1])
    path = written.context_workspace
    if "${CONTEXT_ID}" in path:
        if not context_id:
            return None
        path = path.replace("${CONTEXT_ID}", context_id)
    return path.rstrip("/") or "/"


def _known(text: str, variables: Mapping[str, str], source: str, place: str) -> Mapping[str, str]:
    """Return the variables; refuse a rule that uses one without a value."""
    for name, value in variables.items():
        if f"${{{name}}}" in text and not value:
            raise InvalidRequest(
                f"{source}: {place}: '{text[:200]}' uses {name}, which has no value here",
                field=place,
                hint="give a context, or the path of its workspace",
            )
    return variables


def _refuse_too_broad(rule: Rule, place: str) -> None:
    reason = None
    if rule.kind == "shell" and (not rule.words or (rule.words[0].literal is None and not rule.words[0].prefix)):
        reason = "it allows every command; name the commands, or leave the settings out to allow everything"
    elif rule.kind == "network" and rule.host == "*":
        reason = "it allows every host; name the hosts"
    elif rule.kind == "network" and rule.host.startswith("*.") and "." not in rule.host[2:]:
        reason = "it allows a whole top-level domain; name the hosts"
    elif rule.kind == "network" and rule.network is not None and rule.network.prefixlen == 0:
        reason = "it allows every address; name the networks"
    elif rule.kind == "file" and rule.operation != "read" and rule.path and rule.path.parts == (None,):
        reason = (
            f"it allows every file to be {'deleted' if rule.operation == 'delete' else 'written'}; name the folders"
        )
    if reason:
        raise InvalidRequest(
            f"{rule.source}: {place}: '{rule.text[:200]}' is too broad: {reason}", field=place, hint=reason
        )


def _warning(rule: Rule, text: str) -> PolicyWarning:
    return PolicyWarning(source=rule.source, rule=rule.text, text=text)


def _warnings(denied: Iterable[Rule], allowed: Iterable[Rule], deny: RuleIndex) -> Iterator[PolicyWarning]:
    seen: dict[tuple[bool, str], Rule] = {}
    for allows, rule in (*((False, each) for each in denied), *((True, each) for each in allowed)):
        if rule.source == BUILT_IN:
            continue
        if (earlier := seen.setdefault((allows, rule.text), rule)) is not rule:
            yield _warning(rule, f"this rule is a duplicate; {earlier.source} has it already")
        elif allows:
            yield from _of_allowed(rule, deny)
        elif rule.kind == "shell" and not rule.words:
            yield _warning(rule, "this rule denies every command")
        if rule.kind == "shell" and rule.words and not rule.open and _ends_in_star(rule):
            yield _warning(rule, "the last * matches exactly one word; write :* for any number of words")


def _ends_in_star(rule: Rule) -> bool:
    return len(rule.words) > 1 and rule.words[-1].literal is None and rule.words[-1].text == "*"


def _of_allowed(rule: Rule, deny: RuleIndex) -> Iterable[PolicyWarning]:
    void = _covered_by(rule, deny)
    if void is not None:
        yield _warning(rule, f"this rule has no effect: {void.source} denies {void.text}")
        return
    if rule.kind == "shell" and rule.open and len(rule.words) == 1:
        name = rule.words[0].text.rstrip("0123456789.") or rule.words[0].text
        if rule.words[0].text in RUNNERS:
            yield _warning(
                rule, "this program runs others; the policy decides about those in its arguments, not in scripts"
            )
        elif name in INTERPRETERS or rule.words[0].text in INTERPRETERS:
            yield _warning(
                rule, "this program can run anything; the policy does not decide about the code that it runs"
            )
    if rule.kind == "file" and rule.operation == "read" and rule.path and rule.path.parts == (None,):
        yield _warning(rule, "this rule allows every file to be read")
    if rule.kind == "mcp" and all(word.text == "*" for word in rule.words):
        yield _warning(rule, "this rule allows every tool of every server")


def _covered_by(rule: Rule, deny: RuleIndex) -> Rule | None:
    """Return a deny rule that covers everything that this allow rule allows."""
    if rule.kind == "shell":
        arguments: list[Argument] = [
            word.literal if word.literal is not None else Unknown(word.text, "one", word.prefix) for word in rule.words
        ]
        if rule.open:
            arguments.append(Unknown("…", "any"))
        found = (each for each in deny.shell(arguments) if match_words(each, arguments, deny=True) == "yes")
        return next(iter(found), None)
    if rule.kind == "network" and rule.host:
        return next((each for each in deny.hosts.get("*", ()) if not each.port or each.port == rule.port), None)
    if rule.kind == "file" and rule.path is not None:
        below = [
            each for each in deny.file(rule.operation, rule.path.fixed) if each.path and each.path.parts[-1:] == (None,)
        ]
        return next(
            (each for each in below if all(part is not None for part in (each.path or rule.path).parts[:-1])), None
        )
    if rule.kind == "mcp" and rule.words[0].literal is not None and rule.words[1].literal is not None:
        return next(iter(deny.mcp(rule.words[0].literal, rule.words[1].literal)), None)
    return None
