"""Makes the Grafana dashboard from a table of panels. `tests/test_monitoring.py` checks its queries."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

_SERVER = 'instance=~"$instance"'
_WINDOW = "$__rate_interval"


class Panel(NamedTuple):
    """A graph: its title, its unit, and its queries with the names of their lines. `$where` chooses the servers."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]


def _quantiles(metric: str, label: str, *, everywhere: bool = False) -> tuple[tuple[str, str], ...]:
    chosen = "" if everywhere else "{$where}"
    return tuple(
        (
            f"histogram_quantile({share}, sum by (le, {label}) (rate({metric}_bucket{chosen}[$window])))",
            f"{{{{{label}}}}} p{round(share * 100)}",
        )
        for share in (0.5, 0.99)
    )


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Work",
        (
            Panel("Sandboxes", "short", (("sum by (state) (carrel_sandboxes{$where})", "{{state}}"),)),
            Panel(
                "Operations per second",
                "ops",
                (("sum by (kind) (rate(carrel_operation_seconds_count{$where}[$window]))", "{{kind}}"),),
            ),
            Panel(
                "Operations that fail, per second",
                "ops",
                (
                    (
                        'sum by (name, outcome) (rate(carrel_operation_seconds_count{outcome!="ok",$where}[$window]))',
                        "{{name}} {{outcome}}",
                    ),
                ),
            ),
            Panel("Operations", "s", _quantiles("carrel_operation_seconds", "kind")),
            Panel(
                "Commands, by how they end, per second",
                "ops",
                (
                    (
                        "sum by (template, exit) (rate(carrel_command_seconds_count{$where}[$window]))",
                        "{{template}} {{exit}}",
                    ),
                ),
            ),
            Panel("Calls of MCP servers", "s", _quantiles("carrel_mcp_call_seconds", "origin")),
        ),
    ),
    (
        "Jobs",
        (
            Panel(
                "Jobs that have not ended",
                "short",
                (('max by (state) (carrel_jobs{state=~"queued|running|waiting_approval",$where})', "{{state}}"),),
            ),
            Panel(
                "Ends of attempts, per second",
                "ops",
                (
                    (
                        "sum by (template, state, exit) (rate(carrel_job_ends_total{$where}[$window]))",
                        "{{template}} {{state}} {{exit}}",
                    ),
                ),
            ),
            Panel("Phases of jobs", "s", _quantiles("carrel_job_phase_seconds", "phase")),
            Panel("Processor time of a job", "s", _quantiles("carrel_job_cpu_seconds", "template")),
            Panel("Memory of a job at its peak", "bytes", _quantiles("carrel_job_memory_peak_bytes", "template")),
            Panel(
                "Bytes of jobs",
                "Bps",
                (
                    (
                        "sum by (template, direction) (rate(carrel_job_bytes_total{$where}[$window]))",
                        "{{template}} {{direction}}",
                    ),
                ),
            ),
        ),
    ),
    (
        "Sandboxes",
        (
            Panel("Starts of sandboxes", "s", _quantiles("carrel_sandbox_start_seconds", "kind")),
            Panel(
                "Warm sandboxes",
                "short",
                (
                    ("sum by (provider, state) (carrel_pool_slots{$where})", "{{provider}} {{state}}"),
                    (
                        'sum by (provider) (increase(carrel_pool_claims_total{result="dry",$where}[$window]))',
                        "{{provider}} found none",
                    ),
                ),
            ),
            Panel(
                "Processors, the ten busiest",
                "short",
                (("topk(10, rate(carrel_sandbox_cpu_seconds_total{$where}[$window]))", "{{sandbox}} {{template}}"),),
            ),
            Panel(
                "Memory, the ten largest",
                "bytes",
                (("topk(10, carrel_sandbox_memory_bytes{$where})", "{{sandbox}} {{template}}"),),
            ),
            Panel(
                "Memory at its peak, by template",
                "bytes",
                (("max by (template) (carrel_sandbox_memory_peak_bytes{$where})", "{{template}}"),),
            ),
            Panel(
                "Calls without a context",
                "short",
                (
                    ("sum(carrel_router_waiting{$where})", "wait"),
                    ("sum by (state) (carrel_router_sandboxes{$where})", "{{state}}"),
                ),
            ),
        ),
    ),
    (
        "Network and events",
        (
            Panel(
                "Egress",
                "Bps",
                (
                    (
                        "sum by (template, direction) (rate(carrel_egress_bytes_total{$where}[$window]))",
                        "{{template}} {{direction}}",
                    ),
                ),
            ),
            Panel(
                "Connections, per second",
                "ops",
                (
                    (
                        "sum by (protocol, outcome) (rate(carrel_egress_seconds_count{$where}[$window]))",
                        "{{protocol}} {{outcome}}",
                    ),
                ),
            ),
            Panel(
                "Events",
                "short",
                (
                    ("deriv(carrel_event_last_id{$where}[$window])", "{{instance}} per second"),
                    ("carrel_event_bus_behind{$where}", "{{instance}} NATS lacks"),
                    ("carrel_event_readers{$where}", "{{instance}} readers"),
                ),
            ),
            Panel(
                "Requests to other servers, per second",
                "ops",
                (("sum by (outcome) (rate(carrel_forwarded_requests_total{$where}[$window]))", "{{outcome}}"),),
            ),
        ),
    ),
    (
        "Files",
        (
            Panel(
                "Volume",
                "bytes",
                (
                    ("carrel_volume_used_bytes{$where}", "{{instance}} used"),
                    ("carrel_volume_capacity_bytes{$where}", "{{instance}} size"),
                ),
            ),
            Panel(
                "Largest workspaces",
                "bytes",
                (("topk(10, carrel_workspace_bytes{$where})", "{{context_id}}"),),
            ),
            Panel("Snapshots", "s", _quantiles("carrel_snapshot_seconds", "outcome")),
            Panel("Archive", "s", _quantiles("carrel_archive_seconds", "outcome")),
            Panel("Sync with filespaces", "s", _quantiles("carrel_sync_seconds", "direction")),
            Panel("Pulls of images", "s", _quantiles("carrel_image_pull_seconds", "outcome")),
        ),
    ),
    (
        "Models of `carrel agent`",
        (
            Panel(
                "Requests, per second",
                "ops",
                (
                    (
                        "sum by (model, outcome) (rate(carrel_llm_requests_total[$window]))",
                        "{{model}} {{outcome}}",
                    ),
                ),
            ),
            Panel("Latency", "s", _quantiles("carrel_llm_latency_seconds", "model", everywhere=True)),
            Panel(
                "Tokens, per second",
                "short",
                (
                    (
                        "sum by (model, direction) (rate(carrel_llm_tokens_total[$window]))",
                        "{{model}} {{direction}}",
                    ),
                ),
            ),
        ),
    ),
    (
        "Servers",
        (
            Panel("Processor", "short", (("rate(carrel_process_cpu_seconds_total{$where}[$window])", "{{instance}}"),)),
            Panel("Memory", "bytes", (("carrel_process_resident_memory_bytes{$where}", "{{instance}}"),)),
            Panel(
                "Seconds until the SVID expires",
                "s",
                (("(carrel_svid_expiry_timestamp_seconds{$where} > 0) - time()", "{{instance}}"),),
            ),
            Panel("Open files", "short", (("carrel_process_open_fds{$where}", "{{instance}}"),)),
        ),
    ),
)
_ACROSS, _WIDTH, _HEIGHT = 3, 8, 8
_SOURCE = {"type": "prometheus", "uid": "${source}"}


