"""`dataclass`, as in the standard library, for a program that must start quickly.

The standard library compiles up to six functions for every class, which takes half a millisecond. Here `__init__` is
compiled when the first object is made, and the other functions are shared or closures. So a class that is never used
costs a tenth (docs/decisions/0020-the-proxy-starts-when-it-is-needed.md). Everything else is the standard library's:
fields, `replace`, `asdict`, `slots`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

__all__ = ["dataclass"]

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(cls=None, /, *, frozen=False, slots=False, eq=True, kw_only=False):
        """Make a class a dataclass. The arguments are those of the standard library; others are not used here."""

        def made(cls):
            return _made(cls, frozen=frozen, slots=slots, eq=eq, kw_only=kw_only)

        return made if cls is None else made(cls)


def _made(cls: Any, *, frozen: bool, slots: bool, eq: bool, kw_only: bool) -> Any:
    own = set(vars(cls))
    explicit_hash = "__hash__" in own and not (vars(cls)["__hash__"] is None and "__eq__" in own)
    made: Any = dataclasses.dataclass(cls, init=False, repr=False, eq=False, slots=slots, kw_only=kw_only)
    if "__init__" not in own:
        made.__init__ = _Initializer(made, frozen=frozen)
    if "__repr__" not in own:
        made.__repr__ = _repr
    if eq:
        key = _key(made)
        if "__eq__" not in own:
            made.__eq__ = _equality(key)
        if not explicit_hash:
            made.__hash__ = _hash(key) if frozen else None
    if frozen:
        made.__setattr__, made.__delattr__ = _refuse_to_set, _refuse_to_delete
        if slots and "__getstate__" not in own:
            made.__getstate__, made.__setstate__ = _state, _set_state
    return made


class _Initializer:
    """Stands for `__init__` until somebody asks for it."""

    def __init__(self, cls: type[Any], *, frozen: bool):
        self._cls = cls
        self._frozen = frozen

    def __get__(self, instance: object, owner: type[Any]) -> Any:
        made: Any = _initializer(self._cls, frozen=self._frozen)
        self._cls.__init__ = made
        return made if instance is None else made.__get__(instance, owner)


def _initializer(cls: type[Any], *, frozen: bool) -> Callable[..., None]:
    """Compile `__init__`."""
    known: dict[str, Any] = {"_set": object.__setattr__, "_missing": dataclasses.MISSING}
    positional: list[str] = ["self"]
    by_name: list[str] = []
    body: list[str] = []
    for each in dataclasses.fields(cls):
        name, value = each.name, each.name
        parameter = name
        if each.default_factory is not dataclasses.MISSING:
            known[f"_make_{name}"] = each.default_factory
            parameter = f"{name}=_missing"
            value = f"_make_{name}() if {name} is _missing else {name}" if each.init else f"_make_{name}()"
        elif each.default is not dataclasses.MISSING:
            known[f"_default_{name}"] = each.default
            parameter = f"{name}=_default_{name}"
            value = name if each.init else f"_default_{name}"
        elif not each.init:
            continue
        if each.init:
            (by_name if each.kw_only else positional).append(parameter)
        body.append(f"_set(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    parameters = ", ".join([*positional, *(["*", *by_name] if by_name else [])])
    lines = "".join(f"  {line}\n" for line in body or ["pass"])
    found: dict[str, Any] = {}
    source = f"def make({', '.join(known)}):\n def __init__({parameters}):\n{lines} return __init__\n"
    exec(source, sys.modules[cls.__module__].__dict__, found)  # noqa: S102 - made of the names of fields alone
    made: Callable[..., None] = found["make"](**known)
    made.__qualname__ = f"{cls.__qualname__}.__init__"
    made.__annotations__ = {each.name: each.type for each in dataclasses.fields(cls) if each.init} | {"return": None}
    return made


def _key(cls: type[Any]) -> Callable[[Any], object]:
    """Return the function that returns what is compared."""
    names = [each.name for each in dataclasses.fields(cls) if each.compare]
    return attrgetter(*names) if names else lambda _self: ()


def _equality(key: Callable[[Any], object]) -> Callable[[Any, object], Any]:
    def equals(self: Any, other: object) -> Any:
        return key(self) == key(other) if other.__class__ is self.__class__ else NotImplemented

    return equals


def _hash(key: Callable[[Any], object]) -> Callable[[Any], int]:
    return lambda self: hash(key(self))


@recursive_repr()
def _repr(self: Any) -> str:
    shown = ", ".join(f"{each.name}={getattr(self, each.name)!r}" for each in dataclasses.fields(self) if each.repr)
    return f"{self.__class__.__qualname__}({shown})"


def _refuse_to_set(self: object, name: str, value: object) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_to_delete(self: object, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


def _state(self: Any) -> list[object]:
    return [getattr(self, each.name) for each in dataclasses.fields(self)]


def _set_state(self: object, state: list[object]) -> None:
    for each, value in zip(dataclasses.fields(self), state, strict=True):  # type: ignore[arg-type]
        object.__setattr__(self, each.name, value)
