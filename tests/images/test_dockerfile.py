"""Dockerfiles: what is read, what is refused and where, and what the words mean."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.errors import InvalidRequest
from carrel.images.build_steps import BuildArguments, CopyStep, DirectoryStep, RunStep, StageEvaluation
from carrel.images.dockerfile import parse
from carrel.images.dockerfile_words import WordError, expand, pairs, split
from carrel.images.documents import ImageConfig, ImagePlatform

HOST = ImagePlatform(architecture="amd64")
BASE = ImageConfig(architecture="amd64", environment={"PATH": "/bin"}, command=("sh",), entry_point=("start",))


def evaluated(text, arguments=None, stage=-1, base=BASE):
    file = parse(text)
    number = range(len(file.stages))[stage]
    walk = StageEvaluation(file.stages[number], base, BuildArguments(file, arguments or {}, HOST), file.escape)
    return list(walk.steps()), walk.config


def test_a_service_of_several_stages():
    text = """\
# syntax=docker/dockerfile:1
ARG VERSION=3.13
FROM python:${VERSION}-slim AS build
WORKDIR /src
COPY requirements.txt .
# a comment
RUN pip install \\
    # a comment inside
    --target /deps \\

    -r requirements.txt
FROM python:${VERSION}-slim
ENV PATH=/app/bin:$PATH PORT="80 80"
COPY --from=build --chown=1000:1000 /deps /app/deps/
WORKDIR /app
WORKDIR sub
EXPOSE 80 8080/udp
USER 1000
ENTRYPOINT ["python"]
CMD ["-m", "app"]
LABEL a=b "c d"='e f'
"""
    file = parse(text)
    arguments = BuildArguments(file, {"VERSION": "3.12"}, HOST)
    assert [arguments.base_of(each, "\\")[0] for each in file.stages] == ["python:3.12-slim"] * 2
    assert [each.line for each in file.stages] == [3, 12] and file.find("build", 1) == 0 == file.find("0", 1)
    made, copied, run = evaluated(text, stage=0)[0]
    assert isinstance(made, DirectoryStep) and made.path == "/src"
    assert isinstance(copied, CopyStep) and (copied.sources, copied.target) == (("requirements.txt",), "/src/")
    assert isinstance(run, RunStep) and run.line == 7 and run.working_directory == "/src"
    assert run.command == ("/bin/sh", "-c", "pip install     --target /deps     -r requirements.txt")
    steps, config = evaluated(text)
    assert isinstance(steps[0], CopyStep) and (steps[0].origin, steps[0].owner) == ("build", "1000:1000")
    assert config.environment == {"PATH": "/app/bin:/bin", "PORT": "80 80"} and config.working_directory == "/app/sub"
    assert (config.entry_point, config.command, config.user) == (("python",), ("-m", "app"), "1000")
    assert config.exposed_ports == ("80/tcp", "8080/udp") and config.labels == {"a": "b", "c d": "e f"}


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("FROM a\nHEALTHCHECK CMD true", 2, "HEALTHCHECK is not supported"),
        ("FROM a\n\nONBUILD RUN x", 3, "ONBUILD is not supported"),
        ("RUN x", 1, "before the first FROM"),
        ("FROM a\nRUN --mount=type=cache,target=/x y", 2, "RUN --mount is not supported"),
        ("FROM a\nRUN <<EOF\nx\n EOF", 2, "there is no line 'EOF'"),
        ("FROM a\n\nRUN cat <<EOF|sh\nx\nEOF", 3, "no delimiter"),
        ("FROM a\nADD <<EOF /x\nx\nEOF", 2, "ADD of a here-document"),
        ("FROM a\nCOPY <<A <<B /x\nx\nA\ny\nB", 2, "several sources"),
        ("FROM a\nRUN <<EOF\nx\nEOF\nHEALTHCHECK none", 5, "is not supported"),
        ("FROM a\nWORKDIR /workspace/x", 2, "directories of their own at /workspace"),
        ("FROM a\nCOPY a /home/agent", 2, "directories of their own at /home/agent"),
        ("FROM a\nCOPY --link a b", 2, "COPY --link is not supported"),
        ("# syntax=example.com/other\nFROM a", 1, "is not supported"),
        ("FROM a AS b\nFROM c AS b", 2, "already a stage"),
        ("FROM a b", 1, "FROM is not understood"),
        ("FROM a\nSHELL x", 2, "JSON array"),
        ("FROM a\nCOPY a", 2, "a source and a target"),
        ("FROM a\nCOPY a b c", 2, "several sources"),
        ("FROM a\nADD https://x.example/y z", 2, "from the network"),
        ("FROM a\nENV a", 2, "has no value"),
        ("FROM a\nENV a='x", 2, "is not closed"),
        ("FROM a\nENV a=${x%y}", 2, "is not supported"),
        ("FROM a\nARG 1=x", 2, "the name of an argument"),
        ("FROM a\nEXPOSE none", 2, "is no port"),
        ("FROM a\nCOPY --chmod=rwx a b", 2, "octal"),
        ("FROM a\nENV a=" + "x" * 600_000 + "\nENV b=$a$a", 3, "longer than"),
    ],
)
def test_refused_with_its_line(text, line, words):
    with pytest.raises(InvalidRequest, match=words) as raised:
        evaluated(text)
    assert f"line {line}:" in raised.value.detail


def test_variables_grow_no_further_than_a_limit():
    text = "FROM a\nENV a=xxxxxxxxxx\n" + "ENV a=$a$a\n" * 40
    with pytest.raises(InvalidRequest, match=r"longer than|too large"):
        evaluated(text)


def test_arguments():
    text = "ARG A=1\nFROM x\nARG A\nARG B=${A}2\nARG TARGETARCH\nENV C=$B\nRUN echo"
    steps, config = evaluated(text)
    assert steps[0].environment == {"A": "1", "B": "12", "TARGETARCH": "amd64", "C": "12", "PATH": "/bin"}
    assert evaluated(text, {"A": "7"})[1].environment["C"] == "72"
    assert "A" not in config.environment
    with pytest.raises(InvalidRequest, match="declares no argument D"):
        evaluated(text, {"D": "x"})


def test_an_entry_point_drops_the_command_of_the_base():
    assert evaluated('FROM x\nENTRYPOINT ["a"]')[1].command == ()
    assert evaluated('FROM x\nCMD b\nENTRYPOINT ["a"]')[1].command == ("/bin/sh", "-c", "b")


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("$a", "A"), ("${a}b", "Ab"), ("${none:-x$a}", "xA"), ("${a:+y}", "y"), ("${none:+y}", ""), ("${empty:-z}", "z"),
        ("${empty-z}", ""), ("'$a'", "$a"), ('"$a b"', "A b"), (r"\$a", "$a"), ('"a\\"b"', 'a"b'), ("$", "$"), ("a$ b", "a$ b"),
    ],
)  # fmt: skip
def test_words(word, value):
    assert expand(word, {"a": "A", "empty": ""}, "\\") == value


def test_pairs():
    assert pairs('a=1 b="2 3" c=\\ x', "\\") == [("a", "1"), ("b", '"2 3"'), ("c", "\\ x")]
    assert pairs("name the rest = of it", "\\") == [("name", "the rest = of it")]


@given(st.text(alphabet="ab $\\{}'\":-+\n", max_size=60))
def test_any_word_is_read_or_refused(text):
    for read in (split, pairs, lambda word, escape: expand(word, {"a": "x"}, escape)):
        try:
            read(text, "\\")
        except WordError:
            pass


@given(st.lists(st.sampled_from(
    ["FROM a", "RUN x", "COPY a b", "ENV a=$b", "ARG b", "# c", "\\", "WORKDIR ${", "CMD [", "USER 'x", " RUN y \\", "FROM b AS c", "\t", "`"]
), max_size=12))  # fmt: skip
def test_any_file_is_read_or_refused(lines):
    try:
        evaluated("\n".join(lines))
    except InvalidRequest as error:
        assert "Dockerfile" in error.detail


HERE_DOCUMENTS = r"""FROM a
ARG WORD=world
RUN <<EOF
# a comment of the script
echo "$WORD" \

