"""The import table of the architecture, and other promises about the shape of the code, checked by reading it."""

import ast
import re
from pathlib import Path

from tests.support.source import source

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "carrel"

BASE = {"errors", "primitives"}
KINDS = {"store", "events", "redaction", "audit", "metrics", "workspaces", "identity", "secrets"}
ALLOWED = {
    "errors": set(),
    "primitives": {"errors"},
    "extras": set(),
    "threads": set(),
    "models": BASE,
    "policy": BASE | {"models", "config"},
    "config": BASE | {"models", "policy"},
    **{kind: BASE | {"models", "config"} for kind in KINDS},
    "events": BASE | {"models", "extras"},
    "tracing": BASE | {"extras", "metrics"},
    "images": BASE | {"models", "config", "threads"},
    "isolation": BASE,
    "spiffe": BASE | {"extras"},
    "supervisor": BASE,
    "sandbox_programs": set(),
    "providers": BASE | {"extras", "isolation", "threads", "models", "spiffe"},
    "egress": BASE | {"policy", "models", "metrics", "redaction", "isolation", "threads"},
    "control": BASE
    | KINDS
    | {"threads", "models", "policy", "config", "isolation", "providers", "egress", "images", "spiffe", "tracing"},
    "connections": BASE,
    "workers": BASE | {"control"},
    "api": BASE | {"control", "events", "models", "metrics", "identity", "audit", "connections", "tracing"},
    "client": BASE | {"models"},
    "logging": BASE | {"client"},
    "profiles": BASE | {"policy"},
    "testing": BASE | {"models", "client", "providers", "control"},
    "integrations": BASE | {"client", "connections", "extras", "models"},
    "cli": BASE | {"client", "extras", "models"},
    "local": BASE | {"config", "control", "redaction", "isolation", "models", "providers", "workspaces"},
    "__main__": {"cli"},
}
LAZILY = {
    "cli": {"server", "local", "config", "policy", "profiles", "audit", "integrations", "connections", "isolation"},
    "integrations": {"policy"},  # which addresses are not of the public internet is written down once
    "__init__": {"client", "models", "errors"},
}
"""What may be imported inside a function only."""


def modules():
    return sorted(path for path in SOURCE.rglob("*.py"))


def package(path):
    parts = path.relative_to(SOURCE).parts
    return parts[0].removesuffix(".py")


def imports(path):
    """Pairs of (imported package of carrel, whether at module level)."""
    for node, inside, for_types in source(path).imports:
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module]
            if node.module == "carrel":
                names = [f"carrel.{alias.name}" for alias in node.names]
        for name in names:
            if name and name.startswith("carrel.") and not name.endswith("__"):
                yield name.split(".")[1], not inside and not for_types


def test_imports_follow_the_table():
    breaches = [
        f"{path.relative_to(SOURCE)} may not import carrel.{imported}"
        for path in modules()
        if (own := package(path)) != "server"
        for imported, at_top in imports(path)
        if imported not in ALLOWED.get(own, set()) | {own} and (at_top or imported not in LAZILY.get(own, set()))
    ]
    assert not breaches


def test_admission_knows_nothing_of_what_uses_it():
    users = {f"carrel.control.{each}" for each in ("egress", "jobs", "mcp", "python")}
    for path in [each for room in ("operations", "governance") for each in (SOURCE / "control" / room).glob("*.py")]:
        for node, _inside, _for_types in source(path).imports:
            if isinstance(node, ast.ImportFrom) and node.module:
                assert ".".join(node.module.split(".")[:3]) not in users, f"{path}: {node.module}"


def test_the_table_can_catch_a_breach(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("from carrel.control import sessions\ndef f():\n    import carrel.server\n")
    assert list(imports(bad)) == [("control", True), ("server", False)]


def test_shell_reader_knows_nothing_of_rules_and_shows_one_face():
    shell = SOURCE / "policy" / "shell"
    for path in modules():
        names = set(re.findall(r"^\s*from (carrel\.policy[\w.]*) import", path.read_text(), re.MULTILINE))
        if path.is_relative_to(shell):
            assert all(name.startswith("carrel.policy.shell") for name in names), path
        else:
            inner = {name for name in names if name.startswith("carrel.policy.shell.")}
            assert inner <= {"carrel.policy.shell.finder"}, path


def test_modules_say_what_they_are_for():
    silent = [str(path) for path in modules() if source(path).docstring is None]
    assert not silent


def test_no_class_name_is_used_twice():
    """The two clients are left out: one is generated from the other."""
    allowed = {"Check"}  # public in `carrel.models` and in `carrel.testing`
    places = {}
    for path in modules():
        if "_sync" not in path.parts and "_async" not in path.parts:
            for name in source(path).classes:
                places.setdefault(name, []).append(str(path.relative_to(SOURCE)))
    assert {name: paths for name, paths in places.items() if len(paths) > 1 and name not in allowed} == {}


def test_no_tracked_file_names_a_package_registry():
    hosts = re.compile(r"pypi\.org|pythonhosted|registry\.npmjs|deb\.debian\.org")
    checked = [
        *ROOT.glob("*.*"),
        *ROOT.glob("requirements/*"),
        *ROOT.glob("scripts/*"),
        *ROOT.glob("docs/**/*.md"),
    ]
    for path in checked:
        if path.is_file():
            assert not hosts.search(path.read_text(errors="ignore")), path


def test_architecture_page_lists_every_folder_and_no_other():
    page = (ROOT / "docs/explanation/architecture.md").read_text()
    [table] = re.findall(r"^## Folders$(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    listed = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    files = [path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    folders = {parent for path in files for parent in path.relative_to(SOURCE).parents if parent.parts}
    actual = {f"{folder}/" for folder in folders if folder.parent.name != "migrations"}
    actual |= {path.name for path in SOURCE.glob("*.py")}
    assert len(listed) == len(set(listed))
    assert set(listed) - actual == set(), "the page lists what is not there"
    assert actual - set(listed) == set(), "the page does not list these"
