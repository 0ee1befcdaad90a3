"""The conformance suite on every provider this host has, and proof that it notices a provider that breaks a promise."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support import microvm
from tests.support.gvisor import usable
from tests.support.images import image
from tests.support.known_gaps import NEVER, NOT_JUDGED, SOMETIMES

from carrel.providers.base import Capability, Handle, Launch, Provider
from carrel.providers.built_in import BUILT_IN
from carrel.providers.choosing import open_providers
from carrel.providers.docker import DockerProvider
from carrel.providers.gvisor.options import GvisorOptions
from carrel.providers.kubernetes.options import KubernetesOptions
from carrel.providers.namespace import NamespaceProvider
from carrel.providers.process import ProcessProvider
from carrel.testing import CHECKS, Harness, run, run_check, workspaces_in
from carrel.workspaces.environments import EnvironmentStorage

PROVIDERS: dict[str, type[NamespaceProvider] | type[ProcessProvider]] = {
    "namespace": NamespaceProvider,
    "process": ProcessProvider,
}


@pytest.fixture(autouse=True)
def _forked(forked):
    """Every check has a zygote of its own; that zygotes start is tested with the providers."""


@pytest.fixture
def directories(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "ws").mkdir()
    return str(tmp_path / "run"), str(tmp_path / "ws")


@pytest.fixture
def shelf(tmp_path):
    shelf = EnvironmentStorage(str(tmp_path / "envs"))
    shelf.prepare()
    yield shelf
    shelf.close()


ON_IMAGE = {
    "command_environment", "files_are_isolated", "masks_hold", "secrets_are_files", "terminal",
    "works_on_a_folder_in_place",
}  # fmt: skip
"""Checks that are also made in a sandbox that runs from an image: its root matters for them."""
ON_GVISOR = {
    "allowlist", "background_and_signal", "deadline_ends_the_tree", "failed_start_leaves_nothing",
    "file_size_is_limited", "files_are_isolated", "found_by_another_provider_object", "many_at_once", "masks_hold",
    "memory_is_limited", "no_network", "processes_are_isolated", "processes_are_limited", "readonly_paths_stay", "removal_ends_daemons", "runs_from_an_empty_image", "secrets_are_files", "terminal",
}  # fmt: skip
"""Checks that are made in gVisor: its kernel or its mounts matter for them. With `--on-gvisor` all are made there. Not
`processors_are_limited`: on a busy host gVisor's own clock also counts time in which it had no processor.
"""

ON_DOCKER_IMAGE = {"command_environment", "files_are_isolated"}
NOT_ON_DOCKER = {
    "background_and_signal", "binary_output", "command_ended_by_a_signal", "command_input", "command_not_found",
    "command_result", "commands_side_by_side", "deadline_ends_the_tree", "files_round_trip", "output_cap",
    "starts_and_is_alive", "handle_is_json", "removal_may_be_repeated", "many_at_once",
}  # fmt: skip
"""Checks of what the supervisor alone does, or other checks do too. A container costs a second of CPU time, so these
are made in Docker only with `--on-image`.
"""


def pytest_generate_tests(metafunc):
    if "check" in metafunc.fixturenames and "harness" in metafunc.fixturenames:
        every = metafunc.config.getoption("--on-image")
        pairs = [(check, kind) for check in CHECKS for kind in PROVIDERS]
        pairs += [(check, "docker") for check in CHECKS if every or check.name not in NOT_ON_DOCKER]
        pairs += [(check, "docker image") for check in CHECKS if every or check.name in ON_DOCKER_IMAGE]
        pairs += [(check, "namespace image") for check in CHECKS if every or check.name in ON_IMAGE]
        all_of_gvisor = metafunc.config.getoption("--on-gvisor")
        pairs += [(check, "gvisor") for check in CHECKS if all_of_gvisor or check.name in ON_GVISOR]
        if metafunc.config.getoption("--on-microvm"):
            pairs += [(check, "microvm") for check in CHECKS]
        metafunc.parametrize(("check", "harness"), pairs, indirect=["harness"], ids=[f"{a.name}-{b}" for a, b in pairs])


@pytest.fixture
async def harness(request, directories, shelf, debian_root, bundles):
    run_dir, workspaces = directories
    shared = {"/envs": shelf.path}
    kind, _, on_image = request.param.partition(" ")
    images_dir = str(debian_root.parent)

    def provider() -> Provider:
        if kind == "docker":
            socket = request.getfixturevalue("docker").socket
            return DockerProvider(run_dir, str(bundles), socket_path=socket, shared=shared, images=images_dir)
        if kind == "gvisor":
            return usable(str(bundles), run_dir, shared=shared, images=images_dir)
        if kind == "microvm":
            return microvm.usable(str(bundles), run_dir, shared=shared, images=images_dir)
        return PROVIDERS[kind](run_dir, workspaces, shared, folder_roots=(workspaces,), images=images_dir)

    harness = Harness(
        provider,
        workspaces_in(workspaces),
        images_dir,
        image(debian_root) if on_image else None,
    )
    if (missing := harness.provider.missing()) is not None:
        pytest.skip(missing)
    yield harness
    await harness.close()


async def test_promise(check, harness):
    outcome = await run_check(check, harness, 600 if harness.provider.name == "microvm" else 60)
    assert outcome.kept, f"{check.promise}\n{outcome.failure}"


def test_known_gaps_of_each_provider(request, directories, shelf):
    run_dir, workspaces = directories
    opened = open_providers(
        run_dir,
        workspaces,
        allow_process=True,
        shared={"/envs": shelf.path},
        folder_roots=(workspaces,),
        images=run_dir,
        docker=request.getfixturevalue("docker").socket,
        gvisor=GvisorOptions(),
        microvm=microvm.options(),
        kubernetes=KubernetesOptions("n", "image", "bundle", "claim", run_dir, gvisor_class="gvisor"),
        bundles=run_dir,
    )
    for name, provider in opened.items():
        gaps = {gap for check in CHECKS for gap in check.gaps(provider)}
        closed = set(NEVER[name]) - gaps
        assert not closed, f"{name} has closed these gaps; delete them in tests/support/known_gaps.py"
        assert gaps <= {*NEVER[name], *SOMETIMES[name]}, f"{name} has gaps that nobody declared"
    assert opened.keys() == BUILT_IN.keys() == NEVER.keys() == SOMETIMES.keys()
    assert {name: provider.isolation_level for name, provider in opened.items()} == {
        each.name: each.level for each in BUILT_IN.values()
    }


def test_every_attack_that_is_not_judged_exists():
    attacks = {
        function.name
        for path in (Path(__file__).parent.parent / "security").rglob("test_*.py")
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    for name, known in NOT_JUDGED.items():
        assert not set(known) - attacks, f"these attacks of {name} do not exist"


def test_every_capability_has_a_check():
    assert {capability for check in CHECKS for capability in check.needs} == set(Capability)


class Boaster(ProcessProvider):
    """Promises what it does not do."""

    def capabilities(self) -> frozenset[Capability]:
        return super().capabilities() | {
            Capability.FILE_ISOLATION,
            Capability.PROCESS_ISOLATION,
            Capability.NETWORK_NONE,
            Capability.LIMIT_DISK,
        }


class Ignorer(ProcessProvider):
    """Accepts what it does not promise."""

    def require(self, *wanted: Capability) -> None:
        return


class Deserter(ProcessProvider):
    """Forgets what it started."""

    async def alive(self, handle: Handle) -> bool:
        return False


class Passer(NamespaceProvider):
    """Passes over a part of the masks."""

    async def start(self, launch: Launch) -> Handle:
        return await super().start(replace(launch, masks=launch.masks and replace(launch.masks, readonly=())))


@pytest.mark.parametrize(
    ("kind", "broken"),
    [
        (Boaster, {"files_are_isolated", "processes_are_isolated", "file_size_is_limited", "no_network"}),
        (Ignorer, {"files_are_isolated", "memory_is_limited", "bridge"}),
        (Deserter, {"starts_and_is_alive"}),
        (Passer, {"readonly_paths_stay"}),
    ],
)
async def test_broken_promises_are_noticed(kind: type[Provider], broken, directories):
    harness = Harness(lambda: kind(*directories), workspaces_in(directories[1]))
    if (missing := harness.provider.missing()) is not None:
        pytest.skip(missing)
    try:
        outcomes = {check.name: await run_check(check, harness) for check in CHECKS if check.name in broken}
    finally:
        await harness.close()
    assert {name for name, outcome in outcomes.items() if not outcome.kept} == broken


async def test_report(directories):
    run_dir, workspaces = directories
    report = await run(lambda: ProcessProvider(run_dir, workspaces), workspaces_in(workspaces))
    assert report.ok, str(report)
    assert Capability.FILE_ISOLATION in report.gaps
    assert "refused  files_are_isolated" in str(report)


def test_needs_no_test_framework():
    code = "import sys, carrel.testing; sys.exit('pytest' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
