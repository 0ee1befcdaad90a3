from __future__ import annotations

import json

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.egress.access import AccessRefused
from carrel.egress.http import answers
from carrel.policy.verdict import Verdict


def parsed(data: bytes, method: str = "GET") -> tuple[h11.Response, bytes]:
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method=method, target="/", headers=[("host", "a")]))
    client.receive_data(data)
    client.receive_data(b"")
    response, body = client.next_event(), b""
    assert isinstance(response, h11.Response)
    while isinstance(event := client.next_event(), h11.Data):
        body += event.data
    assert isinstance(event, h11.EndOfMessage)
    return response, body


@given(st.text(max_size=400), st.sampled_from([400, 403, 421, 429, 431, 500, 502, 503, 504]))
def test_a_refusal_says_why_whatever_the_policy_says(reason: str, status: int) -> None:
    refused = AccessRefused(Verdict("deny", reason, "network(outbound:x)", hint="ask"), status=status)
    response, body = parsed(answers.refusal(refused))
    assert response.status_code == status
    assert json.loads(body).items() >= refused.as_dict().items()
    headers = dict(response.headers)
    assert headers[b"content-type"] == b"application/problem+json"
    assert headers[b"connection"] == b"close"
    assert headers[b"proxy-status"].startswith(b"carrel; error=")


def test_readable_reasons_are_in_the_first_line() -> None:
    refused = AccessRefused("example.org is not allowed")
    assert answers.refusal(refused).startswith(b"HTTP/1.1 403 Forbidden (example.org is not allowed)\r\n")
    assert b"Retry-After" not in answers.refusal(refused)
    assert b"Retry-After: 1" in answers.refusal(answers.failed())


def test_what_to_do_reaches_what_tools_print() -> None:
    words = "a.example:443 waits for approval a1"
    refused = AccessRefused(Verdict("deny", words, hint="carrel approve a1, then try again", approval="a1"))
    words = "a.example:443 waits for approval a1: carrel approve a1, then try again"
    answer = answers.refusal(refused)
    assert answer.startswith(f"HTTP/1.1 403 Forbidden ({words})\r\n".encode()), "what pip, wget, npm and apt show"
    body = json.loads(parsed(answer)[1])
    assert (body["title"], body["detail"]) == ("Forbidden", words), "what uv shows"


def test_a_head_gets_no_body() -> None:
    for data in (answers.refusal(AccessRefused("no"), body=False), answers.page(body=False)):
        assert data.endswith(b"\r\n\r\n")
        assert parsed(data, "HEAD")[1] == b""


def test_the_page_says_what_this_port_is() -> None:
    response, body = parsed(answers.page())
    assert response.status_code == 404
    assert b"carrel" in body and b"refusals" not in body
    told = parsed(answers.page(["a.example:443: it is\r\nnot allowed"]))[1]
    assert told.endswith(b"The last refusals:\n- a.example:443: it is??not allowed\n")


def test_alerts_and_numbers() -> None:
    assert answers.alert(AccessRefused("other name", status=421)) == bytes((21, 3, 3, 0, 2, 2, 112))
    assert answers.alert(AccessRefused("no")) == bytes((21, 3, 3, 0, 2, 2, 49))


@pytest.mark.parametrize(("status", "code"), [(403, 2), (429, 2), (502, 4), (504, 4), (400, 1), (500, 1)])
def test_socks_has_a_number_for_each(status: int, code: int) -> None:
    assert answers.socks_code(AccessRefused("no", status=status)) == code
