from __future__ import annotations

import pytest

from carrel.policy.shell.finder import find
from carrel.policy.shell.variables import belongs_to, changes_what_runs, is_evaluated


@pytest.mark.parametrize(
    "name",
    [
        "PATH",
        "CARREL_ENV",
        "LD_PRELOAD",
        "BASH_ENV",
        "BASH_FUNC_ls%%",
        "GIT_SSH_COMMAND",
        "PIP_INDEX_URL",
        "npm_config_registry",
    ],
)
def test_variables_that_change_what_runs(name: str) -> None:
    assert changes_what_runs(name)
    assert find(["env", f"{name}=x", "ls"]).asks


@pytest.mark.parametrize("name", ["FOO", "IFS", "LANG", "DEBUG", "PWD", "CFLAGS"])
def test_variables_that_do_not(name: str) -> None:
    assert not changes_what_runs(name)
    assert not find(f"{name}=x ls").asks


def test_an_interpreter_may_be_told_what_it_could_be_told_anyway() -> None:
    assert belongs_to("PYTHONPATH", "python3.11")
    assert not belongs_to("PYTHONPATH", "ls")
    assert not find("PYTHONPATH=src python -m x").asks
    assert find("PYTHONPATH=src ls; PYTHONPATH=src python x").asks
    assert find("export PYTHONPATH=src; python x").asks


def test_some_evaluate_what_they_get() -> None:
    assert is_evaluated("SECONDS")
    assert find("SECONDS='a[$(b)]'").asks
    assert not find("SECONDS=0").asks


@pytest.mark.parametrize(
    "text",
    ["((PATH=5)); ls", "echo $((PATH++))", "let PATH=5", "unset PATH; ls", "f() { local PATH; ls; }; f", "declare PATH; ls", "read -ra PATH",
     "mapfile PATH < f", "exec {PATH}> f", "coproc PATH { a; }", "a[PATH=5]=1", "${x:PATH=5}", "eval 'PATH=x'", "LC_ALL=x echo é", "TEXTDOMAIN=x; $\"ls\""],
)  # fmt: skip
def test_there_are_many_ways_to_set_one(text: str) -> None:
    assert find(text).asks


def test_showing_one_is_no_way() -> None:
    for text in ("export PATH", "readonly PATH", "echo $PATH", "LC_ALL=C sort", 'x="$PATH"; echo "$x"'):
        assert not find(text).asks
