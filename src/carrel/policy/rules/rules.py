"""Rules: how `kind(pattern)` is parsed, what it matches, and an index that finds the rules that could match.

    shell(git status:*)           the words `git status`, then anything
    shell(make)                   `make` without arguments
    shell(rm -rf /*:*)            `*` in a word matches any characters; quotes and backslashes work as in a shell
    file(read:/etc/**)            read, write or delete; `**` matches any depth, `*` and `?` match within one name
    network(outbound:*.a.org:443) a host, every host below a domain, an address or a network; the port is optional
    network(inbound:8000)         a port of the sandbox that is reached from outside; `*` is every port
    mcp(server:tool)              `*` in either matches any characters

A trailing `:*` means "and anything after it". Knows nothing of layers.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from carrel.errors import InvalidRequest
from carrel.policy.rules.addresses import Address, forms, unmapped
from carrel.policy.rules.addresses import read as read_address
from carrel.policy.rules.patterns import PathPattern, Pattern, path_pattern, pattern
from carrel.policy.shell import Argument, Unknown, base
from carrel.policy.verdict import Kind

KINDS: tuple[Kind, ...] = ("shell", "file", "network", "mcp")
OPERATIONS = ("read", "write", "delete")
INBOUND = "inbound"
Match = Literal["no", "maybe", "yes"]
SYSTEM = ("/bin/", "/usr/bin/", "/usr/local/bin/", "/sbin/", "/usr/sbin/", "/usr/local/sbin/")
"""The directories that a program name without a directory refers to."""

_RULE = re.compile(r"\s*([A-Za-z_]+)\s*\((.*)\)\s*", re.DOTALL)
_VARIABLE = re.compile(r"\$\{([^}]*)\}?")


def word_match(word: Pattern, argument: Argument) -> Match:
    """Whether a word of a rule matches an argument."""
    if isinstance(argument, str):
        return "yes" if word.matches(argument) else "no"
    if word.literal is None and word.text == "*":
        return "yes"
    if argument.count == "any":
        return "maybe"
    if word.literal is not None:
        return "maybe" if argument.may_be(word.literal) else "no"
    if word.text == word.prefix + "*" and argument.prefix.startswith(word.prefix):
        return "yes"
    known, mine = argument.prefix, word.prefix
    return "maybe" if known.startswith(mine) or mine.startswith(known) else "no"


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. `source` is its document. If several rules match, the verdict names the one with the lowest `order`."""

    text: str
    kind: Kind
    source: str
    order: int
    words: tuple[Pattern, ...] = ()
    open: bool = False
    """Anything may follow."""
    operation: str = ""
    path: PathPattern | None = None
    host: str = ""
    network: ipaddress.IPv4Network | ipaddress.IPv6Network | None = None
    port: str = ""


def first(rules: Iterable[Rule]) -> Rule | None:
    """Return the rule that a verdict names; None if there are no rules."""
    return min(rules, key=lambda rule: rule.order, default=None)


def parse(text: str, source: str, order: int, variables: Mapping[str, str], place: str) -> Rule:
    """Parse a rule. Raises `InvalidRequest` with the error and its position in the document."""
    try:
        return _parse(text, source, order, variables)
    except ValueError as error:
        raise InvalidRequest(
            f"{source}: {place}: '{text[:200]}': {error}",
            field=place,
            hint="write kind(pattern), for example shell(git status:*)",
        ) from None


def _parse(text: str, source: str, order: int, variables: Mapping[str, str]) -> Rule:
    found = _RULE.fullmatch(text)
    if not found:
        raise ValueError("a rule must have the form kind(pattern)")
    name, body = found[1], found[2].strip()
    kind = next((each for each in KINDS if each == name), None)
    if kind is None:
        near = difflib.get_close_matches(name, KINDS, n=1)
        raise ValueError(f"there is no kind '{name}'" + (f"; did you mean '{near[0]}'?" if near else ""))
    if not body:
        raise ValueError("the pattern is empty")
    if any(char < " " and char != "\t" for char in body):
        raise ValueError("the pattern contains a control character")
    body = _VARIABLE.sub(lambda found: _variable(found[1], variables), body)
    is_open = body.endswith(":*")
    bare = body[:-2] if is_open else body
    if kind == "shell":
        return Rule(text, kind, source, order, words=_words(bare), open=is_open)
    if kind == "file":
        return _file(text, source, order, bare, is_open)
    if kind == "network":
        return _network(text, source, order, body)
    server, colon, tool = bare.partition(":")
    if not server or (colon and not tool):
        raise ValueError("write mcp(server:tool)")
    if not tool or (is_open and not tool.endswith("*")):
        tool += "*"
    return Rule(text, kind, source, order, words=(pattern(server), pattern(tool)), open=is_open)


