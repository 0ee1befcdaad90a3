from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.calls import ADMIN

from carrel.control.plane import ControlPlane
from carrel.control.sessions.masks import hides, masks_of, unmasked
from carrel.errors import Denied
from carrel.isolation.masks import MOST, check
from carrel.models import CommandRequest, PolicyDocuments, SandboxRequest
from carrel.policy.documents import settings as document
from carrel.policy.rules.layers import Layer, Policy
from carrel.providers import Masks

EXAMPLES = Path(__file__).parents[2] / "policy" / "examples"


def _policy(allow: list[str], deny: list[str]) -> Policy:
    text = json.dumps({"permissions": {"allow": allow, "deny": deny}})
    return Policy.of([Layer("settings.json", document.load(text))], context_id="c", workspace="/workspace")


def test_only_what_is_denied_outright_is_masked() -> None:
    deny = ["shell(curl:*)", "shell(rm -rf /:*)", "shell(nc)", "file(read:/etc/shadow:*)", "file(read:/proc/**:*)"]
    policy = _policy(["shell(ls:*)"], [*deny, "file(read:${WORKSPACE}/se\\*cret/**)"])
    masks = masks_of(policy)
    assert masks is not None
    assert masks.programs == ("curl",)
    assert "/etc/shadow" in masks.hidden and "/workspace/se\\*cret" in masks.hidden
    assert not any(path.startswith("/proc") for path in masks.hidden)
    assert masks.writable is None
    told = json.loads(masks.refusal["curl"])
    assert (told["code"], told["rule"], told["retry"]) == ("denied_by_policy", "shell(curl:*)", False)
    assert [rule.text for rule, _ in unmasked(policy)] == ["file(read:/proc/**:*)"]


NOT, AT_START = "programs inside are not bound by it: ", "programs inside are bound by it for files that exist when"


@pytest.mark.parametrize(
    ("allow", "deny", "told"),
    [
        (["file(write:${WORKSPACE}/**)"], "file(write:${WORKSPACE}/config/**)", AT_START),
        (["file(write:${WORKSPACE}/**)"], "file(write:${WORKSPACE}/config.ini)", AT_START),
        (["file(write:${WORKSPACE}/**)"], "file(write:${WORKSPACE}/*.ini)", AT_START),
        (["file(write:${WORKSPACE}/**)"], "file(write:/**)", None),
        (["file(write:${WORKSPACE}/**)"], "file(write:/**/workspace/**)", None),
        ([], "file(delete:${WORKSPACE}/config/**)", NOT),
        ([], "file(delete:${WORKSPACE}/config)", NOT),
        (["file(write:${WORKSPACE}/**)"], "file(write:/**/.git/**)", AT_START),
        (["file(write:${WORKSPACE}/out/**)"], "file(write:${WORKSPACE}/config/**)", None),
        (["file(write:${WORKSPACE}/out/**)"], "file(write:${WORKSPACE}/out/*.lock)", AT_START),
        (["file(write:${WORKSPACE}/out/**)"], "file(delete:${WORKSPACE}/out/kept/**)", NOT),
        (["file(write:${WORKSPACE}/**)"], "file(write:/etc/**)", None),
        (["file(write:${WORKSPACE}/**)"], "file(write:/et*/x)", None),
        ([], "file(write:${WORKSPACE})", None),
        ([], "file(write:/)", None),
        ([], "file(read:/**/.env)", None),
        ([], "file(read:/tmp/x)", NOT),
        ([], "shell(curl:*)", None),
        ([], "shell(/workspace/tool:*)", NOT),
        ([], "shell(./tool:*)", NOT),
        ([], f"file(read:/{'x' * 300})", None),
        ([], f"file(write:${{WORKSPACE}}/{'x' * 300})", None),
    ],
)
def test_what_does_not_hold_inside_is_told(allow: list[str], deny: str, told: str | None) -> None:
    policy = _policy(allow, [deny])
    found = unmasked(policy)
    assert [rule.text for rule, _ in found] == ([] if told is None else [deny])
    assert all(told is not None and words.startswith(told) for _, words in found)
    masks = masks_of(policy)
    if masks is not None:
        check(masks)


