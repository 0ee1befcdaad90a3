from __future__ import annotations

import uuid
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.langgraph_ground import Ground, graph_of, runs, says, scripted

from carrel.integrations.langgraph import ModelMetrics
from carrel.integrations.langgraph.metrics import MOST_MODELS, MOST_OPEN


def value(metrics: ModelMetrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(name, labels) or 0.0


async def test_latency_and_tokens_of_a_run_are_counted(ground: Ground) -> None:
    metrics = ModelMetrics()
    async with scripted(runs("true"), says("done")) as model, graph_of(model, metrics=metrics) as graph:
        here: Any = {"configurable": {"thread_id": ground.context}}
        await graph.ainvoke({"messages": [("user", "x")]}, here, context=ground.workspace)
        assert value(metrics, "carrel_llm_requests_total", model="scripted", outcome="ok") == 2
        assert value(metrics, "carrel_llm_latency_seconds_count", model="scripted") == 2
        assert value(metrics, "carrel_llm_tokens_total", model="scripted", direction="input") == 22
        assert value(metrics, "carrel_llm_tokens_total", model="scripted", direction="output") == 14
        model.script.clear()
        with pytest.raises(openai.BadRequestError):
            await graph.ainvoke({"messages": [("user", "x")]}, here, context=ground.workspace)
        assert value(metrics, "carrel_llm_requests_total", model="scripted", outcome="error") == 1
    assert b"# TYPE carrel_llm_latency_seconds histogram" in metrics.render()


async def test_tokens_of_a_streamed_answer_are_counted_too(ground: Ground) -> None:
    metrics = ModelMetrics()
    async with scripted(says("letters")) as model, graph_of(model, metrics=metrics) as graph:
        here: Any = {"configurable": {"thread_id": ground.context}}
        stream = graph.astream({"messages": [("user", "x")]}, here, context=ground.workspace, stream_mode="messages")
        assert "".join([chunk.text async for chunk, _ in stream]) == "letters"
        assert value(metrics, "carrel_llm_requests_total", model="scripted", outcome="ok") == 1
        assert value(metrics, "carrel_llm_tokens_total", model="scripted", direction="input") == 11
        assert value(metrics, "carrel_llm_tokens_total", model="scripted", direction="output") == 7


async def test_requests_whose_end_is_never_told_do_not_pile_up() -> None:
    handler: Any = ModelMetrics().handler
    for _ in range(MOST_OPEN + 10):
        await handler.on_chat_model_start({}, [], run_id=uuid.uuid4())
    assert len(handler._begun) == MOST_OPEN


@given(st.lists(st.text(), max_size=3 * MOST_MODELS))
def test_whatever_the_names_the_figures_stay_few(names: list[str]) -> None:
    metrics = ModelMetrics()
    for name in names:
        metrics.answered(name, 0.1, "ok", 1, 1)
    shown = [line for line in metrics.render().splitlines() if line.startswith(b"carrel_llm_requests_total{")]
    assert len(shown) <= MOST_MODELS + 1
