"""Structured output over HTTP: every spelling has an effect, and what cannot be done is refused by name.

The model is random, so whatever it says right it says because it must.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from tests.serving import Server, health_status, running_server
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


def refused(server: Server, **fields: Any) -> dict[str, Any]:
    response = answer(server, **fields)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error["type"] == "invalid_request_error" and error["message"] == response.json()["message"]
    return error


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "`guided_json` and `guided_regex` each say"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "regex", "send one of them"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "it has `json` and `regex`"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs", "it has none"),
        ({"structured_outputs": {"jason": {}}}, "structured_outputs", "jason"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice", "Expected `array"),
        ({"response_format": {"type": "json_shema"}}, "response_format.type", "Did you mean `json_schema`?"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "is missing"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema", "has no effect"),
        ({"response_format": {"type": "json_object", "shema": {}}}, "response_format", "shema"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "only together with `guided_json`"),
        ({"guided_json": "{"}, "guided_json", "not JSON"),
        ({"guided_json": False}, "guided_json", "no JSON satisfies"),
        ({"guided_choice": [""]}, "guided_choice", "not empty"),
        ({"guided_json": json.loads(100 * '{"items":' + "{}" + 100 * "}")}, "guided_json", "levels deep"),
        ({"guided_regex": "a" * 1_100_000}, "guided_regex", "at most 1,048,576"),
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        ({"guided_grammar": "root ::= x"}, "guided_grammar", "Rule 'x' not found"),
        ({"ebnf": "nothing"}, "ebnf", "cannot be used"),
        ({"structural_tag": {"structures": [], "triggers": ["<"]}}, "structural_tag", "no tags"),
        ({"structural_tag": {"format": {"type": "sekwence"}}}, "structural_tag.format.type", "sekwence"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {
                "properties": {"a": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}}}}}},
            "response_format.json_schema.schema.properties.a.uniqueItems",
            "the keyword `uniqueItems` of JSON Schema cannot be enforced",
        ),
        (
            {"structured_outputs": {"json": {"properties": {"when": {"type": "string", "format": "stardate"}}}}},
            "structured_outputs.json.properties.when",
            "Unknown format: stardate",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_with_the_place(
    small: Server, fields: dict[str, Any], param: str, said: str
) -> None:
    error = refused(small, **fields)
    assert error["param"] == param
    assert said in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"response_format": None, "guided_json": None, "regex": None, "structured_outputs": None},
        {"guided_decoding_backend": "outlines"},
    ],
)
def test_what_asks_for_nothing_changes_nothing(small: Server, fields: dict[str, Any]) -> None:
    own = {"temperature": 0, "max_tokens": 8, "return_token_ids": True}
    plain, asked = answer(small, **own).json(), answer(small, **own, **fields).json()
    assert plain["choices"][0]["token_ids"] == asked["choices"][0]["token_ids"]


def test_many_answers_each_match(small: Server) -> None:
    response = answer(small, guided_json=SCHEMA, n=4, seed=11)
    texts = [choice["text"] for choice in response.json()["choices"]]
    assert len(set(texts)) == 4 and all(is_animal(text) for text in texts)


def test_a_dead_end_is_an_error_of_its_request_and_in_its_stream(small: Server) -> None:
    fields = {"guided_regex": "[0-9]{3}x", "allowed_token_ids": list(range(40, 50))}
    error = refused(small, **fields)
    assert error["code"] == "grammar_dead_end"
    assert "The grammar allows nothing more" in error["message"]
    client = openai.OpenAI(base_url=small.base_url, api_key="-", max_retries=0)
    with pytest.raises(openai.APIError, match="The grammar allows nothing more"):
        for _ in client.completions.create(model="", prompt="A", max_tokens=20, stream=True, extra_body=fields):
            pass


def test_log_probabilities_and_stop_strings_go_with_a_grammar(small: Server) -> None:
    response = answer(small, guided_regex="[a-c]{3}-[a-c]{3}", logprobs=2)
    [choice] = response.json()["choices"]
    assert re.fullmatch("[a-c]{3}-[a-c]{3}", choice["text"])
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    [choice] = answer(small, guided_regex="[a-c]{3}-[a-c]{3}", stop="-").json()["choices"]
    assert re.fullmatch("[a-c]{3}", choice["text"]) and choice["finish_reason"] == "stop"


def test_what_max_tokens_cuts_is_the_beginning_of_something_right(small: Server) -> None:
    [choice] = answer(small, guided_json=SCHEMA, max_tokens=4).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["text"].startswith("{")


class Wheel(BaseModel):
    """What the SDK turns into a schema: nested models, an enumeration, a union, a bounded list."""

    class Paddle(BaseModel):
        material: Literal["oak", "steel"]
        width: int = Field(ge=1, le=99)

    name: str = Field(max_length=10)
    paddles: list[Paddle] = Field(min_length=1, max_length=3)
    note: Literal["none"] | int | None = None


QUESTION: list[Any] = [{"role": "user", "content": "Describe a water wheel."}]


def test_the_openai_sdk_parses_the_answer_into_a_model(small: Server) -> None:
    client = openai.OpenAI(base_url=small.base_url, api_key="-", max_retries=0)
    answer = client.chat.completions.parse(
        model="", messages=QUESTION, response_format=Wheel, max_tokens=400, temperature=1.0, seed=5
    )
    wheel = answer.choices[0].message.parsed
    assert isinstance(wheel, Wheel) and 1 <= len(wheel.paddles) <= 3
    assert answer.choices[0].finish_reason == "stop"


def test_the_openai_sdk_streams_a_model(small: Server) -> None:
    client = openai.OpenAI(base_url=small.base_url, api_key="-", max_retries=0)
    with client.chat.completions.stream(
        model="", messages=QUESTION, response_format=Wheel, max_tokens=400, temperature=1.0, seed=6
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"content.delta", "content.done", "chunk"} <= kinds
    assert isinstance(final.choices[0].message.parsed, Wheel)


def test_a_stream_says_what_the_whole_answer_says(small: Server) -> None:
    client = openai.OpenAI(base_url=small.base_url, api_key="-", max_retries=0)
    body: dict[str, Any] = {"guided_json": SCHEMA}
    own: dict[str, Any] = {"model": "", "messages": QUESTION, "max_tokens": 300, "seed": 8, "extra_body": body}
    whole = client.chat.completions.create(**own).choices[0].message.content
    pieces = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**own, stream=True)]
    assert "".join(pieces) == whole and len(pieces) > 5
    assert whole is not None and is_animal(whole)


def test_a_hostile_grammar_costs_the_others_nothing(small: Server) -> None:
    """What each of these may take of the processor is bounded, and it is taken beside the steps."""
    hostile: list[dict[str, Any]] = [
        {"guided_json": {"type": "object", "properties": {f"a{i}": {"type": "string"} for i in range(3000)}}},
        {"guided_json": {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {"const": j}}} for j in range(6)]}
                                   for i in range(6)]}},
        {"guided_grammar": "root ::= " + " | ".join(f"r{i}" for i in range(900))
                           + "".join(f"\nr{i} ::= [a-z]*" for i in range(900))},
        {"guided_grammar": "root ::= " + 5000 * "(" + '"a"'},
    ]  # fmt: skip
    with ThreadPoolExecutor(8) as threads:
        running = [threads.submit(answer, small, temperature=0, max_tokens=150, ignore_eos=True) for _ in range(2)]
        bad = [threads.submit(answer, small, **fields) for fields in hostile]
        assert [future.result().status_code for future in bad] == [400] * len(hostile)
        texts = {future.result().json()["choices"][0]["text"] for future in running}
    assert len(texts) == 1
    assert texts == {answer(small, temperature=0, max_tokens=150, ignore_eos=True).json()["choices"][0]["text"]}
    assert health_status(small.url) == 200
