"""Runs each test that failed once more, alone, however many there are; names those that then pass. Part of
`scripts/test`.

Takes for each run its exit code and its cache, as `1:/tmp/x/first`. Ends with 0 if in the end every test has passed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SOME_FAILED = 1  # pytest's exit code; any other says that the run itself went wrong


def main(runs: list[str]) -> int:
    failed: list[str] = []
    for run in runs:
        code, _, cache = run.partition(":")
        if int(code) not in (0, SOME_FAILED):
            return int(code)
        if int(code) == SOME_FAILED:
            found = Path(cache, "v/cache/lastfailed")
            names = list(json.loads(found.read_text())) if found.exists() else []
            if not names:  # a failure nobody can name cannot be tried again
                return SOME_FAILED
            failed += names
    if not failed:
        return 0
    print(f"{len(failed)} failed, each is tried once more alone", flush=True)
    steady = [name for name in failed if _fails_alone(name)]
    unsteady = [name for name in failed if name not in steady]
    if unsteady:
        print("UNSTEADY (failed in the run, passed alone), to be mended:", *unsteady, sep="\n  ", flush=True)
    if steady:
        print("FAILED in the run and alone:", *steady, sep="\n  ", flush=True)
    return SOME_FAILED if steady else 0


def _fails_alone(name: str) -> bool:
    return subprocess.run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", name], check=False).returncode != 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
