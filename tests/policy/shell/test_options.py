from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.policies import policy

from carrel.policy.documents.settings import load
from carrel.policy.rules.decide import decide_environment, decide_shell
from carrel.policy.rules.layers import Layer, Policy
from carrel.policy.shell.arguments import Unknown
from carrel.policy.shell.options import PROGRAMS, effects, is_safe_config

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def seed() -> Policy:
    """The settings of the examples alone: what their sources say of git and pip must not be what asks."""
    rules = load((EXAMPLES / "settings.json").read_text())
    return Policy.of([Layer("settings.json", rules)], context_id="ctx-1")


HARMFUL = """
find . -exec curl x ;
find . -execdir curl x ;
find . -ok curl x ;
find . -fprint /etc/x
find . -fprint0 /etc/x
find . -fprintf /etc/x %p
find . -fls /etc/x
find /etc -delete
find / -name x -delete
find -L /etc -delete
find -- /etc -delete
find . /etc -delete
find "/etc/$x" -delete
git branch --edit-description
git clone --config core.sshCommand=id https://h/r
git clone --config=core.fsmonitor=id https://h/r
git clone -c core.sshCommand=id https://h/r
git clone -c core.hooksPath=x https://h/r
git clone -ccore.sshCommand=id https://h/r
git clone --template=/tmp/t https://h/r
git clone --templ /tmp/t https://h/r
git clone -u id https://h/r
git clone -uid https://h/r
git clone -qu id https://h/r
git clone --upload-pack id https://h/r
git clone --upload-pack=id https://h/r
git clone --upl=id https://h/r
git clone --bundle-uri=x https://h/r
git clone "ext::sh -c id" r
git log --output=/etc/x
git log --output /etc/x
git log --outp=/etc/x
git log --ext-diff
git diff --output=/etc/x
git diff -M --output=/etc/x
git diff --ext-diff
git commit --edit
git commit -ve
git add -e
git add --edit
sort -o /etc/x a
sort -o/etc/x a
sort -no/etc/x a
sort a -o /etc/x
sort --output=/etc/x a
sort --out /etc/x a
sort -k 2 -uo /etc/x a
sort --compress-program=id a
sort --compress-program id a
sort --compress-p=id a
sort $x
sort "$x"
sed 1e f
sed "1e id" f
sed s/a/b/e f
sed s/a/b/ge f
sed "s/a/b/w /etc/x" f
sed "s/a/b/gw /etc/x" f
sed "1w /etc/x" f
sed "/a/W /etc/x" f
sed -n "/a/{p;w /etc/x" f
sed -e p -e "w /etc/x" f
sed -ne "w /etc/x" f
sed --expression="w /etc/x" f
sed --expr "w /etc/x" f
sed -f x f
sed --file=x f
sed -nf x f
sed -i s/a/b/ /etc/x
sed -i.bak s/a/b/ /etc/x
sed --in-place s/a/b/ /etc/x
sed --in-place=.b s/a/b/ /etc/x
sed -ni p /etc/x
sed s/a/b/ /etc/x -i
sed "s/a/$x/" f
sed "s,a,b,;1e id" f
sed "/a\\/b/e id" f
sed "s/[/]/e id" f
awk 'BEGIN{system("id")}'
awk 'BEGIN{"id" | getline x}'
awk '{print | "sh"}' f
awk '{print |& "sh"}' f
awk '{print > "/etc/x"}' f
awk '{printf "x" >> "/etc/x"}' f
awk '/"/{system("id")}' f
awk '{a = b / 2 | "sh" / 3}' f
awk '{a = b++ / 2 | "sh" / 3}' f
awk '/[/]|"sh" /' f
awk 'BEGIN{f="system"; @f("id")}'
awk -f x f
awk --file=x f
awk -i x '{print}' f
awk -l x '{print}' f
awk -E x
awk -e '{print}' -e 'BEGIN{system("id")}'
awk --source 'BEGIN{system("id")}'
awk -p/etc/x '{print}' f
awk --profile=/etc/x '{print}' f
awk -d/etc/x '{print}' f
awk -o/etc/x '{print}' f
awk "$x" f
uniq a /etc/x
uniq -c a /etc/x
tree -o /etc/x
tree -ao/etc/x
pip install --log /etc/x p
pip install --log=/etc/x p
pip install --report /etc/x p
pip install --python id p
pip list --log /etc/x
pip list --python=id
sh -c "sort -o /etc/x a"
bash -c "sed 1e f"
GIT_SSH_COMMAND=id git clone https://h/r
GIT_EXTERNAL_DIFF=id git diff
GIT_PAGER=id git log
PAGER=id git log
GIT_EDITOR=id git commit
EDITOR=id git commit
VISUAL=id git commit
PIP_INDEX_URL=x pip install p
CC=id pip install p
AWKPATH=x awk '{print}' f
LD_PRELOAD=x ls
BASH_ENV=x bash -c ls
POSIXLY_CORRECT=1 sort a
"""
HARMLESS = """
find . -name x.py
find . -type f -newer a -print
find data -name x -delete
git status
git status -s
git log
git log -n 5 --oneline
git log -S text -- a
git log --stat -3
git diff
git diff HEAD~1 -- a
git diff --stat -M
git diff --output=diff.txt
git add -A
git add .
git commit -m "a message"
git commit -am x
git commit -F message.txt
git checkout -b x
git branch -a
git clone https://h/r
git clone --depth 1 -b main https://h/r dir
git clone -c user.name=a https://h/r
sort a
sort -k2 -n -t, a
sort -u -o out.txt a
sort *.txt
sort -- "$x"
sort --reverse --key=2 a
sort ./"$x"
sed -n 1,5p f
sed s/a/b/g f
sed -e s/a/b/ -e /x/d f
sed -i s/a/b/ f
sed -E "s/([a-z]+) ([0-9]+)/\\2 \\1/" f
sed "/^#/d;/^a/d" f
sed ":a;N;ba;s/x/,/g" f
sed y/abc/xyz/ f
sed "1!G;h" f
sed "2i\\text with e and w" f
sed "s|a/w|b/e|" f
sed 1w f
awk '{print $1}' f
awk -F, '{s+=$2} END {print s}' f
awk -F'|' '{print $1}' f
awk -v x=1 '$1 == x' f
awk '/a|b/ {print $1 "|" $2}' f
awk '$3 > 5' f
awk 'NR==1 || NR==3' f
awk '!seen[$0]++' f
awk '{printf "%s\\n", $1 / $2}' f
uniq -c a
uniq -c -f 1 a
tree -L 2
tree -a
diff -u a b
cut -d, -f1 a
head -n 5 a
tail -n 5 a
wc -l a
tr a b
ls -la
cat a
cp a b
mv a b
mkdir -p d
touch a
pip install pandas
pip install -r requirements.txt -t target
pip list --outdated
python x.py
"""


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line]


