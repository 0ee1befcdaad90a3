"""Verifies an export: that no record was changed, added, removed or moved, and which keys signed it.

Nothing in the export is trusted. The first broken record is reported. Whose key signed must be checked by the caller,
who compares it with the key that the server shows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, NoReturn

import zstandard
from blake3 import blake3

from carrel.audit.export import VERSION, end_message, head_line, line
from carrel.audit.keys import SignedHead, signed
from carrel.audit.records import genesis

MAX_LINE = 1024 * 1024
_BLOCK = 1024 * 1024
_ZSTD = b"\x28\xb5\x2f\xfd"
_HASH, _RECORD = b'{"hash":"', b'","record":'
_BODY = len(_HASH) + 64 + len(_RECORD)
_END = b'{"end":'
_TYPE = re.compile(rb'"at":[-+.\de]+,"type":"(begin|end|whole)","node":"(?:[^"\\]|\\.)*"(?:,"ref":(\d+))?,"actor":')
_HEX = re.compile(r"[0-9a-f]{64}")
_HEAD_TYPES = dict(zip(SignedHead._fields, (str, int, str, int, float, str, str), strict=True))


@dataclass(frozen=True, slots=True)
class Broken:
    """The first error. `seq` is the number of the record, if it is in one."""

    line: int
    chain: str | None
    seq: int | None
    why: str

    def __str__(self) -> str:
        where = f"line {self.line}"
        if self.chain is not None:
            where = f"{self.chain}, " + (where if self.seq is None else f"record {self.seq} ({where})")
        return f"{where}: {self.why}"


@dataclass(slots=True)
class Verification:
    """The result of a verification. `unsigned` counts records after the last head of their chain, covered only by the
    signature of the export; `open` counts operations without an end; `pruned` counts chains that do not start at 1.
    """

    broken: Broken | None = None
    chains: int = 0
    records: int = 0
    heads: int = 0
    unsigned: int = 0
    open: int = 0
    pruned: int = 0
    keys: list[str] = field(default_factory=list)
    tips: dict[str, tuple[int, str]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether the export is unchanged."""
        return self.broken is None


class _Stop(Exception):
    def __init__(self, why: str, seq: int | None = None):
        super().__init__(why)
        self.why = why
        self.seq = seq


def verify(
    source: BinaryIO, *, keys: Collection[str] = (), tips: dict[str, tuple[int, str]] | None = None
) -> Verification:
    """Verify an export, plain or compressed. With `keys`, a signature by any other key is an error. The `tips` of an
    older verification must be in the chains again, so that the end of a chain cannot be removed unnoticed.
    """
    check = _Check(frozenset(keys), dict(tips or {}))
    try:
        check.run(source)
    except _Stop as stop:
        chain = check.chain
        check.verdict.broken = Broken(check.number, chain, stop.seq if chain is not None else None, stop.why)
    return check.verdict


