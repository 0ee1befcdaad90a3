"""The metrics of a control plane, each declared once.

Label values come from closed sets in the code or from the operator's templates, never from a request, and their number
is bounded. Only the two metrics of a workspace name its context; they cover the most recently used workspaces and end
with the workspace. The three metrics of a sandbox name its id; they cover a few running ones and end with the sandbox.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, Literal, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from carrel.errors import BY_CODE, CarrelError
from carrel.models import JobState, State, SyncDirection

MOST_CONTEXTS = 10_000
"""The most workspaces with metrics."""
MOST_SERIES = 1_000
"""The most label sets of one metric; later ones are counted as `other`."""
OTHER = "other"
OK = "ok"
CANCELLED = "cancelled"
UNEXPECTED = "unexpected"
OPENMETRICS = "application/openmetrics-text"

_OUTCOMES = frozenset(BY_CODE) | {OK, CANCELLED, UNEXPECTED}
_OUTCOME = "`ok`, the code of an error, `cancelled` or `unexpected`"
_DRIVER = "the volume driver"
_WORKSPACE_LABELS = {
    "context_id": "the context of the workspace",
    "namespace": "what its id has before the first colon, or `default`",
    "agent": "whom it belongs to: the agent or service whose token made it, else its template; may be empty",
}
_SANDBOX_LABELS = {"sandbox": "the id of the session", "template": "its template; empty without one"}
_TEMPLATE = "the template of the sandbox; empty without one"
_QUICK = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0)

_MCP_OUTCOMES = _OUTCOMES | {"tool_error", "timed_out"}
_EGRESS_PROTOCOLS = frozenset({"connect", "http", "socks5", "index"})
_EGRESS_OUTCOMES = _OUTCOMES | {"denied_by_policy", "bad_request", "unreachable", "timed_out", "broken_off"}
EXITS = frozenset({"ok", "failed", "signaled", "timed_out", "out_of_memory", "error", "cancelled", "unknown", "gone"})
"""How commands end. `error`: carrel failed; `cancelled`: the caller went away; `unknown` and `gone`: nobody saw it."""
_LONGEST_S = 30 * 86_400.0
_COUNTED = tuple(state for state in State if state is not State.TERMINATED)


@dataclass(frozen=True, slots=True)
class MetricDeclaration:
    """One metric: its name, its meaning, and its labels with their values."""

    name: str
    kind: Literal["histogram", "counter", "gauge"]
    text: str
    labels: Mapping[str, str]
    buckets: tuple[float, ...]


DECLARATIONS: list[MetricDeclaration] = []
"""Every metric, in the order of the reference page."""


def _declare(
    name: str,
    kind: Literal["histogram", "counter", "gauge"],
    text: str,
    labels: Mapping[str, str] = MappingProxyType({}),
    buckets: tuple[float, ...] = (),
) -> MetricDeclaration:
    DECLARATIONS.append(MetricDeclaration(name, kind, text, labels, buckets))
    return DECLARATIONS[-1]


OPERATION = _declare(
    "carrel_operation_seconds",
    "histogram",
    "Time an operation took, from the decision to the end of its answer; what carrel does for its own upkeep is left "
    "out.",
    {"kind": "`shell`, `file`, `mcp`, `network` or `session`", "name": "the operation", "outcome": _OUTCOME},
    _QUICK,
)
COMMAND = _declare(
    "carrel_command_seconds",
    "histogram",
    "How long commands, Python calls and cells ran, in the foreground or not.",
    {"template": _TEMPLATE, "exit": ", ".join(f"`{each}`" for each in sorted(EXITS))},
    (*_QUICK, 900.0, 3600.0),
)
SVID_EXPIRY = _declare(
    "carrel_svid_expiry_timestamp_seconds",
    "gauge",
    "When the SVID of this server expires, in seconds since 1970; 0 if servers have no SPIFFE IDs.",
)
EVENT_LAST_ID = _declare("carrel_event_last_id", "gauge", "Number of the newest event; its growth is the rate.")
EVENT_READERS = _declare("carrel_event_readers", "gauge", "Open streams of events of this server.")
EVENT_BUS_BEHIND = _declare("carrel_event_bus_behind", "gauge", "Events that the bus lacks, if this server delivers.")
JOBS = _declare(
    "carrel_jobs",
    "gauge",
    "Jobs in each state, on all servers of the database.",
    {"state": ", ".join(f"`{state}`" for state in JobState)},
)
JOB_PHASE = _declare(
    "carrel_job_phase_seconds",
    "histogram",
    "How long the phases of jobs took.",
    {"phase": "`queued`, `starting`, `running` or `archiving`", "template": "of the job; may be empty"},
    _LONG,
)
JOB_ENDS = _declare(
    "carrel_job_ends_total",
    "counter",
    "Ends of attempts of jobs that this server ran.",
    {
        "state": "`succeeded`, `failed`, `cancelled`, `timed_out` or `lost`, and `retried`",
        "exit": "`ok`, `failed`, `signaled`, `out_of_memory` or `none`",
        "template": "of the job; may be empty",
    },
)
JOB_CPU = _declare(
    "carrel_job_cpu_seconds",
    "histogram",
    "Processor time of jobs that had a sandbox of their own.",
    {"template": "of the job; may be empty"},
    _LONG,
)
JOB_MEMORY = _declare(
    "carrel_job_memory_peak_bytes",
    "histogram",
    "Peak of the memory of jobs that had a sandbox of their own.",
    {"template": "of the job; may be empty"},
    tuple(float(2**power) for power in range(24, 36)),
)
JOB_BYTES = _declare(
    "carrel_job_bytes_total",
    "counter",
    "Bytes that jobs brought as files and standard input, and bytes of their output.",
    {"direction": "`in` or `out`", "template": "of the job; may be empty"},
)
MCP_CALL = _declare(
    "carrel_mcp_call_seconds",
    "histogram",
    "Time a request to an MCP server took, from the decision to its answer.",
    {"origin": "`context` or `platform`", "outcome": f"{_OUTCOME}; `tool_error` and `timed_out` are answers too"},
    _QUICK,
)
MCP_DISCOVERY = _declare(
    "carrel_mcp_discovery_seconds",
    "histogram",
    "Time to ask an MCP server of a context what it offers, in a sandbox of its own.",
    {"outcome": _OUTCOME},
    _LONG,
)
EGRESS = _declare(
    "carrel_egress_seconds",
    "histogram",
    "How long connections and requests of sandboxes to the outside lasted.",
    {"protocol": "`connect`, `http`, `socks5` or `index`", "outcome": "`ok`, or why it was refused or failed"},
    _QUICK,
)
EGRESS_BYTES = _declare(
    "carrel_egress_bytes_total",
    "counter",
    "Bytes between sandboxes and the outside.",
    {"template": _TEMPLATE, "direction": "`in` to sandboxes, `out` of them"},
)
START = _declare(
    "carrel_sandbox_start_seconds",
    "histogram",
    "Time from the wish for a sandbox until it takes commands.",
    {"provider": "where it runs", "kind": "`fresh` or `resume`", "template": _TEMPLATE},
    _QUICK,
)
SANDBOX_CPU = _declare(
    "carrel_sandbox_cpu_seconds_total",
    "counter",
    "Processor time that a running sandbox has used since it started.",
    _SANDBOX_LABELS,
)
SANDBOX_MEMORY = _declare(
    "carrel_sandbox_memory_bytes", "gauge", "Memory of a running sandbox, as its limit counts it.", _SANDBOX_LABELS
)
SANDBOX_MEMORY_PEAK = _declare(
    "carrel_sandbox_memory_peak_bytes",
    "gauge",
    "The most memory that a running sandbox has had. Where the kernel does not keep it, the most that was seen.",
    _SANDBOX_LABELS,
)
POOL_SLOTS = _declare(
    "carrel_pool_slots",
    "gauge",
    "Warm sandboxes without an owner.",
    {"provider": "where they run", "state": "`starting` or `ready`"},
)
POOL_CLAIMS = _declare(
    "carrel_pool_claims_total",
    "counter",
    "Sandboxes that asked a pool for a warm one, and warm ones that died.",
    {"provider": "where it runs", "result": "`claimed`; `dry`: none was ready; `died`: one had ended by itself"},
)
SANDBOXES = _declare(
    "carrel_sandboxes",
    "gauge",
    "Sessions in each state; terminated ones are not counted.",
    {"state": ", ".join(f"`{state}`" for state in _COUNTED)},
)
WORKSPACE_BYTES = _declare(
    "carrel_workspace_bytes", "gauge", "What a workspace held when it was last measured.", _WORKSPACE_LABELS
)
LAST_ACCESSED = _declare(
    "carrel_workspace_last_accessed_timestamp_seconds",
    "gauge",
    "When a workspace was last used, in seconds since 1970.",
    _WORKSPACE_LABELS,
)
VOLUME_USED = _declare("carrel_volume_used_bytes", "gauge", "Used bytes of the volume that holds the workspaces.")
VOLUME_CAPACITY = _declare(
    "carrel_volume_capacity_bytes", "gauge", "Size of the volume that holds the workspaces, in bytes."
)
SNAPSHOT = _declare(
    "carrel_snapshot_seconds",
    "histogram",
    "Time to take a snapshot.",
    {"driver": _DRIVER, "outcome": _OUTCOME},
    _LONG,
)
RESTORE = _declare("carrel_restore_seconds", "histogram", "Time to give a workspace a snapshot's files.", {}, _LONG)
ARCHIVE = _declare(
    "carrel_archive_seconds", "histogram", "Time to put a snapshot into the archive.", {"outcome": _OUTCOME}, _LONG
)
ARCHIVE_BYTES = _declare("carrel_archive_bytes_total", "counter", "Bytes that were sent to the archive.")
SYNC = _declare(
    "carrel_sync_seconds",
    "histogram",
    "Time to sync a workspace with its filespace.",
    {"direction": "`push`, `pull` or `both`", "outcome": _OUTCOME},
    _LONG,
)
IMAGE_PULL = _declare(
    "carrel_image_pull_seconds",
    "histogram",
    "Time to pull and unpack an image.",
    {"outcome": _OUTCOME},
    _LONG,
)
IMAGES = _declare("carrel_images", "gauge", "Images on this server, when they were last looked at.")
FORWARDED = _declare(
    "carrel_forwarded_requests_total",
    "counter",
    "Requests that this server forwarded to the server of their session.",
    {
        "outcome": "`answered`, whatever the answer was; `lost`: the other server died or broke the protocol; "
        "`not_connected`; `refused`: it was not the owner"
    },
)
ROUTER_CALLS = _declare(
    "carrel_router_calls_total", "counter", "Calls of Python without a context.", {"outcome": _OUTCOME}
)
ROUTER_WAITING = _declare("carrel_router_waiting", "gauge", "Calls without a context that wait for a sandbox.")
ROUTER_SANDBOXES = _declare(
    "carrel_router_sandboxes", "gauge", "Sandboxes for calls without a context.", {"state": "`busy` or `idle`"}
)
ROUTER_MEMORY = _declare(
    "carrel_router_memory_bytes", "gauge", "Memory of the sandboxes for calls without a context, as last told."
)


def outcome_of(error: BaseException | None) -> str:
    """Return the outcome of something as a label: `ok`, the error's code, `cancelled` or `unexpected`."""
    if error is None:
        return OK
    if isinstance(error, CarrelError):
        return error.code
    return CANCELLED if isinstance(error, asyncio.CancelledError | GeneratorExit) else UNEXPECTED


