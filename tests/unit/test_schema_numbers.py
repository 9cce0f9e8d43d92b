"""Numbers of every size in a schema: what a grammar lets through, the schema as it was sent lets through too."""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import llguidance
import msgspec
import pytest

from headrace.protocol.errors import ApiError
from headrace.protocol.grammar_text import json_schema_grammar
from headrace.protocol.json import Body
from headrace.protocol.sampling import SamplingFields
from headrace.protocol.structured_output import asked_grammar
from headrace.protocol.tools import tool_request
from headrace.runtime.grammar_check import Words, _ByteView
from headrace.text.tool_formats import FORMATS
from headrace.text.tool_grammar import tool_grammar

_EDGES = [0, 1, 10**15, 2**53, 2**60, 10**18, 2**62, 2**63, 2**64, 10**20, 10**30]
INTEGERS = sorted({sign * (edge + step) for edge in _EDGES for step in (-1025, -2, -1, 0, 1, 2, 3) for sign in (1, -1)})
FLOATS = [0.1, 0.3, 1.5e-7, 0.30000000000000004, 123456789.12345679, 0.12345678901234568, 1e-300, 5e-324, 1e16, 1e22]
FLOATS += [1.7976931348623157e308, 9007199254740993.5, 1.2345678901234567e18, -1e17, -0.1, 2.5]


@pytest.fixture(scope="module")
def compiled() -> Callable[[str], Any]:
    words = Words([bytes([i]) for i in range(256)] + [b"<end>"], [256], [256])
    view: Any = _ByteView(words)
    tokenizer = llguidance.LLTokenizer(view, n_vocab=257, eos_token=[256])

    def compile(text: str) -> Any:
        return llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_json_schema(text), log_level=0)

    return compile


def accepts(matcher: Any, text: str) -> bool:
    own = matcher.deep_copy()
    return bool(own.try_consume_tokens(list(text.encode())) == len(text) and own.is_accepting())


def plain(number: int | float) -> str:
    return format(Decimal(repr(number)), "f").removesuffix(".0")


@pytest.mark.parametrize("wrap", ["const", "enum", "nested"])
def test_a_constant_is_written_as_it_was_sent_or_refused_with_its_path(
    compiled: Callable[[str], Any], wrap: str
) -> None:
    kept = []
    refused = set()
    for number in [*INTEGERS, *FLOATS]:
        schema, before, after, path = {
            "const": ({"const": number}, "", "", "f.const"),
            "enum": ({"enum": ["a", number]}, "", "", "f.enum[1]"),
            "nested": (
                {"properties": {"a": {"const": {"b": [number]}}}, "required": ["a"], "additionalProperties": False},
                '{"a":{"b":[',
                "]}}",
                "f.properties.a.const.b[0]",
            ),
        }[wrap]
        try:
            text = json_schema_grammar(schema, "f", blanks="").text
        except ApiError as error:
            refused.add((error.status, error.param == path))
            continue
        matcher = compiled(text)
        assert not matcher.is_error(), number
        assert accepts(matcher, before + plain(number) + after), number
        for other in (number - 1, number + 1, float(number) * (1 + 2**-52)):
            if other != number:
                assert not accepts(matcher, before + plain(other) + after), (number, other)
        kept.append(number)
    assert refused == {(400, True)}
    assert {0, 1, -1, 2**53, 2**53 - 1, -(2**53), 2**53 + 2, 2**60, 0.1, 0.3, 1.5e-7, 2.5} <= set(kept)
    assert not {2**53 + 1, 2**63, -(2**63), 2**64 + 1, 123456789.12345679} & set(kept)


