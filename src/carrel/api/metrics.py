"""Metrics for Prometheus and compatible readers."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from carrel.api.forwarding import PASS
from carrel.api.guard import GuardedRouter
from carrel.api.parts import Plane
from carrel.api.worker_metrics import WorkerMetrics
from carrel.metrics import OPENMETRICS
from carrel.models.operations import GET_METRICS

router = GuardedRouter(tags=["host"])

_TEXT = {"schema": {"type": "string"}}


@router.operation(GET_METRICS, "Metrics", {"content": {"text/plain": _TEXT, OPENMETRICS: _TEXT}})
async def get_metrics(request: Request, plane: Plane) -> Response:
    """In the text format of Prometheus, or as OpenMetrics if the Accept header asks for it. Needs a token. The workers
    of a server are counted together.
    """
    await plane.resources.measure()
    others: WorkerMetrics | None = request.app.state.worker_metrics
    texts = await others.of_others() if others is not None and PASS not in request.scope else []
    body, media_type = await asyncio.to_thread(plane.metrics.render, request.headers.get("accept", ""), texts)
    return Response(body, headers={"content-type": media_type, "cache-control": "no-store"})
