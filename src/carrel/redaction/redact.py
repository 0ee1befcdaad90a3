"""Redacts secrets in bytes, text and JSON values: known values in every usual spelling, and tokens of well-known
shapes.

The result depends only on the bytes around a secret: every spelling and every shape is redacted, even if they overlap.
So it does not depend on how the bytes are split into chunks, or on whether a stream is read from its start.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from ahocorasick_rs import BytesAhoCorasick, Implementation

from carrel.errors import InvalidRequest
from carrel.redaction.escapes import BACKSLASH, PERCENT, View, boundary
from carrel.redaction.escapes import LONGEST as LONGEST_ESCAPE
from carrel.redaction.shapes import PENDING, SHAPES, Shape, stands_alone
from carrel.redaction.spellings import NO, SHORTEST, WAIT, WRAPPED, Spelling, is_wrapped, spellings

T = TypeVar("T")
Found = tuple[int, int, int, bytes]
"""The position of the candidate, the span to redact (from, to), and the text that replaces it."""

CONTEXT = LONGEST_ESCAPE * (WRAPPED + 2)
"""Bytes that are kept before a position, because they decide about a candidate there."""

BLOCK = 256 * 1024
"""Bytes that are searched at once: hostile text may have a candidate every few bytes."""

LOOKS = 100_000
"""The candidates of a stream that may always be compared."""
SPARSE = 16
"""One more candidate may be compared for this many bytes. Ordinary text has one in thousands of bytes; only hostile
text has more.
"""

LONG = 128
"""Every so many bytes a long shape counts as one more candidate, because long shapes may overlap."""

DEEPEST = 200
"""The most levels of a JSON value that are searched."""

RELEASED = SHORTEST - 1
"""So few bytes reveal too little of a secret to delay a terminal."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,127}")
_MUTE = b"***"
_WITHHELD = b"[withheld: %d bytes that take too long to look through for secrets]"
_LONGEST_SHAPE = max(shape.longest for shape in SHAPES)
_LARGEST_TABLE = 60_000  # bytes of anchors up to which the fastest automaton does not take too much memory
_AUTHORIZATION = "Authorization: "


