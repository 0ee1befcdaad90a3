"""Takes secrets out of what leaves the control plane: values it knows, in every usual spelling, and tokens of
well-known shapes. Knows neither who asks nor where the bytes go.

What is found is a function of the bytes around it alone: every spelling and every shape that is there is taken out,
also where they overlap. So it is the same however the bytes come in, and the same from the middle as from the start.
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
"""Where the look began, what is taken out (from, to), and what stands there instead."""

CONTEXT = LONGEST_ESCAPE * (WRAPPED + 2)
"""Bytes before a place that are kept to be looked at."""

BLOCK = 256 * 1024
"""Bytes that are looked through at once: hostile text may have a candidate in every few of them."""

LOOKS = 100_000
"""How many candidates of a stream are compared whatever lies between them."""
SPARSE = 16
"""Bytes for which there may be one more. Usual text has one in thousands; text with more was made to be slow."""

LONG = 128
"""Bytes of a shape that count as another: long ones may begin in one another."""

DEEPEST = 200
"""Levels of a JSON value that are looked into."""

RELEASED = SHORTEST - 1
"""Bytes that tell too little of a secret to keep a terminal waiting for them."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,127}")
_MUTE = b"***"
_WITHHELD = b"[withheld: %d bytes that take too long to look through for secrets]"
_LONGEST_SHAPE = max(shape.longest for shape in SHAPES)
_LARGEST_TABLE = 60_000  # bytes of anchors up to which the fastest automaton does not take too much memory
_AUTHORIZATION = "Authorization: "


