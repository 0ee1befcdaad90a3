from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.errors import InvalidRequest
from carrel.policy.rules.rules import Rule, RuleIndex, behind_options, match_words, parse
from carrel.policy.shell.arguments import Argument, Unknown

ANY, ONE = Unknown("$x", "any"), Unknown('"$x"', "one")
SLASH = Unknown("/*", "each", "/")


def rule(text: str) -> Rule:
    return parse(text, "settings.json", 0, {"WORKSPACE": "/workspace/c", "CONTEXT_ID": "c"}, "permissions.allow[0]")


@pytest.mark.parametrize(
    ("text", "argv", "answer"),
    [("git status:*", ["git", "status"], "yes"), ("git status:*", ["git", "status", "-s"], "yes"), ("git status:*", ["git", "statusx"], "no"),
     ("git status:*", ["git"], "no"), ("git status:*", ["git", "log"], "no"), ("make", ["make"], "yes"), ("make", ["make", "x"], "no"),
     ("git status:*", ["git", ONE], "maybe"), ("git status:*", ["git", ANY], "maybe"), ("git status:*", ["git", "status", ANY], "yes"),
     ("git status:*", ["git", Unknown("x", "one", "stat")], "maybe"), ("git status:*", ["git", Unknown("x", "one", "log")], "no"),
     ("make", ["make", ANY], "maybe"), ("make", ["make", ONE], "no"), ("rm -rf /:*", ["rm", "-rf", "/"], "yes"), ("rm -rf /:*", ["rm", "-rf", "/etc"], "no"),
     ("rm -rf /*:*", ["rm", "-rf", "/etc"], "yes"), ("rm -rf /*:*", ["rm", "-rf", "etc"], "no"), ("rm -rf /*:*", ["rm", "-rf", SLASH], "yes"),
     ("rm -rf /*:*", ["rm", "-rf", ANY], "maybe"), ("a * b", ["a", "x", "b"], "yes"), ("a * b", ["a", "b"], "no"), ("a * b", ["a", ONE, "b"], "yes"),
     ("echo 'a b':*", ["echo", "a b", "c"], "yes"), ("echo \\*", ["echo", "*"], "yes"), ("echo \\*", ["echo", "x"], "no"), ("py*:*", ["python3", "x"], "yes")],
)  # fmt: skip
def test_what_a_shell_rule_means(text: str, argv: list[Argument], answer: str) -> None:
    assert match_words(rule(f"shell({text})"), argv, deny=False) == answer


def test_a_program_elsewhere_is_denied_by_name_and_not_allowed_by_it() -> None:
    curl = rule("shell(curl:*)")
    for path in ("/usr/bin/curl", "./curl", "/tmp/x/curl"):
        assert match_words(curl, [path], deny=True) == "yes"
    assert match_words(curl, ["/usr/bin/curl"], deny=False) == "yes"
    for path in ("./curl", "/tmp/curl", "/usr/bin/../x/curl", "/usr/bin/x/curl"):
        assert match_words(curl, [path], deny=False) == "no"
    assert match_words(rule("shell(./run.sh:*)"), ["./run.sh", "x"], deny=False) == "yes"


def test_words_behind_options() -> None:
    push = rule("shell(git push:*)")
    assert behind_options(push, ["git", "-C", "x", "push"])
    assert behind_options(push, ["git", ANY, "push"])
    assert not behind_options(push, ["git", "log", "--grep", "push"])
    assert not behind_options(push, ["git", "-C", "x", "pull"])


WORDS = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=4)
KNOWN_OR_NOT = st.lists(st.sampled_from(["a", "b", "c", ONE, ANY, Unknown("b*", "each", "b")]), max_size=4)


@given(
    WORDS,
    st.booleans(),
    KNOWN_OR_NOT,
    st.lists(st.lists(st.sampled_from(["a", "b", "c"]), max_size=2), min_size=4, max_size=4),
)
def test_what_is_said_before_holds_for_everything_that_may_come(
    words: list[str], is_open: bool, rest: list[Argument], values: list[list[str]]
) -> None:
    """Whatever the unknown words turn out to be, `yes` and `no` stay what they were."""
    made = rule(f"shell({' '.join(words)}{':*' if is_open else ''})")
    actual: list[str] = ["a"]
    for argument, chosen in zip(rest, values, strict=False):
        if isinstance(argument, str):
            actual.append(argument)
        elif argument.count == "any":
            actual += chosen
        elif argument.count == "one":
            actual.append((chosen or ["c"])[0])
        else:
            actual += ["b"] * max(1, len(chosen))
    before = match_words(made, ["a", *rest], deny=False)
    after = match_words(made, actual, deny=False)
    assert before in {after, "maybe"}


def found(text: str, **kinds: object) -> bool:
    index = RuleIndex()
    index.add(rule(text))
    if "path" in kinds:
        return bool(list(index.file("read", str(kinds["path"]))))
    if "tool" in kinds:
        server, _, tool = str(kinds["tool"]).partition(":")
        return bool(list(index.mcp(server, tool)))
    host, _, port = str(kinds["host"]).rpartition(" ")
    return bool(list(index.network(host or port, int(port) if host else None, deny=bool(kinds.get("deny")))))


@pytest.mark.parametrize(
    ("text", "path", "answer"),
    [("read:/etc/shadow:*", "/etc/shadow", True), ("read:/etc/shadow:*", "/etc/shadow/x", True), ("read:/etc/shadow:*", "/etc/shadow-", False),
     ("read:/etc/**", "/etc", True), ("read:/etc/**", "/etc/a/b", True), ("read:/etc/**", "/etcx", False), ("read:/a/*/c", "/a/b/c", True),
     ("read:/a/*/c", "/a/b/d/c", False), ("read:${WORKSPACE}/**", "/workspace/c/x", True), ("read:${WORKSPACE}/**", "/workspace/cc/x", False),
     ("read:/**", "/", True), ("write:/etc/**", "/etc/x", False), ("read:/proc/**:*", "/proc/1/mem", True), ("read:/a.?", "/a.b", True)],
)  # fmt: skip
def test_what_a_file_rule_means(text: str, path: str, answer: bool) -> None:
    assert found(f"file({text})", path=path) == answer


