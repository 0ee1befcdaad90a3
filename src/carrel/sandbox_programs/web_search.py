#!/usr/bin/env python3
"""`web-search`: asks the search endpoint that the operator named, and prints the results as text.

It runs in sandboxes, for the template `web-search`. Its requests go through the proxy like all others.
"""

from __future__ import annotations

import argparse
import html
import json
import os
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator

LARGEST_ANSWER = 8 << 20
TIMEOUT_S = 30.0
_LISTS = ("results", "items", "organic_results", "organic", "value", "data", "hits")
_TITLES, _URLS = ("title", "name", "heading"), ("url", "link", "href")
_TEXTS = ("content", "snippet", "description", "text", "abstract", "body")


def endpoint(query: str) -> str:
    """Return the URL that answers a query."""
    template = os.environ.get("WEB_SEARCH_URL", "")
    if "{query}" not in template:
        raise ValueError("no search endpoint is named here: the operator sets CARREL_SEARCH_URL, and the sandbox needs "
                         "the template web-search")  # fmt: skip
    return template.replace("{query}", urllib.parse.quote(query, safe=""))


def fetch(url: str, accept: str) -> tuple[str, str]:
    """Return the type and the text of a page."""
    if not url.startswith(("https://", "http://")):
        raise ValueError(f"{url} is not a URL of the web")
    request = urllib.request.Request(url, headers={"Accept": accept, "User-Agent": "carrel-web-search"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        kind = answer.headers.get_content_type()
        return kind, answer.read(LARGEST_ANSWER).decode(answer.headers.get_content_charset() or "utf-8", "replace")


def plain(text: object) -> str:
    """Return a text of a result or page without markup."""
    without = re.sub(r"(?is)<(script|style|noscript|svg)\b.*?</\1\s*>", " ", str(text))
    without = re.sub(r"(?i)<(br|/p|/div|/li|/h[1-6]|/tr)\b[^>]*>", "\n", without)
    without = html.unescape(re.sub(r"<[^>]*>", " ", without))
    return re.sub(r"\s*\n\s*", "\n", re.sub(r"[ \t\r\f\v\xa0]+", " ", without)).strip()


def results(answer: object) -> Iterator[tuple[str, str, str]]:
    """Yield title, URL and text of each result, from the answers of the usual search services."""
    if isinstance(answer, dict):
        found = next((answer[key] for key in _LISTS if isinstance(answer.get(key), list)), None)
        if found is None:  # some nest the list: {"web": {"results": […]}}
            for value in answer.values():
                if isinstance(value, dict):
                    yield from results(value)
            return
        answer = found
    for each in answer if isinstance(answer, list) else ():
        if isinstance(each, dict):
            title, url, text = (next((each[key] for key in keys if each.get(key)), "")
                                for keys in (_TITLES, _URLS, _TEXTS))  # fmt: skip
            if url:
                yield plain(title), str(url), plain(text)


def main() -> int:
    """Search, or print the text of a page."""
    parser = argparse.ArgumentParser(prog="web-search", description="Search the web; the results are text.")
    parser.add_argument("words", nargs="+", help="what to search for, or with --page the URL of a page")
    parser.add_argument("-n", type=int, default=10, help="most results")
    parser.add_argument("--page", action="store_true", help="print the text of a page instead")
    given = parser.parse_args()
    try:
        if given.page:
            print(plain(fetch(given.words[0], "text/html, text/plain;q=0.9, */*;q=0.1")[1]))
            return 0
        answer = json.loads(fetch(endpoint(" ".join(given.words)), "application/json")[1])
    except urllib.error.HTTPError as error:
        print(f"web-search: the answer is {error.code}: {plain(error.read(4096).decode(errors='replace'))}",
              file=sys.stderr)  # fmt: skip
        return 2
    except (OSError, ValueError) as error:
        print(f"web-search: {error}", file=sys.stderr)
        return 2
    number = 0
    for number, (title, url, text) in enumerate(list(results(answer))[: given.n], start=1):
        print(f"{number}. {title or url}\n   {url}")
        if text:
            print("   " + text.replace("\n", " ")[:1000])
    if number == 0:
        print("nothing was found", file=sys.stderr)
    return 0 if number else 1


if __name__ == "__main__":
    sys.exit(main())