def _panel(number: int, panel: Panel, x: int, y: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "datasource": _SOURCE,
        "gridPos": {"x": x, "y": y, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {
                "refId": "ABCDEFGH"[place],
                "datasource": _SOURCE,
                "expr": query.replace("$where", _SERVER).replace("$window", _WINDOW),
                "legendFormat": legend,
            }
            for place, (query, legend) in enumerate(panel.queries)
        ],
    }


def dashboard() -> str:
    """Return the dashboard as JSON."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        place = {"x": 0, "y": y, "w": _ACROSS * _WIDTH, "h": 1}
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": title, "gridPos": place, "collapsed": False, "panels": []}
        )
        y += 1
        for index, panel in enumerate(row):
            x, below = index % _ACROSS * _WIDTH, index // _ACROSS * _HEIGHT
            panels.append(_panel(len(panels) + 1, panel, x, y + below))
        y += -(-len(row) // _ACROSS) * _HEIGHT
    variables = [
        {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus", "refresh": 1},
        {
            "name": "instance",
            "label": "Server",
            "type": "query",
            "datasource": _SOURCE,
            "query": "label_values(carrel_sandboxes, instance)",
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        },
    ]
    found = {
        "uid": "carrel",
        "title": "carrel",
        "tags": ["carrel"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": variables},
        "panels": panels,
    }
    return json.dumps(found, indent=1) + "\n"
