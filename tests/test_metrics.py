from __future__ import annotations

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from carrel import metrics as declared
from carrel.errors import BY_CODE, LimitExceeded, NotFound
from carrel.metrics import DECLARATIONS, MOST_SERIES, JobUse, Metrics, SandboxSample, outcome_of
from carrel.models import JobState, State, SyncDirection

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def read(metrics: Metrics) -> Series:
    """Every sample as it leaves: name and labels to value."""
    text, _ = metrics.render()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parse(text.decode())
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, /, **labels: str) -> float | None:
    return read(metrics).get((name, frozenset(labels.items())))


def use_all(metrics: Metrics) -> None:
    metrics.jobs({JobState.RUNNING: 2})
    metrics.job_attempt_ended(
        "succeeded", "ok", "", {"queued": 1.0, "running": 20.0, "archiving": None}, JobUse(0.5, 4096, 3, 7)
    )
    metrics.operated("shell", "run_command", "ok", 0.002)
    metrics.egress_ended("connect", "ok", 1000, 20, 0.5)
    metrics.egress_ended("connect", "denied_by_policy", 0, 0, 0.001)
    metrics.egress_ended("made up", "made up", 0, 0, 0.001)
    metrics.egress_ended("connect", "ok", 5, 0, 0.5, template="coding")
    metrics.command_ended("coding", "timed_out", 2.0)
    metrics.command_ended(None, "made up", float("nan"))
    metrics.command_ended(None, "ok", float("inf"))
    metrics.resources([SandboxSample("sbx-1", "coding", 1.5, 4096, 8192), SandboxSample("sbx-2", "", None, 1, None)])
    metrics.started("namespace", "fresh", 0.02)
    metrics.started("namespace", "resume", 0.03, template="coding")
    metrics.pool_slots({("docker", "ready"): 2, ("docker", "starting"): 1})
    metrics.pool_claimed("docker", "claimed")
    metrics.snapshotted("btrfs", "ok", 0.006)
    metrics.restored(1.5)
    metrics.archived("ok", 2.0, 1000)
    metrics.synced(SyncDirection.PUSH, "ok", 0.1)
    metrics.image_pulled("ok", 3.0)
    metrics.images(2)
    metrics.routed("ok")
    metrics.mcp_called("context", "tool_error", 0.003)
    metrics.mcp_called("platform", "made up", 0.003)
    metrics.mcp_discovered("ok", 0.2)
    metrics.router(2, 3, 1, 4096)
    metrics.forwarded("answered")
    metrics.sandboxes({State.RUNNING: 3, State.TERMINATED: 9})
    metrics.workspace("conversation-42", 4096, 1_700_000_000.5, namespace="default", agent="coder")
    metrics.volume(5_000_000, 9_000_000)
    metrics.svid(3600.0)


