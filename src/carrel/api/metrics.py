"""Metrics for Prometheus and compatible readers."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from carrel.api.guard import GuardedRouter
from carrel.api.parts import Plane
from carrel.metrics import OPENMETRICS
from carrel.models.operations import GET_METRICS

router = GuardedRouter(tags=["host"])

_TEXT = {"schema": {"type": "string"}}


@router.operation(GET_METRICS, "Metrics", {"content": {"text/plain": _TEXT, OPENMETRICS: _TEXT}})
async def get_metrics(request: Request, plane: Plane) -> Response:
    """In the text format of Prometheus, or as OpenMetrics if the Accept header asks for it. Needs a token."""
    await plane.resources.measure()
    body, media_type = await asyncio.to_thread(plane.metrics.render, request.headers.get("accept", ""))
    return Response(body, headers={"content-type": media_type, "cache-control": "no-store"})
