"""Marks of the parameters of a route: `Query`, `Path`, `Header`, `Body`, `Depends`, with the arguments of FastAPI.

A mark only keeps its arguments: to import FastAPI and to build all routes took about a third of a server's start (see
decision 0019). `translated` turns the marks of a function into FastAPI's, when its route is built.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel


class ParameterMark:
    """A mark of one parameter: the name of FastAPI's function, and its arguments."""

    def __init__(self, name: str, *arguments: Any, **settings: Any):
        self._name, self._arguments, self._settings = name, arguments, settings

    def made(self) -> Any:
        """Return FastAPI's mark."""
        arguments = [translated(each) if callable(each) else each for each in self._arguments]
        return getattr(import_module("fastapi"), self._name)(*arguments, **self._settings)


Query = partial(ParameterMark, "Query")
Path = partial(ParameterMark, "Path")
Header = partial(ParameterMark, "Header")
Body = partial(ParameterMark, "Body")
Depends = partial(ParameterMark, "Depends")


def translated(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a function the signature that FastAPI reads, and return it."""
    hints = get_type_hints(function, include_extras=True)
    signature = inspect.signature(function)
    parameters = [each.replace(annotation=_translated(hints[each.name])) for each in signature.parameters.values()]
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return function


def _translated(annotation: Any) -> Any:
    if get_origin(annotation) is not Annotated:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            # Otherwise FastAPI's adapter of the body would also be built later, and warn then.
            annotation.model_config["defer_build"] = False
        return annotation
    kind, *marks = get_args(annotation)
    kind = _translated(kind)
    return Annotated[(kind, *(mark.made() if isinstance(mark, ParameterMark) else mark for mark in marks))]