class Redactor:
    """Takes out a set of secrets. Immutable; one for any number of streams.

    `secrets` maps names to values, or is just values. A value stands as `[secret:NAME]` (`[secret]` without a name), a
    token of a well-known shape as `[redacted:KIND]`. Blanks around a value do not count. A value of fewer than 4 bytes
    is refused: it would be found everywhere. `written` says what stands for a value in another way;
    `former` are names and values they had before.
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
            for spelling in spellings(self._unspoken(label), value):
                longest = max(longest, spelling.longest * LONGEST_ESCAPE)
                self._cuts.update((start, spelling.label) for start in spelling.telling_starts())
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
        self._labels = {shape.label: self._unspoken(shape.label) for shape in SHAPES}
        small = sum(map(len, found)) <= _LARGEST_TABLE
        self._automaton = BytesAhoCorasick(
            found, implementation=Implementation.DFA if small else Implementation.ContiguousNFA
        )
        self.lookbehind = longest + 2 * CONTEXT
        """Bytes before a place that decide what is taken out from there on; see `stream`."""

    def __repr__(self) -> str:
        return f"<Redactor of {len(self._plain)} secrets>"

    def _unspoken(self, label: bytes) -> bytes:
        """A label, unless it would itself speak a secret."""
        return _MUTE if any(value in label for value in self._plain) else label

    def data(self, data: bytes) -> bytes:
        """The bytes without secrets; the same object when there are none."""
        if len(data) > BLOCK:
            stream = self.stream()
            pieces = [stream.feed(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]
            clean = b"".join([*pieces, stream.finish()])
            return data if clean == data else clean
        if not data or not self.find(data, 0, final=True)[0]:
            return data
        return self.stream().finish(data)

    def text(self, text: str) -> str:
        """The text without secrets; the same object when there are none."""
        data = text.encode("utf-8", "surrogatepass")
        clean = self.data(data)
        if clean == data:
            return text
        try:
            return clean.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:  # a secret ended in the middle of a character
            return clean.decode("utf-8", "replace")

    def value(self, value: T) -> T:
        """A JSON value of the same shape without secrets, in its keys too.

        A number that spells a secret becomes text. What is nested too deep to look into is taken out whole.
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
        """A stream of its own: feed it bytes as they come. One that goes on from another has that one's `effort`.

        To go on from raw offset N (a caller that attaches again), feed from `max(0, N - lookbehind)` and give as `skip`
        what lies between. Nothing is given for the skipped bytes, and from N on what is given is what a stream from the
        very start gives from there on. What replaces a secret belongs to the secret's first byte: whoever goes on from
        its middle gets nothing for the rest of it. `position` of a stream, added to where it began, is an offset to go
        on from without losing or repeating anything.
        """
        return StreamRedactor(self, skip, effort)

    # what is where

    def find(self, data: bytes, floor: int, *, final: bool) -> tuple[list[Found], int, int]:
        """What is to be taken out of `data` from `floor` on, in order, the place before which that is certain, and how
        many candidates were compared.

        Bytes before `floor` are only looked at. With `final` nothing more comes, and all is certain.
        """
        found: list[Found] = []
        hold, looks = self._look(data, floor, found, final=final, shapes=True)
        if self._knows:
            for escaping in (PERCENT, BACKSLASH):
                if escaping.mark in data:
                    view = View(escaping, data)
                    behind, more = self._look_behind(view, floor, found, final=final)
                    hold, looks = min(hold, behind), looks + more
        found.sort(key=lambda each: (each[1], -each[2]))
        # What was found by a look that began before the hold but begins behind it would be forgotten.
        for began, start, _end, _label in sorted(found, reverse=True):
            if began < hold <= start:
                hold = began
        return found, hold, looks

    def _look(self, data: bytes, floor: int, found: list[Found], *, final: bool, shapes: bool) -> tuple[int, int]:
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

    def _look_behind(self, view: View, floor: int, found: list[Found], *, final: bool) -> tuple[int, int]:
        """The same on a text whose escapes are undone."""
        inside: list[Found] = []
        below = max(0, len(view.text) - (view.size - floor))  # the bytes from the floor on became no more than that
        hold, looks = self._look(view.text, below, inside, final=final, shapes=False)
        for _began, start, end, label in inside:
            at = view.start(start)
            if at >= floor:
                found.append((at, at, view.end(end), label))
        if final:
            return view.size, looks
        return max(floor, view.start(hold) if hold < len(view.text) else view.stop), looks

    def _anchors(self, data: bytes) -> list[tuple[int, int, int]]:
        """Where anchors are, also those that overlap.

        The quick scan leaves some of those out, but each of them touches one that it found.
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
        """Where the first anchor begins that the end of the data cuts."""
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
    """How many candidates of a stream may still be compared: some at any time, and more as bytes come."""

    def __init__(self) -> None:
        self._left = float(LOOKS)

    @property
    def spent(self) -> bool:
        """Whether it was too much."""
        return self._left < 0

    def change(self, came: int, looks: int) -> None:
        """So many bytes have come, and so many candidates were compared."""
        self._left = min(LOOKS, self._left + came / SPARSE) - looks


class StreamRedactor:
    """One stream: `feed` gives what is certain to hold no secret, `finish` the rest.

    Bytes are held back only where a secret may have begun; without one they pass at once. Text that is made to be slow
    to look through is not looked through for ever: beyond an effort that no usual text takes, words stand in its place.
    """

    def __init__(self, redactor: Redactor, skip: int = 0, effort: Effort | None = None):
        self._redactor = redactor
        self.effort = effort or Effort()
        self._kept = b""
        self._floor = 0  # in `_kept`: what lies before is only there to be looked at
        self._covered = 0  # in `_kept`: up to where a secret reaches that was replaced already
        self._base = 0  # of all bytes: where `_kept` begins
        self._skip = skip
        self._given = skip

    @property
    def position(self) -> int:
        """Raw bytes that what was given stands for, counted from the first one fed."""
        return max(self._base + self._floor, self._given)

    @property
    def held(self) -> int:
        """Raw bytes held back."""
        return max(0, self._base + len(self._kept) - self.position)

    def use(self, redactor: Redactor) -> None:
        """Take out these secrets from here on, also of what is held back."""
        self._redactor = redactor

    def feed(self, chunk: bytes) -> bytes:
        """What can be given now that these bytes have come."""
        return self._next(chunk, final=False)

    def finish(self, chunk: bytes = b"") -> bytes:
        """What is left when nothing more comes, or nothing but these bytes."""
        return self._next(chunk, final=True)

    def release(self) -> bytes:
        """For a terminal that has fallen quiet: what is held, when it is so little that it tells nothing of a secret.

        It may be the beginning of one: then the rest is taken out all the same.
        """
        # What was let go before counts too, or a secret that comes byte by byte would go through.
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
        """Words in the place of all that was not given yet. It is kept as far back as a secret may begin in it that
        ends in what comes: that is then looked through, and taken out.
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
            "the name of a secret has a character it may not have",
            field="name",
            hint="letters, digits and _.-, at most 128, a letter or _ first",
        )
    data = (value.encode("utf-8", "surrogatepass") if isinstance(value, str) else bytes(value)).strip()
    if len(data) < SHORTEST:
        raise InvalidRequest(
            f"the secret{f' {name}' if name else ''} is shorter than {SHORTEST} bytes: it would be found everywhere",
            field="value",
            hint="use a longer secret",
        )
    return data