@pytest.mark.parametrize("command", rows(HARMFUL))
def test_option_that_runs_or_writes_something_else_is_not_allowed(seed: Policy, command: str) -> None:
    text = command.replace(" ;", " \\;")
    assert decide_shell(seed, text).verdict in {"ask", "deny"}
    assert decide_shell(seed, text, dialect="sh").verdict in {"ask", "deny"}


@pytest.mark.parametrize("command", rows(HARMLESS))
def test_ordinary_use_stays_allowed(seed: Policy, command: str) -> None:
    verdict = decide_shell(seed, command)
    assert (verdict.verdict, verdict.reason) == ("allow", verdict.reason)


@pytest.mark.parametrize(
    "command",
    [
        "tar -I curl -xf a", "tar --use-compress-program=curl -xf a", "tar --use-comp curl -xf a", "tar xIf curl a",
        "tar -xIcurl -f a", "tar xf a --to-command=curl", "tar cf a b --checkpoint=1 --checkpoint-action=exec=curl",
        "tar xf a --rsh-command=curl", "tar xf a -F curl", "tar xf a -T list", "rsync -e curl a b", "rsync -ave curl a b",
        "rsync --rsync-path=curl a b", "rsync --log-file=/etc/x a b", "man -P curl ls", "man --pager=curl ls", "man -Hcurl ls",
        "rg --pre curl x", "rg --pre=curl x", "fd x -x curl", "zip a b -T -TT curl", "zip a b -T --unzip-command=curl",
        "split --filter=curl a", "ssh -o ProxyCommand=curl h", "ssh -oProxyCommand=curl h", "ssh -F x h", "scp -S curl a h:b",
        "curl -o /etc/x u", "curl -so/etc/x u", "curl --output /etc/x u", "curl -K x", "curl --config=x", "curl -O u",
        "curl -D /etc/x u", "curl --engine x u",
        "curl -w @file u", "curl -w '%output{/etc/x}x' u", "curl -sw'%output{/etc/x}' u", 'curl --write-out "$x" u', "wget -O /etc/x u", "wget --use-askpass=curl u", "wget -e x u", "wget -a /etc/x u",
        "vim -c x a", "vim +x a", "vim --cmd x a", "vim -S x", "less +x a", "less -o /etc/x a", "tee /etc/x", "tee -a /etc/x",
        "dd if=a of=/etc/x", "shuf -o /etc/x a", "iconv -o /etc/x a", "patch -o /etc/x a", "sdiff -o /etc/x a b",
        "sdiff --diff-program=curl a b", "file -C -m x", "sqlite3 a '.shell curl'", "sqlite3 -cmd x a", "pip config edit --editor curl",
        "git -c core.pager=curl log", "git -c alias.x='!curl' x", "git --exec-path=x log", "git rebase -x curl main",
        "git bisect run curl", "git submodule foreach curl", "git difftool -x curl", "git grep -Ocurl x", "git fetch --upload-pack curl",
        "git push --receive-pack=curl", "git archive -o /etc/x HEAD", "git config core.pager curl", "git config set core.editor curl",
        "git config -e", "git filter-branch x", "git $x", "git log $x",
    ],
)  # fmt: skip
def test_program_that_is_allowed_whole_is_still_asked_about(command: str) -> None:
    """A policy that allows every program above, and none that they would run."""
    names = {*PROGRAMS, "git", "pip", "tar", "vim", "dd", "tee"}
    rules = policy([f"shell({name}:*)" for name in names if " " not in name], ["file(write:/etc/**)"])
    if not command.startswith("curl"):
        rules = policy([f"shell({name}:*)" for name in names if " " not in name and name != "curl"])
    assert decide_shell(rules, command).verdict in {"ask", "deny"}


