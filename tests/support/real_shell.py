"""Runs shell texts with real shells in a root that holds nothing but them, recording stubs and a few real wrappers.

Every program a text starts writes its name and arguments to a descriptor of that text. There is no other program in
that root, no network and nothing to write to but a directory of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

WRAPPERS = ("env", "xargs", "timeout", "find", "nice", "nohup", "setsid", "stdbuf")
NAMES = (
    [*"abcdefghijklmnopqrstuvwxyz", "aa", "bb", "ab", "ba", "out", "pwned", "cmd", "foo", "bar", "target", "x1", "a1", "curl", "wget", "rm", "ls", "cat", "grep", "sed", "awk", "git", "pip", "python", "python3", "make", "sort", "tr", "head", "tail", "wc", "sudo", "chmod", "cp", "mv", "mkdir", "touch", "date", "id", "whoami", "ssh", "nc", "tee", "rmdir", "uniq", "cut", "diff", "seq", "sleep", "du", "df", "tar", "gzip", "node", "perl", "ruby", "docker", "сurl", "ｌs", "cu\u200drl", "l\xa0s", "naïve", "echo2", "-x", "{a", "a}", "{", "}", "!", "[[", "]]", "if", "fi", "a,b", "{a,b}", "a\\b", "a b", "a;b", "a'b", 'a"b', "$x", "*", "?", "a=b", "#a", "time", "then", "do", "done", "in"]
)  # fmt: skip
STUB = """#!/bin/dash
printf '%s\\0' "$#" "${0##*/}" "$@" >&9
printf 'pwned\\n'
exit $(( $$ % 3 == 0 ))
"""
DRIVER = """#!/bin/bash
shell=$1
for file in /texts/*; do
  number=${file##*/}
  IFS= read -r -d '' text < "$file"
  cd "/work/$number"
  [[ $number == *[02468] ]] && export PATH=/real:/stubs || export PATH=/stubs
  /driver/timeout -s KILL "$2" "/bin/$shell" -c "$text" 9>"/log/$number" </dev/null >/dev/null 2>&1
  kill -s KILL -- -1 2>/dev/null  # what the text left running, however much that is
done
:
"""
NOT_FOUND = "() { printf '%s\\0' $(($# - 1)) \"$@\" >&9; return 127; }"
BATCH = 80


class RealShell:
    """The root, made once; removed by `close`."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="real-shell-"))
        for name in ("bin", "stubs", "real", "driver", "texts", "work", "log", "dev", "proc"):
            (self.root / name).mkdir()
        self._copy("bash", "bin")
        self._copy("dash", "bin")
        (self.root / "bin/sh").symlink_to("dash")
        for name in WRAPPERS:
            self._copy(name, "real")
            self._stub(name)
        self._copy("timeout", "driver")
        for name in ("bash", "dash"):
            (self.root / "real" / name).symlink_to(f"/bin/{name}")
        (self.root / "real/sh").symlink_to("/bin/dash")
        for name in NAMES:
            self._stub(name)
        locale = Path("/usr/lib/locale/C.utf8")
        shutil.copytree(locale, self.root / locale.relative_to("/"))
        for library in Path("/usr/libexec/coreutils").glob("libstdbuf.so"):
            target = self.root / "usr/libexec/coreutils"
            target.mkdir(parents=True)
            shutil.copy2(library, target)
        driver = self.root / "driver/run"
        driver.write_text(DRIVER)
        driver.chmod(0o755)

    def close(self) -> None:
        shutil.rmtree(self.root)

    def _stub(self, name: str) -> None:
        path = self.root / "stubs" / name
        path.write_text(STUB)
        path.chmod(0o755)

    def _copy(self, name: str, folder: str) -> None:
        program = shutil.which(name)
        assert program is not None, name
        shutil.copy2(program, self.root / folder / name)
        linked = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for library in re.findall(r"(/\S+)", linked):
            target = self.root / library[1:]
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(library, target)

    def run(
        self, texts: Sequence[str], shell: str = "bash", *, wrappers: Sequence[bool] | None = None, seconds: float = 1.0
    ) -> list[list[tuple[str, ...]]]:
        """The programs each text started, with their arguments.

        `wrappers` says for each text whether it finds the real wrappers or their stubs; without, every other one does.
        """
        chosen = wrappers or [number % 2 == 0 for number in range(len(texts))]
        numbered = list(zip(texts, chosen, strict=True))
        batches = [numbered[start : start + BATCH] for start in range(0, len(numbered), BATCH)]
        with ThreadPoolExecutor(2) as pool:
            return [
                each
                for batch in pool.map(lambda batch: list(self._batch(batch, shell, seconds)), batches)
                for each in batch
            ]

    def _batch(self, texts: Sequence[tuple[str, bool]], shell: str, seconds: float) -> Iterator[list[tuple[str, ...]]]:
        with tempfile.TemporaryDirectory(prefix="real-shell-") as directory:
            here = Path(directory)
            for folder in ("texts", "work", "log"):
                (here / folder).mkdir()
            # The driver puts the real wrappers into the path of texts with an even number.
            names = [f"{2 * number + (not wrapped):04}" for number, (_, wrapped) in enumerate(texts)]
            for name, (text, _) in zip(names, texts, strict=True):
                (here / "work" / name).mkdir()
                (here / "texts" / name).write_bytes(text.encode() + b"\0")
            done = subprocess.run(
                [
                    "bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--ro-bind", str(self.root), "/",
                    "--ro-bind", str(here / "texts"), "/texts", "--bind", str(here / "work"), "/work",
                    "--bind", str(here / "log"), "/log", "--dev", "/dev", "--proc", "/proc",
                    "--clearenv", "--setenv", "LC_ALL", "C.UTF-8", "--setenv", "HOME", "/work",
                    "--setenv", "BASH_FUNC_command_not_found_handle%%", NOT_FOUND,
                    "/driver/run", shell, str(seconds),
                ],
                check=False, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=60 + seconds * len(texts),
            )  # fmt: skip
            if done.returncode and len(texts) > 1:
                # One of them took more than the machine has; the others shall not suffer.
                yield from (each for text in texts for each in self._batch([text], shell, seconds))
                return
            for name in names:
                log = here / "log" / name
                yield list(_records(log.read_bytes())) if log.exists() else []


def _records(log: bytes) -> Iterator[tuple[str, ...]]:
    words = iter(os.fsdecode(word) for word in log.split(b"\0")[:-1])
    for count in words:
        yield tuple(next(words) for _ in range(int(count) + 1))
