from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from carrel.audit.records import (
    MAX_ARGUMENTS,
    AuditEntry,
    Ending,
    arguments_hash,
    chain_of,
    context_of,
    fit,
    genesis,
    link,
    row,
    server_chain,
)

TEXT = st.text(st.characters(), max_size=40)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXT | st.binary(max_size=20)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4), max_leaves=8
)
ARGUMENTS = st.dictionaries(TEXT, VALUES, max_size=5)
BASE = AuditEntry("context:c", "agent:a", "shell", "run_command", arguments={"command": "ls"}, arguments_hash="ab")


def test_no_name_reaches_anothers_chain() -> None:
    names = [chain_of("server:n"), server_chain("n"), chain_of("sandbox:n"), chain_of(None, "n"), chain_of("n")]
    assert len(set(names)) == len(names)
    assert [context_of(name) for name in names] == ["server:n", None, "sandbox:n", None, "n"]
    assert len({genesis(name) for name in names}) == len(names)


@settings(max_examples=60)
@given(ARGUMENTS, TEXT.map(lambda text: text * 20), TEXT.map(lambda text: text * 5))
def test_any_record_is_ascii_json_of_bounded_size(arguments: dict[str, object], words: str, name: str) -> None:
    entry = replace(BASE, arguments=arguments, rule=words, name=name, actor=name)
    made = row("whole", entry, Ending(name, reason=words), seq=7, at=1.5, node="n", before=b"x" * 32)
    assert made.body.isascii() and len(made.body) < MAX_ARGUMENTS + 20_000
    values = json.loads(made.body)
    json.dumps(values, ensure_ascii=False).encode()  # no half of a surrogate pair
    assert made.body.startswith('{"chain":"context:c","seq":7,"at":1.500000,"type":"whole","node":"n","actor":')
    assert list(values)[-1] == "arguments" or not arguments
    assert made.hash == link(b"x" * 32, made.body.encode())
    if "truncated" not in values and all(type(value) is str and value.isascii() for value in arguments.values()):
        assert values.get("arguments", {}) == {
            key.encode("utf-8", "surrogatepass").decode("utf-8", "backslashreplace"): value
            for key, value in arguments.items()
        }


@given(st.recursive(st.sampled_from(["x" * 3000, "ü" * 2000]), lambda inner: st.lists(inner, min_size=1, max_size=4)))
def test_what_is_too_large_is_cut_and_says_so(value: object) -> None:
    text, cut = fit({"a": value, "b": "x" * 9000})
    assert cut and len(text) <= MAX_ARGUMENTS and "(+" in json.loads(text).get("b", "(+")


def test_even_a_million_arguments_fit() -> None:
    text, cut = fit({str(number): [number] * 9 for number in range(100_000)})
    assert cut and len(text) <= MAX_ARGUMENTS
    deep: object = "x" * 9000
    for _ in range(5000):
        deep = [deep]
    assert fit({"deep": deep})[1] in {True, False} and len(fit({"deep": deep})[0]) <= MAX_ARGUMENTS


def test_small_arguments_are_kept_as_they_are() -> None:
    assert fit({}) == ("{}", False)
    assert fit({"b": [1, None, True], "a": "ü💡"}) == ('{"b":[1,null,true],"a":"\\u00fc\\ud83d\\udca1"}', False)
    assert json.loads(fit({"path": "not\udcffutf8", "raw": b"\xff", "many": 10**5000, "f": float("nan")})[0]) == {
        "path": "not\\xffutf8",
        "raw": "\\xff",
        "many": hex(10**5000),
        "f": "nan",
    }


def test_the_hash_of_arguments_needs_the_key() -> None:
    one, other = b"1" * 32, b"2" * 32
    assert arguments_hash({"a": 1, "b": 2}, one) == arguments_hash({"b": 2, "a": 1}, one)
    assert arguments_hash({"a": 1}, one) != arguments_hash({"a": 1}, other)
    assert arguments_hash({"a": 1}, one) != arguments_hash({"a": 2}, one)


def test_an_end_says_what_it_ends_and_no_arguments() -> None:
    ending = Ending("timeout", 12.34567, 5, 6, "too slow")
    made = row("end", BASE, ending, seq=2, at=2.0, node="n", before=b"", ref=1)
    assert json.loads(made.body) == {
        "chain": "context:c", "seq": 2, "at": 2.0, "type": "end", "node": "n", "ref": 1, "actor": "agent:a",
        "kind": "shell", "name": "run_command", "decision": "allow", "result": "timeout", "duration_ms": 12.346,
        "bytes_in": 5, "bytes_out": 6, "reason": "too slow",
    }  # fmt: skip
    assert (made.ref, made.result) == (1, "timeout")