class Redactor:
    """Redacts a set of secrets. Immutable; one object serves any number of streams.

    `secrets` maps names to values, or is only values. A value is replaced by `[secret:NAME]` (`[secret]` without a
    name), a token of a well-known shape by `[redacted:KIND]`. Blanks around a value are ignored. A value of fewer than
    4 bytes is refused, because it would be found everywhere. `written` formats the replacement of a name in another
    way; `former` are previous values with their names.
    """

    def __init__(
        self,
        secrets: Mapping[str, bytes | str] | Iterable[bytes | str] = (),
        *,
        shapes: bool = True,
        written: Callable[[str], str] = "[secret:{}]".format,
        former: Iterable[tuple[str, bytes]] = (),
    ):
        named: Iterable[tuple[str | None, bytes | str]]
        named = secrets.items() if isinstance(secrets, Mapping) else ((None, value) for value in secrets)
        values: dict[bytes, bytes] = {}
        for name, value in (*named, *former):
            values.setdefault(_checked(name, value), written(name).encode() if name else b"[secret]")
        self._plain = tuple(values)
        found: dict[bytes, list[Spelling | Shape]] = {}
        self._secret_starts: set[bytes] = set()
        self._broken_starts: set[bytes] = set()
        self._shape_starts: set[bytes] = set()
        self._part_starts: set[bytes] = set()
        self._cuts: dict[bytes, bytes] = {}
        longest = 0
        for value, label in values.items():
            for spelling in spellings(self._safe_label(label), value):
                longest = max(longest, spelling.longest * LONGEST_ESCAPE)
                self._cuts.update((start, spelling.label) for start in spelling.revealing_starts())
                for anchor, whole in spelling.anchors():
                    found.setdefault(anchor, []).append(spelling)
                    for size in range(1, len(anchor)):
                        (self._secret_starts if size <= whole else self._broken_starts).add(anchor[:size])
        self._knows = bool(found)
        for shape in SHAPES if shapes else ():
            longest = max(longest, shape.longest)
            for anchor in shape.anchors:
                found.setdefault(anchor, []).append(shape)
                starts = self._part_starts if shape.part else self._shape_starts
                starts.update(anchor[:size] for size in range(1, len(anchor)))
        self._candidates = list(found.values())
        self._reach = max(map(len, found), default=0)
        self._labels = {shape.label: self._safe_label(shape.label) for shape in SHAPES}
        small = sum(map(len, found)) <= _LARGEST_TABLE
        self._automaton = BytesAhoCorasick(
            found, implementation=Implementation.DFA if small else Implementation.ContiguousNFA
        )
        self.lookbehind = longest + 2 * CONTEXT
        """Bytes before a position that decide what is redacted from there on; see `stream`."""

    def __repr__(self) -> str:
        return f"<Redactor of {len(self._plain)} secrets>"

    def _safe_label(self, label: bytes) -> bytes:
        """Return the label, or `***` if the label itself contains a secret."""
        return _MUTE if any(value in label for value in self._plain) else label

    def data(self, data: bytes) -> bytes:
        """Redact bytes; returns the same object if there are no secrets."""
        if len(data) > BLOCK:
            stream = self.stream()
            pieces = [stream.feed(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]
            clean = b"".join([*pieces, stream.finish()])
            return data if clean == data else clean
        if not data or not self.find(data, 0, final=True)[0]:
            return data
        return self.stream().finish(data)

    def text(self, text: str) -> str:
        """Redact a text; returns the same object if there are no secrets."""
        data = text.encode("utf-8", "surrogatepass")
        clean = self.data(data)
        if clean == data:
            return text
        try:
            return clean.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:  # a secret ended in the middle of a character
            return clean.decode("utf-8", "replace")

    def value(self, value: T) -> T:
        """Redact a JSON value of any shape, including its keys.

        A number that spells a secret becomes text. A value that is nested too deeply is replaced as a whole.
        """
        return self._value(value, 0)  # type: ignore[return-value]

    def _value(self, value: object, depth: int) -> object:
        if isinstance(value, str):
            return self.text(value)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int | float):
            shown = repr(value) if isinstance(value, float) or abs(value) < 10**1000 else hex(value)
            clean = self.text(shown)
            return value if clean == shown else clean
        if isinstance(value, bytes | bytearray):
            return self.data(bytes(value))
        if depth >= DEEPEST:
            return _MUTE.decode()
        if isinstance(value, Mapping):
            return self._mapping(value, depth)
        if isinstance(value, list | tuple):
            items = [self._value(item, depth + 1) for item in value]
            return items if isinstance(value, list) else tuple(items)
        return self.text(str(value))

    def _mapping(self, value: Mapping[object, object], depth: int) -> dict[object, object]:
        clean: dict[object, object] = {}
        for key, item in value.items():
            shown = self._value(key, depth + 1)
            while shown in clean:  # two keys with a secret each
                shown = f"{shown}'"
            if isinstance(item, str) and isinstance(key, str) and key.lower().endswith("authorization"):
                clean[shown] = self.text(_AUTHORIZATION + item).removeprefix(_AUTHORIZATION)
            else:
                clean[shown] = self._value(item, depth + 1)
        return clean

    def stream(self, *, skip: int = 0, effort: Effort | None = None) -> StreamRedactor:
        """Start a stream; feed it the bytes as they arrive. A stream that continues another one gets its `effort`.

        To continue from raw offset N (a caller that attaches again), feed from `max(0, N - lookbehind)` on and pass the
        number of bytes before N as `skip`. The stream returns nothing for the skipped bytes, and from N on the same as
        a stream from the very start. The replacement of a secret belongs to its first byte: a stream that continues in
        the middle of a secret returns nothing for the rest of it. The raw offset where a stream began, plus its
        `position`, is an offset to continue from without losing or repeating anything.
        """
        return StreamRedactor(self, skip, effort)

    def find(self, data: bytes, floor: int, *, final: bool) -> tuple[list[Found], int, int]:
        """Return what to redact in `data` from `floor` on, in order; the position up to which that is certain; and the
        number of candidates that were compared.

        Bytes before `floor` are only context. With `final` no more bytes follow, so everything is certain.
        """
        found: list[Found] = []
        hold, looks = self._search(data, floor, found, final=final, shapes=True)
        if self._knows:
            for escaping in (PERCENT, BACKSLASH):
                if escaping.mark in data:
                    view = View(escaping, data)
                    behind, more = self._search_decoded(view, floor, found, final=final)
                    hold, looks = min(hold, behind), looks + more
        found.sort(key=lambda each: (each[1], -each[2]))
        # A match whose candidate is before `hold` but whose span begins after it would be lost.
        for began, start, _end, _label in sorted(found, reverse=True):
            if began < hold <= start:
                hold = began
        return found, hold, looks

    def _search(self, data: bytes, floor: int, found: list[Found], *, final: bool, shapes: bool) -> tuple[int, int]:
        hold, looks = len(data), 0
        for pattern, at, _end in self._anchors(data):
            if at < floor:
                continue
            for candidate in self._candidates[pattern]:
                if isinstance(candidate, Spelling):
                    looks += 1
                    end = candidate.match(data, at, final=final)
                    if end == WAIT:
                        hold = min(hold, at)
                    elif end != NO:
                        found.append((at, at, end, candidate.label))
                elif shapes and stands_alone(data, at, part=candidate.part):
                    looks += 1
                    span = candidate.match(data, at, final=final)
                    if span == PENDING:
                        hold = min(hold, at)
                    elif span is not None:
                        found.append((at, *span, self._labels[candidate.label]))
                        looks += (span[1] - at) // LONG
        if not final:
            return self._begun(data, floor, hold, shapes=shapes), looks
        tails = range(max(floor, hold - self._reach + 1), hold)
        found += [(at, at, hold, label) for at in tails if (label := self._cuts.get(data[at:])) is not None]
        return hold, looks

    def _search_decoded(self, view: View, floor: int, found: list[Found], *, final: bool) -> tuple[int, int]:
        """Search the decoded text of a view."""
        inside: list[Found] = []
        below = max(0, len(view.text) - (view.size - floor))  # decoding the bytes from the floor on adds none
        hold, looks = self._search(view.text, below, inside, final=final, shapes=False)
        for _began, start, end, label in inside:
            at = view.start(start)
            if at >= floor:
                found.append((at, at, view.end(end), label))
        if final:
            return view.size, looks
        return max(floor, view.start(hold) if hold < len(view.text) else view.stop), looks

    def _anchors(self, data: bytes) -> list[tuple[int, int, int]]:
        """Return all anchors, including overlapping ones.

        The quick scan misses some overlapping anchors, but each of them touches one that it finds.
        """
        quick = self._automaton.find_matches_as_indexes(data)
        if not quick:
            return quick
        parts: list[list[int]] = []
        for _pattern, at, stop in quick:
            if parts and at - self._reach <= parts[-1][1]:
                parts[-1][1] = stop + self._reach
            else:
                parts.append([max(0, at - self._reach), stop + self._reach])
        return [
            (pattern, start + first, start + last)
            for start, stop in parts
            for pattern, first, last in self._automaton.find_matches_as_indexes(data[start:stop], overlapping=True)
        ]

    def _begun(self, data: bytes, floor: int, hold: int, *, shapes: bool) -> int:
        """The position of the first anchor that is incomplete at the end of the data."""
        size = len(data)
        for at in range(max(floor, size - self._reach + 1), min(hold, size)):
            tail = data[at:]
            if (
                tail in self._secret_starts
                or (tail in self._broken_starts and is_wrapped(data, at))
                or (shapes and tail in self._shape_starts and stands_alone(data, at))
                or (shapes and tail in self._part_starts and stands_alone(data, at, part=True))
            ):
                return at
        return hold


