"""Runs the tests that failed once more, by themselves; says which of them were unsteady. Part of `scripts/test`.

Takes for each run its exit code and its cache, as `1:/tmp/x/first`. Ends with 0 if in the end every test has passed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MOST = 3  # tests that may be tried again
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
    if len(failed) > MOST:
        print(f"{len(failed)} tests failed; at most {MOST} are tried again", flush=True)
        return SOME_FAILED
    print("failed, tried once more alone:", *failed, sep="\n  ", flush=True)
    ended = subprocess.run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *failed], check=False).returncode
    if ended == 0:
        print("UNSTEADY (failed in the run, passed alone), to be mended:", *failed, sep="\n  ", flush=True)
    return ended


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
