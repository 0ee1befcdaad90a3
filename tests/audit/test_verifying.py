"""Whatever is done to an export is found, and the first broken record is named."""

from __future__ import annotations

import io
import json

import pytest
import zstandard
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from carrel.audit import AuditEntry, Ending, SigningKey, Verification, verify
from carrel.audit.export import end_message, head_line, line
from carrel.audit.keys import SignedHead
from carrel.audit.records import genesis, link, row

KEY = SigningKey(Ed25519PrivateKey.from_private_bytes(b"k" * 32))
OTHER = SigningKey(Ed25519PrivateKey.from_private_bytes(b"o" * 32))
RECORDS = 12


def chain(
    name: str, *, records: int = RECORDS, every: int = 5, first: int = 1, before: bytes | None = None
) -> list[bytes]:
    """The lines of a chain, a head every few records and at its end."""
    hashed = before or genesis(name)
    lines, last = [], first - 1
    anchor = [] if before is None else [head_line(SignedHead.signed(KEY, name, last, hashed.hex(), 1, 1.0))]
    for seq in range(first, first + records):
        kind = ("begin", "end", "whole")[seq % 3]
        made = row(
            kind,  # type: ignore[arg-type]
            AuditEntry(name, "agent:ä", "shell", "run", arguments={"command": f"echo {seq} …"}),
            None if kind == "begin" else Ending(),
            seq=seq,
            at=100.0 + seq,
            node='n"\\',
            before=hashed,
            ref=seq - 1 if kind == "end" else None,
        )
        hashed = made.hash
        lines.append(b'{"hash":"%s","record":%s}\n' % (hashed.hex().encode(), made.body.encode()))
        if seq % every == 0 or seq == first + records - 1:
            lines.append(head_line(SignedHead.signed(KEY, name, seq, hashed.hex(), seq - last, 1.0)))
            last = seq
    start = line({"chain": name, "start": first - 1, "seq": first + records - 1, "hash": hashed.hex()})
    return [start, *anchor, *lines]


def sealed(lines: list[bytes], key: SigningKey = KEY) -> bytes:
    """An export of these lines with a last line that fits: as one who has a key would write it."""
    head = line({"carrel-audit": 1, "exported_at": 1.0, "node": "n", "key": key.public})
    counts = [sum(text.startswith(kind) for text in lines) for kind in (b'{"chain"', b'{"hash"', b'{"head"')]
    data = head + b"".join(lines)
    digest = blake3(data).hexdigest()
    said = {**dict(zip(("chains", "records", "heads"), counts, strict=True)), "digest": digest, "key": key.public}
    return data + line({"end": {**said, "signature": key.sign(end_message(*counts, digest))}})


def check(data: bytes, **settings: object) -> Verification:
    return verify(io.BytesIO(data), **settings)  # type: ignore[arg-type]


A, B = chain("context:a"), chain("context:b", records=4)
GOOD = sealed([*A, *B])


def test_what_is_whole() -> None:
    verdict = check(GOOD, keys=[KEY.public])
    assert verdict.ok and verdict.broken is None
    assert (verdict.chains, verdict.records, verdict.heads, verdict.unsigned) == (2, 16, 4, 0)
    assert verdict.keys == [KEY.public] and verdict.tips["context:b"][0] == 4


@settings(max_examples=300)
@given(st.integers(0, len(GOOD) - 1), st.integers(0, 7))
def test_one_flipped_bit_is_found(place: int, bit: int) -> None:
    spoiled = bytearray(GOOD)
    spoiled[place] ^= 1 << bit
    assert not check(bytes(spoiled)).ok


def test_one_flipped_byte_in_a_record_is_named() -> None:
    lines = GOOD.splitlines(keepends=True)
    for number, text in enumerate(lines):
        if text.startswith(b'{"hash"'):
            values = json.loads(text)["record"]
            spoiled = [*lines]
            spoiled[number] = text.replace(b"agent:", b"agent;")
            broken = check(b"".join(spoiled)).broken
            assert broken is not None and (broken.chain, broken.seq) == (values["chain"], values["seq"])
            assert broken.line == number + 1 and values["chain"] in str(broken)


