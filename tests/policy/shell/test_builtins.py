from __future__ import annotations

import pytest

from carrel.policy.shell.builtins import BUILTINS, SHELL_WORDS
from carrel.policy.shell.finder import find


@pytest.mark.parametrize(
    "text",
    ["eval $x", "trap $x EXIT", "alias a=b", "shopt -s extglob", "set -k", "set -o posix", "hash -p x y", "jobs -x a", 'read "$x"',
     'printf -v "$x" y', "mapfile -C a", "let 'x[$(b)]'", "unset $x", "declare -n x=y", 'declare "$x"', "export -f f", "[ -v $x ] && x=$(a)",
     "enable -n a", "compgen -W x", "bind x", "fc -s", "complete -C a b", 'getopts ab "$x"', 'wait -p "$x"', "set $x", "printf $x y"],
)  # fmt: skip
def test_what_changes_the_rest_asks(text: str) -> None:
    assert find(text).asks


@pytest.mark.parametrize(
    "text",
    ["eval 'a'", "trap a EXIT", "alias", "shopt", "shopt -s globstar", "set -euo pipefail", "set -- a b", "hash -r", "jobs", "read -r x y",
     "read -p '? ' -t 5 x", "printf -v x y", "printf '%s' \"$x\"", "mapfile -t x", "let x=1", "unset x", "declare -a x=(1)", "export X=1",
     '[ "$x" = y ]', "test -f x", "wait", "getopts ab x", "local x=1", "trap - INT", "trap"],
)  # fmt: skip
def test_what_changes_nothing_does_not(text: str) -> None:
    assert not find(text).asks


def test_every_builtin_is_a_word_of_the_shell() -> None:
    assert set(BUILTINS) <= SHELL_WORDS
    for name in ("eval", "cd", "source"):
        assert find(f"{name}() {{ a; }}").asks
