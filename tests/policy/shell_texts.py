"""Makes shell texts: every construct inside every other, quoted and broken in every way, from a seed."""

from __future__ import annotations

import random

COMMANDS = ["a", "b", "c", "d", "e", "g", "h", "ls", "cat", "grep", "curl", "rm", "git", "foo", "bar"]
ODD = ["сurl", "ｌs", "cu\u200drl", "l\u00a0s", "naïve", "'a b'", "a\\ b", "\\-x", "'{a'", "'#a'", "\\{a,b\\}", "'a;b'"]
VARIABLES = ["x", "y", "n", "i", "arr"]
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

    def pick(self, *options: str) -> str:
        """One of the texts."""
        return self.random.choice(options)

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
        name = self.random.choice(COMMANDS)
        if kind < 0.6:
            return name
        if kind < 0.7 and self.functions:
            return self.random.choice(self.functions)
        if kind < 0.85:
            at = self.random.randint(0, len(name))
            return self.pick(
                f"'{name}'", f'"{name}"', f"\\{name}", f"{name[:at]}''{name[at:]}", f'{name[:at]}"{name[at:]}"',
                f"$'{name}'", f'$"{name}"', f"{name[:at]}\\\n{name[at:]}", f"$'\\x{ord(name[0]):x}'{name[1:]}",
                f"{{{name},-v}}", f"{{{name},}}", f"{name[:at]}{{,}}{name[at:]}", f"/stubs/{name}",
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
            f"y={self.word()} ",
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
                "$x", '"$x"', "${x}", '"${x}"', f"$({self.inner()})", f"`{self.ticked()}`", f'"$({self.inner()})"',
                f'"a`{self.ticked()}`"', f"${{x:-{self.word()}}}", f'"${{x:-$({self.inner()})}}"', "${#x}", "${x%.*}",
                f"${{x/a/{self.plain()}}}", f"<({self.inner()})", f">({self.inner()})", f"$(({self.arithmetic()}))",
                "${arr[@]}", '"${arr[@]}"', f"${{arr[{self.arithmetic()}]}}", "${arr[$i]}", "${!x}", "${x^^}", "${x:1:2}", "$@", '"$*"',
                f"pre{self.plain()}$x'post'", f'"a{self.plain_in_quotes()}"', f"${{x:+`{self.ticked()}`}}",
                f'"$(({self.arithmetic()}))"', "$(<f)", f"$(( $({self.inner()}) ))", f'$"b$({self.inner()})"', "${x@Q}",
                f"{{$x,$({self.inner()})}}", f'"${{x:="{self.plain()}"}}"', "$((1))",
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
        name = self.random.choice(COMMANDS)
        return self.pick(
            name,
            f"{name} x",
            f"{name} '$y'",
            f"{name}; b",
            f"{name} \\`b\\`",
            f"{name} $(c)",
            f"{name} | d",
            f'{name} "e f"',
            f"\\{name}",
            f"{name} \\\\g",
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
            f"x={self.word()}", "x='a[$(pwned)]'", "n=3", "arr=(a b 'c d')", f"arr=({self.word()} {self.word()})", "arr[1]=b",
            f"arr[{self.arithmetic()}]={self.word()}", "x+=b", "y=ls", "declare x=1", f"export y={self.word()}", "local z=1",
            "declare -i n", "x=$y", "read x", "readonly q=1", "declare -a arr", "export x", "unset x", "PATH=/stubs", f"x=$({self.inner()})",
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
            f"<<< {self.word()}",
            "&> f",
            "> /dev/null",
            "2>/dev/null",
            "<> f",
            ">| f",
            "3>&1",
            "{fd}> f",
            f"< <({self.inner()})",
            f"> >({self.inner()})",
            ">&2",
            "2>&-",
            f'> "$({self.inner()})"',
            "&>> f",
            ">f<f",
        )
        return self.pick(
            f"{self.simple()} {redirect}", f"{redirect} {self.simple()}", f"{{ {self.simple()}; }} {redirect}", redirect
        )

    def wrapped(self) -> str:
        """A program that runs another."""
        inner = f"{self.random.choice(COMMANDS)} {self.plain()}".strip()
        text = self.inner().replace("'", "'\\''") if self.depth < 4 else inner
        return self.pick(
            f"env {inner}", f"env -i x=1 {inner}", f"env -u HOME {inner}", f"timeout 1 {inner}", f"timeout -k 1 1 {inner}",
            f"nice -n 5 {inner}", f"nohup {inner}", f"setsid {inner}", f"stdbuf -oL {inner}", f"a | xargs {inner}",
            f"a | xargs -I{{}} {inner} {{}}", f"a | xargs -n1 -- {inner}", f"find . -exec {inner} {{}} \\;", f"bash -c '{text}'",
            f"find . -maxdepth 0 -exec {inner} {{}} + -o -name x", f"bash -c \"{inner}\"", f"bash -ec '{text}' _ x y", f"dash -c '{inner}'",
            f"sh -c '{inner}; b'", f"env bash -c '{text}'", f"timeout 1 env nice {inner}", f"bash <<< '{inner}'", f"echo {inner} | bash",
            f"env $x {inner}", f"xargs -a f {inner}", "a | xargs", f"a | xargs sh -c '{inner}' _", "a | xargs sh -c", f"env -S '{inner}'",
            f"command {inner}", f"exec {inner}", f"exec -a z {inner}", f"command -v {inner}", f"command -p {inner}", "bash f", f"bash -c {self.word()}",
            f"env PATH=/stubs {inner}", "sh -c 'a {b,c} $y'", "sh -c '[[ a && b ]]'", "sh -c 'a &>f'", "sh -c '((b))'", "sh -c '{ls,-l}'",
        )  # fmt: skip

    def compound(self) -> str:
        """A compound command."""
        one, two = self.list_(1), self.list_(self.random.choice([1, 2]))
        return self.pick(
            f"( {one} )", f"({one})", f"{{ {one}; }}", f"{{ {one}\n}}", f"if {one}; then {two}; fi", f"if {one}\nthen\n{two}\nelse {one}\nfi",
            f"for i in {self.word()} {self.word()}; do {two}; done", f"for i; do {two}; done", "for i in a b; do $i; done",
            f"while {one}; do {two}; break; done", f"until {one}; do {two}; done", f"case {self.word()} in {self.case_word()}) {two};; *) {one};; esac",
            f"case x in (a|x) {one} ;; esac", f"[[ {self.word()} == {self.word()} ]] && {one}", f"[[ -n {self.word()} || -z $x ]]",
            f"[ {self.word()} = x ] && {one}", f"test -n {self.word()}", f"coproc {one}", f"coproc N {{ {two}; }}", f"select s in a b; do {one}; done",
            f"for ((i=0;i<2;i++)); do {one}; done", f"(( {self.arithmetic()} )) || {one}", f"time {{ {one}; }}", f"! ( {one} )", f"[[ x =~ ^(x|y)$ ]] && {one}",
            f"{{ {{ {one}; }} }}", f"(({self.arithmetic()}))", f"(({one}))", f"( ( {one} ) )", f"case x in a) {one};& x) {two};; esac", f"if [[ $x ]]; then {one}; elif {two}; then b; fi",
        )  # fmt: skip

    def case_word(self) -> str:
        """A pattern of a case."""
        return self.pick("a", "pwned", "'x y'", "a|b", "*", "[a-z]*", '"$x"', f"$({self.command()})", "?", "esac")

    def function(self) -> str:
        """A function, and perhaps its call."""
        name = self.pick("f", "k", "fn", "ls", "a")
        body = self.list_(self.random.choice([1, 2]))
        self.functions.append(name)
        made = self.pick(
            f"{name}() {{ {body}; }}",
            f"{name} () ( {body} )",
            f"function {name} {{ {body}; }}",
            f"{name}()\n{{\n{body}\n}}",
            f"{name}() if a; then {body}; fi",
        )
        return made + self.pick(
            "",
            f"; {name} x",
            f"\n{name}",
            f"; ({name})",
            f"; unset -f {name}; {name}",
            f"; command {name}",
            f"; export -f {name}; bash -c {name}",
        )

    def evaluated(self) -> str:
        """Text that runs as text."""
        text = self.inner().replace("'", "'\\''")
        return self.pick(
            f"eval '{text}'",
            f'eval "{self.random.choice(COMMANDS)} x"',
            "eval $x",
            f"eval {self.simple()}",
            'eval "$(a)"',
            ". ./f",
            "source f",
            f"eval -- '{text}'",
            "eval",
            f"eval \\{self.random.choice(COMMANDS)}",
        )

    def trapped(self) -> str:
        """Text that runs later."""
        text = self.list_(1).replace("'", "'\\''")
        return self.pick(
            f"trap '{text}' EXIT",
            f"trap '{text}' ERR; a",
            "trap - EXIT",
            "trap $x EXIT",
            f"trap {self.random.choice(COMMANDS)} DEBUG",
            "trap '' INT",
            "trap f EXIT",
            f"trap -- '{text}' 0",
        )

    def here(self) -> str:
        """A here-document."""
        body = "\n".join(
            self.pick(
                "text",
                "$x",
                f"$({self.random.choice(COMMANDS)})",
                f"`{self.random.choice(COMMANDS)}`",
                "\\$(a)",
                "'$(b)'",
                f"${{x:-$({self.random.choice(COMMANDS)})}}",
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
            f"{name} <<{end}\n{body}\nE\n{self.simple()}", f"{name} <<-{end}\n\t{body}\n\tE\n{self.simple()}", f"{name} <<{end} | {self.simple()}\n{body}\nE\n",
            f"{name} <<{end} && {{\n{body}\nE\n{self.simple()}; }}", f"$({name} <<{end}\n{body}\nE\n)", f"{name} <<{end} <<F\n{body}\nE\n{body}\nF\na",
        )  # fmt: skip

    def odd(self) -> str:
        """What changes how the rest is read, or runs what it should not."""
        return self.pick(
            "alias ls=rm; ls", "shopt -s expand_aliases\nalias ls=rm\nls", "shopt -s extglob", "set -k; a b=c", "hash -p /stubs/rm ls; ls",
            "enable -n echo; echo x", "x='a[$(pwned)]'; echo $((x))", "x='a[$(pwned)]'; [[ x -eq 1 ]]", "x='a[$(pwned)]'; echo ${!x}",
            "[ -v 'a[$(pwned)]' ]", "printf -v 'a[$(pwned)]' x", "read 'a[$(pwned)]' <<< 1", "unset 'a[$(pwned)]'", "declare 'a[$(pwned)]=1'",
            "x='-v a[$(pwned)]'; [ $x ]", "PS4='$(pwned)'; set -x; :", "x='$(pwned)'; echo \"${x@P}\"", "compgen -W '$(pwned)'", "mapfile -C pwned -c 1 <<< x",
            "BASH_CMDS[ls]=/stubs/rm; ls", "exec > f; a", "echo {a,b}{1..2}", "let 'a[$(pwned)]=1'", "declare -i z='a[$(pwned)]'", "a=1 b=2 c", "echo a >f; bash f",
            "x=ls; y='$x'; eval $y", "printf '%s' $(a)", "coproc a; wait", "echo $(( $(a) ))", "wait", "type a", "jobs -x a", "for f in *; do b \"$f\"; done",
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
