"""Whatever eight clients run at once, with environments and templates mixed: no call sees anything of another."""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as given_settings
from hypothesis import strategies as st
from tests.support.environments_ground import sources, stocked
from tests.support.sandboxes import ROOT

from carrel.config import Settings
from carrel.control.operations.caller import Caller
from carrel.control.plane import ControlPlane
from carrel.identity import Identity, OwnerKind, Scope
from carrel.models import StatelessRequest, StatelessResult

CLIENTS = 8
LEFTOVERS = ("variables", "environment", "files", "hidden", "process", "daemon", "shared memory", "noise", "packages")

CODE = """
import builtins, ctypes, glob, os, re, subprocess, sys, time
me, leaves, env = {me!r}, {leaves!r}, {env!r}
seen = set()

def look(text):
    seen.update(set(re.findall('mark-[0-9]+-[0-9]+', text)) - {{me}})

look(repr(dict(os.environ))); look(repr(vars(builtins).get('left'))); look(repr(sorted(globals())))
look(repr([getattr(module, 'left', None) for module in list(sys.modules.values())]))
for top in ('/workspace', '/tmp', '/var/tmp', '/dev/shm', os.path.expanduser('~')):
    for place, dirs, files in os.walk(top):
        look(place + ' '.join([*dirs, *files]))
        for name in files:
            try: look(open(os.path.join(place, name), errors='replace').read())
            except OSError: pass
for path in glob.glob('/proc/[0-9]*/cmdline'):
    try: look(open(path).read())
    except OSError: pass
for kind in ('shm', 'msg', 'sem'):
    if len(open('/proc/sysvipc/' + kind).readlines()) > 1: seen.add(kind)
try:
    import nail
    found = 'nail'
except ImportError:
    found = None
if found != env: seen.add(f'{{found}} in the place of {{env}}')
if open('given-' + me).read() != me: seen.add('input')

if 'variables' in leaves: builtins.left = sys.left = globals()[me] = me
if 'environment' in leaves: os.environ[me] = me
if 'files' in leaves:
    for top in ('/workspace', '/workspace/scripts', '/tmp', '/var/tmp', '/dev/shm', os.path.expanduser('~')):
        os.makedirs(top, exist_ok=True)
        open(os.path.join(top, 'file-' + me), 'w').write(me)
if 'hidden' in leaves:
    os.makedirs('/tmp/.x/' + me); open('/tmp/.x/y', 'w').write(me); os.chmod('/tmp/.x', 0)
if 'process' in leaves: subprocess.Popen(['sleep', '1000', me], stderr=subprocess.DEVNULL)
if 'daemon' in leaves: subprocess.Popen(f'(setsid sh -c "while :; do echo {{me}}; sleep 0.01; done" &)', shell=True)
if 'shared memory' in leaves: ctypes.CDLL(None).shmget(7, 4096, 0o1600)
if 'noise' in leaves: print(me, file=sys.stderr, flush=True)
if 'packages' in leaves:
    site = os.path.expanduser(f'~/.local/lib/python{{sys.version_info[0]}}.{{sys.version_info[1]}}/site-packages')
    os.makedirs(site); open(site + '/left.pth', 'w').write(f'import builtins; builtins.left = "{{me}}"')
if 'daemon' not in leaves: print(me, sorted(seen))
elif seen: raise SystemExit(str(seen))
"""


@dataclass(frozen=True)
class Call:
    client: int
    template: str | None
    env: str | None
    leaves: frozenset[str]


CALLS = st.lists(
    st.builds(
        Call,
        st.integers(0, CLIENTS - 1),
        st.sampled_from([None, "recipe"]),
        st.sampled_from([None, "nail"]),
        st.frozensets(st.sampled_from(LEFTOVERS), max_size=4),
    ),
    min_size=8,
    max_size=20,
)


@pytest.fixture
async def shared(settings: Settings) -> AsyncIterator[ControlPlane]:
    recipe = Path(settings.data_dir, "templates", "recipe")
    recipe.mkdir(parents=True)
    (recipe / "template.toml").write_text('description = "another"\n')
    async with stocked() as index:
        file = Path(settings.data_dir, "sources.json")
        file.write_text(json.dumps(sources(index)))
        changed = {
            "volumes": "btrfs" if ROOT else "directory",
            "policy": settings.policy.model_copy(update={"sources_file": str(file)}),
            "router": settings.router.model_copy(update={"max_sandboxes": 10, "wait_s": 120.0}),
            "max_sandboxes": 20,
        }
        plane = await ControlPlane.open(settings.model_copy(update=changed))
        try:
            yield plane
        finally:
            await plane.close()


async def run(plane: ControlPlane, me: str, given: Call) -> StatelessResult:
    caller = Caller(Identity(f"agent:{given.client}", OwnerKind.AGENT, frozenset({Scope.OPERATE})))
    code = CODE.format(me=me, leaves=sorted(given.leaves), env=given.env)
    files = {f"given-{me}": b64encode(me.encode()).decode()}
    wanted = None if given.env is None else [given.env]
    return await plane.router.run(
        caller, StatelessRequest(code=code, template=given.template, requirements=wanted, files=files)
    )


@given_settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=CALLS)
async def test_no_call_sees_another(shared: ControlPlane, calls: list[Call]) -> None:
    marks = [f"mark-{number}-{each.client}" for number, each in enumerate(calls)]
    tasks = [
        asyncio.get_running_loop().create_task(run(shared, me, each)) for me, each in zip(marks, calls, strict=True)
    ]
    for me, each, done in zip(marks, calls, await asyncio.gather(*tasks), strict=True):
        assert done.exit_code == 0, (each, done)
        if "daemon" in each.leaves:
            assert set(done.output.split()) <= {me}, (each, done)
        else:
            assert done.output == f"{me} []\n", (each, done)
        assert set(done.stderr.split()) <= {me}, (each, done)
        assert all(me in name or name == ".x/y" for name in done.files_produced), (each, done)