def _variable(name: str, variables: Mapping[str, str]) -> str:
    if name not in variables:
        raise ValueError(f"there is no variable '{name}'; the variables are {', '.join(sorted(variables))}")
    return re.sub(r"([*?\\'\"\s])", r"\\\1", variables[name])


def _words(text: str) -> tuple[Pattern, ...]:
    words: list[tuple[list[str], list[bool]]] = []
    current: tuple[list[str], list[bool]] | None = None
    quote = ""
    chars = iter(text)
    for char in chars:
        if not quote and char in " \t":
            current = None
            continue
        if current is None:
            current = ([], [])
            words.append(current)
        if quote and char == quote:
            quote = ""
        elif not quote and char in "'\"":
            quote = char
        elif char == "\\" and quote != "'":
            following = next(chars, None)
            if following is None:
                raise ValueError("the pattern ends with a backslash")
            current[0].append(following)
            current[1].append(True)
        else:
            current[0].append(char)
            current[1].append(bool(quote))
    if quote:
        raise ValueError("a quote is not closed")
    return tuple(pattern("".join(chars), quoted) for chars, quoted in words)


def _file(text: str, source: str, order: int, body: str, is_open: bool) -> Rule:
    operation, colon, path = body.partition(":")
    if not colon or operation not in OPERATIONS:
        near = difflib.get_close_matches(operation, OPERATIONS, n=1)
        raise ValueError("write file(read:…), file(write:…) or file(delete:…)" + (f"; '{near[0]}'?" if near else ""))
    if not path.startswith("/"):
        raise ValueError("the path must begin with / or ${WORKSPACE}")
    if re.search(r"(^|/)\.\.?(/|$)", path):
        raise ValueError("the path must not contain . or ..")
    made = path_pattern(f"{path}/**" if is_open else path)
    return Rule(text, "file", source, order, operation=operation, path=made)


def _network(text: str, source: str, order: int, body: str) -> Rule:
    direction, colon, rest = body.partition(":")
    if direction == INBOUND and re.fullmatch(r"\*|[1-9]\d{0,4}", rest):
        return Rule(text, "network", source, order, operation=INBOUND, port="" if rest == "*" else rest)
    if direction != "outbound" or not colon or not rest:
        raise ValueError("write network(outbound:host), network(outbound:host:port) or network(inbound:port)")
    host, port = rest, ""
    if found := re.fullmatch(r"(\[[0-9A-Fa-f:.]+\](?:/\d+)?|[^:\[\]]+):(\*|\d{1,5})", rest):
        host, port = found[1], "" if found[2] == "*" else found[2]
    host = host.replace("[", "").replace("]", "").rstrip(".").lower()
    if re.search(r"[:/]", host) or re.fullmatch(r"[\d.]+", host):
        return Rule(text, "network", source, order, network=ipaddress.ip_network(host, strict=False), port=port)
    if not re.fullmatch(r"\*|(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?", host):
        raise ValueError("the host must be a name, *.name, an address, a network or *")
    return Rule(text, "network", source, order, host=host, port=port)


# --- matching shell rules


def match_words(rule: Rule, arguments: Sequence[Argument], *, deny: bool) -> Match:
    """Whether a rule matches a command. A deny rule matches a program of this name in every directory."""
    first = arguments[0]
    if not rule.words:
        return "yes"
    if not isinstance(first, str):
        return "maybe"
    if "/" in first and "/" not in rule.words[0].text and (deny or first.startswith(SYSTEM)):
        in_system = any(first == folder + base(first) for folder in SYSTEM)
        if deny or in_system:
            arguments = (base(first), *arguments[1:])
    can, cannot = _outcome(rule, arguments)
    if can and not cannot:
        return "yes"
    return "maybe" if can else "no"


_Outcome = tuple[bool, bool]
"""Whether the words can match, and whether they can fail to match."""


