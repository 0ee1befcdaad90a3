from __future__ import annotations

import subprocess

import pytest

from carrel.isolation import inside, launchers, rootfs
from carrel.supervisor import environment

OF_THEIR_OWN = ("carrel-heartbeat", "file-search", "web-search")
"""These run nothing of the sandbox's tools or environments."""


@pytest.mark.parametrize("name", launchers.TEXTS)
def test_a_shell_can_read_it(name: str) -> None:
    done = subprocess.run(["sh", "-n"], input=launchers.TEXTS[name], text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_places_are_those_of_the_root() -> None:
    path = environment.PATH.split(":")
    assert (path[0], path[-1]) == (launchers.PLACE, f"{launchers.VENV}/bin")
    assert environment.VENV == launchers.VENV
    plan = rootfs.base_plan({})
    made = {step.target: step for step in plan}
    for name in launchers.TEXTS:
        step = made[f"{launchers.PLACE}/{name}"]
        assert isinstance(step, rootfs.TextFile) and step.mode == 0o755
    for path in (inside.UV, inside.PIP, launchers.VENV, inside.ENVIRONMENTS):
        assert path == launchers.VENV or path in made
    assert isinstance(made[launchers.MAIN_PLACE], rootfs.TextFile)
    compile(launchers.MAIN, launchers.MAIN_PLACE, "exec")
    shared = f"{launchers.SHARED_PIP_PLACE}/pip/__main__.py"
    assert isinstance(made[shared], rootfs.TextFile)
    compile(launchers.SHARED_PIP, shared, "exec")
    for text in (text for name, text in launchers.TEXTS.items() if name not in {*OF_THEIR_OWN}):
        assert inside.UV in text or launchers.PLACE in text or launchers.VENV in text