EOF
RUN cat <<-'A' <<B > /x
TABone $WORD
A
two
TABB
B
RUN <<X
#!/usr/bin/env -S python3 -u
print("EOF")
X
COPY --chmod=700 <<EOF <<'RAW' /etc/
hello ${WORD} \$WORD 'quoted' \n ${NONE:-none}
EOF
$WORD
RAW
COPY <<EOF /etc/one
EOF
RUN echo "a <<EOF" $((1 << 2)) <<<word
""".replace("TAB", "\t")


def test_here_documents():
    steps, _ = evaluated(HERE_DOCUMENTS)
    runs = [step.command[2] for step in steps if isinstance(step, RunStep)]
    assert runs[0] == '# a comment of the script\necho "$WORD" \\\n\n'
    assert runs[1] == "cat <<-'A' <<B > /x\none $WORD\nA\ntwo\n\tB\nB\n"
    assert runs[2].startswith("/usr/bin/env '-S python3 -u' /dev/stdin <<'CARREL_END'\n#!/usr/bin/env")
    assert runs[3] == 'echo "a <<EOF" $((1 << 2)) <<<word'
    several, one = (step for step in steps if isinstance(step, CopyStep))
    assert (several.sources, several.target, several.mode) == ((), "/etc/", 0o700)
    assert several.texts == (("EOF", "hello world $WORD 'quoted' \\n none\n"), ("RAW", "$WORD\n"))
    assert (one.target, one.texts) == ("/etc/one", (("EOF", ""),))
