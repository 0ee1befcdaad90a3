"""What every refusal of the API looks like, and whether the OpenAPI document told of an answer."""

from __future__ import annotations

import re
from typing import Any

import httpx

PROBLEM = "application/problem+json"


def refused(answer: httpx.Response, status: int, field: str | None, code: str | None = None) -> dict[str, Any]:
    """The problem of an answer, which has to be this one and tell nothing of carrel's insides."""
    assert answer.status_code == status, f"{answer.request.method} {answer.request.url}: {answer.text}"
    assert answer.headers["content-type"] == PROBLEM
    problem = answer.json()
    assert (problem["status"], problem.get("field")) == (status, field), problem
    assert code in {None, problem["code"]}
    assert problem["type"] == f"urn:carrel:problem:{problem['code']}"
    assert problem["title"] and problem["detail"]
    assert problem.get("hint") or status in {404, 409}, "what can be mended has a hint"
    assert "Traceback" not in answer.text and ".py" not in answer.text
    return dict(problem)


class Contract:
    """An OpenAPI document as the judge of answers."""

    def __init__(self, document: dict[str, Any]):
        self.document = document
        # A path without a parameter goes before one with, as in the server.
        self._paths = [
            (re.compile(re.sub(r"\{\w+\}", "[^/]+", path)), methods)
            for path, methods in sorted(document["paths"].items(), key=lambda pair: pair[0].count("{"))
        ]

    def operations(self) -> list[tuple[str, str, dict[str, Any]]]:
        """Method, path and description of each operation."""
        paths = self.document["paths"].items()
        return [(method.upper(), path, operation) for path, found in paths for method, operation in found.items()]

    def judge(self, answer: httpx.Response) -> None:
        """Complain of an answer that the document does not have. A failure of carrel is never foreseen."""
        if answer.is_error:
            assert answer.headers["content-type"] == PROBLEM, answer.headers
        path = answer.request.url.raw_path.decode().partition("?")[0]
        method = answer.request.method.lower()
        declared = next((ways[method] for known, ways in self._paths if known.fullmatch(path) and method in ways), None)
        if declared is None:
            assert answer.status_code in {400, 401, 404, 405, 413} or path in {"/docs", "/openapi.json"}
        elif answer.status_code != 500:
            assert str(answer.status_code) in declared["responses"], f"{method} {path}: {answer.status_code}"
