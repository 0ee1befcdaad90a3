"""Writes the generated files: the blocking client, the reference pages and the dashboard.

python scripts/generate.py            write stale files
python scripts/generate.py --check    change nothing; fail if a file is stale
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import generate_dashboard
import generate_policy
import generate_reference
import generate_sync

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the declarations of known gaps are in tests/


def wanted() -> dict[Path, Callable[[], str]]:
    files: dict[Path, Callable[[], str]] = {}
    sources = ROOT / "src/carrel/client/_async"
    for source in sorted(sources.glob("*.py")):
        target = sources.parent / "_sync" / source.name
        files[target] = lambda source=source, target=target: generate_sync.derive(source.read_text(), target)  # type: ignore[misc]
    reference = ROOT / "docs/reference"
    files[reference / "errors.md"] = generate_reference.errors_page
    files[reference / "cli.md"] = generate_reference.cli_page
    files[reference / "metrics.md"] = generate_reference.metrics_page
    files[reference / "scopes.md"] = generate_reference.scopes_page
    files[reference / "operations.md"] = generate_reference.operations_page
    files[reference / "trust.md"] = generate_reference.trust_page
    files[reference / "providers.md"] = generate_reference.providers_page
    files[reference / "e2b.md"] = generate_reference.e2b_page
    files[reference / "policy.md"] = generate_policy.page
    for name in ("settings", "sources"):
        files[reference / f"{name}.schema.json"] = lambda name=name: generate_policy.schema(name)  # type: ignore[misc]
    files[ROOT / "deploy/grafana/carrel.json"] = generate_dashboard.dashboard
    if (ROOT / "src/carrel/config.py").exists():
        files[reference / "settings.md"] = generate_reference.settings_page
    return files


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    check = bool(arguments)
    files = wanted()
    stale = []
    for path, make in files.items():
        text = make()
        if path.exists() and path.read_text() == text:
            continue
        stale.append(path.relative_to(ROOT))
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    made = ROOT / "src/carrel/client/_sync"
    for left in sorted(set(made.glob("*.py")) - set(files)):
        stale.append(left.relative_to(ROOT))
        if not check:
            left.unlink()
    for path in stale:
        print(f"stale: {path}" if check else f"wrote {path}")
    if check and stale:
        print("run `make generate`", file=sys.stderr)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
