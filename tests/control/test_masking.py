from __future__ import annotations

import json
from pathlib import Path

import pytest

from carrel.control.masking import hides, masks_of, unmasked
from carrel.control.plane import ControlPlane
from carrel.errors import Denied
from carrel.models import CommandRequest, PolicyDocuments, SandboxRequest
from carrel.policy import settings as document
from carrel.policy.layers import Layer, Policy
from carrel.providers import Masks

EXAMPLES = Path(__file__).parent.parent / "policy" / "examples"


def _policy(allow: list[str], deny: list[str]) -> Policy:
    text = json.dumps({"permissions": {"allow": allow, "deny": deny}})
    return Policy.of([Layer("settings.json", document.load(text))], context_id="c", workspace="/workspace")


def test_only_what_is_denied_outright_is_masked() -> None:
    deny = ["shell(curl:*)", "shell(rm -rf /:*)", "shell(nc)", "file(read:/etc/shadow:*)", "file(read:/proc/**:*)"]
    policy = _policy(["shell(ls:*)"], [*deny, "file(read:${WORKSPACE}/se\\*cret/**)"])
    masks = masks_of(policy, "c")
    assert masks is not None
    assert masks.programs == ("curl",)
    assert "/etc/shadow" in masks.hidden and "/workspace/se\\*cret" in masks.hidden
    assert not any(path.startswith("/proc") for path in masks.hidden)
    assert masks.writable is None
    told = json.loads(masks.refusal["curl"])
    assert (told["code"], told["rule"], told["retry"]) == ("denied_by_policy", "shell(curl:*)", False)
    assert [rule.text for rule, _ in unmasked(policy)] == ["file(read:/proc/**:*)"]


@pytest.mark.parametrize(
    ("allow", "deny", "held"),
    [
        (["file(write:${WORKSPACE}/**)"], "file(write:${WORKSPACE}/config/**)", True),
        (["file(write:${WORKSPACE}/**)"], "file(write:${WORKSPACE}/config.ini)", True),
        (["file(write:${WORKSPACE}/**)"], "file(write:${WORKSPACE}/*.ini)", False),
        (["file(write:${WORKSPACE}/**)"], "file(write:/**)", True),
        ([], "file(delete:${WORKSPACE}/config/**)", False),
        (["file(write:${WORKSPACE}/**)"], "file(write:/**/.git/**)", False),
        (["file(write:${WORKSPACE}/out/**)"], "file(write:${WORKSPACE}/config/**)", True),
        (["file(write:${WORKSPACE}/out/**)"], "file(delete:${WORKSPACE}/out/kept/**)", False),
        (["file(write:${WORKSPACE}/**)"], "file(write:/etc/**)", True),
    ],
)
def test_what_holds_only_at_the_door_is_told(allow: list[str], deny: str, held: bool) -> None:
    assert [rule.text for rule, _ in unmasked(_policy(allow, [deny]))] == ([] if held else [deny])


@pytest.mark.parametrize(
    ("allow", "writable"),
    [
        ([], None),
        (["file(write:${WORKSPACE}/**)"], None),
        (["file(write:${WORKSPACE}/data/**)", "file(write:${WORKSPACE}/notes.txt)"], ("/workspace/data/**", "/workspace/notes.txt")),
        (["file(write:${WORKSPACE}/out/*.csv)"], ("/workspace/out/**",)),
        (["file(write:/tmp/**)"], ()),
    ],
)  # fmt: skip
def test_what_may_be_written(allow: list[str], writable: tuple[str, ...] | None) -> None:
    masks = masks_of(_policy([*allow, "shell(ls:*)"], ["shell(curl:*)"]), "c")
    assert masks is not None and masks.writable == writable


@pytest.mark.parametrize(
    ("allow", "deny", "writable", "readonly"),
    [
        ([], ["file(write:${WORKSPACE}/config/**)", "file(write:${WORKSPACE}/a\\*b)"], None, ("/workspace/config", "/workspace/a*b")),
        ([], ["file(write:${WORKSPACE}/*.ini)", "file(write:/**/.git/**)", "file(write:/etc/**)", "file(write:${WORKSPACE})"], None, ()),
        ([], ["file(write:${WORKSPACE}/**)", "file(write:${WORKSPACE}/x)"], (), ()),
        ([], ["file(write:/**)"], (), ()),
        (["file(write:${WORKSPACE}/out/**)"], ["file(write:${WORKSPACE}/out/x)"], ("/workspace/out/**",), ("/workspace/out/x",)),
    ],
)  # fmt: skip
def test_what_may_not_be_written(
    allow: list[str], deny: list[str], writable: tuple[str, ...] | None, readonly: tuple[str, ...]
) -> None:
    masks = masks_of(_policy([*allow, "shell(ls:*)"], ["shell(curl:*)", *deny]), "c")
    assert masks is not None and (masks.writable, masks.readonly) == (writable, readonly)


