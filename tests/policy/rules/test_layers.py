from __future__ import annotations

import pytest
from tests.support.policies import policy, settings, sources

from carrel.errors import InvalidRequest
from carrel.policy.rules.decide import decide_shell
from carrel.policy.rules.layers import DEFAULTS, Layer, Policy


def test_a_lower_layer_tightens_and_never_loosens() -> None:
    template = Layer("template", settings(["shell(git:*)"], ["shell(curl:*)"]))
    context = Layer("context", settings(["shell(curl:*)", "shell(make:*)"], ["shell(git push:*)"]))
    made = Policy.of([template, context], context_id="c")
    verdicts = {text: decide_shell(made, text) for text in ("git log", "git push", "curl x", "make", "ls")}
    assert {text: each.verdict for text, each in verdicts.items()} == {
        "git log": "allow", "git push": "deny", "curl x": "deny", "make": "allow", "ls": "ask",
    }  # fmt: skip
    assert verdicts["git push"].source == "context"
    assert verdicts["curl x"].source == "template"
    assert [(each.source, each.rule) for each in made.warnings if "has no effect" in each.text] == [
        ("context", "shell(curl:*)")
    ]


def test_no_settings_allow_everything() -> None:
    assert decide_shell(Policy.open(), "rm -rf / ((").verdict == "allow"
    assert Policy.of([]) == Policy.open()
    assert not Policy.of([Layer("a", None, sources())]).governed


def test_the_words_of_the_shell_are_allowed_unless_denied() -> None:
    assert decide_shell(policy(), "cd x && [ -f y ] && echo a; set -e; export X=1").verdict == "allow"
    assert decide_shell(policy(deny=["shell(cd:*)"]), "cd x").verdict == "deny"
    assert all(rule.startswith("shell(") for rule in DEFAULTS.permissions.allow)


@pytest.mark.parametrize(
    "rule", ["shell(*)", "shell(*:*)", "shell(:*)", "shell(* x)", "network(outbound:*)", "network(outbound:*.com)", "network(outbound:0.0.0.0/0)", "file(write:/**)", "file(delete:/:*)"]
)  # fmt: skip
def test_allowing_everything_is_refused_with_the_reason(rule: str) -> None:
    with pytest.raises(InvalidRequest, match="too broad") as caught:
        policy([rule])
    assert caught.value.field == "permissions.allow[0]"
    policy(deny=[rule])


@pytest.mark.parametrize(
    ("allow", "deny", "words"),
    [("shell(bash:*)", [], "runs others"), ("shell(env:*)", [], "runs others"), ("shell(python3.11:*)", [], "does not decide"),
     ("shell(git *)", [], "exactly one word"), ("shell(curl x:*)", ["shell(curl:*)"], "has no effect"), ("file(write:/etc/x)", ["file(write:/etc/**)"], "has no effect"),
     ("network(outbound:a.example)", ["network(outbound:*)"], "has no effect"), ("mcp(a:b)", ["mcp(a:*)"], "has no effect"), ("file(read:/**)", [], "every file"),
     ("mcp(*:*)", [], "every tool")],
)  # fmt: skip
def test_rules_that_mislead_are_warned_about(allow: str, deny: list[str], words: str) -> None:
    assert any(words in each.text for each in policy([allow], deny).warnings)


def test_rules_that_mean_what_they_say_are_not() -> None:
    made = policy(
        ["shell(git status:*)", "shell(grep:*)", "file(read:${WORKSPACE}/**)"],
        ["shell(git push:*)", "file(read:/etc/**)"],
    )
    assert made.warnings == ()


def test_duplicate_rule_gives_a_warning() -> None:
    assert any("duplicate" in each.text for each in policy(["shell(a)", "shell(a)"]).warnings)


def test_variables_need_values() -> None:
    with pytest.raises(InvalidRequest, match="uses WORKSPACE"):
        Policy.of([Layer("s", settings(["file(read:${WORKSPACE}/**)"]))])
    assert Policy.of([Layer("s", settings())], context_id="x").workspace == "/workspace/x"
    assert Policy.of([Layer("s", settings())], context_id="x", workspace="/w").workspace == "/w"


def test_an_odd_context_is_no_pattern() -> None:
    made = Policy.of([Layer("s", settings(["file(read:${WORKSPACE}/**)"]))], context_id="*")
    from carrel.policy.rules.decide import decide_file

    assert decide_file(made, "read", "/workspace/*/x").verdict == "allow"
    assert decide_file(made, "read", "/workspace/other/x").verdict == "ask"


def test_limits_of_all_layers() -> None:
    one = Layer("a", None, sources(runtime={"max_memory_mb": 10}))
    two = Layer("b", None, sources(runtime={"max_memory_mb": 20}))
    assert Policy.of([one, two]).limits.max_memory_mb == 10


def test_every_rule_knows_its_layer() -> None:
    layers = [
        Layer("x", settings(["shell(a)"], ["shell(b)"])),
        Layer("x"),
        Layer("x", settings(["shell(c)", "shell(d)"])),
    ]
    made = Policy.of(layers, context_id="c")
    owners = {}
    for index in (made.allow, made.deny):
        for name in ("a", "b", "c", "d", "cd"):
            owners |= {rule.words[0].text: made.layer_of(rule) for rule in index.firsts.get(name, ())}
    assert owners["a"] is owners["b"] is layers[0]
    assert owners["c"] is owners["d"] is layers[2]
    assert owners["cd"] is None
