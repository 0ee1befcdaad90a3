from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.policy.shell.arguments import Unknown
from carrel.policy.shell.wrappers import RUNNERS, base, module_of, unwrap

ANY = Unknown("$x", "any")


@pytest.mark.parametrize(
    ("argv", "runs"),
    [(["env", "X=1", "a", "b"], [("a", "b")]), (["timeout", "-k", "1", "5", "a"], [("a",)]), (["nice", "-n5", "a"], [("a",)]), (["sudo", "-u", "root", "X=1", "a"], [("a",)]),
     (["find", ".", "-exec", "a", ";", "-exec", "b", ";"], [("a",), ("b",)]), (["busybox", "wget", "x"], [("wget", "x")]), (["/usr/bin/env", "a"], [("a",)]),
     (["ld-linux-x86-64.so.2", "/bin/a"], [("/bin/a",)]), (["uv", "run", "a"], [("a",)]), (["python3", "-m", "pip", "install", "x"], [("pip", "install", "x")]),
     (["xargs", "-I%", "a", "b%c"], [("a", Unknown("b%c", "one", "b"))]), (["xargs", "a"], [("a", Unknown("…", "any"))])],
)  # fmt: skip
def test_what_runs_inside(argv: list[str], runs: list[tuple[object, ...]]) -> None:
    found = unwrap(argv)
    assert found is not None
    assert not found.asks
    assert found.runs == runs


@pytest.mark.parametrize(
    "argv",
    [
        ["env", ANY],
        ["timeout", ANY, "a"],
        ["xargs", ANY],
        ["find", ANY],
        ["bash", ANY],
        ["env", "--odd", "a"],
        ["parallel", "a"],
        ["zsh", "-c", "a"],
        ["sudo", "-s"],
        ["nice", "-n"],
    ],
)
def test_what_is_not_known_asks(argv: list[str]) -> None:
    found = unwrap(argv)
    assert found is not None
    assert found.asks


def test_ordinary_programs_run_nothing() -> None:
    for argv in (["ls"], ["python", "x.py"], ["git", "env"], [], ["uv", "pip"]):
        assert unwrap(argv) is None


@given(
    st.sampled_from(sorted(RUNNERS | {"find"})),
    st.lists(
        st.sampled_from(
            [
                "-c",
                "-n",
                "1",
                "a",
                "--",
                "-",
                "X=1",
                "{}",
                ";",
                "+",
                "-exec",
                "-I",
                "--x",
                "",
                ANY,
                Unknown("p$x", "one", "p"),
            ]
        ),
        max_size=6,
    ),
)
def test_any_arguments_are_answered(name: str, rest: list[str | Unknown]) -> None:
    found = unwrap([*name.split(), *rest])
    if found is not None:
        for run in found.runs:
            assert isinstance(run[0], str)


def test_modules_of_python() -> None:
    assert module_of(["-I", "-m", "pip", "x"]) == ("pip", ("x",))
    assert module_of(["-mpip", "x"]) == ("pip", ("x",))
    assert module_of(["x.py", "-m", "pip"]) is None
    assert base("/usr/bin/x") == base("x") == "x"