@pytest.mark.parametrize(
    ("text", "host", "answer"),
    [("*", "a.example 443", True), ("a.example", "a.example 80", True), ("a.example", "A.Example. 80", True), ("a.example", "b.a.example 80", False),
     ("*.a.example", "b.a.example 80", True), ("*.a.example", "c.b.a.example 80", True), ("*.a.example", "a.example 80", False),
     ("a.example:443", "a.example 443", True), ("a.example:443", "a.example 80", False), ("a.example:*", "a.example 80", True), ("10.0.0.0/8", "10.1.2.3 80", True),
     ("10.0.0.0/8", "11.1.2.3 80", False), ("[::1]:80", "::1 80", True), ("10.0.0.0/8", "::ffff:10.1.2.3 80", True), ("*", "10.1.2.3 1", True)],
)  # fmt: skip
def test_what_a_network_rule_means(text: str, host: str, answer: bool) -> None:
    assert found(f"network(outbound:{text})", host=host) == answer


def test_a_port_that_is_not_known_is_every_port_to_a_deny_rule_only() -> None:
    assert found("network(outbound:a.example:443)", host="a.example", deny=True)
    assert not found("network(outbound:a.example:443)", host="a.example")


@pytest.mark.parametrize(
    ("text", "tool", "answer"),
    [("git:push", "git:push", True), ("git:push", "git:pushx", False), ("git:*", "git:x", True), ("git:get:*", "git:get_x", True), ("*:read", "a:read", True), ("git", "git:x", True),
     ("fs:*_read:*", "fs:a_read", True), ("fs:*_read:*", "fs:a_read_all", True), ("fs:*_read:*", "fs:delete_all", False), ("fs:get_*_safe:*", "fs:get_x", False)],
)  # fmt: skip
def test_what_an_mcp_rule_means(text: str, tool: str, answer: bool) -> None:
    assert found(f"mcp({text})", tool=tool) == answer


@pytest.mark.parametrize(
    ("text", "words"),
    [("shell", "kind(pattern)"), ("shell()", "empty"), ("shel(a)", "did you mean 'shell'"), ("file(reed:/a)", "'read'"), ("file(read:a)", "begin with /"),
     ("file(read:/a/../b)", ". or .."), ("network(inbound:a)", "outbound"), ("network(outbound:a b)", "host must be"), ("network(outbound:300.1.1.1)", "300.1.1.1"),
     ("mcp(:x)", "server:tool"), ("shell('a)", "quote"), ("shell(a\\)", "backslash"), ("file(read:${HOME}/x)", "no variable 'HOME'"), ("shell(a\nb)", "control"),
     ("file(/a)", "file(read"), ("shell(a", "kind(pattern)")],
)  # fmt: skip
def test_a_rule_that_cannot_be_read_is_refused_with_the_reason(text: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        rule(text)
    assert words in caught.value.detail
    assert caught.value.field == "permissions.allow[0]"


@given(st.text(max_size=30))
def test_any_text_is_a_rule_or_refused(text: str) -> None:
    for kind in ("shell", "file", "network", "mcp"):
        try:
            rule(f"{kind}({text})")
        except InvalidRequest as error:
            assert error.hint


@given(st.lists(WORDS, max_size=30), WORDS)
def test_the_index_finds_what_looking_at_all_rules_finds(every: list[list[str]], argv: list[str]) -> None:
    index = RuleIndex()
    rules = [parse(f"shell({' '.join(words)}:*)", "s", order, {}, "p") for order, words in enumerate(every)]
    for each in rules:
        index.add(each)
    hits = {each.order for each in index.shell(argv) if match_words(each, argv, deny=True) == "yes"}
    assert hits == {each.order for each in rules if match_words(each, argv, deny=True) == "yes"}


NETWORKS = st.builds(
    lambda address, length: ipaddress.ip_network((address, min(length, address.max_prefixlen)), strict=False),
    st.ip_addresses(),
    st.integers(1, 128),
)


@given(st.lists(NETWORKS, max_size=20), st.ip_addresses())
def test_networks_are_found_as_if_each_was_looked_at(
    networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network],
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    index = RuleIndex()
    for network in networks:
        index.add(
            rule(
                f"network(outbound:{network})"
                if network.version == 4
                else f"network(outbound:[{network.network_address}]/{network.prefixlen})"
            )
        )
    for each in (address, *(network[0] for network in networks), *(network[-1] for network in networks)):
        found = sorted(str(one.network) for one in index.addresses(each, 443, deny=False))
        assert found == sorted(str(network) for network in networks if each in network)


def test_a_deny_rule_holds_for_every_form_of_an_address() -> None:
    for host in (
        "10.0.0.1",
        "::ffff:10.0.0.1",
        "[64:ff9b::a00:1]",
        "2002:a00:1::",
        "::ffff:0:10.0.0.1",
        "64:ff9b:1::10.0.0.1",
    ):
        assert found("network(outbound:10.0.0.0/8)", host=host, deny=True)
        assert found("network(outbound:10.0.0.0/8)", host=host) == (host in {"10.0.0.1", "::ffff:10.0.0.1"})
    assert not found("network(outbound:*.0.0.1)", host="10.0.0.1")
    assert found("network(outbound:*.0.0.1)", host="10.0.0.1", deny=True)
