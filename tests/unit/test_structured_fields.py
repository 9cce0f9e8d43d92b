"""From a request's fields to the one grammar that they mean."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest

from headrace.config.errors import ConfigError
from headrace.config.json_style import json_style
from headrace.llm import GuidedDecodingParams, SamplingParams, StructuredOutputsParams
from headrace.protocol.errors import ApiError
from headrace.protocol.grammar_text import BLANKS, MAX_SCHEMA_DEPTH
from headrace.protocol.ipc import GrammarSpec
from headrace.protocol.sampling import ModelLimits, SamplingFields, sampling_params
from headrace.protocol.structured_output import JSONStyle, asked_grammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def grammar(**fields: Any) -> GrammarSpec | None:
    return asked_grammar(msgspec.convert(fields, SamplingFields), {})


def schema_in(spec: GrammarSpec | None) -> dict[str, Any]:
    assert spec is not None and spec.kind == "json_schema"
    schema: dict[str, Any] = json.loads(spec.text)
    return schema


def test_every_spelling_of_a_schema_means_the_same() -> None:
    specs = [
        grammar(guided_json=SCHEMA),
        grammar(guided_json=json.dumps(SCHEMA)),
        grammar(json_schema=SCHEMA),
        grammar(structured_outputs={"json": SCHEMA}),
        grammar(structured_outputs={"json": json.dumps(SCHEMA), "_backend": "auto"}),
        grammar(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}),
        grammar(response_format={"type": "json_schema", "schema": SCHEMA}),
        grammar(response_format={"type": "json_object", "schema": SCHEMA}),
    ]
    assert {spec.text for spec in specs if spec is not None} == {specs[0].text if specs[0] else ""}
    assert len({spec.field for spec in specs if spec is not None}) == 5


def test_any_object_and_any_json_are_told_apart() -> None:
    assert schema_in(grammar(response_format={"type": "json_object"}))["type"] == "object"
    assert schema_in(grammar(structured_outputs={"json_object": True}))["type"] == "object"
    assert set(schema_in(grammar(guided_json={}))) == {"x-guidance"}
    assert set(schema_in(grammar(structured_outputs={"json": {}}))) == {"x-guidance"}
    assert set(schema_in(grammar(json_schema=True))) == {"x-guidance"}


def test_a_schema_cannot_loosen_its_own_grammar() -> None:
    spec = grammar(guided_json={**SCHEMA, "x-guidance": {"lenient": True}})
    assert schema_in(spec)["x-guidance"] == {"whitespace_pattern": BLANKS}


def test_blanks_are_as_asked_for() -> None:
    def options(**fields: Any) -> Any:
        return schema_in(grammar(**fields))["x-guidance"]

    assert options(guided_json={}, guided_whitespace_pattern=r"\s?") == {"whitespace_pattern": r"[ \n\t\r]?"}
    assert options(guided_json={}, guided_whitespace_pattern="") == {"whitespace_flexible": False}
    assert options(structured_outputs={"json": {}, "whitespace_pattern": " "}) == {"whitespace_pattern": " "}
    assert options(structured_outputs={"json_object": True, "disable_any_whitespace": True}) == {
        "whitespace_flexible": False
    }


@pytest.mark.parametrize("pattern", [r"[\n\s]{0,3}", r" |\n(?: {0,16}|\t{0,6})", r"\s*", "[ \t]+", r"(\r\n)?"])
def test_a_pattern_of_blanks_matches_what_json_allows_and_nothing_else(pattern: str) -> None:
    spec = grammar(guided_json={}, guided_whitespace_pattern=pattern)
    own = schema_in(spec)["x-guidance"]["whitespace_pattern"]
    for character in map(chr, range(0x3000)):
        assert not re.fullmatch(own, character) or character in " \t\r\n"
    assert re.fullmatch(own, "\r\n" if "r" in pattern else "\n" if "n" in pattern or "s" in pattern else " ")


@pytest.mark.parametrize(
    "pattern", ["X", ".", "[^a]", r"\S", r"\x41", "[ -~]", r"\d", " a", "\u00a0", r"\f", "(?i: )", "[]"]
)
@pytest.mark.parametrize("field", ["guided_whitespace_pattern", "structured_outputs.whitespace_pattern"])
def test_a_pattern_of_more_than_blanks_is_refused(field: str, pattern: str) -> None:
    fields: dict[str, Any] = {"guided_json": {}, "guided_whitespace_pattern": pattern}
    if field.startswith("structured"):
        fields = {"structured_outputs": {"json": {}, "whitespace_pattern": pattern}}
    with pytest.raises(ApiError, match="only blanks") as caught:
        grammar(**fields)
    assert (caught.value.status, caught.value.param) == (400, field)


def test_properties_can_be_closed_everywhere_but_in_data() -> None:
    inner = {"properties": {"properties": {"const": {"properties": {}}}, "open": {"additionalProperties": True}}}
    asked = {"structured_outputs": {"json": {"$defs": {"d": inner}}, "disable_additional_properties": True}}
    closed = schema_in(grammar(**asked))["$defs"]["d"]
    assert closed["additionalProperties"] is False
    assert closed["properties"]["properties"] == {"const": {"properties": {}}}
    assert closed["properties"]["open"] == {"additionalProperties": True}
    assert "additionalProperties" not in closed["properties"]


def test_choices_are_kept_once_and_in_order() -> None:
    spec = grammar(guided_choice=["b", "a", "b", 'q"'])
    assert spec is not None and json.loads(spec.text) == ["b", "a", 'q"']


@pytest.mark.parametrize("depth", [MAX_SCHEMA_DEPTH, 5000])
@pytest.mark.parametrize("where", ["guided_json", "structural_tag", "structured_outputs"])
def test_what_is_nested_too_deeply_is_refused_however_deep(where: str, depth: int) -> None:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"items": value}
    field: dict[str, Any] = {
        "guided_json": value,
        "structural_tag": {"format": value},
        "structured_outputs": {"json": value, "disable_additional_properties": True},
    }
    with pytest.raises(ApiError, match="levels deep") as caught:
        asked_grammar(SamplingFields(**{where: field[where]}), {})
    assert caught.value.status == 400


def test_an_end_token_ends_a_constrained_answer_also_where_it_is_ignored() -> None:
    limits = ModelLimits(max_model_len=100, vocab_size=50, eos_token_ids=(7,))

    def stops(grammar: GrammarSpec | None) -> tuple[int, ...]:
        fields = SamplingFields(ignore_eos=True, stop_token_ids=[9])
        own = {"prompt_tokens": 1, "where": "prompt", "max_tokens": 5, "fresh_seed": lambda: 0}
        return sampling_params(fields, {}, limits, grammar=grammar, **own).stop_token_ids  # type: ignore[arg-type]

    assert stops(None) == (9,)
    assert stops(GrammarSpec(kind="regex", text="a")) == (7, 9)


def test_in_python_it_is_spelled_as_in_vllm() -> None:
    pydantic = pytest.importorskip("pydantic")
    model = pydantic.create_model("Wheel", width=(int, ...))

    def text(**params: Any) -> str:
        spec = asked_grammar(SamplingParams(**params).fields(), {})
        assert spec is not None
        return spec.text

    as_text = text(structured_outputs=StructuredOutputsParams(json=model))
    assert json.loads(as_text)["properties"]["width"]["type"] == "integer"
    assert text(guided_decoding=GuidedDecodingParams(json=model.model_json_schema(), backend="outlines")) == as_text
    assert text(structured_outputs={"json": json.dumps(model.model_json_schema())}) == as_text
    assert text(structured_outputs=StructuredOutputsParams(regex="a+")) == "a+"
    assert text(guided_decoding=GuidedDecodingParams(choice=["x"])) == '["x"]'
    with pytest.raises(ValueError, match="exactly one of"):
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="a", choice=["b"]))
    with pytest.raises(ValueError, match="mean the same"):
        SamplingParams(
            structured_outputs=StructuredOutputsParams(regex="a"), guided_decoding=GuidedDecodingParams(regex="a")
        )
    with pytest.raises(ValueError, match="not JSON"):
        SamplingParams(structured_outputs=StructuredOutputsParams(json="{"))


def test_the_server_may_say_how_json_is_written_and_the_request_says_otherwise() -> None:
    style = JSONStyle.of(compact=True, closed=True)

    def written(**fields: Any) -> tuple[Any, Any]:
        schema = schema_in(asked_grammar(msgspec.convert(fields, SamplingFields), {}, style))
        return schema["x-guidance"], schema.get("additionalProperties")

    compact = {"whitespace_flexible": False}
    format = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    assert written(response_format=format) == written(json_schema=SCHEMA) == (compact, False)
    assert written(guided_json=SCHEMA, guided_whitespace_pattern=" ") == ({"whitespace_pattern": " "}, False)
    own = {"json": SCHEMA, "disable_any_whitespace": False, "disable_additional_properties": False}
    assert written(structured_outputs=own) == ({"whitespace_pattern": BLANKS}, None)
    assert written(structured_outputs={"json": {**SCHEMA, "additionalProperties": True}}) == (compact, True)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"disable_any_whitespaces": True}, "Did you mean disable_any_whitespace?"),
        ({"disable_any_whitespace": 1}, "must be true or false"),
        ({"reasoning_parser": "qwen3"}, "see --reasoning-parser"),
    ],
)
def test_a_key_of_the_configuration_without_effect_is_refused(config: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        json_style(config)
    assert json_style({"backend": "xgrammar", "disable_additional_properties": True}) == (False, True)


EMPTY: list[tuple[str, dict[str, Any], str]] = [
    *((name, {name: ""}, "empty") for name in ("guided_regex", "regex", "guided_grammar", "grammar", "ebnf")),
    ("guided_choice", {"guided_choice": []}, "must have a text that is not empty, but it has none"),
    ("guided_choice", {"guided_choice": ["", ""]}, "but it has only empty ones"),
    ("guided_json", {"guided_json": ""}, "not JSON"),
    ("json_schema", {"json_schema": ""}, "not JSON"),
    ("structural_tag", {"structural_tag": ""}, "not JSON"),
    ("structural_tag", {"structural_tag": {}}, "structures"),
    ("structural_tag", {"structural_tag": {"structures": [], "triggers": []}}, "there are no tags"),
    ("structural_tag", {"structural_tag": {"format": {"type": "regex", "pattern": ""}}}, "`pattern` is empty"),
    ("response_format", {"response_format": {}}, "type"),
    ("structured_outputs", {"structured_outputs": {}}, "exactly one of json, regex"),
    ("structured_outputs", {"structured_outputs": {"json_object": False}}, "exactly one of json, regex"),
    ("structured_outputs", {"structured_outputs": {"disable_any_whitespace": True}}, "exactly one of json, regex"),
    ("structured_outputs.choice", {"structured_outputs": {"choice": []}}, "but it has none"),
    ("structured_outputs.regex", {"structured_outputs": {"regex": ""}}, "is empty"),
    ("structured_outputs.grammar", {"structured_outputs": {"grammar": ""}}, "is empty"),
    ("structured_outputs.json", {"structured_outputs": {"json": ""}}, "not JSON"),
    ("structured_outputs.structural_tag", {"structured_outputs": {"structural_tag": ""}}, "not JSON"),
]


@pytest.mark.parametrize(("field", "sent", "reason"), EMPTY)
def test_an_empty_grammar_is_refused_and_never_means_a_free_answer(
    field: str, sent: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ApiError) as refused:
        grammar(**sent)
    assert refused.value.status == 400
    assert str(refused.value.param).startswith(field)
    assert reason in refused.value.message


def test_every_field_that_asks_for_a_grammar_is_tried_empty() -> None:
    plain = {"guided_whitespace_pattern"}  # says nothing by itself, and is refused alone
    names = {name for name in SamplingFields.__struct_fields__ if name.startswith("guided_")} - plain
    names |= {"response_format", "structured_outputs", "structural_tag", "json_schema", "grammar", "regex", "ebnf"}
    assert {field.partition(".")[0] for field, _, _ in EMPTY} == names