class _Check:
    """Reads an export line by line; `number` and `chain` are the current position."""

    def __init__(self, keys: frozenset[str], tips: dict[str, tuple[int, str]]):
        self.verdict = Verification()
        self.number = 0
        self.chain: str | None = None
        self._trusted = keys
        self._tips = tips
        self._before: tuple[int, str] | None = None
        self._digest = blake3()
        self._prefix = b""
        self._seq = 0
        self._hash = b""
        self._tip = (0, "")
        self._heads: set[int] = set()
        self._open: set[int] = set()
        self._anchored = True
        self._ended = False

    def run(self, source: BinaryIO) -> None:
        for data in _blocks(source):
            lines = data.split(b"\n")
            lines.pop()
            last = 0 if data.startswith(_END) else data.find(b"\n" + _END) + 1 or len(data)
            self._digest.update(data[:last])
            start = 0
            while start < len(lines):
                start = self._records(lines, start)
                if start < len(lines):
                    self.number += 1
                    if self._ended:
                        raise _Stop("there is more after the last line")
                    self._other(lines[start])
                    start += 1
        if not self._ended:
            self.number += 1
            raise _Stop("the export is cut off: its last line is missing")

    def _records(self, lines: list[bytes], start: int) -> int:
        """Check consecutive records from `start` on, and return where they end. Nearly all time is spent here, so each
        record is only hashed, not parsed.
        """
        seq, before, opened, number = self._seq, self._hash, self._open, start
        awaited = -1 if self._before is None else self._before[0]
        try:
            for number in range(start, len(lines)):
                text = lines[number]
                if not text.startswith(_HASH):
                    return number
                if self.chain is None or not self._anchored or self._ended:
                    self._unexpected()
                body = text[_BODY:-1]
                prefix = b"%s%d," % (self._prefix, seq + 1)
                if not body.startswith(prefix) or text[_BODY - len(_RECORD) : _BODY] != _RECORD or text[-1:] != b"}":
                    self._misplaced(body, seq + 1)
                found = blake3(before + body).digest()
                if found.hex().encode() != text[len(_HASH) : _BODY - len(_RECORD)]:
                    raise _Stop("the hash does not match this record and the one before: one was changed", seq + 1)
                kind = _TYPE.match(body, len(prefix))
                if kind is None:
                    raise _Stop("this is not a record", seq + 1)
                seq, before = seq + 1, found
                if kind[1] == b"begin":
                    opened.add(seq)
                elif kind[2] is not None:
                    opened.discard(int(kind[2]))
                if seq == awaited:
                    self._same_as_before(seq, before)
            number += 1
            return number
        except _Stop:
            self.number += 1
            raise
        finally:
            self.verdict.records += seq - self._seq
            self._seq, self._hash = seq, before
            self.number += number - start

    def _unexpected(self) -> NoReturn:
        if self.chain is None:
            raise _Stop("there is more after the last line" if self._ended else "a record is outside of any chain")
        raise _Stop("the signed head that the chain starts with is missing", self._seq + 1)

    def _misplaced(self, body: bytes, seq: int) -> NoReturn:
        values = _object(body)
        chain, number = values.get("chain"), values.get("seq")
        if isinstance(chain, str) and chain != self.chain:
            raise _Stop(f"this record belongs to the chain {chain[:200]}", seq)
        if type(number) is int and number > seq:
            raise _Stop(f"the record is missing: the next one is {number}", seq)
        if type(number) is int and number < seq:
            raise _Stop(f"record {number} is here a second time", seq)
        raise _Stop("this is not a record", seq)

    def _other(self, text: bytes) -> None:
        values = _object(text)
        if self.number == 1:
            self._first(values)
        elif "head" in values:
            self._head(values["head"], text)
        elif "chain" in values:
            self._begin_chain(values)
        elif "end" in values:
            self._end(values["end"], text)
        else:
            raise _Stop("this is not a line of an export")

    def _first(self, values: dict[str, object]) -> None:
        version = values.get("carrel-audit")
        if type(version) is not int:
            raise _Stop("this is not an export of an audit log")
        if version != VERSION:
            raise _Stop(f"the export has format {version}, but this carrel reads format {VERSION}")
        self._key(values.get("key"))

    def _begin_chain(self, values: dict[str, object]) -> None:
        self._end_chain()
        chain, start, seq, hashed = (values.get(name) for name in ("chain", "start", "seq", "hash"))
        if not isinstance(chain, str) or type(start) is not int or type(seq) is not int or not isinstance(hashed, str):
            raise _Stop("this is not the first line of a chain")
        if chain in self.verdict.tips:
            raise _Stop(f"the chain {chain[:200]} is here a second time")
        if not 0 <= start <= seq or seq == 0:
            raise _Stop("this is not the first line of a chain")
        self.chain = chain
        self._prefix = b'{"chain":%s,"seq":' % json.dumps(chain).encode()
        self._seq, self._tip = start, (seq, hashed)
        self._hash = genesis(chain)
        self._heads, self._open, self._anchored = {0}, set(), start == 0
        self._before = self._tips.pop(chain, None)
        self.verdict.tips[chain] = self._tip
        self.verdict.chains += 1
        self.verdict.pruned += start > 0

    def _end_chain(self) -> None:
        if self.chain is None:
            return
        seq, hashed = self._tip
        if not self._anchored or self._seq != seq:
            raise _Stop(f"the chain ends here, but it has {seq} records", self._seq + 1)
        if self._hash.hex() != hashed:
            raise _Stop("the chain does not end with the hash in its first line", seq)
        if self._before is not None and self._before[0] > seq:
            raise _Stop(f"the older export has records up to {self._before[0]}: they were removed", seq + 1)
        self.verdict.unsigned += seq - max(self._heads)
        self.verdict.open += len(self._open)
        self.chain = None

    def _head(self, values: object, text: bytes) -> None:
        head = _head(values)
        if head is None or head_line(head) != text + b"\n":
            raise _Stop("this is not a head", self._seq)
        if head.chain != self.chain or head.seq != self._seq:
            raise _Stop(f"this head belongs to {head.chain[:200]}, record {head.seq}", self._seq)
        if not head.genuine():
            raise _Stop("the signature of the head is wrong", self._seq)
        self._key(head.key)
        if not self._anchored:
            self._hash, self._anchored = bytes.fromhex(head.hash), True
            if self._before is not None and self._before[0] == head.seq:
                self._same_as_before(self._seq, self._hash)
        elif head.hash != self._hash.hex():
            raise _Stop("the head signs a different hash", self._seq)
        elif head.seq in self._heads:
            raise _Stop("the head is here a second time", self._seq)
        elif head.seq - head.records not in self._heads:
            raise _Stop(f"the head before it, of record {head.seq - head.records}, is missing", self._seq)
        self._heads.add(head.seq)
        self.verdict.heads += 1

    def _same_as_before(self, seq: int, hashed: bytes) -> None:
        if self._before is not None and self._before[1] != hashed.hex():
            raise _Stop("the record differs from the one in the older export", seq)

    def _end(self, values: object, text: bytes) -> None:
        self._end_chain()
        digest = self._digest.hexdigest()
        counted = (self.verdict.chains, self.verdict.records, self.verdict.heads)
        summary = {**dict(zip(("chains", "records", "heads"), counted, strict=True)), "digest": digest}
        key, signature = (values.get("key"), values.get("signature")) if isinstance(values, dict) else (None, None)
        if line({"end": {**summary, "key": key, "signature": signature}}) != text + b"\n":
            raise _Stop("the last line does not match the lines before it: some were changed, added or removed")
        if not isinstance(signature, str) or not signed(self._key(key), signature, end_message(*counted, digest)):
            raise _Stop("the signature of the export is wrong")
        if self._tips:
            raise _Stop(f"the chain {min(self._tips)[:200]} of the older export is missing")
        self._ended = True

    def _key(self, key: object) -> str:
        if not isinstance(key, str):
            raise _Stop("the key is missing", self._seq)
        if self._trusted and key not in self._trusted:
            raise _Stop(f"it is signed with the key {key[:64]}, which is not trusted", self._seq)
        if key not in self.verdict.keys:
            self.verdict.keys.append(key)
        return key


