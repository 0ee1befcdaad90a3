"""What one audit record is: the values, the exact bytes that are hashed, and the hash that links it to the one before.

Pure: no file, no clock, no database. The bytes of a record are ASCII JSON, written once and kept as they are, so that
nobody ever has to agree on how to write them again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii
from typing import Literal, NamedTuple

from blake3 import blake3

Verdict = Literal["allow", "deny", "ask"]
Type = Literal["begin", "end", "whole"]
"""`begin` and `end` are the two halves of an operation that was dispatched; what was not is one `whole` record."""

MAX_ARGUMENTS = 8192
"""Characters of the JSON of one record's arguments."""
MAX_WORDS = 500
MAX_NAME = 128
"""Characters of what a record can be found by."""

_DEPTH = 8
_GENESIS = b"carrel audit chain v1\0"
_dumps = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode
_sorted = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"), allow_nan=False, sort_keys=True).encode
_WORDS = ("rule", "source", "approval", "request", "arguments_hash")


def chain_of(context_id: str | None, sandbox_id: str = "") -> str:
    """The chain of a context, or of a sandbox that belongs to none. No context can be named into another's chain."""
    return f"sandbox:{sandbox_id}" if context_id is None else f"context:{context_id}"


def server_chain(node: str) -> str:
    """The chain of what a server does that belongs to no context: starts, tokens, pruning."""
    return f"server:{node}"


