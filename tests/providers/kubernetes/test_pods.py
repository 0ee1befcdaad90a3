"""What the status of a pod means."""

from __future__ import annotations

import pytest

from carrel.providers.kubernetes.pods import StartedPod, failure, obstacle, started


def pod(*, deleted=False, node="n1", **status):
    metadata = {"name": "p", "uid": "u"} | ({"deletionTimestamp": "2026-01-01T00:00:00Z"} if deleted else {})
    return {"metadata": metadata, "spec": {"nodeName": node}, "status": status}


def container(name, **state):
    return {"name": name, "state": state}


def test_a_pod_with_an_address_has_started():
    assert started(pod(podIP="10.0.0.2", phase="Pending")) == StartedPod("p", "u", "n1", "10.0.0.2")
    assert started(pod(phase="Pending")) is None
    assert started(pod(podIP="10.0.0.2", deleted=True)) is None


@pytest.mark.parametrize(
    "status",
    [
        {},
        {"phase": "Pending", "containerStatuses": [container("sandbox", waiting={"reason": "PodInitializing"})]},
        {"phase": "Running", "containerStatuses": [container("sandbox", running={})]},
        {"initContainerStatuses": [container("unpack", terminated={"exitCode": 0, "reason": "Completed"})]},
    ],
)
def test_pods_that_run_or_start_have_not_failed(status):
    assert failure(pod(**status)) is None


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (
            {"phase": "Failed", "reason": "Evicted", "message": "low on  memory"},
            "its pod has ended (Evicted): low on memory",
        ),
        ({"phase": "Succeeded"}, "its pod has ended (Succeeded)"),
        (
            {
                "containerStatuses": [
                    container("sandbox", waiting={"reason": "ErrImageNeverPull", "message": "not here"})
                ]
            },
            "container sandbox waits: ErrImageNeverPull: not here",
        ),
        (
            {"containerStatuses": [container("sandbox", terminated={"exitCode": 0, "reason": "Completed"})]},
            "container sandbox ended with exit code 0 (Completed)",
        ),
        (
            {
                "initContainerStatuses": [
                    container("unpack", terminated={"exitCode": 1, "reason": "Error", "message": "no"})
                ]
            },
            "container unpack ended with exit code 1 (Error): no",
        ),
        ({"deleted": True}, "its pod is being deleted"),
    ],
)
def test_pods_that_failed_say_why(status, words):
    assert failure(pod(**status)) == words


def test_what_is_said_is_bounded():
    assert len(failure(pod(phase="Failed", message="x" * 10_000)) or "") == 800


def test_what_a_pod_waits_for():
    conditions = [{"type": "PodScheduled", "status": "False", "message": "0/1 nodes: too little memory"}]
    assert obstacle(pod(conditions=conditions)) == "PodScheduled: 0/1 nodes: too little memory"
    assert obstacle(pod()) == ""
