"""Calls that a random model is made to write: right in every family's form, by the schema, and only where they must."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.config.settings import EngineSettings
from headrace.core import EngineCore
from headrace.protocol.grammar_text import json_schema_grammar
from headrace.protocol.ipc import GrammarSpec
from headrace.protocol.tools import tool_request
from headrace.text.tool_formats import FORMATS
from headrace.text.tool_grammar import tool_grammar
from headrace.text.tool_parser import Call, Part, ToolParser
from tests.engine_runs import request, run
from tests.scripted_engine import END_OF_SEQUENCE, tokenizer
from tests.tiny_models import tiny_llama

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "unit": {"enum": ["C", "F"]},
        "sure": {"type": "boolean"},
    },
    "required": ["city", "unit", "sure"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
CLOCK: Any = {"type": "function", "function": {"name": "clock", "parameters": NOTHING}}


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> EngineCore:
    model = tiny_llama(tmp_path_factory.mktemp("model"), bundled_tokenizer=True)
    return EngineCore(EngineSettings(model=str(model), dtype="float32", kv_cache_memory_bytes=1 << 24))


def said(core: EngineCore, grammar: GrammarSpec | None, seed: int = 0, liked: str = "") -> str:
    bias = dict.fromkeys(tokenizer().encode(liked, add_special_tokens=False), 50.0) or None
    options = {"max_tokens": 300, "temperature": 1.0, "seed": seed, "stop_token_ids": (END_OF_SEQUENCE,)}
    asked = request("r", [5, 6, 7], grammar=grammar, logit_bias=bias, **options)
    done = run(core, [asked], max_steps=10_000_000)["r", 0]
    assert done.finish_reason == "stop", tokenizer().decode(done.token_ids)
    return tokenizer().decode(done.token_ids)


def read(format: str, text: str) -> list[Part]:
    parser = ToolParser(FORMATS[format], {"weather": SCHEMA, "clock": NOTHING})
    return parser.add(text) + parser.finish()


def is_weather(arguments: str) -> bool:
    value = json.loads(arguments)
    return set(value) == {"city", "unit", "sure"} and value["unit"] in ("C", "F") and len(value["city"]) <= 8


@pytest.mark.parametrize("format", FORMATS)
def test_a_named_call_is_written_and_read_in_every_familys_form(core: EngineCore, format: str) -> None:
    asked = tool_request([WEATHER, CLOCK], {"function": {"name": "weather"}}, None)
    (call,) = read(format, said(core, tool_grammar(asked, FORMATS[format], special_tokens={})))
    assert isinstance(call, Call) and call.name == "weather" and is_weather(call.arguments)


@pytest.mark.parametrize("format", ["hermes", "mistral", "llama3_json"])
def test_required_calls_may_be_several_unless_one_is_asked_for(core: EngineCore, format: str) -> None:
    counts = set()
    for parallel in (True, False):
        asked = tool_request([WEATHER, CLOCK], "required", parallel)
        grammar = tool_grammar(asked, FORMATS[format], special_tokens={})
        for seed in range(3):
            calls = read(format, said(core, grammar, seed))
            assert calls and all(isinstance(call, Call) for call in calls)
            counts.add((parallel, len(calls) > 1))
    assert (True, True) in counts or format == "llama3_json"
    assert (False, True) not in counts


def test_a_mark_that_is_a_token_is_demanded_as_that_token(core: EngineCore) -> None:
    mark = "<|im_start|>"
    token_id = tokenizer().token_id(mark)
    assert token_id is not None
    asked = tool_request([CLOCK], "required", False)
    row = FORMATS["hermes"]
    grammar = tool_grammar(asked, row, special_tokens={"<tool_call>": token_id})
    options = {"max_tokens": 60, "temperature": 1.0, "stop_token_ids": (END_OF_SEQUENCE,)}
    done = run(core, [request("r", [5], grammar=grammar, **options)], max_steps=10_000_000)["r", 0]
    assert done.token_ids[0] == token_id


def test_json_that_is_asked_for_may_come_instead_of_a_call_and_nothing_else(core: EngineCore) -> None:
    answer = json_schema_grammar(SCHEMA, "response_format")
    strict = {"type": "function", "function": {**CLOCK["function"], "strict": True}}
    grammar = tool_grammar(tool_request([strict], "auto", False), FORMATS["hermes"], special_tokens={}, answer=answer)
    assert read("hermes", said(core, grammar, liked="<")) == [Call("clock", "{}")]
    for seed in range(3):
        assert is_weather(said(core, grammar, seed, liked="{"))


def test_a_schema_that_cannot_be_used_is_named_by_its_place(core: EngineCore) -> None:
    wrong: Any = {
        "function": {"name": "wrong", "parameters": {"type": "object", "properties": {"a": {"type": "strin"}}}}
    }
    grammar = tool_grammar(tool_request([CLOCK, wrong], "required", None), FORMATS["hermes"], special_tokens={})
    assert core.add(request("r", [5], grammar=grammar, max_tokens=9)) is None
    core.gate.wait()
    core.step()
    ((_, refusal),) = core.gate.take_refused()
    assert refusal.param == "tools[1].function.parameters.properties.a"
    assert "Invalid type: strin" in refusal.message


def test_nothing_is_demanded_where_the_model_may_choose() -> None:
    row = FORMATS["hermes"]
    assert tool_grammar(tool_request([CLOCK], "auto", None), row, special_tokens={}) is None
    regex = GrammarSpec(kind="regex", text="a+", field="regex")
    assert tool_grammar(tool_request([CLOCK], "auto", None), row, special_tokens={}, answer=regex) == regex
    assert tool_grammar(tool_request([CLOCK], "required", None), row, special_tokens={}, answer=regex) != regex
