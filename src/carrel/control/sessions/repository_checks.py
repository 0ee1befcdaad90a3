"""Decides whether the configuration and hooks of a git repository that appeared in a folder can run nothing.

An agent may make a repository, by `git clone` or `git init`, as long as git outside of the sandbox finds no command in
it. Everything that is not known to be harmless is refused: git has many keys that name a program. Blocking; the files
are hostile.
"""

from __future__ import annotations

import os
import re
import stat

CONFIG, HOOKS = "config", "hooks"
LARGEST_CONFIG = 64 * 1024
MOST_SAMPLES = 64
_SAMPLE = ".sample"

_HARMLESS = {
    "core": {
        "repositoryformatversion",
        "filemode",
        "bare",
        "logallrefupdates",
        "ignorecase",
        "precomposeunicode",
        "symlinks",
        "autocrlf",
    },
    "extensions": {"objectformat", "refstorage"},
    "remote": {"url", "fetch", "tagopt"},
    "branch": {"remote", "merge", "rebase"},
    "submodule": {"active", "url"},
    "user": {"name", "email"},
    "init": {"defaultbranch"},
    "pull": {"rebase", "ff"},
    "push": {"default", "autosetupremote"},
}
_SECTION = re.compile(r'\[([A-Za-z]+)(?: "[^"\\]*")?\]')
_ENTRY = re.compile(r"([A-Za-z]+)(?: *= *([^\"\\]*))?")
_UNSEEN = r"[^\t\n -\x7e\xa0-\U0010ffff]"


def is_harmless_config(content: bytes) -> bool:
    """Whether every line of a configuration is of a form that is read here as git reads it, and sets a harmless key."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return False
    if len(content) > LARGEST_CONFIG or re.search(_UNSEEN, text):
        return False
    section = ""
    for line in (line.strip(" \t") for line in text.split("\n")):
        if not line or line[0] in "#;":
            continue
        if (header := _SECTION.fullmatch(line)) is not None:
            section = header[1].lower()
            continue
        entry = _ENTRY.fullmatch(line)
        if entry is None or entry[1].lower() not in _HARMLESS.get(section, ()):
            return False
        if "::" in (entry[2] or ""):  # the address of a remote helper, which is a program
            return False
    return True


def is_harmless(directory: int, name: str) -> bool:
    """Whether the entry `config` or `hooks` of an open `.git` directory can be left: it is of the usual kind, and holds
    only harmless keys, or only the samples that git puts there. Raises `OSError` if it cannot be read.
    """
    kind = os.O_DIRECTORY if name == HOOKS else os.O_NONBLOCK
    opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | kind, dir_fd=directory)
    try:
        if name == HOOKS:
            with os.scandir(opened) as found:
                return all(
                    number < MOST_SAMPLES and entry.name.endswith(_SAMPLE) and entry.is_file(follow_symlinks=False)
                    for number, entry in enumerate(found)
                )
        status = os.fstat(opened)
        return stat.S_ISREG(status.st_mode) and is_harmless_config(os.read(opened, LARGEST_CONFIG + 1))
    finally:
        os.close(opened)
