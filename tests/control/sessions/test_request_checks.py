from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.records import SESSION, Promising

from carrel.control.sessions.request_checks import changes, launch, refuse_differences
from carrel.errors import Conflict
from carrel.models import Limits, Network, SandboxRequest
from carrel.providers.base import Capability, Launch

RECORD = replace(SESSION, limits=Limits(cpus=1, memory_mb=64, disk_mb=10, processes=20, timeout_s=5), env={"A": "b"})


def test_the_disk_limit_is_given_only_to_who_can_hold_it():
    told = launch(RECORD, Promising(Capability.LIMIT_DISK), "/w")
    assert told == Launch("sbx-1", "/w", Network.NONE, 1, 64, 10, 20, {"A": "b"})
    assert launch(RECORD, Promising(), "/w").disk_mb is None


def test_a_new_start_writes_what_may_have_changed():
    assert {"state", "provider", "limits", "env", "last_activity_at"} <= changes(RECORD).keys()
    assert "created_at" not in changes(RECORD) and "id" not in changes(RECORD)


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"provider": "process"}, "provider"),
        ({"network": "host"}, "network"),
        ({"trust": "high"}, "trust"),
        ({"env": {"A": "c"}}, "env"),
        ({"template": "other"}, "template"),
        ({"limits": {"memory_mb": 65}}, "limits.memory_mb"),
    ],
)
def test_what_differs_from_what_runs_is_refused(asked, field):
    with pytest.raises(Conflict) as caught:
        refuse_differences(RECORD, SandboxRequest.model_validate({"context_id": "c", **asked}))
    assert caught.value.field == field and caught.value.hint


def test_what_is_the_same_or_left_out_is_fine():
    same = {"provider": "namespace", "network": "none", "trust": "medium", "env": {"A": "b"}, "limits": {"cpus": 1}}
    refuse_differences(RECORD, SandboxRequest(context_id="c"))
    refuse_differences(RECORD, SandboxRequest.model_validate({"context_id": "c", **same}))
