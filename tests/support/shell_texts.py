"""Makes shell texts: every construct inside every other, quoted and broken in every way, from a seed."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

COMMANDS = ["a", "b", "c", "d", "e", "g", "h", "ls", "cat", "grep", "curl", "rm", "git", "foo", "bar"]
ODD = ["сurl", "ｌs", "cu\u200drl", "l\u00a0s", "naïve", "'a b'", "a\\ b", "\\-x", "'{a'", "'#a'", "\\{a,b\\}", "'a;b'"]
PART = re.compile("«(\\w+)»")
NOISE = [
    *list("\"'`$(){}[]<>|&;#\\\n \t*?~!=,.:-+@^%/"),
    "$(",
    "$((",
    "))",
    "${",
    "<<E\n",
    "\\\n",
    "&&",
    "||",
    ";;",
    " in ",
    " do ",
    "#{",
    "<(",
    "'",
    '"',
    "|&",
    "&>",
    ">&",
    "$'",
    '$"',
    "[[",
    "]]",
    " time ",
    " ! ",
    "coproc ",
    "function ",
    "\nE\n",
]


class Maker:
    """Texts from a seed."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.depth = 0
        self.functions: list[str] = []

    def text(self) -> str:
        """A whole text."""
        self.functions = []
        made = self.list_(self.random.choice([1, 1, 2, 3]))
        if self.random.random() < 0.3:
            made = self.broken(made)
        if self.random.random() < 0.12:
            made = self.continued(made)
        return made

    def broken(self, text: str) -> str:
        """The text with a few characters added, removed or moved."""
        for _ in range(self.random.randint(1, 3)):
            at = self.random.randint(0, len(text))
            kind = self.random.random()
            if kind < 0.55:
                text = text[:at] + self.random.choice(NOISE) + text[at:]
            elif kind < 0.8:
                text = text[:at] + text[at + self.random.randint(1, 2) :]
            else:
                other = self.random.randint(0, len(text))
                text = text[:at] + text[other : other + 4] + text[at:]
        return text

    def continued(self, text: str) -> str:
        """The text with line continuations anywhere."""
        for _ in range(self.random.randint(1, 3)):
            at = self.random.randint(0, len(text))
            text = text[:at] + "\\\n" + text[at:]
        return text

    def pick(self, *options: str, **parts: Callable[[], str]) -> str:
        """One of the texts, with a part made for every «name» in it."""
        made = self.random.choice(options)
        while "«" in made:
            made = PART.sub(lambda found: (parts.get(found[1]) or getattr(self, found[1]))(), made)
        return made

    def name(self) -> str:
        """The name of a program."""
        return self.random.choice(COMMANDS)

    def one(self) -> str:
        """A statement."""
        return self.list_(1)

    def two(self) -> str:
        """A statement or two."""
        return self.list_(self.random.choice([1, 2]))

    def text_in_quotes(self) -> str:
        """Commands as they stand between single quotes."""
        made = self.inner() if self.depth < 4 else self.started()
        return made.replace("'", "'\\''")

    def started(self) -> str:
        """A program that another one starts."""
        return f"{self.name()} {self.plain()}".strip()

    def list_(self, count: int) -> str:
        """Statements."""
        made = ""
        for index in range(count):
            if index and made.endswith("\nE\n"):
                pass
            elif index:
                made += self.pick("; ", "\n", " && ", " || ", " & ", ";", "\n\n", " ; # it's\n", "&&\n")
            made += self.statement()
        return made

    def statement(self) -> str:
        """One statement of any kind."""
        self.depth += 1
        try:
            kinds = [self.simple] * 6 + [self.pipeline, self.assignment, self.redirected, self.wrapped]
            if self.depth < 5:
                kinds += [self.compound] * 3 + [self.function, self.evaluated, self.here, self.trapped, self.odd]
            return self.random.choice(kinds)()
        finally:
            self.depth -= 1

    def command(self) -> str:
        """A word in command position."""
        kind = self.random.random()
        name = self.name()
        if kind < 0.6:
            return name
        if kind < 0.7 and self.functions:
            return self.random.choice(self.functions)
        if kind < 0.85:
            at = self.random.randint(0, len(name))
            return self.pick(
                "'«name»'", '"«name»"', "\\«name»", f"{name[:at]}''{name[at:]}", f'{name[:at]}"{name[at:]}"',
                "$'«name»'", '$"«name»"', f"{name[:at]}\\\n{name[at:]}", f"$'\\x{ord(name[0]):x}'{name[1:]}",
                "{«name»,-v}", "{«name»,}", f"{name[:at]}{{,}}{name[at:]}", "/stubs/«name»",
            )  # fmt: skip
        if kind < 0.92:
            return self.random.choice(ODD)
        return self.pick(
            "$x",
            "${x}",
            "$(a)",
            "`a`",
            "${x:-ls}",
            '"$x"',
            "l?",
            "~/a",
            "$x$y",
            "{a..c}",
            "${arr[0]}",
            "$1",
            "*",
            "[a]",
        )

    def simple(self) -> str:
        """A simple command."""
        words = [self.command(), *(self.word() for _ in range(self.random.randint(0, 3)))]
        prefix = self.pick(
            "",
            "",
            "",
            "",
            "x=1 ",
            "IFS=: ",
            "y=«word» ",
            "! ",
            "time ",
            "command ",
            "exec ",
            "builtin ",
            "> f ",
        )
        return prefix + self.pick(" ", "  ", "\t").join(words)

    def word(self) -> str:
        """A word in any other position."""
        self.depth += 1
        try:
            plain = self.pick(
                "1",
                "-v",
                "file",
                "x=y",
                "{a,b}",
                "{1..3}",
                "*.txt",
                "~",
                "a#b",
                "-",
                "''",
                '""',
                "'$(a)'",
                "\\$x",
                "'`b`'",
                "if",
                "}",
                "]]",
                "a\\;b",
                "$",
                "=",
                "%",
                "$#",
                "\\'",
                "'it'\\''s'",
                "$'a\\'b'",
                "$'\\x41\\n'",
                "é",
            )
            if self.depth > 6 or self.random.random() < 0.5:
                return plain
            return self.pick(
                "$x", '"$x"', "${x}", '"${x}"', "$(«inner»)", "`«ticked»`", '"$(«inner»)"',
                '"a`«ticked»`"', "${x:-«word»}", '"${x:-$(«inner»)}"', "${#x}", "${x%.*}",
                "${x/a/«plain»}", "<(«inner»)", ">(«inner»)", "$((«arithmetic»))",
                "${arr[@]}", '"${arr[@]}"', "${arr[«arithmetic»]}", "${arr[$i]}", "${!x}", "${x^^}", "${x:1:2}", "$@", '"$*"',
                "pre«plain»$x'post'", '"a«plain_in_quotes»"', "${x:+`«ticked»`}",
                '"$((«arithmetic»))"', "$(<f)", "$(( $(«inner») ))", '$"b$(«inner»)"', "${x@Q}",
                "{$x,$(«inner»)}", '"${x:="«plain»"}"', "$((1))",
            )  # fmt: skip
        finally:
            self.depth -= 1

    def plain(self) -> str:
        """A harmless piece of a word."""
        return self.pick("b", "'c d'", '"e"', "\\g", "h", "", "$y")

    def plain_in_quotes(self) -> str:
        """A piece of text in double quotes."""
        return self.pick("'", '\\"', "\\$(a)", "\\`b\\`", "#", ";", "\n", "$y", "${x}", "!", "\\\\", "{a,b}", "*")

    def inner(self) -> str:
        """The commands of a substitution."""
        self.depth += 2
        try:
            if self.depth > 7:
                return self.command()
            return (
                self.pick("", "", " ", "\n")
                + self.list_(self.random.choice([1, 1, 2]))
                + self.pick("", "", " ", "\n", ";", " # ) x\n")
            )
        finally:
            self.depth -= 2

    def ticked(self) -> str:
        """The commands between backquotes."""
        return self.pick(
            "«name»",
            "«name» x",
            "«name» '$y'",
            "«name»; b",
            "«name» \\`b\\`",
            "«name» $(c)",
            "«name» | d",
            '«name» "e f"',
            "\\«name»",
            "«name» \\\\g",
        )

    def arithmetic(self) -> str:
        """An arithmetic expression."""
        return self.pick(
            "1+2",
            "x",
            "i++",
            "x+y*2",
            "n=3",
            "(1+2)*3",
            "x>y?1:2",
            "16#ff",
            "x<<2",
            "arr[0]",
            "i+1",
            "$x+1",
            "${#x}",
            "i<3",
            "x,y",
            "~1",
            "1",
        )

    def pipeline(self) -> str:
        """Commands joined by pipes."""
        return self.pick(" | ", "|", " |& ", " |\n").join(
            self.simple_or_block() for _ in range(self.random.randint(2, 3))
        )

    def simple_or_block(self) -> str:
        """A command of a pipeline."""
        return (
            self.random.choice(COMMANDS) + " " + self.word()
            if self.random.random() < 0.7 or self.depth > 3
            else self.compound()
        )

    def assignment(self) -> str:
        """Assignments, some of which change what runs."""
        return self.pick(
            "x=«word»", "x='a[$(pwned)]'", "n=3", "arr=(a b 'c d')", "arr=(«word» «word»)", "arr[1]=b",
            "arr[«arithmetic»]=«word»", "x+=b", "y=ls", "declare x=1", "export y=«word»", "local z=1",
            "declare -i n", "x=$y", "read x", "readonly q=1", "declare -a arr", "export x", "unset x", "PATH=/stubs", "x=$(«inner»)",
            "printf -v x '%s' b", "let n=1+1", "declare -A m", "m[k]=v", "typeset x", "i=0", "x=`b`", "set -- a b", "set -e", "shift",
            "SECONDS='arr[$(pwned)]'", "((x))", "((i++))", "[[ $x -eq 1 ]]", "let x", "x=; y=", "readarray arr < f", "getopts ab x",
        )  # fmt: skip

    def redirected(self) -> str:
        """A command with redirections."""
        redirect = self.pick(
            "> f",
            ">> f",
            "2>&1",
            "< f",
            "<<< x",
            "<<< «word»",
            "&> f",
            "> /dev/null",
            "2>/dev/null",
            "<> f",
            ">| f",
            "3>&1",
            "{fd}> f",
            "< <(«inner»)",
            "> >(«inner»)",
            ">&2",
            "2>&-",
            '> "$(«inner»)"',
            "&>> f",
            ">f<f",
            ">& '$(pwned)'",
            '>& "$x"',
            ">& f",
        )
        return self.pick(
            "«simple» «redirect»",
            "«redirect» «simple»",
            "{ «simple»; } «redirect»",
            redirect,
            redirect=lambda: redirect,
        )

    def wrapped(self) -> str:
        """A program that runs another."""
        return self.pick(
            "env «started»", "env -i x=1 «started»", "env -u HOME «started»", "timeout 1 «started»", "timeout -k 1 1 «started»",
            "nice -n 5 «started»", "nohup «started»", "setsid «started»", "stdbuf -oL «started»", "a | xargs «started»",
            "a | xargs -I{} «started» {}", "a | xargs -n1 -- «started»", "find . -exec «started» {} \\;", "bash -c '«text_in_quotes»'",
            "find . -maxdepth 0 -exec «started» {} + -o -name x", "bash -c \"«started»\"", "bash -ec '«text_in_quotes»' _ x y", "dash -c '«started»'",
            "sh -c '«started»; b'", "env bash -c '«text_in_quotes»'", "timeout 1 env nice «started»", "bash <<< '«started»'", "echo «started» | bash",
            "env $x «started»", "xargs -a f «started»", "a | xargs", "a | xargs sh -c '«started»' _", "a | xargs sh -c", "env -S '«started»'",
            "command «started»", "exec «started»", "exec -a z «started»", "command -v «started»", "command -p «started»", "bash f", "bash -c «word»",
            "env PATH=/stubs «started»", "sh -c 'a {b,c} $y'", "sh -c '[[ a && b ]]'", "sh -c 'a &>f'", "sh -c '((b))'", "sh -c '{ls,-l}'",
        )  # fmt: skip

    def compound(self) -> str:
        """A compound command."""
        return self.pick(
            "( «one» )", "(«one»)", "{ «one»; }", "{ «one»\n}", "if «one»; then «two»; fi", "if «one»\nthen\n«two»\nelse «one»\nfi",
            "for i in «word» «word»; do «two»; done", "for i; do «two»; done", "for i in a b; do $i; done",
            "while «one»; do «two»; break; done", "until «one»; do «two»; done", "case «word» in «case_word») «two»;; *) «one»;; esac",
            "case x in (a|x) «one» ;; esac", "[[ «word» == «word» ]] && «one»", "[[ -n «word» || -z $x ]]",
            "[ «word» = x ] && «one»", "test -n «word»", "coproc «one»", "coproc N { «two»; }", "select s in a b; do «one»; done",
            "for ((i=0;i<2;i++)); do «one»; done", "(( «arithmetic» )) || «one»", "time { «one»; }", "! ( «one» )", "[[ x =~ ^(x|y)$ ]] && «one»",
            "{ { «one»; } }", "((«arithmetic»))", "((«one»))", "( ( «one» ) )", "case x in a) «one»;& x) «two»;; esac", "if [[ $x ]]; then «one»; elif «two»; then b; fi",
        )  # fmt: skip

    def case_word(self) -> str:
        """A pattern of a case."""
        return self.pick("a", "pwned", "'x y'", "a|b", "*", "[a-z]*", '"$x"', "$(«command»)", "?", "esac")

    def function(self) -> str:
        """A function, and perhaps its call."""
        name = self.pick("f", "k", "fn", "ls", "a")
        body = self.two()
        self.functions.append(name)
        made = self.pick(
            "«name»() { «body»; }",
            "«name» () ( «body» )",
            "function «name» { «body»; }",
            "«name»()\n{\n«body»\n}",
            "«name»() if a; then «body»; fi",
            name=lambda: name,
            body=lambda: body,
        )
        return made + self.pick(
            "",
            "; «name» x",
            "\n«name»",
            "; («name»)",
            "; unset -f «name»; «name»",
            "; command «name»",
            "; export -f «name»; bash -c «name»",
            name=lambda: name,
        )

    def evaluated(self) -> str:
        """Text that runs as text."""
        return self.pick(
            "eval '«text_in_quotes»'",
            'eval "«name» x"',
            "eval $x",
            "eval «simple»",
            'eval "$(a)"',
            ". ./f",
            "source f",
            "eval -- '«text_in_quotes»'",
            "eval",
            "eval \\«name»",
        )

    def trapped(self) -> str:
        """Text that runs later."""
        return self.pick(
            "trap '«text_in_quotes»' EXIT",
            "trap '«text_in_quotes»' ERR; a",
            "trap - EXIT",
            "trap $x EXIT",
            "trap «name» DEBUG",
            "trap '' INT",
            "trap f EXIT",
            "trap -- '«text_in_quotes»' 0",
        )

    def here(self) -> str:
        """A here-document."""
        body = "\n".join(
            self.pick(
                "text",
                "$x",
                "$(«name»)",
                "`«name»`",
                "\\$(a)",
                "'$(b)'",
                "${x:-$(«name»)}",
                '"',
                "'",
                "E2",
                " E",
                "#",
                "\\\\$(c)",
                "${x",
                "$(( 1+1 ))",
            )
            for _ in range(self.random.randint(0, 3))
        )
        end = self.pick("E", "E", "'E'", '"E"', "\\E")
        name = self.random.choice([*COMMANDS, "bash", "cat"])
        return self.pick(
            "«name» <<«end»\n«body»\nE\n«simple»", "«name» <<-«end»\n\t«body»\n\tE\n«simple»", "«name» <<«end» | «simple»\n«body»\nE\n",
            "«name» <<«end» && {\n«body»\nE\n«simple»; }", "$(«name» <<«end»\n«body»\nE\n)", "«name» <<«end» <<F\n«body»\nE\n«body»\nF\na",
            name=lambda: name, end=lambda: end, body=lambda: body,
        )  # fmt: skip

    def odd(self) -> str:
        """What changes how the rest is read, or runs what it should not."""
        return self.pick(
            "alias ls=rm; ls", "shopt -s expand_aliases\nalias ls=rm\nls", "shopt -s extglob", "set -k; a b=c", "hash -p /stubs/rm ls; ls",
            "enable -n echo; echo x", "x='a[$(pwned)]'; echo $((x))", "x='a[$(pwned)]'; [[ x -eq 1 ]]", "x='a[$(pwned)]'; echo ${!x}",
            "[ -v 'a[$(pwned)]' ]", "printf -v 'a[$(pwned)]' x", "read 'a[$(pwned)]' <<< 1", "unset 'a[$(pwned)]'", "declare 'a[$(pwned)]=1'",
            "x='-v a[$(pwned)]'; [ $x ]", "PS4='$(pwned)'; set -x; :", "x='$(pwned)'; echo \"${x@P}\"", "compgen -W '$(pwned)'", "mapfile -C pwned -c 1 <<< x",
            "BASH_CMDS[ls]=/stubs/rm; ls", "exec > f; a", "echo {a,b}{1..2}", "let 'a[$(pwned)]=1'", "declare -i z='a[$(pwned)]'", "a=1 b=2 c", "echo a >f; bash f",
            "x=ls; y='$x'; eval $y", "printf '%s' $(a)", "coproc a; wait", "((PATH=5)); ls", "unset PATH; ls", "f() { local PATH; ls; }; f", "echo $(( $(a) ))", "wait", "type a", "jobs -x a", "for f in *; do b \"$f\"; done",
            "local x=$(a)", "export x=$(a) y=`b`", "x=(`a` $(b))", "echo \"$(a \"$(b \"$(c)\")\")\"", "echo $(case x in x) a;; esac)", "echo $(( 1 + $(a; echo 2) ))",
            "a <(b) >(c)", "a 2> >(b)", "< <(a) b", "echo ${x:-<(a)}", "a=b{c,d}", "echo \\\n\\\na", "#a\nb", "a #b", "a;#b\nc", "echo a#`b`", ": ${x:=$(a)}",
            "a&&b||c", "a&b&c", "!a", "! a", "{a;}", "{ a;}", "(a)|(b)", "a|b|&c", "if a;then b;fi;c", "x=a;$x", "command $x", "\\command a", "'exec' a", "e\\val 'a b'",
            "x='a[$(pwned)]'; arr=([x]=1)", "x='a[$(pwned)]'; echo ${arr[x]}", "x='a[$(pwned)]'; echo ${y:x}", "for ((x=0;x<1;x++)); do a; done", "select q in a; do b; done <<< 1",
        )  # fmt: skip


def texts(count: int, seed: int = 0) -> list[str]:
    """So many texts, all different."""
    made: dict[str, None] = {}
    number = seed
    while len(made) < count:
        text = Maker(number).text()
        number += 1
        if text.strip() and len(text) < 2000 and "\0" not in text:
            made.setdefault(text)
    return list(made)