def test_option_is_decided_as_what_it_does() -> None:
    rules = policy(
        ["shell(sort:*)", "shell(tar:*)", "shell(gzip:*)", "file(write:/workspace/c/**)"],
        ["shell(curl:*)", "file(write:/etc/**)"],
    )
    assert decide_shell(rules, "sort -o out a").verdict == "allow"
    assert decide_shell(rules, "sort -o /etc/x a").rule == "file(write:/etc/**)"
    assert decide_shell(rules, "sort --compress-program=gzip a").verdict == "allow"
    assert decide_shell(rules, "tar --use-compress-program 'gzip -9' -cf a b").verdict == "allow"
    denied = decide_shell(rules, "tar -I 'curl x' -cf a b")
    assert (denied.verdict, denied.rule) == ("deny", "shell(curl:*)")
    assert next(part.via for part in denied.parts if part.verdict.rule == "shell(curl:*)") == ("tar",)


def test_format_that_curl_writes_out_is_allowed_unless_it_names_a_file() -> None:
    rules = policy(["shell(curl:*)"])
    for text in ("curl -s -w '%{http_code}' u", "curl -sw '%{json}\\n' u", "curl --write-out=%{size_download} u"):
        assert decide_shell(rules, text).verdict == "allow"


def test_value_of_another_option_is_no_option() -> None:
    assert effects("sort", ["-t", "-o", "a"]) is None
    assert effects("sort", ["--", "-o", "a"]) is None
    assert effects("ls", ["-o"]) is None


@given(
    st.sampled_from([*sorted(PROGRAMS), "git clone", "git log", "git config", "sed", "awk", "git"]),
    st.lists(
        st.sampled_from(
            [
                "-o",
                "-I",
                "--out",
                "--",
                "-",
                "a",
                "-e",
                "-xIf",
                "--x=y",
                "",
                "-c",
                "s/a/b/w",
                Unknown("$x", "any"),
                "-i",
            ]
        ),
        max_size=6,
    ),
)
def test_any_arguments_are_read(name: str, rest: list[str | Unknown]) -> None:
    first, *more = name.split()
    found = effects(first, [*more, *rest])
    assert found is None or all(isinstance(each, str) and each for each in (*found.texts, *found.programs))


def test_settings_of_git_that_are_safe() -> None:
    assert is_safe_config("user.name=a")
    assert is_safe_config(Unknown('user.name="$x"', "one", "user.name="))
    assert not is_safe_config("core.pager=a")
    assert not is_safe_config(Unknown("$x", "any"))


@pytest.mark.parametrize(
    "name", ["MANPAGER", "LESSOPEN", "TAR_OPTIONS", "RSYNC_RSH", "PYTHONSTARTUP", "MAKEFLAGS", "VIMINIT"]
)
def test_variable_that_changes_what_a_program_runs_asks(seed: Policy, name: str) -> None:
    assert decide_environment(seed, [name]).verdict == "ask"


@pytest.mark.parametrize(
    ("argv", "made"),
    [
        (["sort", "-no", "made", "given"], "made"),
        (["sort", "--outp=made", "given"], "made"),
        (["sed", "-n", "1w made", "given"], "made"),
        (["sed", "1e touch made", "given"], "made"),
        (["sed", "s/.*/touch made/e", "given"], "made"),
        (["awk", 'BEGIN{system("touch made")}'], "made"),
        (["awk", '{print > "made"}', "given"], "made"),
        (["find", ".", "-maxdepth", "0", "-fprint", "made"], "made"),
        (["uniq", "given", "made"], "made"),
        (["tar", "--to-command=touch made", "-xf", "given.tar"], "made"),
        (["tar", "cIf", "touch made; cat", "x.tar", "given"], "made"),
        (["tar", "cf", "x.tar", "--checkpoint=1", "--checkpoint-action=exec=touch made", "given"], "made"),
        (["split", "--filter=touch made", "given"], "made"),
        (["git", "diff", "--no-index", "--output=made", "given", "other"], "made"),
    ],
)
def test_real_program_does_what_the_table_says(tmp_path: Path, argv: list[str], made: str) -> None:
    if shutil.which(argv[0]) is None:
        pytest.skip(f"{argv[0]} is not installed")
    (tmp_path / "given").write_text("a\n")
    (tmp_path / "other").write_text("b\n")
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    if "given.tar" in argv:
        subprocess.run(["tar", "-cf", "given.tar", "given"], cwd=tmp_path, env=env, check=True, timeout=60)
    subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, check=False, timeout=60)
    assert (tmp_path / made).exists()
    assert argv[0] == "find" or effects(argv[0], argv[1:]) is not None
