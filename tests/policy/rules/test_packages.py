from __future__ import annotations

import pytest
from tests.support.policies import sources

from carrel.policy.rules.packages import MOST_READ, SHORT_LINE, judge, limited_reader, normalised
from carrel.policy.shell.finder import find
from carrel.policy.verdict import strictest

INDEX = "https://python-index.example/simple/"
SOURCES = sources(
    package_managers={
        "pip": {"registries": [{"name": "index", "url": INDEX, "trusted": True}], "blocked_packages": ["subprocess32", "PyAuto_GUI"]},
        "conda": {"enabled": False}, "npm": {"enabled": True, "blocked_packages": ["left-pad"]},
    },
    git={"allowed_remotes": ["https://github.com/*"]},
)  # fmt: skip
FILES = {
    "ok.txt": "pandas>=2  # data\n\nnumpy[x]==1 ; python_version < '3'\n",
    "bad.txt": "pandas\nsubprocess32==1.0\n",
    "nested.txt": "-r bad.txt\n",
    "loop.txt": "-r loop.txt\npandas\n",
    "index.txt": "--index-url https://evil.example/simple\npandas\n",
    "index2.txt": "--extra-index-url=https://evil.example/simple\npandas\n",
    "url.txt": "x @ https://evil.example/x.whl\n",
    "joined.txt": "sub\\\nprocess32\n",
    "variable.txt": "${X}\n",
    "hashed.txt": "pandas==2 --hash=sha256:00\n",
}


def verdict(command: str) -> str:
    found = find(command)
    remarks = [each for one in found.commands for each in judge(SOURCES, one.arguments, "sources.json", FILES.get)]
    worst = strictest(remarks)
    return worst.verdict if worst else "allow"


@pytest.mark.parametrize("prefix", ["pip install", "pip3 install", "pip3.11 install", "python -m pip install", "python3 -I -m pip install", "python3.11 -Im pip install",
                                    "uv pip install", "uv add", "uv tool install", "uvx", "pipx install", "uv run --with", "env pip install", "/usr/bin/pip install",
                                    "timeout 9 pip install", "pip --no-input install", "pip download", "pip wheel", "poetry add", "python -mpip install"])  # fmt: skip
@pytest.mark.parametrize(
    ("package", "answer"),
    [("pandas", "allow"), ("subprocess32", "deny"), ("Subprocess32", "deny"), ("pyauto.gui", "deny"), ("subprocess32==1.0", "deny"), ("'subprocess32[x]>=1'", "deny"),
     ("'subprocess32 ; python_version > \"3\"'", "deny"), ("$x", "ask"), ("pyautogui2", "allow")],
)  # fmt: skip
def test_blocked_packages_however_asked_for(prefix: str, package: str, answer: str) -> None:
    assert verdict(f"{prefix} {package}") == answer


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [(f"-i {INDEX} pandas", "allow"), ("--index-url https://evil.example/simple pandas", "deny"), ("-ihttps://evil.example pandas", "deny"),
     ("--extra-index-url=https://evil.example pandas", "deny"), ("-f https://evil.example pandas", "deny"), ("-f ./wheels pandas", "allow"),
     ("--trusted-host evil.example pandas", "deny"), ("--trusted-host python-index.example pandas", "allow"), ("-i $x pandas", "ask"),
     ("-i https://python-index.example.evil.example/simple pandas", "deny"), ("-i https://python-index.example/simple/../x pandas", "deny"),
     ("-i https://user@python-index.example/simple pandas", "deny"), ("-i http://python-index.example/simple/ pandas", "deny"), ("--proxy x pandas", "ask"),
     ("--nonsense pandas", "ask"), ("-U -q --no-deps pandas", "allow"), ("-t out pandas", "allow"), ("-t subprocess32 pandas", "allow"),
     ("https://evil.example/x-1.whl", "deny"), (f"{INDEX}x-1.whl", "allow"), (f"{INDEX}subprocess32-1-py3-none-any.whl", "deny"),
     ("git+https://github.com/a/b", "allow"), ("git+https://github.com/a/b@v1#egg=subprocess32", "deny"), ("git+https://evil.example/a/b", "deny"),
     ("'x @ git+https://evil.example/a'", "deny"), ("'subprocess32 @ git+https://github.com/a/b'", "deny"), ("git+ssh://git@evil.example/a", "deny"), ("hg+https://x/y", "ask"),
     ("-e .", "allow"), ("-e git+https://evil.example/a", "deny"), (".", "allow"), ("./dir", "allow"), ("./subprocess32-1.0.tar.gz", "deny"), ("file:///x/subprocess32-1.zip", "deny"),
     ("-r ok.txt", "allow"), ("-rok.txt", "allow"), ("--requirement=ok.txt", "allow"), ("-r bad.txt", "deny"), ("-r nested.txt", "deny"), ("-r loop.txt", "allow"),
     ("-r missing.txt", "ask"), ("-r index.txt", "deny"), ("-r index2.txt", "deny"), ("-r url.txt", "deny"), ("-r joined.txt", "deny"), ("-r variable.txt", "ask"),
     ("-r hashed.txt", "allow"), ("-r https://evil.example/r.txt", "ask"), ("-r $x", "ask"), ("-c bad.txt pandas", "deny"), ("", "ask"), ("'a b c'", "ask")],
)  # fmt: skip
def test_indexes_links_and_files(arguments: str, answer: str) -> None:
    assert verdict(f"pip install {arguments}") == answer


