"""The composition root: everything is connected by constructors, and no part can be left out."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from pathlib import Path

import pytest

from carrel.control import plane as composition
from carrel.control.governance.approvals import Approvals
from carrel.control.governance.decisions import ApprovalDecisions
from carrel.control.governance.policies import Policies
from carrel.control.operations.admission import Admission
from carrel.control.operations.operations import Operations
from carrel.control.plane import ControlPlane
from carrel.control.secrets.service import SecretService
from carrel.control.sessions.attachments import Attachment, Attachments
from carrel.control.sessions.sessions import Sessions
from carrel.control.sessions.starting import Starting

NAMES = [each.name for each in dataclasses.fields(Attachments)]


def test_nothing_is_assigned_to_another_object() -> None:
    source = Path(inspect.getfile(composition))
    found = []
    for node in ast.walk(ast.parse(source.read_text())):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        for target in [inner for each in targets for inner in ast.walk(each)]:
            if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store):
                owner = ast.unparse(target.value)
                if owner != "self":
                    found.append(f"line {target.lineno}: {ast.unparse(target)}")
    assert not found


@pytest.mark.parametrize("left_out", NAMES)
def test_attachment_cannot_be_left_out(left_out: str) -> None:
    given = {name: Attachment() for name in NAMES if name != left_out}
    with pytest.raises(TypeError, match=left_out):
        Attachments(**given)
    with pytest.raises(TypeError, match=left_out):
        Attachments(**given, **{left_out: None})  # type: ignore[arg-type]


def test_attachments_keep_their_order() -> None:
    given = {name: Attachment() for name in NAMES}
    assert list(Attachments(**given)) == [given[name] for name in NAMES]


def test_control_plane_has_every_attachment(plane: ControlPlane) -> None:
    kinds = [type(each) for each in plane.attachments]
    assert len(set(kinds)) == len(NAMES), "each is a class of its own"
    assert Attachment not in kinds


@pytest.mark.parametrize(
    "part",
    [Admission, Approvals, ApprovalDecisions, Attachments, Operations, Policies, SecretService, Sessions, Starting],
)
def test_no_part_of_admission_or_sessions_has_a_default(part: type) -> None:
    """What enforces something cannot be forgotten: every object that a constructor takes must be given."""
    plain = {"bool", "float", "int", "str", "Callable[[], float]"}
    with_default = [
        name
        for name, parameter in inspect.signature(part).parameters.items()
        if parameter.default is not inspect.Parameter.empty and str(parameter.annotation) not in plain
    ]
    assert not with_default