def test_what_is_deleted_in_a_folder_that_is_not_written_is_held_there() -> None:
    deny = ["file(write:${WORKSPACE}/a\\*b/**)", "file(delete:${WORKSPACE}/a\\*b/c/**)", "file(delete:${WORKSPACE}/ab)"]
    told = {rule.text: words for rule, words in unmasked(_policy([], deny))}
    assert list(told) == deny
    assert [words.startswith(AT_START) for words in told.values()] == [True, True, False]


def test_rules_that_are_too_many_to_mask_are_told() -> None:
    deny = [f"shell(tool-{number}:*)" for number in range(MOST - 1)]
    policy = _policy([], [*deny, "file(read:/etc/a)", "file(read:/etc/b)", "file(write:${WORKSPACE}/c)"])
    told = [rule.text for rule, words in unmasked(policy) if "more than" in words]
    assert told == ["file(read:/etc/b)", "file(write:${WORKSPACE}/c)"]
    masks = masks_of(policy)
    assert masks is not None and (len(masks.programs), masks.hidden, masks.readonly) == (MOST - 1, ("/etc/a",), ())
    check(masks)


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
    masks = masks_of(_policy([*allow, "shell(ls:*)"], ["shell(curl:*)"]))
    assert masks is not None and masks.writable == writable


@pytest.mark.parametrize(
    ("allow", "deny", "writable", "readonly"),
    [
        ([], ["file(write:${WORKSPACE}/config/**)", "file(write:${WORKSPACE}/a\\*b)"], None, ("/workspace/config/**", "/workspace/a\\*b/**")),
        ([], ["file(write:${WORKSPACE}/*.ini)", "file(write:${WORKSPACE}/a\\*b?)"], None, ("/workspace/*.ini", "/workspace/a\\*b?")),
        ([], ["file(write:/**/.git/**)", "file(write:/wo*/x)"], None, ("/workspace/**/.git/**", "/workspace/x/**")),
        ([], ["file(write:/**/work*/y)"], None, ("/workspace/**/work*/y/**", "/workspace/y/**")),
        ([], ["file(write:/etc/**)", "file(write:${WORKSPACE})", "file(delete:${WORKSPACE}/x)"], None, ()),
        ([], ["file(write:${WORKSPACE}/**)", "file(write:${WORKSPACE}/x)"], (), ()),
        ([], ["file(write:/**)"], (), ()),
        (["file(write:${WORKSPACE}/out/**)"], ["file(write:${WORKSPACE}/out/x)"], ("/workspace/out/**",), ("/workspace/out/x/**",)),
    ],
)  # fmt: skip
def test_what_may_not_be_written(
    allow: list[str], deny: list[str], writable: tuple[str, ...] | None, readonly: tuple[str, ...]
) -> None:
    masks = masks_of(_policy([*allow, "shell(ls:*)"], ["shell(curl:*)", *deny]))
    assert masks is not None and (masks.writable, masks.readonly) == (writable, readonly)


def test_without_a_policy_there_is_nothing_to_mask() -> None:
    assert masks_of(Policy.open()) is None
    assert masks_of(_policy(["shell(ls:*)"], ["shell(rm -rf /:*)"])) is None


