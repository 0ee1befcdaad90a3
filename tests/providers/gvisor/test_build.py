"""`scripts/build-runsc`, with a Go that takes no time."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from tests.support.gvisor import VERSION

SCRIPTS = Path(__file__).parents[3] / "scripts"
GO = """#!/bin/sh
echo "$GOFLAGS $*" >> "$LOG"
sleep 0.2
[ -z "$FAILS" ] || { echo no such module >&2; exit 1; }
while [ "$1" != -o ]; do shift; done
printf '#!/bin/sh\\necho runsc version 1\\n' > "$2"
chmod +x "$2"
"""


def build(place: Path, **more: str) -> subprocess.Popen[str]:
    env = {"PATH": f"{place}/bin:/usr/bin:/bin", "XDG_CACHE_HOME": f"{place}/cache", "LOG": f"{place}/log", **more}
    return subprocess.Popen(
        [SCRIPTS / "build-runsc"], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_it_is_built_once_and_whole(tmp_path: Path) -> None:
    refused = build(tmp_path)
    assert "Go is missing" in refused.communicate()[1] and refused.returncode == 1
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "go").write_text(GO)
    (tmp_path / "bin" / "go").chmod(0o755)
    failed = build(tmp_path, FAILS="1")
    assert "no such module" in failed.communicate()[1] and failed.returncode == 1
    folder = tmp_path / "cache" / "carrel" / "runsc" / VERSION
    assert os.listdir(folder) == ["lock"]
    runs = [build(tmp_path) for _ in range(3)]
    assert {run.communicate()[0] for run in runs} == {f"{folder}/runsc\n"}
    assert sorted(os.listdir(folder)) == ["lock", "runsc"]
    calls = (tmp_path / "log").read_text().splitlines()
    assert len(calls) == 2, "one that failed, one that did not"
    assert all("-mod=readonly" in call and call.endswith(" gvisor.dev/gvisor/runsc") for call in calls)


def test_everything_is_pinned_by_a_checksum() -> None:
    required = re.findall(
        r"^\t?(?:require )?(\S+/\S+) (v\S+)", (SCRIPTS / "runsc" / "go.mod").read_text(), re.MULTILINE
    )
    sums = (SCRIPTS / "runsc" / "go.sum").read_text().splitlines()
    assert ("gvisor.dev/gvisor", VERSION) in required and len(required) > 10
    assert all(re.fullmatch(r"\S+ v\S+ h1:[A-Za-z0-9+/]{43}=", line) for line in sums)
    assert {f"{name} {version}" for name, version in required} <= {line.rpartition(" ")[0] for line in sums}