@settings(max_examples=200)
@given(st.data())
def test_lines_removed_doubled_or_moved_are_found(data: st.DataObject) -> None:
    lines = GOOD.splitlines(keepends=True)
    one = data.draw(st.integers(0, len(lines) - 1))
    other = data.draw(st.integers(0, len(lines) - 1).filter(lambda number: number != one))
    how = data.draw(st.sampled_from(["remove", "double", "swap", "cut", "insert"]))
    spoiled = [*lines]
    if how == "remove":
        del spoiled[one]
    elif how == "double":
        spoiled.insert(one, lines[one])
    elif how == "swap":
        spoiled[one], spoiled[other] = lines[other], lines[one]
    elif how == "cut":
        spoiled = lines[:one]
    else:
        spoiled.insert(one, b"\n")
    assert not check(b"".join(spoiled)).ok


@settings(max_examples=200)
@given(st.data())
def test_even_with_a_last_line_that_fits(data: st.DataObject) -> None:
    """An attacker who can have exports signed, because the server signs what its database holds."""
    lines = [*A, *B]
    one = data.draw(st.integers(0, len(lines) - 1))
    other = data.draw(st.integers(0, len(lines) - 1).filter(lambda number: number != one))
    how = data.draw(st.sampled_from(["remove", "double", "swap", "edit", "cut"]))
    spoiled = [*lines]
    if how == "remove":
        del spoiled[one]
    elif how == "double":
        spoiled.insert(one, lines[one])
    elif how == "swap":
        spoiled[one], spoiled[other] = lines[other], lines[one]
    elif how == "edit":
        place = data.draw(st.integers(0, len(lines[one]) - 2))
        spoiled[one] = lines[one][:place] + bytes([lines[one][place] ^ 1]) + lines[one][place + 1 :]
    else:
        spoiled = lines[:one]
        if one in {0, len(A)}:
            return  # nothing but whole chains is left
    verdict = check(sealed(spoiled))
    # The last head of a chain may go: its records are then not signed, which is told.
    assert not verdict.ok or (how in {"remove", "cut"} and lines[one].startswith(b'{"head"') and verdict.unsigned)


def test_the_words_for_each() -> None:
    records = [text for text in A if text.startswith(b'{"hash"')]
    cases = {
        "record is missing": [text for text in A if text is not records[3]],
        "is here a second time": [*A[:3], A[2], *A[3:]],
        "belongs to the chain context:b": [*A[:3], B[1], *A[3:]],
        "it has 12 records": A[:-3],
        "is missing": [text for text in A if not text.startswith(b'{"head"') or b'"seq":5' not in text],
        "is here a second time ": [*A, *A],
        "outside of any chain": A[1:],
        "not a line of an export": [b'{"what":1}\n', *A],
        "not JSON": [*A, b"hello\n"],
        "not a JSON object": [*A, b"[]\n"],
    }
    for words, lines in cases.items():
        broken = check(sealed(lines)).broken
        assert broken is not None and words.strip() in broken.why, (words, broken)
    assert "cut off" in str(check(GOOD[:-1]).broken) and "cut off" in str(check(b"").broken)
    assert "not an export" in str(check(b"{}\n").broken)
    assert "format 2" in str(check(GOOD.replace(b'"carrel-audit":1', b'"carrel-audit":2')).broken)
    assert "more after" in str(check(GOOD + b"{}\n").broken)
    broken = check(sealed([*A[:4], A[4].replace(b"agent:", b"agent;"), *A[5:]])).broken
    assert broken is not None and (broken.chain, broken.seq, broken.line) == ("context:a", 4, 6)
    assert str(broken).startswith("context:a, record 4 (line 6): ")