class Effort:
    """How many candidates of a stream may still be compared: a fixed number, and more for each byte that arrives."""

    def __init__(self) -> None:
        self._left = float(LOOKS)

    @property
    def spent(self) -> bool:
        """Whether too many candidates were compared."""
        return self._left < 0

    def change(self, arrived: int, looks: int) -> None:
        """Count bytes that arrived and candidates that were compared."""
        self._left = min(LOOKS, self._left + arrived / SPARSE) - looks


class StreamRedactor:
    """One stream: `feed` returns the bytes that certainly contain no secret, `finish` the rest.

    Bytes are held back only if a secret may have begun in them. Hostile text that is slow to search is not searched
    without limit: beyond an effort that no ordinary text needs, a notice replaces it.
    """

    def __init__(self, redactor: Redactor, skip: int = 0, effort: Effort | None = None):
        self._redactor = redactor
        self.effort = effort or Effort()
        self._kept = b""
        self._floor = 0  # position in `_kept`: the bytes before it are only context
        self._covered = 0  # position in `_kept`: the end of a secret that was already replaced
        self._base = 0  # position of `_kept` in the whole stream
        self._skip = skip
        self._given = skip

    @property
    def position(self) -> int:
        """The number of raw bytes, from the first one fed, that the returned bytes stand for."""
        return max(self._base + self._floor, self._given)

    @property
    def held(self) -> int:
        """The number of raw bytes that are held back."""
        return max(0, self._base + len(self._kept) - self.position)

    def use(self, redactor: Redactor) -> None:
        """Redact these secrets from now on, also in the bytes that are held back."""
        self._redactor = redactor

    def feed(self, chunk: bytes) -> bytes:
        """Add bytes; return those that are certain."""
        return self._next(chunk, final=False)

    def finish(self, chunk: bytes = b"") -> bytes:
        """End the stream, optionally with last bytes; return the rest."""
        return self._next(chunk, final=True)

    def release(self) -> bytes:
        """Return the bytes that are held back, if they are so few that they reveal nothing. For an idle terminal.

        If they are the beginning of a secret, the rest of it is redacted all the same.
        """
        # Bytes that were released before count too, or a secret that arrives byte by byte would pass.
        if not self.held or len(self._kept) - self._floor > RELEASED or self._covered > self._floor:
            return b""
        start = self.position - self._base
        self._given = self._base + len(self._kept)
        return self._kept[start:]

    def _next(self, chunk: bytes, *, final: bool) -> bytes:
        data = self._kept + chunk if self._kept else bytes(chunk)
        self.effort.change(len(chunk), 0)
        return self._withhold(data) if self.effort.spent else self._take(data, final=final)

    def _withhold(self, data: bytes) -> bytes:
        """Return a notice in the place of everything that was not returned yet. The end of it is kept, because a secret
        may begin there and end in bytes that arrive later.
        """
        size = self._base + len(data) - self.position
        behind = max(self._redactor.lookbehind, _LONGEST_SHAPE + CONTEXT)
        cut = boundary(data, max(0, len(data) - behind))
        self._base += cut
        self._kept = data[cut:]
        self._floor = self._covered = 0
        self._given = max(self._given, self._base + len(self._kept))
        return _WITHHELD % size if size > 0 else b""

    def _take(self, data: bytes, *, final: bool) -> bytes:
        found, hold, looks = self._redactor.find(data, self._floor, final=final)
        self.effort.change(0, looks)
        pieces: list[bytes] = []
        at = max(self._floor, self._covered)
        given = self._given - self._base
        for _began, start, end, label in found:
            if start >= hold:
                break
            if end <= at:
                continue
            if start > max(at, given):
                pieces.append(data[max(at, given) : start])
            if self._base + start >= self._skip and end > given:
                pieces.append(label)
            at = end
        if hold > max(at, given):
            whole = not pieces and max(at, given) == 0 and hold == len(data)
            pieces.append(data if whole else data[max(at, given) : hold])
        cut = boundary(data, max(0, hold - CONTEXT))
        self._base += cut
        self._floor = hold - cut
        self._covered = max(0, at - cut)
        self._kept = data[cut:]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _checked(name: str | None, value: bytes | str) -> bytes:
    if name is not None and not _NAME.fullmatch(name):
        raise InvalidRequest(
            "the name of the secret is invalid",
            field="name",
            hint="use at most 128 letters, digits and _.-, beginning with a letter or _",
        )
    data = (value.encode("utf-8", "surrogatepass") if isinstance(value, str) else bytes(value)).strip()
    if len(data) < SHORTEST:
        raise InvalidRequest(
            f"the secret{f' {name}' if name else ''} is shorter than {SHORTEST} bytes, so it would be found everywhere",
            field="value",
            hint="use a longer secret",
        )
    return data
