"""Eight clients at once: no call sees another's variables, files it did not share, environment variables or output."""

from __future__ import annotations

import asyncio
import json
import tempfile

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from carrel.client import AsyncClient
from carrel.config import load
from carrel.server import running

CLIENTS = 8
KINDS = ("variables", "environment", "output", "files", "raises", "exits", "cell", "late")
plans = st.lists(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4), min_size=CLIENTS, max_size=CLIENTS)

LOOK = """
import builtins, json, os, sys
print(json.dumps({
    "marks": sorted(n for n in globals() if n.startswith("mark_")),
    "builtins": sorted(n for n in dir(builtins) if n.startswith("mark_")),
    "env": sorted(n for n in os.environ if n.startswith("MARK_")),
    "argv": sys.argv[1:],
}))
"""


async def one(client: AsyncClient, box_id: str, mark: str, kinds: list[str]) -> None:
    box = client.attach(await client.find(box_id))
    for kind in kinds:
        setting = f"import builtins\nmark_{mark} = 1\nbuiltins.mark_{mark} = 1\n"
        if kind in {"variables", "environment"}:
            given = {f"MARK_{mark}": mark} if kind == "environment" else {}
            result = await box.python.run(setting + LOOK, variables=given, args=[mark])
            seen = json.loads(result.stdout)
            assert seen["marks"] == seen["builtins"] == [f"mark_{mark}"], seen
            assert seen["env"] == sorted(given) and seen["argv"] == [mark], seen
        elif kind == "output":
            result = await box.python.run(
                f"import sys\nfor n in range(200): print('{mark}')\nprint('{mark}', file=sys.stderr)"
            )
            assert result.stdout == f"{mark}\n" * 200 and result.stderr == f"{mark}\n"
        elif kind == "files":
            code = f"open('{mark}/out', 'w').write(open('{mark}/in').read() * 2)"
            result = await box.python.run(code, files={f"{mark}/in": mark.encode()})
            assert result.exit_code == 0 and f"{mark}/out" in result.files_produced, result
            assert await box.files.read(f"{mark}/out") == mark.encode() * 2
        elif kind == "raises":
            result = await box.python.run(f"raise ValueError('{mark}')")
            assert result.exit_code == 1 and result.stderr.endswith(f"\nValueError: {mark}\n")
        elif kind == "exits":
            assert (await box.python.run("import os; os._exit(7)")).exit_code == 7
        elif kind == "cell":
            context = box.python.context(f"c{mark}")
            assert (await context.run(setting)).ok
            names = (await context.run("sorted(n for n in globals() if n.startswith('mark_'))")).text
            assert names == repr([f"mark_{mark}"])
        else:
            result = await box.python.run("import time; time.sleep(30)", timeout=0.1)
            assert result.timed_out and result.stdout == ""


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(plan=plans)
async def test_no_call_sees_another(forked: None, plan: list[list[str]]) -> None:
    with tempfile.TemporaryDirectory(prefix="carrel-t-") as place:
        flags = {"data_dir": place, "port": 0, "volumes": "directory"}
        async with (
            running(load(flags, environ={})) as server,
            AsyncClient(server.url, server.token) as client,
            await client.sandbox() as box,
        ):
            await asyncio.gather(*(one(client, box.id, f"m{number}", kinds) for number, kinds in enumerate(plan)))
            assert (await box.python.run(LOOK)).stdout.count("[]") == 4