def _outcome(rule: Rule, arguments: Sequence[Argument]) -> _Outcome:
    sure = True
    for index, word in enumerate(rule.words):
        if index == len(arguments):
            return False, True
        argument = arguments[index]
        if isinstance(argument, Unknown) and argument.count != "one":
            can, cannot = _of_any_number(rule, arguments, index)
            return can, cannot or not sure
        hit = word_match(word, argument)
        if hit == "no":
            return False, True
        sure = sure and hit == "yes"
    can, cannot = _behind_words(rule, arguments, len(rule.words))
    return can, cannot or not sure


def _behind_words(rule: Rule, arguments: Sequence[Argument], at: int) -> _Outcome:
    """The outcome for the arguments after the last word."""
    if rule.open or at == len(arguments):
        return True, False
    return all(isinstance(each, Unknown) and each.count == "any" for each in arguments[at:]), True


def _of_any_number(rule: Rule, arguments: Sequence[Argument], first: int) -> _Outcome:
    """The outcome from the word and argument number `first` on, where an argument may expand to any number of
    arguments.

    The words are taken from the last to the first. `row[at]` is the outcome of the words taken so far against the
    arguments from `first + at` on.
    """
    count = len(arguments) - first
    if rule.open:
        row: list[_Outcome] = [(True, False)] * (count + 1)
    else:
        row, open_end = [(True, False)], True
        for argument in reversed(arguments[first:]):
            open_end = open_end and isinstance(argument, Unknown) and argument.count == "any"
            row.append((open_end, True))
        row.reverse()
    for word in reversed(rule.words[first:]):
        made: list[_Outcome] = [(False, True)]
        for at in range(count - 1, -1, -1):
            argument = arguments[first + at]
            hit = word_match(word, argument)
            if isinstance(argument, Unknown) and argument.count == "any":
                none, more = made[-1], row[at]
                made.append((none[0] or more[0], hit != "yes" or none[1] or more[1]))
            elif hit == "no":
                made.append((False, True))
            else:
                can, cannot = row[at + 1]
                if isinstance(argument, Unknown) and argument.count == "each":
                    can, cannot = can or row[at][0], cannot or row[at][1]
                made.append((can, cannot or hit == "maybe"))
        made.reverse()
        row = made
    return row[0]


def behind_options(rule: Rule, arguments: Sequence[Argument]) -> bool:
    """Whether a command contains the words of a deny rule with options between them, as in `git -C x push`."""
    place = 1
    for word in rule.words[1:]:
        if place < len(arguments) and word_match(word, arguments[place]) != "no":
            place += 1
            continue
        if place >= len(arguments) or not _is_option(arguments[place]):
            return False
        while place < len(arguments) and word_match(word, arguments[place]) == "no":
            place += 1
        if place == len(arguments):
            return False
        place += 1
    return True


def _is_option(argument: Argument) -> bool:
    if isinstance(argument, str):
        return argument.startswith("-")
    return argument.prefix.startswith("-") or not argument.prefix


# --- the index