def test_every_call_shows() -> None:
    metrics = Metrics()
    use_all(metrics)
    assert value(metrics, "carrel_operation_seconds_count", kind="shell", name="run_command", outcome="ok") == 1
    assert value(metrics, "carrel_egress_seconds_sum", protocol="connect", outcome="ok") == 1.0
    assert value(metrics, "carrel_egress_seconds_count", protocol="connect", outcome="denied_by_policy") == 1
    assert value(metrics, "carrel_egress_seconds_count", protocol="other", outcome="unexpected") == 1
    assert value(metrics, "carrel_egress_bytes_total", template="", direction="in") == 1000
    assert value(metrics, "carrel_egress_bytes_total", template="coding", direction="in") == 5
    assert value(metrics, "carrel_egress_bytes_total", template="", direction="out") == 20
    started = "carrel_sandbox_start_seconds"
    assert value(metrics, f"{started}_count", provider="namespace", kind="fresh", template="") == 1
    assert value(metrics, f"{started}_sum", provider="namespace", kind="resume", template="coding") == 0.03
    assert value(metrics, "carrel_command_seconds_sum", template="coding", exit="timed_out") == 2.0
    assert value(metrics, "carrel_command_seconds_sum", template="", exit="unknown") == 0.0
    assert math.isfinite(value(metrics, "carrel_command_seconds_sum", template="", exit="ok") or math.inf)
    assert value(metrics, "carrel_sandbox_cpu_seconds_total", sandbox="sbx-1", template="coding") == 1.5
    assert value(metrics, "carrel_sandbox_cpu_seconds_total", sandbox="sbx-2", template="") is None
    assert value(metrics, "carrel_sandbox_memory_bytes", sandbox="sbx-2", template="") == 1
    assert value(metrics, "carrel_sandbox_memory_peak_bytes", sandbox="sbx-1", template="coding") == 8192
    assert value(metrics, "carrel_snapshot_seconds_bucket", driver="btrfs", outcome="ok", le="0.005") == 0
    assert value(metrics, "carrel_snapshot_seconds_bucket", driver="btrfs", outcome="ok", le="0.01") == 1
    assert value(metrics, "carrel_restore_seconds_sum") == 1.5
    assert value(metrics, "carrel_archive_seconds_sum", outcome="ok") == 2.0
    assert value(metrics, "carrel_archive_bytes_total") == 1000
    assert value(metrics, "carrel_sync_seconds_count", direction="push", outcome="ok") == 1
    assert value(metrics, "carrel_mcp_call_seconds_count", origin="context", outcome="tool_error") == 1
    assert value(metrics, "carrel_mcp_call_seconds_count", origin="platform", outcome="unexpected") == 1
    assert value(metrics, "carrel_mcp_discovery_seconds_sum", outcome="ok") == 0.2
    assert value(metrics, "carrel_forwarded_requests_total", outcome="answered") == 1
    assert value(metrics, "carrel_sandboxes", state="running") == 3
    assert value(metrics, "carrel_sandboxes", state="stopped") == 0
    assert value(metrics, "carrel_sandboxes", state="terminated") is None
    assert (
        value(metrics, "carrel_workspace_bytes", context_id="conversation-42", namespace="default", agent="coder")
        == 4096
    )
    name = "carrel_workspace_last_accessed_timestamp_seconds"
    assert value(metrics, name, context_id="conversation-42", namespace="default", agent="coder") == 1_700_000_000.5
    assert value(metrics, "carrel_volume_used_bytes") == 5_000_000
    assert value(metrics, "carrel_volume_capacity_bytes") == 9_000_000
    assert (value(metrics, "carrel_process_resident_memory_bytes") or 0) > 1_000_000
    metrics.resources([])
    assert "carrel_sandbox_memory_bytes{" not in metrics.render()[0].decode()
    metrics.sandboxes({State.STOPPED: 1})
    assert value(metrics, "carrel_sandboxes", state="running") == 0