def context_of(chain: str) -> str | None:
    """The context a chain belongs to."""
    kind, _, name = chain.partition(":")
    return name if kind == "context" else None


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known of an operation before it is dispatched. `arguments` have been redacted by the caller;
    `arguments_hash` is of the full ones (`AuditLog.hash_arguments`).
    """

    chain: str
    actor: str
    kind: str
    name: str
    decision: Verdict = "allow"
    rule: str | None = None
    source: str | None = None
    arguments: Mapping[str, object] = field(default_factory=dict)
    arguments_hash: str | None = None
    approval: str | None = None
    request: str | None = None


@dataclass(frozen=True, slots=True)
class Ending:
    """How an operation went. `result` is `ok` or the code of an error; `arguments` were not known when it began."""

    result: str = "ok"
    duration_ms: float | None = None
    bytes_in: int | None = None
    bytes_out: int | None = None
    reason: str | None = None
    arguments: Mapping[str, object] = field(default_factory=dict)


class Row(NamedTuple):
    """A record as it is stored: the bytes that count (`body`), their link, and what they can be found by."""

    chain: str
    seq: int
    at: float
    type: Type
    ref: int | None
    actor: str
    kind: str
    name: str
    decision: str
    result: str | None
    hash: bytes
    body: str


def genesis(chain: str) -> bytes:
    """What the first record of a chain is linked to."""
    return blake3(_GENESIS + chain.encode("utf-8", "replace")).digest()


def link(before: bytes, body: bytes) -> bytes:
    """The hash of a record: over the hash of the record before it and its own bytes."""
    return blake3(before + body).digest()


def arguments_hash(arguments: Mapping[str, object], key: bytes) -> str:
    """A keyed hash of full arguments. Without the key nobody can try out guesses: a short command, or a password in
    one, could otherwise be found from its hash.
    """
    return blake3(_encode(arguments, keys_sorted=True).encode(), key=key).hexdigest()


def row(
    type: Type,
    entry: Entry,
    ending: Ending | None,
    *,
    seq: int,
    at: float,
    node: str,
    before: bytes,
    ref: int | None = None,
) -> Row:
    """The record of an entry, of its ending, or of both, linked to the record before."""
    actor, kind, name = entry.actor[:MAX_NAME], entry.kind[:MAX_NAME], entry.name[:MAX_NAME]
    # Put together by hand: this is done twice for every operation, and an encoder for the whole takes three times as
    # long.
    body = f'{{"chain":{_quoted(entry.chain)},"seq":{seq},"at":{at:.6f},"type":"{type}","node":{_quoted(node)}'
    if ref is not None:
        body += f',"ref":{ref}'
    body += f',"actor":{_quoted(actor)},"kind":{_quoted(kind)},"name":{_quoted(name)},"decision":"{entry.decision}"'
    if ending is not None:
        body += _ended(ending)
    if type != "end":
        body += _began(entry)
    elif ending is not None and ending.arguments:
        body += f',"arguments":{fit(ending.arguments)[0]}'
    body += "}"
    result = None if ending is None else ending.result[:MAX_NAME]
    hashed = link(before, body.encode())
    return Row(entry.chain, seq, at, type, ref, actor, kind, name, entry.decision, result, hashed, body)


def _quoted(value: str) -> str:
    return encode_basestring_ascii(value if value.isascii() else _text(value))


def _ended(ending: Ending) -> str:
    body = f',"result":{_quoted(ending.result[:MAX_NAME])}'
    if ending.duration_ms is not None:
        body += f',"duration_ms":{ending.duration_ms:.3f}'
    if ending.bytes_in is not None:
        body += f',"bytes_in":{ending.bytes_in}'
    if ending.bytes_out is not None:
        body += f',"bytes_out":{ending.bytes_out}'
    if ending.reason is not None:
        body += f',"reason":{_quoted(ending.reason[:MAX_WORDS])}'
    return body


def _began(entry: Entry) -> str:
    body = ""
    for name in _WORDS:
        value = getattr(entry, name)
        if value is not None:
            body += f',"{name}":{_quoted(value[:MAX_WORDS])}'
    arguments, cut = fit(entry.arguments)
    if cut:
        body += ',"truncated":true'
    # The last field, so that a search for a text can be told where arguments begin.
    return body if arguments == "{}" else f'{body},"arguments":{arguments}'


def fit(arguments: Mapping[str, object]) -> tuple[str, bool]:
    """Arguments as JSON of at most `MAX_ARGUMENTS` characters, and whether something had to be left out for that."""
    if not arguments:
        return "{}", False
    text = _encode(arguments)
    if len(text) <= MAX_ARGUMENTS:
        return text, False
    for share in (1024, 256, 64, 16):
        text = _encode(_cut(arguments, share, _DEPTH))
        if len(text) <= MAX_ARGUMENTS:
            return text, True
    return _encode({"…": f"{len(arguments)} arguments"}), True


def _cut(value: object, share: int, depth: int) -> object:
    if isinstance(value, str):
        return value if len(value) <= share else f"{value[:share]}… (+{len(value) - share})"
    if depth == 0:
        return "…"
    most = max(share // 16, 4)
    if isinstance(value, Mapping):
        kept: dict[str, object] = {}
        for key, each in value.items():
            if len(kept) == most:
                kept["…"] = f"+{len(value) - most}"
                break
            kept[str(_cut(str(key), share, depth))] = _cut(each, share, depth - 1)
        return kept
    if isinstance(value, list | tuple):
        items = [_cut(each, share, depth - 1) for each in value[:most]]
        return items if len(value) <= most else [*items, f"… (+{len(value) - most})"]
    return value if value is None or isinstance(value, bool | int | float) else _cut(str(value), share, depth)


def _encode(value: object, *, keys_sorted: bool = False) -> str:
    dump = _sorted if keys_sorted else _dumps
    try:
        text = dump(value)
    except (TypeError, ValueError, RecursionError):
        return dump(_plain(value, _DEPTH * 4))
    # Half of a surrogate pair is no text, and many readers of JSON refuse it. (Whole pairs land here as well.)
    return dump(_plain(value, _DEPTH * 4)) if "\\ud" in text else text


def _plain(value: object, depth: int) -> object:
    """The same in what JSON can say; text that is none shows its bytes."""
    if isinstance(value, str):
        return _text(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if value.bit_length() < 64 else hex(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth == 0:
        return "…"
    if isinstance(value, Mapping):
        return {_text(str(key)): _plain(each, depth - 1) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each, depth - 1) for each in value]
    if isinstance(value, bytes | bytearray):
        return value.decode("utf-8", "backslashreplace")
    return _text(str(value))


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        try:
            return value.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        except UnicodeEncodeError:
            return value.encode("utf-8", "surrogatepass").decode("utf-8", "backslashreplace")
    return value