def _object(text: bytes) -> dict[str, object]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise _Stop("the line is not JSON") from None
    if not isinstance(values, dict):
        raise _Stop("the line is not a JSON object")
    return values


def _head(values: object) -> SignedHead | None:
    if not isinstance(values, dict) or values.keys() != _HEAD_TYPES.keys():
        return None
    for name, kind in _HEAD_TYPES.items():
        if type(values[name]) is not kind and not (kind is float and type(values[name]) is int):
            return None
    return SignedHead(**values) if _HEX.fullmatch(values["hash"]) else None


class _Joined:
    """A file with its first bytes put back."""

    def __init__(self, head: bytes, rest: BinaryIO):
        self._head = head
        self._rest = rest

    def read(self, size: int = -1) -> bytes:
        head, self._head = self._head, b""
        return head or self._rest.read(size)


def _blocks(source: BinaryIO) -> Iterator[bytes]:
    """Yield whole lines, many at a time, decompressed if necessary."""
    start = source.read(4)
    joined = _Joined(start, source)
    reader = zstandard.ZstdDecompressor().stream_reader(joined) if start == _ZSTD else joined  # type: ignore[arg-type]
    rest = b""
    try:
        while block := reader.read(_BLOCK):
            cut = block.rfind(b"\n") + 1
            if cut:
                yield rest + block[:cut]
                rest = block[cut:]
            else:
                rest += block
            if len(rest) > MAX_LINE:
                raise _Stop(f"a line has more than {MAX_LINE} bytes")
    except zstandard.ZstdError:
        raise _Stop("the compressed data is damaged") from None
    if rest:
        raise _Stop("the export is cut off in the middle of a line")
