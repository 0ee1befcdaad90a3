from __future__ import annotations

from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from langgraph_ground import Ground, graph_of, runs, says, scripted

from carrel.integrations.langgraph import ModelMetrics
from carrel.integrations.langgraph.metrics import MOST_MODELS


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


@given(st.lists(st.text(), max_size=3 * MOST_MODELS))
def test_whatever_the_names_the_figures_stay_few(names: list[str]) -> None:
    metrics = ModelMetrics()
    for name in names:
        metrics.answered(name, 0.1, "ok", 1, 1)
    shown = [line for line in metrics.render().splitlines() if line.startswith(b"carrel_llm_requests_total{")]
    assert len(shown) <= MOST_MODELS + 1
