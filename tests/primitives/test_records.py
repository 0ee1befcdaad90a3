"""`dataclass` of `carrel.primitives.records` behaves like the standard library's, tried side by side."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import pickle
import typing
from dataclasses import FrozenInstanceError, asdict, field, fields, replace
from typing import Any, ClassVar

import pytest

from carrel.primitives import records

FLAGS = [
    dict(zip(("frozen", "slots", "eq", "kw_only"), given, strict=True))
    for given in itertools.product((False, True), repeat=4)
]


def declare(dataclass: Any, flags: dict[str, bool]) -> Any:
    """Declare the same classes with the one or the other."""

    @dataclass(**flags)
    class Base:
        name: str
        kind: ClassVar[str] = "base"
        size: int = 3
        parts: list[int] = field(default_factory=list)
        seen: int = field(default=0, compare=False, repr=False)
        made: str = field(init=False, default="here")

    @dataclass(**flags)
    class Derived(Base):
        more: str = "more"

        def __post_init__(self) -> None:
            if self.size < 0:
                raise ValueError("negative")

    return Base, Derived


def outcome(work: Any) -> Any:
    """Return what a call returns, or the kind of its error."""
    try:
        return work()
    except Exception as error:
        return type(error)


def behaviour(dataclass: Any, flags: dict[str, bool]) -> list[str]:
    """Return everything that the two could differ in."""
    base, derived = declare(dataclass, flags)
    one, same, other = base(name="a"), base(name="a", seen=9), base(name="a", parts=[1])
    child = derived(name="a", more="x")
    plain = base(name="a", parts=())
    found = [
        *(repr(one), repr(child), asdict(child), [each.name for each in fields(derived)], base.__match_args__),
        *(one == same, one == other, one == child, one != object(), one.parts is not same.parts),
        outcome(lambda: hash(plain) == hash(base(name="a", parts=()))),
        outcome(lambda: hash(one) == hash(one)),
        *(replace(child, size=5).size, replace(child, size=5).more, outcome(lambda: replace(child, made="x"))),
        *(outcome(base), outcome(lambda: base("a", 1, [2])), outcome(lambda: base(name="a", wrong=1))),
        outcome(lambda: derived(name="a", size=-1)),
        *(outcome(lambda: setattr(one, "name", "b")), outcome(lambda: delattr(one, "size"))),
        isinstance(outcome(lambda: setattr(child, "nothing", "b")), type),
        *(hasattr(one, "__dict__"), asdict(copy.copy(child)), asdict(copy.deepcopy(child))),
        [*inspect.signature(derived).parameters],
        typing.get_type_hints(derived.__init__),
    ]
    return [str(each) for each in found]


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "+".join(name for name, on in flags.items() if on) or "-")
def test_same_as_the_standard_library(flags: dict[str, bool]) -> None:
    assert behaviour(records.dataclass, flags) == behaviour(dataclasses.dataclass, flags)


@records.dataclass(frozen=True, slots=True)
class Node:
    value: int
    below: list[Node] = field(default_factory=list)


def test_frozen_objects_with_slots_can_be_pickled_and_contain_themselves() -> None:
    node = Node(1, [Node(2)])
    assert pickle.loads(pickle.dumps(node)) == node
    node.below.append(node)
    assert repr(node) == "Node(value=1, below=[Node(value=2, below=[]), ...])"
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'value'"):
        node.value = 3  # type: ignore[misc]


def test_methods_of_the_class_are_kept() -> None:
    @records.dataclass(frozen=True)
    class Own:
        value: int

        def __init__(self) -> None:
            object.__setattr__(self, "value", 7)

        def __repr__(self) -> str:
            return "own"

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 5

    assert (Own().value, repr(Own()), Own() == 1, hash(Own())) == (7, "own", True, 5)


def test_init_is_compiled_for_the_first_object() -> None:
    @records.dataclass
    class Late:
        value: int

    assert type(vars(Late)["__init__"]).__name__ == "_Initializer"
    assert Late(1).value == 1
    assert inspect.isfunction(vars(Late)["__init__"])
