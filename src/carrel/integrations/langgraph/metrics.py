"""Prometheus metrics of models: latency, requests, tokens. Their registry is in the agent's process."""

from __future__ import annotations

import time
from typing import Any
from uuid import UUID

from langchain_core.callbacks import AsyncCallbackHandler
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, LLMResult
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from carrel.primitives.cache import Cache

MOST_MODELS = 32
"""Further models are counted as `other`, so that callers cannot make the metrics grow."""
MOST_OPEN = 4096
"""Requests whose end is awaited. A cancelled request has no end, so the oldest are dropped."""
OTHER = "other"
BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)


class ModelMetrics:
    """The metrics of the models of one process. Give `handler` to a model as a callback; serve `render()`."""

    def __init__(self, registry: CollectorRegistry | None = None):
        self.registry = registry or CollectorRegistry()
        self.handler: AsyncCallbackHandler = _Handler(self)
        self._names: set[str] = set()
        self._requests = Counter(
            "carrel_llm_requests", "Requests to models", ["model", "outcome"], registry=self.registry
        )
        self._latency = Histogram(
            "carrel_llm_latency_seconds",
            "From a request to a model to the end of its answer",
            ["model"],
            registry=self.registry,
            buckets=BUCKETS,
        )
        self._tokens = Counter(
            "carrel_llm_tokens", "Tokens that models were sent and have sent", ["model", "direction"],
            registry=self.registry,
        )  # fmt: skip

    def render(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self.registry)

    def answered(self, model: str, seconds: float, outcome: str, sent: int = 0, received: int = 0) -> None:
        """Count one request. `outcome` is `ok` or `error`."""
        name = self._name(model)
        self._requests.labels(name, outcome).inc()
        self._latency.labels(name).observe(seconds)
        if sent:
            self._tokens.labels(name, "input").inc(sent)
        if received:
            self._tokens.labels(name, "output").inc(received)

    def _name(self, model: str) -> str:
        name = "".join(letter for letter in model[:80] if letter.isprintable()) or OTHER
        if name not in self._names and len(self._names) >= MOST_MODELS:
            return OTHER
        self._names.add(name)
        return name


class _Handler(AsyncCallbackHandler):
    """Receives the start and the end of each request."""

    def __init__(self, metrics: ModelMetrics):
        self._metrics = metrics
        self._begun: Cache[UUID, tuple[str, float]] = Cache(MOST_OPEN)

    async def on_chat_model_start(
        self,
        serialized: dict[str, Any],
        messages: list[list[BaseMessage]],
        *,
        run_id: UUID,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        del messages
        given = kwargs.get("invocation_params") or {}
        named = (metadata or {}).get("ls_model_name") or given.get("model") or given.get("model_name")
        name = str(named or (serialized or {}).get("name") or OTHER)
        self._begun.put(run_id, (name, time.monotonic()))

    async def on_llm_end(self, response: LLMResult, *, run_id: UUID, **_kwargs: Any) -> None:
        if (begun := self._begun.pop(run_id)) is not None:
            sent, received = _tokens(response)
            self._metrics.answered(begun[0], time.monotonic() - begun[1], "ok", sent, received)

    async def on_llm_error(self, error: BaseException, *, run_id: UUID, **_kwargs: Any) -> None:
        del error
        if (begun := self._begun.pop(run_id)) is not None:
            self._metrics.answered(begun[0], time.monotonic() - begun[1], "error")


def _tokens(response: LLMResult) -> tuple[int, int]:
    """Return the tokens sent and received, as the provider counted them."""
    sent = received = 0
    for generations in response.generations:
        for generation in generations:
            message = generation.message if isinstance(generation, ChatGeneration) else None
            usage = message.usage_metadata if isinstance(message, AIMessage) else None
            if usage is not None:
                sent += max(0, usage["input_tokens"])
                received += max(0, usage["output_tokens"])
    return sent, received