@dataclass(slots=True)
class RuleIndex:
    """The allow rules or the deny rules of a policy, indexed by their fixed words, folders, hosts and servers."""

    pairs: dict[tuple[str, str], list[Rule]] = field(default_factory=dict)
    firsts: dict[str, list[Rule]] = field(default_factory=dict)
    seconds: dict[str, list[Rule]] = field(default_factory=dict)
    """The rules of `pairs` by their first word, for commands whose second word is unknown."""
    wild: list[Rule] = field(default_factory=list)
    files: dict[tuple[str, str], list[Rule]] = field(default_factory=dict)
    hosts: dict[str, list[Rule]] = field(default_factory=dict)
    networks: dict[tuple[int, int], dict[int, list[Rule]]] = field(default_factory=dict)
    """By IP version and prefix length, then by prefix."""
    ports: list[Rule] = field(default_factory=list)
    """The rules for ports of the sandbox."""
    servers: dict[str, list[Rule]] = field(default_factory=dict)
    tools: list[Rule] = field(default_factory=list)

    def add(self, rule: Rule) -> None:
        """Add a rule."""
        if rule.kind == "shell":
            self._add_shell(rule)
        elif rule.kind == "file":
            assert rule.path is not None
            self.files.setdefault((rule.operation, rule.path.fixed), []).append(rule)
        elif rule.kind == "network":
            if rule.operation == INBOUND:
                self.ports.append(rule)
            elif rule.network is not None:
                self._add_network(rule, rule.network)
            else:
                self.hosts.setdefault(rule.host, []).append(rule)
        elif rule.words[0].literal is not None:
            self.servers.setdefault(rule.words[0].literal, []).append(rule)
        else:
            self.tools.append(rule)

    def _add_network(self, rule: Rule, network: ipaddress.IPv4Network | ipaddress.IPv6Network) -> None:
        prefix = int(network.network_address) >> (network.max_prefixlen - network.prefixlen)
        same_length = self.networks.setdefault((network.version, network.prefixlen), {})
        same_length.setdefault(prefix, []).append(rule)

    def _add_shell(self, rule: Rule) -> None:
        first = rule.words[0].literal if rule.words else None
        second = rule.words[1].literal if len(rule.words) > 1 else None
        if first is None:
            self.wild.append(rule)
        elif second is None:
            self.firsts.setdefault(first, []).append(rule)
        else:
            self.pairs.setdefault((first, second), []).append(rule)
            self.seconds.setdefault(first, []).append(rule)

    def shell(self, arguments: Sequence[Argument], *, gaps: bool = False) -> Iterable[Rule]:
        """Return the shell rules that may match a command; with `gaps`, also those with options between their words."""
        first = arguments[0]
        if not isinstance(first, str):
            return [
                *self.wild,
                *(rule for rules in (self.firsts, self.seconds) for each in rules.values() for rule in each),
            ]
        found = list(self.wild)
        names = {first, base(first)}
        second = arguments[1] if len(arguments) > 1 else None
        for name in names:
            found += self.firsts.get(name, ())
            if isinstance(second, Unknown) or (gaps and any(isinstance(each, Unknown) for each in arguments)):
                found += self.seconds.get(name, ())
            elif gaps:
                for word in set(arguments[1:]):
                    if isinstance(word, str):
                        found += self.pairs.get((name, word), ())
            elif second is not None:
                found += self.pairs.get((name, second), ())
        return found

    def files_of(self, operation: str) -> Iterable[Rule]:
        """Return every file rule for an operation."""
        return [rule for (name, _), rules in self.files.items() if name == operation for rule in rules]

    def file(self, operation: str, path: str) -> Iterable[Rule]:
        """Yield the file rules that match a path."""
        folder = path
        while True:
            for rule in self.files.get((operation, folder), ()):
                if rule.path is not None and rule.path.matches(path):
                    yield rule
            if folder == "/":
                return
            folder = folder.rpartition("/")[0] or "/"

    def network(self, host: str, port: int | None, *, deny: bool) -> Iterable[Rule]:
        """Return the network rules that match a host and port. To a deny rule an unknown port is every port."""
        name = host.strip("[]").rstrip(".").lower()
        candidates = [*self.hosts.get("*", ()), *self.hosts.get(name, ())]
        address = read_address(name)
        if address is not None:
            # An allow rule must match the address itself; a deny rule may also match an address inside it.
            for each in forms(address) if deny else (unmapped(address),):
                candidates += self.addresses(each, port, deny=deny)
        parent = name if address is None or deny else ""
        while "." in parent:
            parent = parent.partition(".")[2]
            candidates += self.hosts.get(f"*.{parent}", ())
        return _of_port(candidates, port, deny=deny)

    def addresses(self, address: Address, port: int | None, *, deny: bool) -> Iterable[Rule]:
        """Return the rules whose network contains an address."""
        found: list[Rule] = []
        for (version, length), prefixes in self.networks.items():
            if version == address.version:
                found += prefixes.get(int(address) >> (address.max_prefixlen - length), ())
        return _of_port(found, port, deny=deny)

    def inbound(self, port: int) -> Iterable[Rule]:
        """Return the rules for a port of the sandbox."""
        return _of_port(self.ports, port, deny=False)

    def mcp(self, server: str, tool: str) -> Iterable[Rule]:
        """Yield the rules that match a tool of a server."""
        for rule in (*self.servers.get(server, ()), *self.tools):
            if rule.words[0].matches(server) and rule.words[1].matches(tool):
                yield rule


def _of_port(rules: Iterable[Rule], port: int | None, *, deny: bool) -> Iterable[Rule]:
    return (rule for rule in rules if not rule.port or (deny if port is None else rule.port == str(port)))