@pytest.mark.parametrize(
    ("command", "answer"),
    [("pip list", "allow"), ("pip --version", "allow"), ("pip uninstall subprocess32", "allow"), ("python x.py", "allow"), ("python -m pytest", "allow"), ("conda list", "deny"),
     ("mamba install x", "deny"), ("npm install x", "allow"), ("npm i left-pad", "deny"), ("npm install left-pad@1", "deny"), ("npx left-pad", "deny"), ("npm ci", "ask"),
     ("npm install --registry https://x y", "ask"), ("apt-get install x", "ask"), ("cargo add x", "ask"), ("cargo build", "allow"), ("go get x", "ask"), ("go build", "allow"),
     ("uv sync", "ask"), ("poetry install", "ask"), ("uv run pytest", "allow"), ("pip $x", "ask"), ("uv pip install --index https://evil.example x", "deny"),
     (f"uv add --default-index {INDEX} x", "allow"), ("ls", "allow")],
)  # fmt: skip
def test_other_commands_and_managers(command: str, answer: str) -> None:
    assert verdict(command) == answer


def test_names_are_compared_as_indexes_do() -> None:
    assert normalised("Py__Auto.-GUI") == "py-auto-gui"


def test_without_a_reader_a_file_asks() -> None:
    remarks = list(judge(SOURCES, ("pip", "install", "-r", "ok.txt"), "sources.json"))
    assert [each.verdict for each in remarks] == ["ask"]


@pytest.mark.parametrize("text", ["x" * (MOST_READ // 2), "x\n" * (MOST_READ // 2 // SHORT_LINE)])
def test_no_more_is_read_than_can_be_looked_through_at_once(text: str) -> None:
    """A command may name many files, and many commands the same: nobody is served while they are looked through."""
    asked: list[str] = []

    def read(path: str) -> str:
        asked.append(path)
        return text

    reading = limited_reader(read)
    assert [reading("a") for _ in range(9)] == [text, text, *[None] * 7]
    assert len(asked) <= 3
    assert limited_reader(lambda _path: text * 2)("a") == text * 2
    assert limited_reader(lambda _path: text * 3)("a") is None


def test_blanks_in_a_requirements_file_are_gone_through_once() -> None:
    read = {"wide.txt": f"pandas{' ' * 300_000}x", "hashed.txt": f"pandas{' ' * 300_000}--hash=sha256:00"}.get
    for file, answer in (("wide.txt", ["ask"]), ("hashed.txt", [])):
        remarks = list(judge(SOURCES, ("pip", "install", "-r", file), "sources.json", read))
        assert [each.verdict for each in remarks] == answer


FEW = sources(
    package_managers={
        "pip": {"registries": [{"name": "index", "url": INDEX}], "allowed_packages": ["Pandas", "py_yaml"], "blocked_packages": ["py-yaml"]},
        "npm": {"allowed_packages": ["left-pad"]},
    },
    git={"allowed_remotes": ["https://github.com/*"]},
)  # fmt: skip


@pytest.mark.parametrize(
    ("command", "answer"),
    [("pip install pandas", "allow"), ("pip install 'PANDAS[x]>=2'", "allow"), ("uv pip install pandas", "allow"), ("uv add numpy", "deny"), ("pip install numpy", "deny"), ("pip install pandas numpy", "deny"),
     ("pip install Py.YAML", "deny"), ("pip install -r ok.txt", "deny"), ("pip install .", "allow"), ("pip install ./pandas-2.0-py3-none-any.whl", "allow"), ("pip install ./numpy-2.0.tar.gz", "deny"),
     ("pip install ./x.zip", "ask"), (f"pip install {INDEX}numpy-1.whl", "deny"), (f"pip install {INDEX}x.zip", "ask"), ("pip install git+https://github.com/a/b", "ask"),
     ("pip install git+https://github.com/a/b#egg=pandas", "allow"), ("pip install git+https://github.com/a/b#egg=numpy", "deny"), ("pip install 'pandas @ git+https://github.com/a/b'", "allow"),
     ("pip install 'numpy @ git+https://github.com/a/b'", "deny"), ("npm install left-pad", "allow"), ("npm install right-pad", "deny"), ("pip list", "allow")],
)  # fmt: skip
def test_only_allowed_packages(command: str, answer: str) -> None:
    found = find(command)
    remarks = [each for one in found.commands for each in judge(FEW, one.arguments, "sources.json", FILES.get)]
    worst = strictest(remarks)
    assert (worst.verdict if worst else "allow") == answer
    if worst and answer == "deny" and "yaml" not in command.lower():
        assert worst.rule
        assert worst.rule.endswith("allowed_packages")