def test_without_a_policy_there_is_nothing_to_mask() -> None:
    assert masks_of(Policy.open(), None) is None
    assert masks_of(_policy(["shell(ls:*)"], ["shell(rm -rf /:*)"]), "c") is None


async def test_a_denied_program_cannot_be_run_from_a_script_either(plane: ControlPlane) -> None:
    settings = {
        "permissions": {
            "allow": ["shell(sh:*)", "shell(python3:*)", "file(read:${WORKSPACE}/**)", "file(write:${WORKSPACE}/data/**)"],
            "deny": ["shell(head:*)", "file(read:/etc/passwd)"],
        }
    }  # fmt: skip
    await plane.policies.put("c", PolicyDocuments.model_validate({"settings": settings}), "person:ann")
    await plane.operations.deploy_or_resume(SandboxRequest(context_id="c"))
    with pytest.raises(Denied):
        await plane.operations.run_command("c", CommandRequest(command="head -1 /dev/null"))
    await plane.operations.write_file("c", "data/script", b"head -c 3 /dev/zero\n")
    result = await plane.operations.run_command("c", CommandRequest(command="sh data/script"))
    assert result.exit_code == 126
    assert json.loads(result.stderr)["rule"] == "shell(head:*)"
    code = "import subprocess; print(subprocess.run(['/usr/bin/head']).returncode); open('/etc/passwd')"
    result = await plane.operations.run_command("c", CommandRequest(command=["python3", "-c", code]))
    assert result.stdout == "126\n" and "PermissionError" in result.stderr
    code = "open('data/x', 'w'); open('x', 'w')"
    result = await plane.operations.run_command("c", CommandRequest(command=["python3", "-c", code]))
    assert "Read-only file system: 'x'" in result.stderr


async def test_a_changed_policy_holds_inside_after_a_restart(plane: ControlPlane) -> None:
    await plane.operations.deploy_or_resume(SandboxRequest(context_id="c"))
    settings = {"permissions": {"allow": ["shell(sh:*)"], "deny": ["shell(head:*)"]}}
    given = PolicyDocuments.model_validate({"settings": settings})
    assert (await plane.put_policy("c", given, "person:ann")).restart_needed
    request = CommandRequest(command=["sh", "-c", "eval 'hea'd' -c 1 /dev/zero'"])
    with pytest.raises(Denied):
        await plane.operations.run_command("c", CommandRequest(command="head x"))
    restarted = await plane.put_policy("c", given.model_copy(update={"restart": True}), "person:ann")
    assert not restarted.restart_needed
    await plane.policies.delete("c")
    assert (await plane.operations.run_command("c", request)).exit_code == 126
    assert (
        await plane.put_policy("c", PolicyDocuments.model_validate({"settings": None}), "person:ann")
    ).restart_needed


@pytest.mark.parametrize(
    ("pattern", "hidden", "open_"),
    [
        ("/workspace/.env", [".env", ".env/x"], ["a/.env", ".envy", "x"]),
        ("/workspace/private", ["private", "private/a/b"], ["privately", "a/private"]),
        ("/workspace/**/.env", [".env", "a/.env", "a/b/.env"], ["a/env"]),
        ("/**/key", ["key", "a/key", "a/key/b"], ["keys"]),
        ("/workspace/*.pem", ["a.pem", "a.pem/b"], ["a/b.pem", "pem"]),
        ("/work*/x", ["x"], ["y"]),
        ("/workspace/a/**/b/*.c", ["a/b/x.c", "a/q/r/b/x.c"], ["a/b", "b/x.c", "a/b/d/x.h"]),
        ("/workspace/se\\*cret", ["se*cret"], ["seXcret"]),
        ("/workspace", ["anything", "at/all"], []),
    ],
)
def test_which_paths_of_the_workspace_are_hidden(pattern: str, hidden: list[str], open_: list[str]) -> None:
    check = hides(Masks(hidden=("/etc/shadow", pattern), readonly=("/workspace/kept/*",)))
    assert check is not None
    assert [path for path in hidden if not check(path)] == []
    assert [path for path in open_ if check(path)] == []
    assert check("kept/*/x") and (check("kept/x") == check("anything"))


def test_masks_that_hide_nothing_of_the_workspace() -> None:
    assert hides(None) is None
    assert hides(Masks(programs=("curl",), hidden=("/etc/shadow", "/etc/*.d"))) is None
