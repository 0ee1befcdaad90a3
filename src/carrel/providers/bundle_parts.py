"""A program that finds and makes the parts of the supervisor's bundle. `carrel.providers.bundle` runs it by its path.

It runs on the interpreter that goes into the bundle, with nothing loaded but the supervisor. So the modules and
libraries that it has when the supervisor has handled one request of each kind are those that the bundle needs. Python
writes the same code to different bytes in processes with different histories: each run of this program has the same.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import marshal
import os
import re
import struct
import sys
from importlib.machinery import EXTENSION_SUFFIXES, BuiltinImporter, FrozenImporter
from types import ModuleType
from typing import cast

UNUSED = ("bz2", "lzma", "_bz2", "_lzma")
"""Modules that others import if they are there. The supervisor does not need them, and their libraries are large."""
TLS = ("ssl",)
"""The same, but a supervisor on another machine needs them."""
APART = ("encodings", "__future__")
"""Modules and packages that the interpreter needs before it can import others: each has a file of its own."""
_PROGRAMS = {
    "local": ("carrel.isolation.machine.guest",),
    "remote": ("carrel.supervisor.remote", "carrel.supervisor.lent_directory", "carrel.supervisor.unpack"),
}
"""The programs of a bundle besides the supervisor of containers, by the kind of the bundle."""
ARCHIVE = "modules"
"""As in `bundle_modules`, which can only be imported in a bundle."""
_UNCHECKED_HASH = 1
_WITHOUT_REFERENCES = 2
"""The version of marshal whose bytes depend on nothing but the values."""
_LOADER = re.compile(r"ld-[^/]*\.so(\.\d+)*")


def main(kind: str, output: str, place: str, *search: str) -> None:
    """Write the compiled modules to the directory `output`, as they will be at `place`; print the other parts as JSON.

    `kind` is `local`, or `remote` for supervisors that are reached over a network. `search` are the directories of
    carrel and of the packages that the supervisor needs.
    """
    sys.dont_write_bytecode = True
    for name in UNUSED if kind == "remote" else (*UNUSED, *TLS):
        sys.modules[name] = cast(ModuleType, None)
    sys.path += search
    importlib.import_module("carrel.supervisor.program")
    for name in _PROGRAMS[kind]:
        importlib.import_module(name)
    importlib.import_module("carrel.supervisor.app").warm()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    library = f"{sys.platlibdir}/{version}"
    os.makedirs(f"{output}/{library}/lib-dynload")  # by this directory the interpreter finds its extensions
    extensions: dict[str, str] = {}
    sources: list[str] = []
    code: list[tuple[str, str, bool, bytes]] = []
    for name, module in sorted(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        if spec is None or spec.loader in {BuiltinImporter, FrozenImporter} or name == "__main__":
            continue
        path, relative = spec.origin, name.replace(".", "/")
        package = spec.submodule_search_locations is not None
        if package:
            relative += "/__init__"
        if path and path.endswith(tuple(EXTENSION_SUFFIXES)):
            relative = os.path.join(os.path.dirname(relative), os.path.basename(path))
            extensions[f"{library}/{relative}"] = path
            code.append((name, relative, False, b""))
        elif path and path.endswith(".py"):
            sources.append(path)
            if name.partition(".")[0] in APART:
                _write(path, f"{library}/{relative}", output, place)
            else:
                code.append((name, f"{relative}.pyc", package, _compile(path, f"{place}/{library}/{relative}.py")[1]))
    starter = os.path.join(os.path.dirname(__file__), "bundle_modules.py")
    # By the file of `os` the interpreter finds its library.
    for name, path in (("os", os.__file__), ("bundle_modules", starter)):
        sources.append(path)
        _write(path, f"{library}/{name}", output, place)
    _write_archive(f"{output}/{library}/{ARCHIVE}", code)
    libraries = {os.path.basename(each): each for each in _libraries() if each not in extensions.values()}
    found = {
        "interpreter": os.readlink("/proc/self/exe"),
        "loader": [name for name in libraries if _LOADER.fullmatch(name)],
        "libraries": libraries,
        "extensions": extensions,
        "sources": sources,
    }
    print(json.dumps(found))  # noqa: T201 - the answer to the parent


def _compile(path: str, name: str) -> tuple[bytes, bytes]:
    """Return the hash of a file of Python, and its code, which says that it comes from the file `name`."""
    with open(path, "rb") as file:
        source = file.read()
    code = compile(source, name, "exec", dont_inherit=True)
    return importlib.util.source_hash(source), marshal.dumps(code)


def _write(path: str, relative: str, output: str, place: str) -> None:
    """Write the code of a module to a file of its own."""
    source_hash, code = _compile(path, f"{place}/{relative}.py")
    target = os.path.join(output, f"{relative}.pyc")
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with open(target, "wb") as file:
        file.write(importlib.util.MAGIC_NUMBER + struct.pack("<I", _UNCHECKED_HASH) + source_hash + code)


def _write_archive(target: str, modules: list[tuple[str, str, bool, bytes]]) -> None:
    """Write the code of modules to one file (see `bundle_modules`): name, path, whether it is a package, code."""
    index, offset = {}, 0
    for name, relative, package, code in modules:
        index[name] = (relative, package, offset, len(code))
        offset += len(code)
    head = marshal.dumps(index, _WITHOUT_REFERENCES)
    with open(target, "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        file.writelines(code for *_, code in modules)


class _LoadedObject(ctypes.Structure):
    """The beginning of `struct dl_phdr_info`."""

    _fields_ = (("address", ctypes.c_void_p), ("name", ctypes.c_char_p))


def _libraries() -> list[str]:
    """Return the paths of the shared objects of this process by the names under which they were asked for."""
    found: list[str] = []

    def note(loaded: ctypes._Pointer[_LoadedObject], _size: int, _data: int | None) -> int:
        name = os.fsdecode(loaded.contents.name or b"")
        if "/" in name:
            found.append(name)
        return 0

    callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_LoadedObject), ctypes.c_size_t, ctypes.c_void_p)
    ctypes.CDLL(None).dl_iterate_phdr(callback(note), None)
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
