"""The format of audit records: their fields, the exact bytes that are hashed, and the hash that chains them.

Pure: no I/O, no clock. The bytes of a record are ASCII JSON, encoded once and stored as they are, so that a verifier
never has to encode them again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii
from typing import Literal, NamedTuple

from blake3 import blake3

Decision = Literal["allow", "deny", "ask"]
Type = Literal["begin", "end", "whole"]
"""A dispatched operation has a `begin` and an `end` record; anything else has one `whole` record."""

MAX_ARGUMENTS = 8192
"""The most characters of one record's arguments, in JSON."""
MAX_WORDS = 500
MAX_NAME = 128
"""The most characters of a searchable field."""

_DEPTH = 8
_GENESIS = b"carrel audit chain v1\0"
_dumps = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode
_sorted = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"), allow_nan=False, sort_keys=True).encode
_WORDS = ("agent", "rule", "source", "approval", "request", "arguments_hash")


def chain_of(context_id: str | None, sandbox_id: str = "") -> str:
    """Return the chain of a context, or of a sandbox without one. No name of a context leads to another's chain."""
    return f"sandbox:{sandbox_id}" if context_id is None else f"context:{context_id}"


def server_chain(node: str) -> str:
    """Return the chain for actions of a server that belong to no context: starts, tokens, pruning."""
    return f"server:{node}"


def context_of(chain: str) -> str | None:
    """Return the context of a chain."""
    kind, _, name = chain.partition(":")
    return name if kind == "context" else None


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """The known facts of an operation before it is dispatched. The caller has redacted `arguments`; `arguments_hash` is
    of the full ones (`AuditLog.hash_arguments`).
    """

    chain: str
    actor: str
    kind: str
    name: str
    decision: Decision = "allow"
    rule: str | None = None
    source: str | None = None
    arguments: Mapping[str, object] = field(default_factory=dict)
    arguments_hash: str | None = None
    approval: str | None = None
    request: str | None = None
    agent: str | None = None
    """Whom the workspace belongs to."""
    sandbox: str | None = None
    """For the event of the operation; the record does not have it."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of an operation. `result` is `ok` or the code of an error; `arguments` are those not known before."""

    result: str = "ok"
    duration_ms: float | None = None
    bytes_in: int | None = None
    bytes_out: int | None = None
    reason: str | None = None
    arguments: Mapping[str, object] = field(default_factory=dict)
    told: Mapping[str, object] = field(default_factory=dict)
    """For the event of the operation, such as the exit code of its command; the record does not have it."""


class RecordRow(NamedTuple):
    """A stored record: its bytes (`body`), their hash, and the searchable fields."""

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
    """Return the hash that the first record of a chain is linked to."""
    return blake3(_GENESIS + chain.encode("utf-8", "replace")).digest()


def link(before: bytes, body: bytes) -> bytes:
    """Return the hash of a record: over the hash of the record before and its own bytes."""
    return blake3(before + body).digest()


def arguments_hash(arguments: Mapping[str, object], key: bytes) -> str:
    """Return a keyed hash of the full arguments. Without a key, a short command or password could be guessed from its
    hash.
    """
    return blake3(_encode(arguments, keys_sorted=True).encode(), key=key).hexdigest()


def row(
    type: Type,
    entry: AuditEntry,
    ending: Ending | None,
    *,
    seq: int,
    at: float,
    node: str,
    before: bytes,
    ref: int | None = None,
) -> RecordRow:
    """Make the record of an entry, of its ending, or of both, linked to the record before."""
    actor, kind, name = entry.actor[:MAX_NAME], entry.kind[:MAX_NAME], entry.name[:MAX_NAME]
    # Encoded by hand: this happens twice for every operation, and a JSON encoder takes three times as long.
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
    return RecordRow(entry.chain, seq, at, type, ref, actor, kind, name, entry.decision, result, hashed, body)


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


def _began(entry: AuditEntry) -> str:
    body = ""
    for name in _WORDS:
        value = getattr(entry, name)
        if value is not None:
            body += f',"{name}":{_quoted(value[:MAX_WORDS])}'
    arguments, cut = fit(entry.arguments)
    if cut:
        body += ',"truncated":true'
    # The last field, so that a text search knows where the arguments begin.
    return body if arguments == "{}" else f'{body},"arguments":{arguments}'


def fit(arguments: Mapping[str, object]) -> tuple[str, bool]:
    """Encode arguments as JSON of at most `MAX_ARGUMENTS` characters; also return whether something was left out."""
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
    # A lone surrogate is not text, and many JSON parsers refuse it. (Pairs come here as well.)
    return dump(_plain(value, _DEPTH * 4)) if "\\ud" in text else text


def _plain(value: object, depth: int) -> object:
    """Convert a value to what JSON can express; invalid text becomes escaped bytes."""
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
