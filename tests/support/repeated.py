"""Fragments of shell text that are repeated up to the longest text there may be, and what reading one costs."""

from __future__ import annotations

import cProfile
from collections.abc import Callable

FRAGMENTS = (
    "eval ", "eval 'a';", "f(){ f; };", "f(){ a; };", "x(){ y; };y(){ x; };", "f(){ cd a; g; };g(){ a; };f;",
    "function f { a; };", "$(a) ", "$(", "$(a;", "${a:-", "${a:-b} ", "${a[", "$((1+", "$((1)) ", "$(($a+1)) ",
    "cat <<E\nx\nE\n", "cat <<A <<B\nA\nB\n", "case x in a) b;; esac;", "case x in ", "[[ a == b ]];", "[[ a =~ b ]];",
    "[[ ", "((1+1));", "((", "`a` ", "`", "\\`", '"a" ', '"', "'a' ", "'", '"$a"', '"$(a)"', '"`a`"', "{a,b} ", "{a,",
    "{1..9}", "{", "{ ", "{ a; };", "alias a=b;", "a|", "a |& b;", ">a ", "2>&1 ", "<<<a ", "{a}>b ", "A=b ", "A=b;",
    "a+=b ", "a=(b) ", "a[1]=2 ", "declare a=b;", "unset f;", "set -e;", "set -e ", "trap 'a' 0;", "xargs ",
    "timeout 1 ", "sudo ", "nohup ", "nice ", "env ", "env A=b ", "env -S ", "-S a ", "find . -exec ", "-exec a ; ",
    '-"$a" ', "command ", "exec ", "builtin ", "time ", "! ", "a&&", "a||", "a;", "a&", "a\n", "a\\\n", "\\\n", "(",
    "(a);", "if a;then ", "if a;then b;fi;", "while a;do ", "while a;do b;done;", "for a in b;do c;done;", "coproc a;",
    "[a] ", "[ a = b ];", "[ -v a ];", "* ", "? ", "~ ", "$a ", "$@ ", "<(a) ", "\\a", "#", "# \n", "cd a;", "cd a&&",
    "let a=1;", "read a;", "printf -v a b;", "bash -c 'a';", "sh -c ", "a", "a ", "é ", "é;", "1", "=", "/a", ">/a/",
    ">/dev/tcp/a/1 ", "git clone a;", "pip install a;", "source a;", "local a;", "mapfile a;", "hash -p a;", "shopt -s a;",
    "-r a ", "a=$a;", "a=$b b=$a;", "watch ", "flock a ", "busybox ", "xargs -I% ", "test a;", ". a;", "$'a' ", '$"a" ',
)  # fmt: skip


def repeated(fragment: str, length: int) -> str:
    """A fragment again and again, up to a length."""
    return fragment * (length // len(fragment))


def calls_of(work: Callable[[], object]) -> int:
    """How many functions a piece of work calls, of Python and of C: a cost that no machine changes."""
    profile = cProfile.Profile()
    profile.runcall(work)
    return sum(entry.callcount for entry in profile.getstats())