def test_a_chain_that_was_forged_whole_has_no_head_of_ours() -> None:
    forged = [text for text in A if not text.startswith(b'{"head"')]
    assert check(sealed(forged)).unsigned == RECORDS
    assert not check(sealed(forged, OTHER), keys=[KEY.public]).ok
    assert OTHER.public in check(sealed(forged, OTHER)).keys
    head = json.loads(A[-1])["head"]
    mine = head_line(SignedHead.signed(OTHER, head["chain"], head["seq"], head["hash"], head["records"], head["at"]))
    assert "not trusted" in str(check(sealed([*A[:-1], mine]), keys=[KEY.public]).broken)
    assert check(sealed([*A[:-1], mine])).ok, "without a key to compare with, it is only told"


def test_a_pruned_chain_starts_with_its_head() -> None:
    pruned = chain("context:a", first=6, records=3, before=b"h" * 32)
    verdict = check(sealed(pruned))
    assert verdict.ok and (verdict.pruned, verdict.records) == (1, 3)
    assert "head that the chain starts with" in str(check(sealed([pruned[0], *pruned[2:]])).broken)
    empty = [line({"chain": "context:a", "start": 5, "seq": 5, "hash": (b"h" * 32).hex()}), pruned[1]]
    assert check(sealed(empty)).ok
    assert not check(sealed(empty[:1])).ok
    assert not check(sealed([line({"chain": "context:a", "start": 0, "seq": 0, "hash": ""})])).ok
    other = [line({"chain": "context:a", "start": 5, "seq": 5, "hash": "00" * 32}), pruned[1]]
    assert "does not end with the hash" in str(check(sealed(other)).broken)


def test_an_older_export_shows_what_was_taken_away() -> None:
    old = check(sealed([*chain("context:a", records=7), *B])).tips
    assert check(GOOD, tips=old).ok, "a chain may grow"
    shorter = check(sealed([*chain("context:a", records=5), *B]), tips=old).broken
    assert shorter is not None and "were removed" in shorter.why and shorter.seq == 6
    assert "is missing" in str(check(sealed(A), tips=old).broken)
    rewritten = check(GOOD, tips={**old, "context:a": (7, "00" * 32)}).broken
    assert rewritten is not None and (rewritten.seq, "older export" in rewritten.why) == (7, True)
    pruned = sealed(chain("context:a", first=9, records=3, before=b"h" * 32))
    assert check(pruned, tips={"context:a": old["context:a"]}).ok, "what was pruned since cannot be compared"


def test_compressed_or_in_small_pieces() -> None:
    packed = zstandard.ZstdCompressor(write_checksum=True).compress(GOOD)
    assert check(packed).ok
    for cut in (3, 10, len(packed) - 5):
        assert not check(packed[:cut]).ok
    assert not check(packed[:20] + bytes([packed[20] ^ 1]) + packed[21:]).ok

    class Drip(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            return super().read(7)

    assert verify(Drip(GOOD)).ok
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("carrel.audit.verifying._BLOCK", 1000)
        assert check(GOOD).ok and check(packed).ok


def test_a_line_without_end_is_refused() -> None:
    class Endless(io.RawIOBase):
        given = 0

        def read(self, size: int = -1) -> bytes:
            self.given += size
            return b"x" * size

    endless = Endless()
    broken = verify(endless).broken  # type: ignore[arg-type]
    assert broken is not None and "more than" in broken.why and endless.given < 10_000_000


@settings(max_examples=300)
@given(st.binary(max_size=300), st.integers(0, 5))
def test_any_bytes_are_judged(noise: bytes, after: int) -> None:
    lines = GOOD.splitlines(keepends=True)[:after]
    assert not check(b"".join(lines) + noise).ok


@given(st.recursive(st.none() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3)))
def test_any_values_are_judged(value: object) -> None:
    for name in ("head", "chain", "end", "hash", "carrel-audit"):
        for fields in ({name: value}, {name: {"chain": value, "seq": value, "key": value}}):
            assert not check(sealed([*A, line(fields)])).ok
            assert not check(line(fields)).ok
    assert link(b"", b"") != genesis("")
