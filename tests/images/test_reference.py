"""References of images: what Docker reads, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.errors import InvalidRequest
from carrel.images.reference import ImageReference

DIGEST = "sha256:" + "ab" * 32


@pytest.mark.parametrize(
    ("text", "whole", "familiar"),
    [
        ("python", "docker.io/library/python:latest", "python:latest"),
        ("python:3.13-slim", "docker.io/library/python:3.13-slim", "python:3.13-slim"),
        ("team/app", "docker.io/team/app:latest", "team/app:latest"),
        ("index.docker.io/team/app:1", "docker.io/team/app:1", "team/app:1"),
        ("ghcr.io/team/app:1", "ghcr.io/team/app:1", "ghcr.io/team/app:1"),
        ("localhost:5000/app", "localhost:5000/app:latest", "localhost:5000/app:latest"),
        ("localhost/app", "localhost/app:latest", "localhost/app:latest"),
        ("[::1]:5000/a/b__c/d--e:x", "[::1]:5000/a/b__c/d--e:x", "[::1]:5000/a/b__c/d--e:x"),
        (f"python@{DIGEST}", f"docker.io/library/python@{DIGEST}", f"python@{DIGEST}"),
        (f"h.example/a:1@{DIGEST}", f"h.example/a:1@{DIGEST}", f"h.example/a:1@{DIGEST}"),
    ],
)
def test_parses_as_docker_does(text: str, whole: str, familiar: str) -> None:
    reference = ImageReference.parse(text)
    assert (str(reference), reference.familiar) == (whole, familiar)
    assert ImageReference.parse(whole) == reference


@pytest.mark.parametrize(
    "text",
    ["", "/", "a/", "/a", "a//b", "Python", "a b", "a:", "a:-x", "a@", "a@sha256:12", f"a@{DIGEST.upper()}", "a__.b",
     "../a", "a/../b", "http://h.example/a", "h.example:0/a", "h.example:99999/a", "h.example:x/a", "-h.example/a",
     "user@h.example/a", "a\n", "a:b\n", "é", "a" * 600, "x" * 300, "h.example/" + "a/" * 200],
)  # fmt: skip
def test_refuses_others(text: str) -> None:
    with pytest.raises(InvalidRequest):
        ImageReference.parse(text)


@given(st.text(alphabet="aB0./:@-_[]\n%?# é", max_size=30))
def test_whatever_it_reads_it_reads_back(text: str) -> None:
    try:
        reference = ImageReference.parse(text, "r.example")
    except InvalidRequest:
        return
    assert ImageReference.parse(str(reference), "other.example") == reference
    assert not set("\n%?# ") & set(str(reference))