async def test_a_denied_program_cannot_be_run_from_a_script_either(plane: ControlPlane) -> None:
    settings = {
        "permissions": {
            "allow": ["shell(sh:*)", "shell(python3:*)", "file(read:${WORKSPACE}/**)", "file(write:${WORKSPACE}/data/**)"],
            "deny": ["shell(head:*)", "file(read:/etc/passwd)"],
        }
    }  # fmt: skip
    await plane.policy_changes.put("c", PolicyDocuments.model_validate({"settings": settings}), "person:ann")
    await plane.operations.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    with pytest.raises(Denied):
        await plane.operations.run_command(ADMIN, "c", CommandRequest(command="head -1 /dev/null"))
    await plane.operations.write_file(ADMIN, "c", "data/script", b"head -c 3 /dev/zero\n")
    result = await plane.operations.run_command(ADMIN, "c", CommandRequest(command="sh data/script"))
    assert result.exit_code == 126
    assert json.loads(result.stderr)["rule"] == "shell(head:*)"
    code = "import subprocess; print(subprocess.run(['/usr/bin/head']).returncode); open('/etc/passwd')"
    result = await plane.operations.run_command(ADMIN, "c", CommandRequest(command=["python3", "-c", code]))
    assert result.stdout == "126\n" and "PermissionError" in result.stderr
    code = "open('data/x', 'w'); open('x', 'w')"
    result = await plane.operations.run_command(ADMIN, "c", CommandRequest(command=["python3", "-c", code]))
    assert "Read-only file system: 'x'" in result.stderr


async def test_a_changed_policy_holds_inside_after_a_restart(plane: ControlPlane) -> None:
    await plane.operations.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    settings = {"permissions": {"allow": ["shell(sh:*)"], "deny": ["shell(head:*)"]}}
    given = PolicyDocuments.model_validate({"settings": settings})
    assert (await plane.policy_changes.put("c", given, "person:ann")).restart_needed
    request = CommandRequest(command=["sh", "-c", "eval 'hea'd' -c 1 /dev/zero'"])
    with pytest.raises(Denied):
        await plane.operations.run_command(ADMIN, "c", CommandRequest(command="head x"))
    restarted = await plane.policy_changes.put("c", given.model_copy(update={"restart": True}), "person:ann")
    assert not restarted.restart_needed
    await plane.policy_changes.delete("c")
    assert (await plane.operations.run_command(ADMIN, "c", request)).exit_code == 126
    assert (
        await plane.policy_changes.put("c", PolicyDocuments.model_validate({"settings": None}), "person:ann")
    ).restart_needed


async def test_what_is_hidden_or_kept_by_a_pattern_is_still_so_at_the_next_start(plane: ControlPlane) -> None:
    deny = ["file(read:${WORKSPACE}/a/b/key)", "file(write:${WORKSPACE}/**/*.lock)"]
    allow = ["shell(python3:*)", "file(read:${WORKSPACE}/**)", "file(write:${WORKSPACE}/**)"]
    settings = {"permissions": {"allow": allow, "deny": deny}}
    given = PolicyDocuments.model_validate({"settings": settings, "restart": True})
    await plane.operations.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    for path in ("a/b/key", "a/x.lock"):
        await plane.operations.write_file(ADMIN, "c", path, b"canary")
    told = (await plane.policy_changes.put("c", given, "person:ann")).warnings
    assert [each.rule for each in told if each.text.startswith(AT_START)] == [deny[1]]
    script = "mv a z; mv a/b b; echo x > a/x.lock; cat a/b/key z/b/key b/key"
    attack = CommandRequest(command=["python3", "-c", f"import os; os.system({script!r})"])
    for _start in range(2):
        result = await plane.operations.run_command(ADMIN, "c", attack)
        assert (result.stdout, "Read-only file system" in result.stderr) == ("", True)
        await plane.operations.stop(ADMIN, "c")
        await plane.operations.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    assert Path(plane.sessions.live()[0].workspace, "a/x.lock").read_bytes() == b"canary"


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
    hiding = hides(Masks(hidden=("/etc/shadow", pattern), readonly=("/workspace/kept/**", "/workspace/some/*.ini")))
    assert hiding is not None
    assert [path for path in hidden if not hiding(path)] == []
    assert [path for path in open_ if hiding(path)] == []
    for path in ("kept", "kept/x", "kept/x/y", "some/a.ini"):
        assert hiding(path)
    assert hiding("some/a.ini/in/a/folder") == hiding("anything")


def test_masks_that_hide_nothing_of_the_workspace() -> None:
    assert hides(None) is None
    assert hides(Masks(programs=("curl",), hidden=("/etc/shadow", "/etc/*.d"))) is None
