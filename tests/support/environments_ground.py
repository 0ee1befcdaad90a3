"""The ground of tests of environments: an index of real wheels, packages that run code when they are built, and a context
that may install from there.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.support.calls import ADMIN
from tests.support.indexes import IndexServer, serving, wheel

from carrel.control.plane import ControlPlane
from carrel.models import EnvironmentAttach, EnvironmentInfo, PolicyDocuments, SandboxRequest

PYTHON = os.path.basename(os.path.realpath("/usr/bin/python3"))
"""The Python of sandboxes, such as `python3.11`."""

_BACKEND = """
import os, zipfile

SITE = "/workspace/env/lib/{python}/site-packages"

def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    said = []
    if os.path.isdir(SITE):
        act(said)
    info = "{module}-1.0.dist-info"
    files = {{
        "{module}/__init__.py": f"said = {{said!r}}\\n",
        f"{{info}}/METADATA": "Metadata-Version: 2.1\\nName: {name}\\nVersion: 1.0\\n",
        f"{{info}}/WHEEL": "Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    }}
    files[f"{{info}}/RECORD"] = "".join(f"{{path}},,\\n" for path in [*files, f"{{info}}/RECORD"])
    made = "{module}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(wheel_directory, made), "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return made

def act(said):
{code}
"""


def source_package(name: str, code: str) -> tuple[str, bytes]:
    """A source package that runs `code` while it is built for an environment; it can leave words in `said`."""
    module = name.replace("-", "_")
    body = "\n".join(f"    {line}" for line in code.strip().splitlines())
    files = {
        "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
        "backend.py": _BACKEND.format(name=name, module=module, code=body, python=PYTHON),
    }
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for path, text in files.items():
            member = tarfile.TarInfo(f"{module}-1.0/{path}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return f"{module}-1.0.tar.gz", packed.getvalue()


@asynccontextmanager
async def stocked() -> AsyncIterator[IndexServer]:
    """An index with a few packages."""
    server = IndexServer()
    server.add(wheel("shelf", requires=("plank",)))
    server.add(wheel("plank"))
    server.add(wheel("nail"))
    server.add(wheel("blocked-thing"))
    async with serving(server):
        yield server


def sources(index: IndexServer, **more: object) -> dict[str, object]:
    """A policy document that installs from an index."""
    registry = {"name": "main", "url": f"{index.web.url}/simple/"}
    pip = {"registries": [registry], "blocked_packages": ["blocked-thing"], **more}
    return {"package_managers": {"pip": pip}}


async def context(plane: ControlPlane, index: IndexServer, name: str = "c", **more: object) -> str:
    """A context that may install from an index, and its sandbox."""
    await plane.policy_changes.put(name, PolicyDocuments(sources=sources(index)), "tests")
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id=name, **more))  # type: ignore[arg-type]
    return name


async def attach(plane: ControlPlane, name: str, *requirements: str) -> EnvironmentInfo:
    """An environment for a context."""
    return await plane.envs.attach(ADMIN, name, EnvironmentAttach(requirements=list(requirements)))
