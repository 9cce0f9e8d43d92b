"""The route table for people and programs: /docs, one page that needs nothing from the network, and OpenAPI."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import Protocol

import msgspec

import headrace


class Documented(Protocol):
    @property
    def path(self) -> str: ...

    @property
    def method(self) -> str: ...

    @property
    def summary(self) -> str: ...

    @property
    def body(self) -> tuple[type[msgspec.Struct], ...]: ...


def openapi_document(routes: Sequence[Documented], root_path: str) -> dict[str, object]:
    """An OpenAPI 3.1 document. Its schemas are the very types that requests are read with."""
    types = list(dict.fromkeys(type for route in routes for type in route.body))
    references, schemas = msgspec.json.schema_components(
        types, schema_hook=_any_value, ref_template="#/components/schemas/{name}"
    )
    by_type = dict(zip(types, references, strict=True))
    paths: dict[str, dict[str, object]] = {}
    for route in routes:
        operation: dict[str, object] = {
            "summary": route.summary,
            "operationId": f"{route.method.lower()}{re.sub('[/{}]+', '_', route.path).rstrip('_')}",
            "responses": {
                "200": {"description": "The result"},
                "default": {"description": "What was wrong", "content": _json({"$ref": "#/components/schemas/Error"})},
            },
        }
        if route.body:
            parts = [by_type[type] for type in route.body]
            operation["requestBody"] = {"required": True, "content": _json({"allOf": parts})}
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in re.findall(r"\{(\w+)\}", route.path)
        ]
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Headrace", "version": headrace.__version__},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": {**schemas, "Error": _ERROR_SCHEMA},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _any_value(type: type) -> dict[str, object]:
    """The schema of `object`, the one type that msgspec has none for: anything."""
    return {"description": "any JSON value"}


def _json(schema: object) -> dict[str, object]:
    return {"application/json": {"schema": schema}}


_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error", "message"],
    "properties": {
        "message": {"type": "string"},
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        },
    },
}

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Headrace API</title>
<style>
  :root {{ color-scheme: light dark; }}
  body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem; }}
  table {{ border-collapse: collapse; width: 100%; }}
  th, td {{ text-align: left; padding: .35rem .75rem .35rem 0; border-bottom: 1px solid #8884; vertical-align: top; }}
  code, pre {{ font-family: ui-monospace, monospace; font-size: .9em; }}
  pre {{ padding: .75rem; overflow-x: auto; border: 1px solid #8884; border-radius: .3rem; }}
</style>
<h1>Headrace {version}</h1>
<p>Serving <code>{model}</code>. The machine-readable form of this page is
<a href="{root}/openapi.json">openapi.json</a>.</p>
<pre>curl http://HOST:PORT{root}/v1/chat/completions -H 'Content-Type: application/json' \\
  -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'</pre>
<table>
<tr><th>Method</th><th>Path</th><th>What it does</th></tr>
{rows}
</table>
{fields}
<p>An error is always JSON: <code>{{"error": {{"message", "type", "param", "code"}}, "message"}}</code>.</p>
</html>
"""


def docs_page(routes: Sequence[Documented], model: str, root_path: str) -> str:
    rows = "\n".join(
        f"<tr><td>{route.method}</td><td><code>{html.escape(route.path)}</code></td><td>{html.escape(route.summary)}</td></tr>"
        for route in routes
    )
    fields = "\n".join(_fields(route) for route in routes if route.body)
    name = html.escape(model)
    return _PAGE.format(version=headrace.__version__, model=name, root=html.escape(root_path), rows=rows, fields=fields)


def _fields(route: Documented) -> str:
    names = [field.encode_name for type in route.body for field in msgspec.structs.fields(type)]
    listed = ", ".join(f"<code>{name}</code>" for name in names)
    return f"<h2><code>{html.escape(route.path)}</code></h2>\n<p>Fields: {listed}.</p>"
