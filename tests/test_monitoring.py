"""The dashboard, the alerts and the queries of the how-to page ask for metrics and labels that exist, with values that
can occur.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from prometheus_client.metrics_core import Metric

from carrel.control.operations.happened import told_of
from carrel.errors import BY_CODE
from carrel.integrations.langgraph.metrics import ModelMetrics
from carrel.metrics import DECLARATIONS, EXITS, MetricDeclaration, Metrics
from carrel.models import CommandResult, JobState, State
from carrel.models.operations import TABLE

ROOT = Path(__file__).parent.parent
DASHBOARD = ROOT / "deploy/grafana/carrel.json"
ALERTS = ROOT / "deploy/prometheus/alerts.yaml"
PAGE = ROOT / "docs/how-to/monitor.md"
OF_PROMETHEUS = {"job", "instance", "le"}
VALUES = {
    "outcome": set(BY_CODE) | {"ok", "unexpected", "cancelled", "lost", "not_connected"},
    "name": {row.name for row in TABLE},
    "exit": set(EXITS),
    "state": {*map(str, State), *map(str, JobState), "starting", "ready", "busy", "idle"},
    "result": {"claimed", "dry", "died"},
    "kind": {"fresh", "resume"},
    "direction": {"in", "out"},
}


def of_dashboard() -> Iterator[str]:
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"].replace("$__rate_interval", "5m").replace("$instance", ".*")


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def of_page() -> Iterator[str]:
    for line in PAGE.read_text().splitlines():
        if found := re.fullmatch(r"\| [^|]+\? \| `([^`]+)` \|", line):
            yield found[1]


QUERIES = [*of_dashboard(), *(rule["expr"] for rule in rules()), *of_page()]


def declared() -> dict[str, set[str]]:
    """Every series that there is, and its labels."""
    found: dict[str, set[str]] = {"up": {"job", "instance"}}

    def take(each: MetricDeclaration) -> None:
        labels = set(each.labels) | OF_PROMETHEUS
        for end in ("_bucket", "_count", "_sum") if each.kind == "histogram" else ("",):
            found[each.name + end] = labels

    for each in DECLARATIONS:
        take(each)
    models = ModelMetrics()
    models.answered("model", 1.0, "ok", 1, 1)
    for family in models.registry.collect():
        for sample in family.samples:
            found[sample.name] = set(sample.labels) | OF_PROMETHEUS
    families: list[Metric] = [each for each in Metrics().families() if each.name.startswith("carrel_process_")]
    assert families
    for family in families:
        for sample in family.samples:
            found[sample.name] = OF_PROMETHEUS
    return found


DECLARED = declared()


def parts(node: Any) -> Iterator[Any]:
    """The node of a query and all below it."""
    yield node
    for name in ("expr", "lhs", "rhs", "param", "vector_selector"):
        if (inner := getattr(node, name, None)) is not None:
            yield from parts(inner)
    for inner in getattr(node, "args", ()):
        yield from parts(inner)


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_asks_for_what_there_is(query: str) -> None:
    found = [*parts(promql.parse(query))]
    selectors = [each for each in found if isinstance(each, promql.VectorSelector)]
    assert selectors
    known: set[str] = set()
    for each in selectors:
        assert each.name in DECLARED, f"there is no metric {each.name}"
        known |= DECLARED[each.name]
        for matcher in each.matchers.matchers:
            assert matcher.name in DECLARED[each.name], f"{each.name} has no label {matcher.name}"
            if matcher.name in VALUES:
                assert set(matcher.value.split("|")) <= VALUES[matcher.name], matcher.value
    for each in found:
        if isinstance(each, promql.AggregateExpr) and each.modifier is not None:
            labels = set(each.modifier.labels)
            assert labels <= known, f"no label {labels - known} in {query}"
        if isinstance(each, promql.Call):
            inner = [part for part in parts(each) if isinstance(part, promql.VectorSelector)]
            if each.func.name in {"rate", "increase"}:
                assert all(re.search("_(total|count|sum|bucket)$", part.name) for part in inner), (
                    "rates are of counters"
                )
            if each.func.name == "histogram_quantile":
                assert all(part.name.endswith("_bucket") for part in inner)


def test_there_are_queries_everywhere() -> None:
    assert len([*of_dashboard()]) > 30
    assert len([*of_page()]) > 12
    assert len(rules()) > 8


def test_a_wrong_query_is_noticed() -> None:
    with pytest.raises(ValueError, match=r".+"):
        promql.parse("sum by (rate(carrel_sandboxes[5m])")
    for query in ('carrel_sandboxes{stat="x"}', "carrel_sandbox", 'carrel_sandboxes{state="gone"}'):
        with pytest.raises(AssertionError):
            test_a_query_asks_for_what_there_is(query)
    with pytest.raises(AssertionError):
        test_a_query_asks_for_what_there_is("sum by (nothing) (carrel_sandboxes)")


def test_lines_of_the_dashboard_name_labels_that_their_query_keeps() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            expression = target["expr"].replace("$__rate_interval", "5m").replace("$instance", ".*")
            aggregated = [part for part in parts(promql.parse(expression)) if isinstance(part, promql.AggregateExpr)]
            modifiers = [each.modifier for each in aggregated if str(each.op) != "topk"]
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert all(modifier is not None and label in modifier.labels for modifier in modifiers), panel["title"]


def test_alerts_say_what_to_do_about_labels_that_they_have() -> None:
    for rule in rules():
        assert rule["annotations"]["summary"] and rule["annotations"]["description"].endswith(".")
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        aggregated = [each for each in parts(promql.parse(rule["expr"])) if isinstance(each, promql.AggregateExpr)]
        for label in re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])):
            assert all(label in each.modifier.labels for each in aggregated), f"{rule['alert']}: {label}"


def test_every_end_of_a_command_has_a_value_of_its_own() -> None:
    given = {"id": "c", "stdout": "", "stderr": "", "duration_ms": 1.0, "exit_code": 0}
    ends = [{}, {"exit_code": 1}, {"signal": "SIGTERM"}, {"timed_out": True}, {"oom_killed": True}]
    found = {told_of(CommandResult.model_validate(given | end))["exit"] for end in ends}
    assert found == {"ok", "failed", "signaled", "timed_out", "out_of_memory"} <= EXITS
