from __future__ import annotations

import ast
import functools
import re
import sys
import tomllib
from collections.abc import Mapping
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from tests.support.source import source

from carrel import __version__
from carrel.extras import PARTS, ExtraMissing, using

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "carrel"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOT_SERVER = {
    "__init__.py",
    "__main__.py",
    "cli",
    "client",
    "errors.py",
    "extras.py",
    "integrations",
    "logging.py",
    "models",
    "supervisor",
}
OPTIONAL = {
    ("a2a", "uvloop"),  # a faster event loop where the server is installed too
    ("supervisor", "matplotlib"),  # only if the code that an agent runs imports it
    ("server", "yaml"),  # only with a kubeconfig file
    ("server", "nats"),  # only with the setting `bus`
    ("server", "spiffe"),  # only with the setting `spiffe.source`
    ("server", "opentelemetry"),  # only with the setting `tracing.enabled`
    ("server", "spiffe"),  # only with certificates of SPIRE
    ("server", "pypdf"),  # only in sandboxes of the template file-search
}


def names(requirements: list[str]) -> set[str]:
    """The distributions that these requirements name directly; extras of carrel count as what they name."""
    found: set[str] = set()
    for requirement in requirements:
        name, _, extras = re.match(r"([\w.-]+)(\[([^\]]*)\])?", requirement).groups()
        if name == "carrel":
            for extra in extras.split(","):
                found |= names(PROJECT["optional-dependencies"][extra])
        else:
            found.add(re.sub(r"[-_.]+", "-", name).lower())
    return found


def imported(path: Path) -> set[str]:
    """The top-level modules of others that a file imports at run time, also inside functions."""
    found: set[str] = set()
    for node, _inside, for_types in source(path).imports:
        if for_types:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return {name.partition(".")[0] for name in found} - set(sys.stdlib_module_names) - {"carrel", ""}


@functools.cache
def providers() -> Mapping[str, list[str]]:
    """The distributions that have each top-level module."""
    return packages_distributions()


def files_of(extra: str) -> list[Path]:
    """The source files that have to work when only this extra is installed."""
    if extra == "":
        parts = ["client", "models", "primitives", "errors.py", "extras.py", "logging.py"]
    elif extra == "cli":
        parts = ["cli"]
    elif extra == "supervisor":
        parts = ["supervisor"]
    elif extra == "server":
        parts = [entry.name for entry in SOURCE.iterdir() if entry.name not in NOT_SERVER]
    elif extra == "mcp":
        parts = ["integrations/mcp", "integrations/http.py", "integrations/client_pool.py", "cli/mcp.py"]
    elif extra == "kubernetes":
        parts = ["providers/kubernetes/access.py"]
    elif extra == "nats":
        parts = ["events/nats_bus.py"]
    elif extra == "spiffe":
        parts = ["spiffe/spire.py"]
    elif extra == "otel":
        parts = ["tracing/otel.py"]
    elif extra == "deepagents":
        parts = ["integrations/deepagents.py"]
    else:
        parts = [f"integrations/{extra}", "integrations/text.py"]
        parts += ["integrations/http.py", "integrations/client_pool.py"] if extra == "a2a" else []
    return [
        file for part in parts for file in ([SOURCE / part] if part.endswith(".py") else (SOURCE / part).rglob("*.py"))
    ]


@pytest.mark.parametrize("extra", ["", *PARTS])
def test_extra_names_every_package_that_its_files_import(extra: str) -> None:
    declared = names(PROJECT["dependencies"])
    if extra:
        declared |= names(PROJECT["optional-dependencies"][extra])
    missing = set()
    for path in files_of(extra):
        for module in imported(path):
            if extra == "cli" and path.name == "mcp.py":
                continue  # a command of the extra `mcp`
            by = {re.sub(r"[-_.]+", "-", name).lower() for name in providers().get(module, [])}
            own = module.replace("_", "-") == "pydantic-core"  # pydantic requires one version of it, its other half
            if not own and not by & declared and (extra, module) not in OPTIONAL:
                missing.add(f"{path.relative_to(SOURCE)} imports {module}")
    assert not missing


def test_every_extra_for_users_has_words() -> None:
    assert set(PARTS) == PROJECT["optional-dependencies"].keys() - {"dev"}


def test_missing_package_names_the_extra() -> None:
    with pytest.raises(ExtraMissing) as caught, using("server"):
        import no_such_package.inner  # type: ignore[import-not-found]  # noqa: F401
    assert caught.value.detail == "the server is not installed: pip install 'carrel[server]'"
    assert caught.value.name == "no_such_package"
    assert f"carrel-{__version__}-py3-none-any.whl[server]" in caught.value.hint
    assert caught.value.detail in str(caught.value) and caught.value.hint in str(caught.value)


def test_missing_module_of_carrel_stays_a_defect() -> None:
    with pytest.raises(ModuleNotFoundError) as caught, using("server"):
        import carrel.no_such_module  # noqa: F401
    assert not isinstance(caught.value, ExtraMissing)


def test_no_text_fetches_the_bare_name_from_an_index() -> None:
    """carrel is not on a public index: whoever takes its name there would be installed in its place."""
    fetches = re.compile(
        r"(pip3?|pipx|uv tool|uv pip) (install|run) (-\S+ )*['\"]?carrel\b|uvx (--from )?['\"]?carrel\b|uv add ['\"]?carrel\b"
    )
    assert all(map(fetches.search, ["pip install carrel", "pip install -U 'carrel[server]'", "uvx --from carrel x"]))
    texts = [*ROOT.glob("*.md"), ROOT / "Makefile"]
    texts += [
        path
        for folder in ("docs", "examples", "scripts", "src")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix not in {".pyc", ".svg"}
    ]
    found = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in texts
        for line in path.read_text(errors="ignore").splitlines()
        # The words of the error itself; the hint below them names the wheel.
        if fetches.search(line) and "is not installed: pip install" not in line
    ]
    assert not found


def test_inner_extra_is_the_one_that_is_named() -> None:
    with pytest.raises(ExtraMissing, match="LangGraph"), using("a2a"), using("langgraph"):
        import no_such_package  # noqa: F401
