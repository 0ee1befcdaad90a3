"""Imports the modules of a bundle from one file, and starts the supervisor. It runs in the bundle, on its own.

With a file for each module, a start would make two thousand more system calls, most of which gVisor passes on to
another process. So the bundle has their code in one file, one after the other, behind an index. What the interpreter
itself imports before it can read this module stays apart.
"""

from __future__ import annotations

import gc
import marshal
import posix
import sys
from _frozen_importlib import ModuleSpec
from _frozen_importlib_external import ExtensionFileLoader

TYPE_CHECKING = False  # `typing` cannot be imported yet
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import CodeType, ModuleType

ARCHIVE = "modules"
"""The name of the file, in the directory of this module."""
SIZE_OF_LENGTH = 8
Index = dict[str, tuple[str, bool, int, int]]
"""What the file begins with, behind its length: for each module its path in the directory of this module, whether it is
a package, and where its code is. A module that is a shared object has no code here: its size is 0.
"""


class BundleModules:
    """Finds and loads the modules of the file."""

    def __init__(self, folder: str):
        self._folder = folder
        self._file = self._open()
        length = int.from_bytes(posix.read(self._file, SIZE_OF_LENGTH), "little")
        self._index: Index = marshal.loads(posix.read(self._file, length))  # noqa: S302 - the bundle is ours
        self._start = SIZE_OF_LENGTH + length

    def find_spec(self, name: str, _path: Sequence[str] | None, _target: object = None) -> ModuleSpec | None:
        """Return how to import a module; None if it is not one of ours."""
        entry = self._index.get(name)
        if entry is None:
            return None
        relative, package, _, size = entry
        path = f"{self._folder}/{relative}"
        loader = self if size else ExtensionFileLoader(name, path)
        spec = ModuleSpec(name, loader, origin=path, is_package=package)  # type: ignore[arg-type]  # it has all that is used
        spec.has_location = True
        return spec

    def create_module(self, _spec: ModuleSpec) -> None:
        """Have the interpreter create the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the code of a module."""
        exec(self._code(module.__name__), module.__dict__)  # noqa: S102 - this is what importing means

    def _code(self, name: str) -> CodeType:
        _, _, offset, size = self._index[name]
        file = self._file if self._file >= 0 else self._open()
        try:
            code: CodeType = marshal.loads(posix.pread(file, size, self._start + offset))  # noqa: S302 - as above
        finally:
            if file != self._file:
                posix.close(file)
        return code

    def _open(self) -> int:
        return posix.open(f"{self._folder}/{ARCHIVE}", posix.O_RDONLY | posix.O_CLOEXEC)

    def close(self) -> None:
        """Close the file. It is opened again for a module that is imported later."""
        posix.close(self._file)
        self._file = -1


def install() -> BundleModules:
    """Let this process import the modules of the bundle."""
    modules = BundleModules(__file__.rpartition("/")[0])
    sys.meta_path.insert(0, modules)
    return modules


def run(name: str) -> None:
    """Run the function `main` of a module, with the arguments of this process."""
    gc.disable()  # nothing of what is imported is garbage
    modules = install()
    program = __import__(name, fromlist=["main"])
    modules.close()
    gc.freeze()
    gc.enable()
    program.main(sys.argv)
