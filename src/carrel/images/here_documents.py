"""Here-documents of a Dockerfile: `RUN <<EOF` and `COPY <<EOF /file`. Pure: no I/O."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from carrel.images.dockerfile_words import WordError, split

MOST = 100
"""Here-documents of one instruction."""
_MARKER = re.compile(r"(\d*)<<(-?)(['\"]?)([A-Za-z_][A-Za-z0-9_.-]*)\3")
_LIKE_ONE = re.compile(r"(?:^|[\s;&|(])\d*<<-?\s*['\"]?[A-Za-z_]")


@dataclass(frozen=True, slots=True)
class HereDocument:
    """The text between an instruction and the line with `name` alone. `marker` is the word that announces it."""

    marker: str
    name: str
    text: str
    expands: bool
    """Whether variables in it are replaced: if the delimiter has no quotes."""


def announced(rest: str, escape: str) -> list[tuple[str, str, bool, bool]]:
    """Return the marker, the delimiter, whether tabs are stripped and whether variables are expanded, of each
    here-document that an instruction announces. Raises `WordError`.
    """
    if not _LIKE_ONE.search(rest):
        return []
    found = []
    for word in split(rest, escape):
        match = _MARKER.fullmatch(word)
        if match is not None:
            found.append((word, match[4], bool(match[2]), not match[3]))
        elif _LIKE_ONE.match(word):
            raise WordError(f"'{word[:80]}' is no delimiter of a here-document")
    if len(found) > MOST:
        raise WordError(f"more than {MOST} here-documents")
    return found


def take(marker: tuple[str, str, bool, bool], lines: Sequence[str], first: int) -> tuple[HereDocument, int]:
    """Return the here-document that begins at this line, and the index of the line after it. Raises `WordError`."""
    word, name, tabs, expands = marker
    text: list[str] = []
    for index in range(first, len(lines)):
        line = lines[index].lstrip("\t") if tabs else lines[index]
        if line == name:
            return HereDocument(word, name, "".join(f"{each}\n" for each in text), expands), index + 1
        text.append(line)
    raise WordError(f"there is no line '{name}' that ends the here-document")


def shell_text(rest: str, documents: Sequence[HereDocument]) -> str:
    """Return the shell text of a RUN with here-documents.

    One alone is the script itself, for the interpreter in its first line if it names one; others go to the shell.
    """
    if len(documents) != 1 or rest != documents[0].marker:
        # Tabs are gone already, so `<<-` changes nothing any more.
        return rest + "\n" + "".join(f"{each.text}{each.name}\n" for each in documents)
    [script] = documents
    if not script.text.startswith("#!"):
        return script.text
    interpreter, _, argument = script.text.split("\n", 1)[0][2:].strip().partition(" ")
    words = [interpreter, *([argument.strip()] if argument.strip() else []), "/dev/stdin"]
    end = "CARREL_END"
    while end in script.text:
        end += "_"
    return f"{shlex.join(words)} <<'{end}'\n{script.text}{end}\n"