Child = TypeVar("Child", bound=MetricWrapperBase)


class _Series(Generic[Child]):
    """The series of one metric by label values, looked up without the library's lock; bounded."""

    def __init__(self, metric: Child):
        self._metric = metric
        self._known: dict[tuple[str, ...], Child] = {}

    def __getitem__(self, values: tuple[str, ...]) -> Child:
        child = self._known.get(values)
        return self._made(values) if child is None else child

    def _made(self, values: tuple[str, ...]) -> Child:
        if len(self._known) >= MOST_SERIES:
            return self._metric.labels(*(OTHER for _ in values))
        child = self._known[values] = self._metric.labels(*values)
        return child


class _Workspaces(Collector):
    """The metrics of single workspaces, made when they are collected."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[str, tuple[float, float, str, str]] = {}
        self._lock = threading.Lock()

    def set(self, context_id: str, size: int, last_accessed: float, namespace: str, agent: str) -> None:
        with self._lock:
            self._known[context_id] = (last_accessed, size, namespace, agent)
            if len(self._known) > self._most + self._most // 10:  # cutting at each call would sort at each call
                self._known = dict(self._newest())

    def forget(self, context_id: str) -> None:
        with self._lock:
            self._known.pop(context_id, None)

    def _newest(self) -> list[tuple[str, tuple[float, float, str, str]]]:
        return heapq.nlargest(self._most, self._known.items(), key=lambda pair: pair[1])

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            shown = self._newest() if len(self._known) > self._most else list(self._known.items())
        held = GaugeMetricFamily(WORKSPACE_BYTES.name, WORKSPACE_BYTES.text, labels=[*_WORKSPACE_LABELS])
        used = GaugeMetricFamily(LAST_ACCESSED.name, LAST_ACCESSED.text, labels=[*_WORKSPACE_LABELS])
        for context_id, (last_accessed, size, namespace, agent) in shown:
            held.add_metric([context_id, namespace, agent], size)
            used.add_metric([context_id, namespace, agent], last_accessed)
        return [held, used]

    def describe(self) -> Iterable[Metric]:
        return [
            GaugeMetricFamily(WORKSPACE_BYTES.name, WORKSPACE_BYTES.text),
            GaugeMetricFamily(LAST_ACCESSED.name, LAST_ACCESSED.text),
        ]


@dataclass(frozen=True, slots=True)
class SandboxSample:
    """What a running sandbox uses; None is not shown."""

    sandbox: str
    template: str
    cpu_s: float | None
    memory_bytes: int | None
    memory_peak_bytes: int | None


@dataclass(frozen=True, slots=True)
class JobUse:
    """What an attempt of a job used; None where that is not known."""

    cpu_s: float | None
    memory_peak: int | None
    bytes_in: int
    bytes_out: int


class _Sandboxes(Collector):
    """The metrics of single sandboxes: those of the last measurement."""

    def __init__(self) -> None:
        self.samples: Sequence[SandboxSample] = ()

    def collect(self) -> Iterable[Metric]:
        cpu, memory, peak = self._empty()
        for each in self.samples:
            labels = [each.sandbox, each.template]
            for family, value in ((cpu, each.cpu_s), (memory, each.memory_bytes), (peak, each.memory_peak_bytes)):
                if value is not None:
                    family.add_metric(labels, value)
        return [cpu, memory, peak]

    def describe(self) -> Iterable[Metric]:
        return self._empty()

    @staticmethod
    def _empty() -> tuple[CounterMetricFamily, GaugeMetricFamily, GaugeMetricFamily]:
        labels = [*_SANDBOX_LABELS]
        return (
            CounterMetricFamily(SANDBOX_CPU.name, SANDBOX_CPU.text, labels=labels),
            GaugeMetricFamily(SANDBOX_MEMORY.name, SANDBOX_MEMORY.text, labels=labels),
            GaugeMetricFamily(SANDBOX_MEMORY_PEAK.name, SANDBOX_MEMORY_PEAK.text, labels=labels),
        )


class Metrics:
    """The metrics of one control plane. Every method is fast, never fails and may be called from any thread."""

    def __init__(self, *, most_contexts: int = MOST_CONTEXTS) -> None:
        self._registry = CollectorRegistry()
        self._operations = _Series(self._histogram(OPERATION))
        self._commands = _Series(self._histogram(COMMAND))
        self._mcp_calls = _Series(self._histogram(MCP_CALL))
        self._mcp_discoveries = _Series(self._histogram(MCP_DISCOVERY))
        self._egress = _Series(self._histogram(EGRESS))
        moved = Counter(EGRESS_BYTES.name, EGRESS_BYTES.text, list(EGRESS_BYTES.labels), registry=self._registry)
        self._egress_bytes = _Series(moved)
        self._starts = _Series(self._histogram(START))
        self._pool_slots = _Series(self._gauge(POOL_SLOTS))
        claims = Counter(POOL_CLAIMS.name, POOL_CLAIMS.text, list(POOL_CLAIMS.labels), registry=self._registry)
        self._pool_claims = _Series(claims)
        self._snapshots = _Series(self._histogram(SNAPSHOT))
        self._restores = self._histogram(RESTORE)
        self._archives = _Series(self._histogram(ARCHIVE))
        self._event_last = self._gauge(EVENT_LAST_ID)
        self._event_readers = self._gauge(EVENT_READERS)
        self._event_behind = self._gauge(EVENT_BUS_BEHIND)
        self._svid_expiry = self._gauge(SVID_EXPIRY)
        self._job_states = _Series(self._gauge(JOBS))
        self._job_phases = _Series(self._histogram(JOB_PHASE))
        ends = Counter(JOB_ENDS.name, JOB_ENDS.text, list(JOB_ENDS.labels), registry=self._registry)
        self._job_ends = _Series(ends)
        self._job_cpu = _Series(self._histogram(JOB_CPU))
        self._job_memory = _Series(self._histogram(JOB_MEMORY))
        job_bytes = Counter(JOB_BYTES.name, JOB_BYTES.text, list(JOB_BYTES.labels), registry=self._registry)
        self._job_bytes = _Series(job_bytes)
        self._archive_bytes = Counter(ARCHIVE_BYTES.name, ARCHIVE_BYTES.text, registry=self._registry)
        self._syncs = _Series(self._histogram(SYNC))
        self._image_pulls = _Series(self._histogram(IMAGE_PULL))
        self._images = self._gauge(IMAGES)
        self._states = _Series(self._gauge(SANDBOXES))
        self._workspaces = _Workspaces(most_contexts)
        self._registry.register(self._workspaces)
        self._resources = _Sandboxes()
        self._registry.register(self._resources)
        self._volume_used = self._gauge(VOLUME_USED)
        self._volume_capacity = self._gauge(VOLUME_CAPACITY)
        routed = Counter(ROUTER_CALLS.name, ROUTER_CALLS.text, list(ROUTER_CALLS.labels), registry=self._registry)
        self._routed = _Series(routed)
        forwarded = Counter(FORWARDED.name, FORWARDED.text, list(FORWARDED.labels), registry=self._registry)
        self._forwarded = _Series(forwarded)
        self._router_waiting = self._gauge(ROUTER_WAITING)
        self._router_memory = self._gauge(ROUTER_MEMORY)
        self._router_sandboxes = _Series(self._gauge(ROUTER_SANDBOXES))
        ProcessCollector(namespace="carrel", registry=self._registry)
        self.sandboxes({})

    def operated(self, kind: str, name: str, outcome: str, seconds: float) -> None:
        """Count an operation that ended or was refused; `outcome` is from `outcome_of`."""
        self._operations[kind, name, _known(outcome)].observe(seconds)

    def jobs(self, counts: Mapping[JobState, int]) -> None:
        """Set the number of jobs in each state."""
        for state in JobState:
            self._job_states[state.value,].set(counts.get(state, 0))

    def job_attempt_ended(
        self, state: str, exit: str, template: str, phases: Mapping[str, float | None], used: JobUse
    ) -> None:
        """Count the end of an attempt of a job, how many milliseconds its phases took, and what it used."""
        self._job_ends[state, exit, template].inc()
        if used.cpu_s is not None:
            self._job_cpu[template,].observe(max(0.0, used.cpu_s))
        if used.memory_peak is not None:
            self._job_memory[template,].observe(max(0, used.memory_peak))
        self._job_bytes["in", template].inc(used.bytes_in)
        self._job_bytes["out", template].inc(used.bytes_out)
        for phase, taken in phases.items():
            if taken is not None:
                self._job_phases[phase, template].observe(taken / 1000)

    def command_ended(self, template: str | None, exit: str, seconds: float) -> None:
        """Count a command, a Python call or a cell that ended; `exit` is one of `EXITS`."""
        # A sandbox may say any duration.
        self._commands[template or "", exit if exit in EXITS else "unknown"].observe(min(max(0.0, seconds), _LONGEST_S))

    def mcp_called(self, origin: Literal["context", "platform"], outcome: str, seconds: float) -> None:
        """Count a request to an MCP server."""
        self._mcp_calls[origin, outcome if outcome in _MCP_OUTCOMES else UNEXPECTED].observe(seconds)

    def mcp_discovered(self, outcome: str, seconds: float) -> None:
        """Count a discovery of an MCP server's tools."""
        self._mcp_discoveries[_known(outcome),].observe(seconds)

    def egress_ended(
        self, protocol: str, outcome: str, received: int, sent: int, seconds: float, *, template: str | None = None
    ) -> None:
        """Count an outbound connection or request of a sandbox that ended or was refused."""
        shown = protocol if protocol in _EGRESS_PROTOCOLS else OTHER
        self._egress[shown, outcome if outcome in _EGRESS_OUTCOMES else UNEXPECTED].observe(seconds)
        self._egress_bytes[template or "", "in"].inc(max(0, received))
        self._egress_bytes[template or "", "out"].inc(max(0, sent))

    def started(
        self, provider: str, kind: Literal["fresh", "resume"], seconds: float, *, template: str | None = None
    ) -> None:
        """Count a started sandbox: a fresh one, or one on an existing workspace."""
        self._starts[provider, kind, template or ""].observe(seconds)

    def resources(self, samples: Sequence[SandboxSample]) -> None:
        """Set what running sandboxes use; the others lose their series."""
        self._resources.samples = samples

    def pool_slots(self, counts: Mapping[tuple[str, str], int]) -> None:
        """Set the number of warm sandboxes of each provider in each state."""
        for key, count in counts.items():
            self._pool_slots[key].set(count)

    def pool_claimed(self, provider: str, result: Literal["claimed", "dry", "died"]) -> None:
        """Count a wish for a warm sandbox, or one that died."""
        self._pool_claims[provider, result].inc()

    def snapshotted(self, driver: str, outcome: str, seconds: float) -> None:
        """Count a snapshot."""
        self._snapshots[driver, _known(outcome)].observe(seconds)

    def restored(self, seconds: float) -> None:
        """Count a restored workspace."""
        self._restores.observe(seconds)

    def archived(self, outcome: str, seconds: float, size: int) -> None:
        """Count an archived snapshot, for which `size` bytes were sent."""
        self._archives[_known(outcome),].observe(seconds)
        self._archive_bytes.inc(max(0, size))

    def synced(self, direction: SyncDirection, outcome: str, seconds: float) -> None:
        """Count a sync of a workspace with its filespace."""
        self._syncs[direction.value, _known(outcome)].observe(seconds)

    def image_pulled(self, outcome: str, seconds: float) -> None:
        """Count a pulled image."""
        self._image_pulls[_known(outcome),].observe(seconds)

    def images(self, count: int) -> None:
        """Set the number of images."""
        self._images.set(count)

    def sandboxes(self, counts: Mapping[State, int]) -> None:
        """Set the number of sessions in each state; a missing state has none."""
        for state in _COUNTED:
            self._states[state.value,].set(counts.get(state, 0))

    def routed(self, outcome: str) -> None:
        """Count a call without a context that ended or was refused."""
        self._routed[_known(outcome),].inc()

    def forwarded(self, outcome: Literal["answered", "lost", "not_connected", "refused"]) -> None:
        """Count a request that was forwarded to another server."""
        self._forwarded[outcome,].inc()

    def router(self, waiting: int, busy: int, idle: int, memory_bytes: int) -> None:
        """Set how many calls without a context wait, and the state of their sandboxes."""
        self._router_waiting.set(waiting)
        self._router_memory.set(memory_bytes)
        self._router_sandboxes["busy",].set(busy)
        self._router_sandboxes["idle",].set(idle)

    def workspace(
        self, context_id: str, size: int, last_accessed: float, *, namespace: str = "default", agent: str = ""
    ) -> None:
        """Set the size of a workspace, and when it was last used (seconds since 1970)."""
        self._workspaces.set(context_id, size, last_accessed, namespace, agent)

    def forget(self, context_id: str) -> None:
        """Remove the metrics of a workspace."""
        self._workspaces.forget(context_id)

    def svid(self, expires_at: float) -> None:
        """Set when the SVID of this server expires."""
        self._svid_expiry.set(expires_at)

    def events(self, last: int, readers: int, behind: int) -> None:
        """Set how long the event log is, how many read it, and what the bus lacks."""
        self._event_last.set(last)
        self._event_readers.set(readers)
        self._event_behind.set(behind)

    def volume(self, used: int, capacity: int) -> None:
        """Set how full the volume of the workspaces is."""
        self._volume_used.set(used)
        self._volume_capacity.set(capacity)

    def render(self, accept: str = "", others: Sequence[str] = ()) -> tuple[bytes, str]:
        """Return everything as text with its media type: OpenMetrics if `accept` has it, else the older format.
        `others` are the metrics of the other workers of this server in the older format; they are added.
        """
        shown: CollectorRegistry = _Summed(self._registry, others) if others else self._registry  # type: ignore[assignment]
        if OPENMETRICS in accept:
            text: bytes = openmetrics.generate_latest(shown)  # type: ignore[no-untyped-call]
            return text, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(shown), CONTENT_TYPE_PLAIN_0_0_4

    def families(self) -> Iterator[Metric]:
        """Return everything as objects of the library."""
        return iter(self._registry.collect())

    def _histogram(self, declared: MetricDeclaration) -> Histogram:
        return Histogram(
            declared.name, declared.text, list(declared.labels), buckets=declared.buckets, registry=self._registry
        )

    def _gauge(self, declared: MetricDeclaration) -> Gauge:
        return Gauge(declared.name, declared.text, list(declared.labels), registry=self._registry)


