"""Structured output over HTTP: every spelling has an effect, and what cannot be done is refused by name.

The model is random, so whatever it says right it says because it must.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serving import Server, running_server
from tests.tiny_models import tiny_llama

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
STRUCTURES = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f>"]}
OK = {"type": "const_string", "value": "ok "}
TAG = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A tiny random Llama with the bundled model's tokenizer."""
    folder = tmp_path_factory.mktemp("structured")
    model = tiny_llama(folder / "model", bundled_tokenizer=True, max_positions=2048)
    flags = ("--model", str(model), "--kv-cache-memory-bytes", "32M", "--max-num-seqs", "32")
    with running_server(folder / "server.log", flags) as server:
        yield server


def answer(server: Server, **fields: Any) -> httpx.Response:
    body = {"prompt": "A dog:", "max_tokens": 300, "temperature": 1.0, "seed": 3, **fields}
    return httpx.post(server.base_url + "/completions", json=body, timeout=60)


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    assert choice["finish_reason"] == "stop", choice
    return str(choice["text"])


def is_animal(text: str) -> bool:
    value = json.loads(text)
    return list(value) == ["name", "age", "kind"] and 0 <= value["age"] <= 120 and value["kind"] in ("cat", "dog")


SPELLINGS: dict[str, tuple[dict[str, Any], Any]] = {
    "response_format json_schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}},
        is_animal,
    ),
    "response_format with schema": ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, is_animal),
    "response_format json_object with schema": (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        is_animal,
    ),
    "response_format structural_tag": (
        {"response_format": {"type": "structural_tag", "format": TAG}},
        lambda text: is_animal(text.removeprefix("<f>").removesuffix("</f>")),
    ),
    "guided_json": ({"guided_json": SCHEMA}, is_animal),
    "guided_json as text": ({"guided_json": json.dumps(SCHEMA)}, is_animal),
    "guided_json with a whitespace pattern": (
        {"guided_json": SCHEMA, "guided_whitespace_pattern": ""},
        lambda text: is_animal(text) and not re.search(r"[{,:]\s|\s[},:]", re.sub(r'"[^"]*"', "", text)),
    ),
    "guided_regex": ({"guided_regex": r"[ab]{3}-\d\d"}, lambda text: re.fullmatch(r"[ab]{3}-\d\d", text)),
    "guided_choice": ({"guided_choice": ["yes", "no", "é…😀"]}, lambda text: text in ("yes", "no", "é…😀")),
    "guided_grammar": (
        {"guided_grammar": 'root ::= ("ab" | "é\\u00e9"){2} [0-9]'},
        lambda text: re.fullmatch("(ab|éé){2}[0-9]", text),
    ),
    "structured_outputs json": ({"structured_outputs": {"json": SCHEMA}}, is_animal),
    "structured_outputs compact": (
        {"structured_outputs": {"json": {"type": "array", "items": {"const": 1}, "minItems": 3, "maxItems": 3},
                                "disable_any_whitespace": True}},
        lambda text: text == "[1,1,1]",
    ),
    "structured_outputs without more properties": (
        {"structured_outputs": {"json": {"properties": {"a": {"const": 1}}, "required": ["a"], "type": "object"},
                                "disable_additional_properties": True}},
        lambda text: json.loads(text) == {"a": 1},
    ),
    "structured_outputs regex": ({"structured_outputs": {"regex": "[xy]{4}"}}, lambda t: re.fullmatch("[xy]{4}", t)),
    "structured_outputs choice": ({"structured_outputs": {"choice": ["on", "off"]}}, {"on", "off"}.__contains__),
    "structured_outputs grammar": (
        {"structured_outputs": {"grammar": 'start: "q" X\nX: /[xyz]{2}/\n'}},
        lambda text: re.fullmatch("q[xyz]{2}", text),
    ),
    "structured_outputs structural_tag": (
        {"structured_outputs": {"structural_tag": json.dumps({"type": "structural_tag", "format": TAG})}},
        lambda text: is_animal(text.removeprefix("<f>").removesuffix("</f>")),
    ),
    "structural_tag": (
        {"structural_tag": {"format": {"type": "sequence", "elements": [OK, TAG]}}},
        lambda text: is_animal(text.removeprefix("ok <f>").removesuffix("</f>")),
    ),
    "json_schema": ({"json_schema": SCHEMA}, is_animal),
    "grammar": ({"grammar": 'root ::= "a" b\nb ::= [0-9]{3}'}, lambda text: re.fullmatch("a[0-9]{3}", text)),
    "regex": ({"regex": "(foo|bar)!"}, {"foo!", "bar!"}.__contains__),
    "ebnf": ({"ebnf": 'root ::= "x" | "y"'}, {"x", "y"}.__contains__),
}  # fmt: skip


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_has_its_effect(small: Server, spelling: str) -> None:
    fields, fits = SPELLINGS[spelling]
    text = text_of(answer(small, **fields))
    assert fits(text), text