def test_what_is_declared_is_what_there_is() -> None:
    metrics = Metrics()
    use_all(metrics)
    shown = {family.name: family for family in metrics.families() if not family.name.startswith("carrel_process_")}
    assert set(shown) == {each.name.removesuffix("_total") for each in DECLARATIONS}
    for each in DECLARATIONS:
        family = shown[each.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (each.kind, each.text)
        assert each.name.startswith("carrel_")
        if each.kind == "histogram":
            assert each.name.endswith(("_seconds", "_bytes")) and list(each.buckets) == sorted(each.buckets)
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert labels == set(each.labels), each.name


def test_two_planes_in_one_process_share_nothing() -> None:
    one, other = Metrics(), Metrics()
    one.restored(1.0)
    assert value(one, "carrel_restore_seconds_count") == 1
    assert value(other, "carrel_restore_seconds_count") == 0


def test_both_formats() -> None:
    metrics = Metrics()
    use_all(metrics)
    text, media_type = metrics.render("text/html, */*")
    assert media_type.startswith("text/plain; version=0.0.4") and not text.endswith(b"# EOF\n")
    text, media_type = metrics.render("application/openmetrics-text; version=1.0.0; q=0.9, text/plain;q=0.1")
    assert media_type.startswith("application/openmetrics-text; version=1.0.0")
    names = {family.name for family in parse_openmetrics(text.decode())}
    assert {"carrel_operation_seconds", "carrel_archive_bytes", "carrel_workspace_bytes"} <= names


@pytest.mark.parametrize(
    ("error", "label"),
    [
        (None, "ok"),
        (NotFound("x"), "not_found"),
        (LimitExceeded("x"), "limit_exceeded"),
        (asyncio.CancelledError(), "cancelled"),
        (GeneratorExit(), "cancelled"),
        (ValueError("x"), "unexpected"),
        (KeyboardInterrupt(), "unexpected"),
    ],
)
def test_how_something_went(error: BaseException | None, label: str) -> None:
    assert outcome_of(error) == label


def test_every_error_has_its_code_as_outcome() -> None:
    metrics = Metrics()
    for code in BY_CODE:
        metrics.archived(code, 1.0, 0)
        assert value(metrics, "carrel_archive_seconds_count", outcome=code) == 1
    metrics.archived("made up by a sandbox", 1.0, -5)
    assert value(metrics, "carrel_archive_seconds_count", outcome="unexpected") == 1
    assert value(metrics, "carrel_archive_bytes_total") == 0


def test_label_sets_are_bounded() -> None:
    metrics = Metrics()
    for number in range(MOST_SERIES + 50):
        metrics.operated("shell", f"name-{number}", "ok", 0.001)
    metrics.operated("shell", "name-0", "ok", 0.001)
    counts = {
        labels: count for (name, labels), count in read(metrics).items() if name.endswith("operation_seconds_count")
    }
    assert len(counts) == MOST_SERIES + 1
    assert counts[frozenset({("kind", "other"), ("name", "other"), ("outcome", "other")})] == 50
    assert counts[frozenset({("kind", "shell"), ("name", "name-0"), ("outcome", "ok")})] == 2


def test_a_label_cannot_break_the_text() -> None:
    metrics = Metrics()
    metrics.workspace('a"} 1\nforged{x="', 1, 2.0, agent='b"} 1\n')
    labels = {"context_id": 'a"} 1\nforged{x="', "namespace": "default", "agent": 'b"} 1\n'}
    assert value(metrics, "carrel_workspace_bytes", **labels) == 1


contexts = st.sampled_from([f"c{number}" for number in range(12)])
steps = st.lists(
    st.one_of(
        st.tuples(st.just("set"), contexts, st.integers(0, 2**50)),
        st.tuples(st.just("forget"), contexts, st.just(0)),
    ),
    max_size=60,
)


@given(steps, st.integers(1, 15))
def test_the_workspaces_used_last_are_shown(taken: list[tuple[str, str, int]], most: int) -> None:
    metrics = Metrics(most_contexts=most)
    known: dict[str, tuple[int, float]] = {}
    for moment, (what, context, size) in enumerate(taken):
        if what == "set":
            known[context] = (size, float(moment))
            metrics.workspace(context, size, float(moment))
        else:
            known.pop(context, None)
            metrics.forget(context)
    shown: dict[str, dict[str, float]] = {}
    for family in metrics.families():
        if family.name.startswith("carrel_workspace_"):
            shown[family.name] = {sample.labels["context_id"]: sample.value for sample in family.samples}
    held, used = shown["carrel_workspace_bytes"], shown["carrel_workspace_last_accessed_timestamp_seconds"]
    assert set(held) == set(used) and len(held) <= most
    for context, size in held.items():
        assert (size, used[context]) == known[context]
    if most >= 12:
        assert set(held) == set(known)
    elif known and held:
        newest = max(known, key=lambda context: known[context][1])
        assert newest in held


def test_calls_may_come_from_any_thread() -> None:
    metrics = Metrics(most_contexts=50)

    def work(thread: int) -> None:
        for number in range(300):
            metrics.operated("file", "read", "ok", 0.001)
            metrics.workspace(f"{thread}-{number}", number, float(number))
            if number % 50 == 0:
                metrics.render()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert value(metrics, "carrel_operation_seconds_count", kind="file", name="read", outcome="ok") == 1200
    text = metrics.render()[0].decode()
    assert text.count("carrel_workspace_bytes{") == 50


def test_states_are_those_of_sessions() -> None:
    assert all(f"`{state}`" in declared.SANDBOXES.labels["state"] for state in State if state is not State.TERMINATED)
    assert not math.isnan(value(Metrics(), "carrel_sandboxes", state="error") or 0.0)