_NOT_SUMMED = (
    "_timestamp_seconds",
    "_start_time_seconds",
    "_max_fds",
    *(each.name for each in (WORKSPACE_BYTES, EVENT_LAST_ID, SANDBOX_MEMORY, SANDBOX_MEMORY_PEAK, SVID_EXPIRY)),
    SANDBOX_CPU.name.removesuffix("_total"),
)
"""The ends of the names of metrics of which the largest value counts: several workers have the same one."""


class _Summed:
    """The metrics of several workers together, as a registry for the library's writers."""

    def __init__(self, own: CollectorRegistry, others: Sequence[str]):
        self._own = own
        self._others = others

    def collect(self) -> Iterator[Metric]:
        """Return each metric once, with the sum of its values."""
        families: dict[str, Metric] = {}
        values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
        every = [self._own.collect(), *(text_string_to_metric_families(text) for text in self._others)]
        for metrics in every:
            for metric in metrics:
                if metric.name.endswith("_created"):  # a moment, which the older format shows as a metric of its own
                    continue
                families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                known = values.setdefault(metric.name, {})
                for sample in metric.samples:
                    if sample.name.endswith("_created"):
                        continue
                    key = sample.name, tuple(sorted(sample.labels.items()))
                    if metric.name.endswith(_NOT_SUMMED):
                        known[key] = max(known.get(key, sample.value), sample.value)
                    else:
                        known[key] = known.get(key, 0.0) + sample.value
        for name, metric in families.items():
            for (sample_name, labels), value in values[name].items():
                metric.add_sample(sample_name, dict(labels), value)
            yield metric


def _known(outcome: str) -> str:
    return outcome if outcome in _OUTCOMES else UNEXPECTED
