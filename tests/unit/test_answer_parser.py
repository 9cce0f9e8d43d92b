"""Deltas with their parts: no token and no score is lost on the way, streamed is whole, marks reach the parser."""

from __future__ import annotations

import dataclasses
import itertools
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.protocol.answers import AnswerPart, Delta, ToolCall
from headrace.protocol.ipc import SamplingParams, SequenceOutput
from headrace.protocol.logprobs import ScoredToken, TokenScore
from headrace.protocol.sampling import TextRules
from headrace.text import reasoning, tool_formats
from headrace.text.answer_parser import AnswerParser, Reading
from headrace.text.choice import Choice, joined
from tests.scripted_engine import END_OF_SEQUENCE, tokenizer

THINK, HERMES = reasoning.FORMATS["qwen3"], tool_formats.FORMATS["hermes"]
READING = Reading(reasoning=THINK, is_thinking=True, tools=HERMES, schemas={"f": {}})
CALL = '<tool_call>{"name": "f", "arguments": {"a": "é"}}</tool_call>'


def deltas_of(pieces: list[str], finish_reason: str = "stop") -> list[Delta]:
    """A token for each piece, the last one the end."""
    scores = [ScoredToken(TokenScore(str(at), -1.0, [at % 256]), (), at) for at in range(len(pieces) + 1)]
    told = [Delta(0, text, (at,), (scores[at],)) for at, text in enumerate(pieces)]
    return [*told, Delta(0, "", (len(pieces),), (scores[-1],), finish_reason)]


def parsed(deltas: list[Delta], reading: Reading = READING) -> list[Delta]:
    parser = AnswerParser(reading)
    return [found for delta in deltas if (found := parser.add(delta)) is not None]


def without_ids(parts: tuple[AnswerPart, ...] | None) -> list[AnswerPart]:
    return [dataclasses.replace(part, id="") if isinstance(part, ToolCall) else part for part in parts or ()]


texts = st.lists(
    st.sampled_from(["Hm", "</think>", "\n", CALL, "<tool", "Yes.", "<think>", CALL[:20], "é", " "]), max_size=9
).map("".join)


@settings(max_examples=100, deadline=None)
@given(text=texts, places=st.lists(st.integers(0, 300), max_size=20))
def test_a_stream_is_the_whole_and_every_token_is_told_once(text: str, places: list[int]) -> None:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    streamed = parsed(deltas_of([text[a:b] for a, b in itertools.pairwise(edges)]))
    whole = joined(parsed(deltas_of([text])))
    assert without_ids(joined(streamed).parts) == without_ids(whole.parts)
    assert [token for delta in streamed for token in delta.token_ids] == list(range(len(edges)))
    assert [score.text_offset for delta in streamed for score in delta.tokens or ()] == list(range(len(edges)))
    calls = [part for part in joined(streamed).parts or () if isinstance(part, ToolCall)]
    assert [call.index for call in calls] == list(range(len(calls))) and len({call.id for call in calls}) == len(calls)
    assert all(json.loads(call.arguments) == {"a": "é"} for call in calls)
    reasons = [delta.finish_reason for delta in streamed]
    assert reasons[-1] == ("tool_calls" if calls else "stop") and set(reasons[:-1]) <= {None}


def test_only_a_natural_end_becomes_tool_calls() -> None:
    answer = f"</think>{CALL}"
    assert parsed(deltas_of([answer]))[-1].finish_reason == "tool_calls"
    assert parsed(deltas_of([answer], "length"))[-1].finish_reason == "length"


def test_with_one_call_the_answer_is_over_when_it_is_there() -> None:
    parser = AnswerParser(dataclasses.replace(READING, one_call=True))
    deltas = deltas_of(["Hm</think>", CALL, " and ", CALL])
    found = [parser.add(delta) for delta in deltas[:3]]
    assert parser.is_over
    last = next(delta for delta in found if delta is not None and delta.finish_reason is not None)
    assert last.finish_reason == "tool_calls"


def test_tokens_of_thinking_are_counted_and_thinking_can_be_left_out() -> None:
    pieces = ["Hm", " so", "</think>", "Yes"]
    assert sum(delta.reasoning_tokens for delta in parsed(deltas_of(pieces))) == 3
    quiet = parsed(deltas_of(pieces), dataclasses.replace(READING, tells_reasoning=False))
    assert without_ids(joined(quiet).parts) == without_ids(joined(parsed(deltas_of(["</think>Yes"]))).parts)


def test_marks_that_are_special_tokens_are_text_for_the_parser_and_others_are_not() -> None:
    marked = dataclasses.replace(HERMES, opens=("<|im_start|>",), closes=("<|im_end|>",))
    reading = Reading(tools=marked, schemas={"f": {}})
    kept = reading.kept_token_ids(tokenizer())
    assert {tokenizer().token_text(token_id) for token_id in kept} == {"<|im_start|>", "<|im_end|>"}
    token_ids = tokenizer().encode('<|im_start|>{"name": "f"}<|im_end|><|endoftext|>', add_special_tokens=False)
    output = SequenceOutput(
        request_id="r", index=0, token_ids=[*token_ids, END_OF_SEQUENCE], finish_reason="stop",
        stop_token_id=END_OF_SEQUENCE,
    )  # fmt: skip
    choice = Choice(0, tokenizer(), SamplingParams(max_tokens=99), TextRules(kept_token_ids=kept))
    (call,) = joined(parsed(choice.add(output), reading)).parts or ()
    assert isinstance(call, ToolCall) and (call.name, call.arguments) == ("f", "{}")


def test_mistrals_ids_are_as_its_template_wants_them() -> None:
    for name in ("mistral", "mistral_args"):
        row = tool_formats.FORMATS[name]
        reading = Reading(tools=row, schemas={"f": {}})
        (call,) = joined(parsed(deltas_of([row.written([("f", "{}")])]), reading)).parts or ()
        assert isinstance(call, ToolCall) and len(call.id) == 9 and call.id.isalnum()
