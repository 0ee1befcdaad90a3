"""The options of `carrel here`, read without a library: importing one takes longer than the whole command may take.

`here.py` declares the same options for the help. It reads whatever this module does not understand, and says what is
wrong with it.
"""

from __future__ import annotations

from typing import NamedTuple

TEXTS = {"--profile": "profile", "--name": "name", "--image": "image"}
LISTS = {"--allow-host": "allow_hosts", "--unprotect": "unprotect", "--env": "env", "--host-file": "host_files"}
LISTS |= {"-e": "env"}
FLAGS = {"--yes": "yes", "-y": "yes", "--no-questions": "no_questions", "--json": "json"}


TYPED = "the user typed this command"
"""The message of an approval that nobody was asked for: the program itself, which the user has named."""


class HereOptions(NamedTuple):
    """What the user asks `carrel here` for."""

    command: tuple[str, ...] = ()
    profile: str | None = None
    name: str | None = None
    allow_hosts: tuple[str, ...] = ()
    unprotect: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    host_files: tuple[str, ...] = ()
    yes: bool = False
    no_questions: bool = False
    json: bool = False
    image: str | None = None


def parse(words: list[str]) -> HereOptions | None:
    """Return the options, or None for words that are not understood, and for `--help`."""
    given: dict[str, object] = {}
    lists: dict[str, tuple[str, ...]] = {}
    rest = list(words)
    while rest and rest[0].startswith("-"):
        word, equals, value = rest.pop(0).partition("=")
        if word == "--" and not equals:
            if not rest:
                return None
            break
        if word in FLAGS and not equals:
            given[FLAGS[word]] = True
            continue
        if word not in TEXTS and word not in LISTS:
            return None
        if not equals:
            if not rest:
                return None
            value = rest.pop(0)
        if word in TEXTS:
            given[TEXTS[word]] = value
        else:
            lists[LISTS[word]] = (*lists.get(LISTS[word], ()), value)
    return HereOptions(tuple(rest), **given, **lists)  # type: ignore[arg-type]
