"""The page `/docs`, built from the OpenAPI document. It loads nothing from other hosts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#1f2328;background:#fff}
h1{margin-bottom:0} h2{margin-top:2.5rem;border-bottom:1px solid #d0d7de} code,pre{font:13px ui-monospace,monospace}
details{border:1px solid #d0d7de;border-radius:6px;margin:.5rem 0;padding:.4rem .8rem} summary{cursor:pointer}
.m{display:inline-block;width:4.5rem;font-weight:700} .GET{color:#0969da} .POST{color:#1a7f37} .PUT{color:#9a6700}
.DELETE{color:#cf222e} .s{color:#57606a} table{border-collapse:collapse;margin:.5rem 0}
td,th{border:1px solid #d0d7de;padding:.2rem .6rem;text-align:left;vertical-align:top}
@media(prefers-color-scheme:dark){
body{color:#e6edf3;background:#0d1117} td,th,details,h2{border-color:#30363d} .s{color:#8b949e}}
"""


def page(document: Mapping[str, Any]) -> str:
    return "".join(_parts(document))


def _parts(document: Mapping[str, Any]) -> Iterator[str]:
    info = document["info"]
    yield f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(info['title'])} API</title>"
    yield f"<style>{_STYLE}</style><h1>{escape(info['title'])}</h1><p class=s>API {escape(info['version'])} · "
    yield "<a href=/openapi.json>openapi.json</a></p>"
    yield "".join(f"<p>{escape(text)}</p>" for text in info.get("description", "").split("\n\n"))
    groups: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            tag = (operation.get("tags") or ["other"])[0]
            groups.setdefault(tag, []).append(_operation(method.upper(), path, operation))
    for tag, operations in groups.items():
        yield f"<h2>{escape(tag)}</h2>" + "".join(operations)
    yield "<h2>objects</h2>"
    for name, schema in sorted(document["components"]["schemas"].items()):
        yield f"<details id=o-{escape(name)}><summary><code>{escape(name)}</code> "
        words = schema.get("description", "").split(". ")[0]
        yield f"<span class=s>{escape(words)}</span></summary>{_fields(schema)}</details>"


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> str:
    parts = [f"<details><summary><span class='m {method}'>{method}</span><code>{escape(path)}</code> "]
    parts.append(f"<span class=s>{escape(operation.get('summary', ''))}</span></summary>")
    parts.append(f"<p>{escape(operation.get('description', ''))}</p>")
    parts.append(f"<p class=s>operation id <code>{escape(operation.get('operationId', ''))}</code></p>")
    parameters = operation.get("parameters", [])
    if parameters:
        rows = "".join(
            f"<tr><td><code>{escape(p['name'])}</code><td>{escape(p['in'])}<td>{_kind(p.get('schema', {}))}"
            f"<td>{escape(p.get('description', ''))}"
            for p in parameters
        )
        parts.append(f"<table><tr><th>parameter<th>in<th>type<th>{rows}</table>")
    for kind, body in operation.get("requestBody", {}).get("content", {}).items():
        parts.append(f"<p>body: {_kind(body.get('schema', {}))} <span class=s>{escape(kind)}</span></p>")
    rows = ""
    for status, response in operation.get("responses", {}).items():
        kinds = ", ".join(_kind(c.get("schema", {})) for c in response.get("content", {}).values())
        rows += f"<tr><td>{escape(status)}<td>{kinds}<td>{escape(response.get('description', ''))}"
    return "".join(parts) + f"<table><tr><th>status<th>body<th>{rows}</table></details>"


def _fields(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return f"<p>{escape(', '.join(map(str, schema['enum'])))}</p>"
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code><td>{_kind(field)}<td>{escape(_default(field))}"
        f"<td>{escape(field.get('description', ''))}"
        for name, field in schema.get("properties", {}).items()
    )
    return f"<table><tr><th>field<th>type<th>default<th>{rows}</table>" if rows else ""


def _default(field: Mapping[str, Any]) -> str:
    return str(field["default"]) if field.get("default") is not None else ""


def _kind(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = escape(schema["$ref"].rsplit("/", 1)[-1])
        return f"<a href='#o-{name}'>{name}</a>"
    if "anyOf" in schema:
        return " or ".join(_kind(part) for part in schema["anyOf"] if part.get("type") != "null")
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    if "const" in schema or "enum" in schema:
        return escape(", ".join(map(str, schema.get("enum", [schema.get("const")]))))
    return escape(str(schema.get("format") or schema.get("type", "any")))