@pytest.mark.parametrize("kind", ["integer", "number", None])
@pytest.mark.parametrize("keyword", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
def test_nothing_beyond_a_limit_is_let_through(compiled: Callable[[str], Any], keyword: str, kind: str | None) -> None:
    inside = {
        "minimum": lambda value, limit: value >= limit,
        "maximum": lambda value, limit: value <= limit,
        "exclusiveMinimum": lambda value, limit: value > limit,
        "exclusiveMaximum": lambda value, limit: value < limit,
    }[keyword]
    is_low = keyword.lower().endswith("minimum")
    refused = set()
    for limit in [*INTEGERS, *FLOATS]:
        typed = {keyword: limit} if kind is None else {"type": kind, keyword: limit}
        for schema in (typed, {**typed, ("maximum" if is_low else "minimum"): 5}):
            try:
                matcher = compiled(json_schema_grammar(schema, "f", blanks="").text)
            except ApiError as error:
                refused.add((error.status, (error.param or "")[:2]))
                continue
            if matcher.is_error():
                continue
            near = [limit + step for step in (-2000, -1025, -2, -1, 0, 1, 2, 1025, 2000)]
            for value in [*near, -(2**63), 2**63, 0, 3, 7]:
                if accepts(matcher, plain(value)):
                    assert inside(Decimal(repr(value)), Decimal(repr(limit))), (schema, value)
    assert refused == {(400, "f.")}


def test_limits_of_64_bits_leave_nearly_all_of_them(compiled: Callable[[str], Any]) -> None:
    for low, high in ((-(2**63), 2**63 - 1), (0, 2**64 - 1), (-(2**63), None), (None, 2**63 - 1)):
        limits = {name: value for name, value in (("minimum", low), ("maximum", high)) if value is not None}
        matcher = compiled(json_schema_grammar({"type": "integer", **limits}, "f", blanks="").text)
        assert accepts(matcher, str(2**63 - 1024)) and accepts(matcher, "7")
        assert accepts(matcher, str(-(2**63) + 1024)) == (low != 0)
    matcher = compiled(
        json_schema_grammar({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 3}, "f", blanks="").text
    )
    assert [n for n in range(2**53 - 3, 2**53 + 9) if accepts(matcher, str(n))] == [2**53 + 2]


def test_limits_that_leave_no_number_this_server_keeps_are_refused() -> None:
    for limits in ({"minimum": 2**53 + 1, "maximum": 2**53 + 1}, {"exclusiveMinimum": 2**60, "maximum": 2**60 + 5}):
        with pytest.raises(ApiError, match="up to the last digit") as caught:
            json_schema_grammar({"properties": {"a": {"type": "integer", **limits}}}, "f")
        assert (caught.value.param or "").startswith("f.properties.a.")


@pytest.mark.parametrize("number", ["0.1234567890123456789", "1.00000000000000000001", "9007199254740993.0", "1e-400"])
@pytest.mark.parametrize("keyword", ["const", "minimum", "exclusiveMaximum", "multipleOf", "enum"])
def test_a_number_with_more_digits_than_are_read_is_refused_in_every_field(keyword: str, number: str) -> None:
    value = f"[{number}]" if keyword == "enum" else number
    schema = f'{{"properties": {{"a": {{"{keyword}": {value}}}}}}}'
    path = f"properties.a.{keyword}" + ("[0]" if keyword == "enum" else "")
    for field, raw in (
        ("guided_json", schema),
        ("structured_outputs.json", f'{{"json": {schema}}}'),
        ("response_format.json_schema.schema", f'{{"json_schema": {{"schema": {schema}}}}}'),
        ("tools[0].function.parameters", f'[{{"function": {{"parameters": {schema}}}}}]'),
        ("tools[0].input_schema", f'[{{"input_schema": {schema}}}]'),
    ):
        top = field.partition(".")[0].partition("[")[0]
        with pytest.raises(ApiError) as caught:
            Body(f'{{"model": "m", "{top}": {raw}}}'.encode())
        assert (caught.value.status, caught.value.param) == (400, f"{field}.{path}")
    with pytest.raises(ApiError) as caught:
        asked_grammar(SamplingFields(guided_json=schema), {})
    assert caught.value.param == f"guided_json.{path}"


def test_long_numbers_elsewhere_are_nobodys_business() -> None:
    described = {"description": "0.1234567890123456789", "default": 1, "examples": [2**53 + 1]}
    assert json_schema_grammar(described, "f")
    assert Body(b'{"guided_json": {"default": 0.1234567890123456789}, "seed": 1}')
    assert Body(b'{"guided_json": {"maximum": 1.7976931348623157E+308, "const": 0.30000000000000004}}')


@pytest.mark.parametrize("keyword", ["const", "enum"])
def test_a_forced_call_has_the_same_rules(keyword: str) -> None:
    def spec(number: int) -> Any:
        value: Any = [number] if keyword == "enum" else number
        parameters = {"type": "object", "properties": {"id": {keyword: value}}}
        tools: Any = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        return tool_grammar(tool_request(tools, "required", None), next(iter(FORMATS.values())), special_tokens={})

    assert str(2**53 - 1) in spec(2**53 - 1).text
    with pytest.raises(ApiError) as caught:
        spec(1234567890123456789)
    assert (caught.value.param or "").startswith(f"tools[0].function.parameters.properties.id.{keyword}")


def test_a_body_of_any_depth_is_read_or_refused() -> None:
    deep = b'{"guided_json": ' + b'{"const": ' * 3000 + b"0.1234567890123456789" + b"}" * 3001
    with pytest.raises(ApiError):
        Body(deep)
    assert json.loads(msgspec.json.encode({"a": 2**70})) == {"a": 2**70}
