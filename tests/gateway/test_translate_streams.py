"""Streams from one dialect into another: nothing lost, nothing invented, however the bytes come."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.protocol.errors import ApiError
from headrace.protocol.translate.events import Answer, Block, Dialect, Stop, Usage
from headrace.protocol.translate.exchange import Outgoing
from headrace.protocol.translate.translator import (
    _READ_WHOLE,
    _WRITE_WHOLE,
    StreamTranslator,
    translate_answer,
)
from headrace.protocol.translate.wire import Json
from tests.gateway.answers import answers, chat_stream, chunk, cut, exchange, objects, upstream_bytes

DIALECTS: tuple[Dialect, ...] = ("chat", "messages", "responses")
PAIRS = [pair for pair in itertools.product(DIALECTS, DIALECTS) if pair[0] != pair[1]]

pairs = st.sampled_from(PAIRS)
places = st.lists(st.integers(0, 10_000), max_size=12)


def translated(client: Dialect, upstream: Dialect, *pieces: bytes) -> tuple[list[Outgoing], StreamTranslator]:
    stream = StreamTranslator(exchange(client, upstream))
    sent = [outgoing for piece in pieces for outgoing in stream.feed(piece)]
    return sent + stream.finish(), stream


def data(sent: list[Outgoing]) -> list[Json]:
    return [dict(outgoing.data) for outgoing in sent if outgoing.data is not None]


@settings(max_examples=80, deadline=None)
@given(answers(), pairs, places)
def test_any_cut_of_the_bytes_gives_the_same_events(answer: Answer, pair: tuple[Dialect, Dialect], cuts: list[int]):
    upstream, client = pair
    stream = upstream_bytes(answer, upstream)
    whole, _ = translated(client, upstream, stream)
    assert translated(client, upstream, *cut(stream, cuts))[0] == whole
    assert translated(client, upstream, stream.replace(b"\n", b"\r\n"))[0] == whole


@settings(max_examples=80, deadline=None)
@given(answers(), pairs)
def test_streamed_is_what_the_whole_answer_is(answer: Answer, pair: tuple[Dialect, Dialect]):
    """The client's stream, put together again by another translator, against the translated whole answer."""
    upstream, client = pair
    sent, stream = translated(client, upstream, upstream_bytes(answer, upstream))
    body = json.dumps(_WRITE_WHOLE[upstream](answer, exchange(upstream, upstream))).encode()
    whole = translate_answer(body, exchange(client, upstream))
    again = StreamTranslator(exchange("responses", client))
    events = [*again.feed(b"".join(outgoing.encode() for outgoing in sent)), *again.finish()]
    from_stream = data(events)[-1]["response"]
    from_whole = _WRITE_WHOLE["responses"](_READ_WHOLE[client](whole.body, "req-1"), exchange("responses", client))
    assert normal(from_stream) == normal(from_whole)
    assert stream.usage == whole.usage == answer.usage


def normal(response: Json) -> Json:
    """Arguments as values: white space in their JSON is no part of a call. Ids as far as they are told."""
    output = [
        {**item, "arguments": json.loads(item["arguments"])} if "arguments" in item else item
        for item in response["output"]
    ]
    return {**response, "output": output, "id": "", "created_at": 0}


@settings(max_examples=80, deadline=None)
@given(answers(), pairs)
def test_there_and_back_again_is_the_same_answer(answer: Answer, pair: tuple[Dialect, Dialect]):
    """What both dialects can say survives the way through the other."""
    first, second = pair
    there = StreamTranslator(exchange(second, first))
    middle = [*there.feed(upstream_bytes(answer, first)), *there.finish()]
    body = json.dumps(_WRITE_WHOLE[second](answer, exchange(second, second))).encode()
    back = _READ_WHOLE[first](translate_answer(body, exchange(first, second)).body, "r")
    assert [comparable(block) for block in back.blocks] == [comparable(block) for block in answer.blocks]
    assert back.stop == answer.stop
    assert back.usage == answer.usage
    assert middle[-1].data is None or there.error is None


def comparable(block: object) -> tuple[object, ...]:
    kind, text = getattr(block, "kind"), getattr(block, "text")  # noqa: B009
    return kind, json.loads(text) if kind == "call" else text, getattr(block, "name")  # noqa: B009


@settings(max_examples=100, deadline=None)
@given(answers(), pairs, st.floats(0, 1, exclude_max=True))
def test_a_stream_cut_anywhere_never_looks_finished(answer: Answer, pair: tuple[Dialect, Dialect], share: float):
    upstream, client = pair
    stream = upstream_bytes(answer, upstream)
    sent, state = translated(client, upstream, stream[: int(len(stream) * share)])
    assert state.is_done
    full = translated(client, upstream, stream)[0]
    if state.error is None:  # Only usage or the closing formality was lost.
        assert spoken(sent, client) == spoken(full, client)
        return
    assert state.error.code == "upstream_stream_truncated"
    last = sent[-1].data
    assert last is not None
    match client:
        case "chat":
            assert last["error"]["code"] == "upstream_stream_truncated"
            assert all(outgoing.data is not None for outgoing in sent)
        case "messages":
            assert (last["type"], last["error"]["type"]) == ("error", "api_error")
        case "responses":
            assert last["type"] == "response.failed"
            assert last["response"]["error"]["code"] == "server_error"
            assert sent[0].data is not None and sent[0].data["type"] == "response.created"
    assert sent[:-1] == full[: len(sent) - 1] or sent[0].data != full[0].data


def spoken(sent: list[Outgoing], client: Dialect) -> list[Json]:
    """The output of the client's stream, as a responses answer has it."""
    again = StreamTranslator(exchange("responses", client))
    output: list[Json] = data(again.feed(b"".join(outgoing.encode() for outgoing in sent)))[-1]["response"]["output"]
    return output


# several tool calls at once


@settings(max_examples=50, deadline=None)
@given(st.lists(objects, min_size=1, max_size=4), st.integers(0, 10**9), st.sampled_from(["messages", "responses"]))
def test_interleaved_calls_are_told_one_after_the_other(arguments: list[Json], seed: int, client: Dialect):
    size = 1 + seed % 7
    whole = [json.dumps(value) for value in arguments]
    pieces = [[text[at : at + size] for at in range(0, len(text), size)] for text in whole]
    chunks = [chunk({"role": "assistant"})]
    order = [index for index, text in enumerate(pieces) for _ in text]
    random.Random(seed).shuffle(order)
    named: set[int] = set()
    for index in order:
        call: Json = {"index": index, "function": {"arguments": pieces[index].pop(0)}}
        if index not in named:
            named.add(index)
            call |= {"id": f"call_{index}", "type": "function"}
            call["function"]["name"] = f"f{index}"
        chunks.append(chunk({"tool_calls": [call]}))
    chunks.append(chunk({}, "tool_calls"))
    sent, state = translated(client, "chat", chat_stream(chunks))
    assert state.error is None
    calls = assembled_calls(data(sent), client)
    assert calls == {f"call_{index}": (f"f{index}", value) for index, value in enumerate(arguments)}


def assembled_calls(events: list[Json], client: Dialect) -> dict[str, tuple[str, Json]]:
    """Put together as a client would; asserts that no two blocks are open at once and indexes rise by one."""
    calls: dict[str, tuple[str, Json]] = {}
    open_index: int | None = None
    told, last = "", -1
    opened: Json = {}
    index_name = "index" if client == "messages" else "output_index"
    starts = ("content_block_start", "response.output_item.added")
    deltas = ("content_block_delta", "response.function_call_arguments.delta")
    ends = ("content_block_stop", "response.output_item.done")
    for event in events:
        if event["type"] in starts:
            assert open_index is None and event[index_name] == last + 1
            open_index = last = event[index_name]
            opened, told = event.get("content_block") or event["item"], ""
        elif event["type"] in deltas:
            assert event[index_name] == open_index
            told += event["delta"]["partial_json"] if client == "messages" else event["delta"]
        elif event["type"] in ends:
            assert event[index_name] == open_index
            open_index = None
            calls[opened.get("call_id") or opened["id"]] = (opened["name"], json.loads(told))
    assert open_index is None
    return calls


@pytest.mark.parametrize("client", ["messages", "responses"])
def test_a_call_without_arguments_is_an_empty_object(client: Dialect):
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "now", "arguments": ""}}
    sent, _ = translated(client, "chat", chat_stream([chunk({"tool_calls": [call]}), chunk({}, "tool_calls")]))
    assert assembled_calls(data(sent), client) == {"c": ("now", {})}


def test_calls_without_index_or_with_the_same_index_are_different_calls():
    first = {"id": "a", "function": {"name": "f", "arguments": "{}"}}
    second = {"id": "b", "function": {"name": "g", "arguments": '{"x": 1}'}}
    for extra in ({}, {"index": 0}):
        chunks = [chunk({"tool_calls": [{**call, **extra}]}) for call in (first, second)]
        sent, _ = translated("messages", "chat", chat_stream([*chunks, chunk({}, "tool_calls")]))
        assert assembled_calls(data(sent), "messages") == {"a": ("f", {}), "b": ("g", {"x": 1})}


def test_text_between_the_pieces_of_a_call_waits_for_the_call():
    chunks = [
        chunk({"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": '{"x"'}}]}),
        chunk({"content": "By the way."}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]}),
        chunk({"content": " Yes."}, "tool_calls"),
    ]
    sent, _ = translated("messages", "chat", chat_stream(chunks))
    deltas = [event["delta"] for event in data(sent) if event["type"] == "content_block_delta"]
    assert "".join(delta.get("partial_json", "") for delta in deltas) == '{"x": 1}'
    assert "".join(delta.get("text", "") for delta in deltas) == "By the way. Yes."
    assert [event["index"] for event in data(sent) if event["type"] == "content_block_stop"] == [0, 1]


# how an answer ends


@pytest.mark.parametrize(
    ("reason", "stop_reason"),
    [("stop", "end_turn"), ("length", "max_tokens"), ("content_filter", "refusal"), ("eos", "end_turn")],
)
def test_finish_reasons_become_stop_reasons(reason: str, stop_reason: str):
    sent, _ = translated("messages", "chat", chat_stream([chunk({"content": "x"}), chunk({}, reason)]))
    assert data(sent)[-2]["delta"]["stop_reason"] == stop_reason


def test_a_named_stop_string_survives():
    last = chunk({}, "stop")
    last["choices"][0]["stop_reason"] = "END"
    sent, _ = translated("messages", "chat", chat_stream([chunk({"content": "x"}), last]))
    assert data(sent)[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "END"}


def test_a_forced_call_that_ends_in_stop_still_asks_for_the_tool():
    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}
    sent, _ = translated("messages", "chat", chat_stream([chunk({"tool_calls": [call]}), chunk({}, "stop")]))
    assert data(sent)[-2]["delta"]["stop_reason"] == "tool_use"


def test_an_answer_cut_by_a_limit_is_incomplete_for_a_responses_client():
    sent, _ = translated("responses", "chat", chat_stream([chunk({"content": "x"}), chunk({}, "length")]))
    assert data(sent)[-1]["type"] == "response.incomplete"
    assert data(sent)[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


def test_the_end_may_lack_done():
    stream = chat_stream([chunk({"content": "x"}), chunk({}, "stop")])
    whole = translated("messages", "chat", stream)[0]
    assert translated("messages", "chat", stream.removesuffix(b"data: [DONE]\n\n"))[0] == whole


def test_done_without_a_finish_reason_is_a_cut():
    _, state = translated("messages", "chat", chat_stream([chunk({"content": "x"})]))
    assert state.error is not None and state.error.code == "upstream_stream_truncated"


@pytest.mark.parametrize(
    "event",
    [
        {"error": {"message": "CUDA out of memory", "type": "server_error", "code": 500}},
        {"object": "error", "message": "CUDA out of memory", "type": "InternalServerError", "code": 500},
        {"error": "CUDA out of memory"},
    ],
)
@pytest.mark.parametrize("client", DIALECTS)
def test_an_error_in_the_stream_is_the_clients_error(client: Dialect, event: Json):
    sent, state = translated(
        client, "chat", chat_stream([chunk({"content": "Good"}), event, chunk({"content": "bye"})])
    )
    assert state.error is not None and (state.error.status, state.error.message) == (502, "CUDA out of memory")
    last = data(sent)[-1]
    error = last["response"]["error"] if client == "responses" else last["error"]
    assert error["message"] == "CUDA out of memory"
    assert "bye" not in json.dumps(data(sent))


def test_what_came_in_one_event_with_a_failure_is_told_before_it():
    call = {"index": 0, "id": "c", "function": {"arguments": "{}"}}
    nameless = chunk({"content": "So:", "tool_calls": [call]}, "tool_calls")
    sent, state = translated("chat", "chat", chat_stream([nameless]))
    assert state.error is not None and state.error.code == "upstream_invalid_response"
    assert [event["choices"][0]["delta"].get("content") for event in data(sent)[:-1]] == ["", "So:"]


def test_an_overload_of_anthropics_is_an_overload():
    stream = b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}\n\n'
    _, state = translated("chat", "messages", stream)
    assert state.error is not None and (state.error.status, state.has_content) == (503, False)


def test_html_is_no_stream():
    _, state = translated("messages", "chat", b"<html>Bad gateway</html>")
    assert state.error is not None and state.error.code == "upstream_stream_truncated"
    _, state = translated("messages", "chat", b"data: <html>\n\n")
    assert state.error is not None and state.error.code == "upstream_invalid_response"


def test_content_is_what_holds_back_ends_with():
    stream = StreamTranslator(exchange("messages", "chat"))
    stream.feed(chat_stream([chunk({"role": "assistant", "content": ""})])[:-14])
    assert not stream.has_content
    stream.feed(b"data: " + json.dumps(chunk({"content": "x"})).encode() + b"\n\n")
    assert stream.has_content


def test_failing_from_outside_ends_the_stream_once():
    stream = StreamTranslator(exchange("responses", "chat"))
    first = data(stream.fail(ApiError(504, "Too slow.", code="upstream_timeout_idle")))
    assert [event["type"] for event in first] == ["response.created", "response.in_progress", "response.failed"]
    assert stream.fail(ApiError(500, "again")) == stream.feed(b"data: {}\n\n") == stream.finish() == []


def test_a_whole_answer_can_feed_a_stream():
    """Some upstreams answer a request for a stream with one JSON body."""
    message = {"role": "assistant", "content": "Hi"}
    body = {"id": "x", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    stream = StreamTranslator(exchange("messages", "chat"))
    sent = stream.feed_answer(json.dumps(body).encode())
    assert [event["type"] for event in data(sent)][-1] == "message_stop"
    assert stream.is_done and stream.usage == Usage(input_tokens=0, output_tokens=1, estimated=True)


# usage


def test_usage_missing_is_estimated_and_marked():
    stream = StreamTranslator(exchange("chat", "chat", prompt_tokens=7))
    sent = stream.feed(chat_stream([chunk({"content": "x" * 36}), chunk({}, "stop")]))
    assert stream.usage == Usage(input_tokens=7, output_tokens=10, estimated=True)
    assert data(sent)[-1]["usage"]["total_tokens"] == 17


def test_usage_of_a_broken_stream_is_what_was_generated_and_not_what_its_start_said():
    blocks = (Block("text", "x" * 360),)
    usage = Usage(input_tokens=50, output_tokens=1)
    answer = Answer(id="1", model="m", created_s=None, blocks=blocks, stop=Stop("stop"), usage=usage)
    told = upstream_bytes(answer, "messages")
    stream = StreamTranslator(exchange("chat", "messages"))
    stream.feed(told[: told.index(b"content_block_stop")])
    assert stream.usage == Usage(input_tokens=50, output_tokens=100, estimated=True)
    stream.finish()
    assert stream.error is not None and stream.usage.output_tokens == 100


def test_the_usage_chunk_comes_only_when_asked_for():
    usage = {**chunk({}), "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}
    for asked in (True, False):
        stream = StreamTranslator(exchange("chat", "chat", wants_usage=asked))
        sent = data(stream.feed(chat_stream([chunk({"content": "x"}), chunk({}, "stop"), usage])))
        assert [event for event in sent if not event["choices"]] == ([sent[-1]] if asked else [])
        assert all(("usage" in event) == asked for event in sent)


def test_cached_tokens_are_in_openais_prompt_and_beside_anthropics_input():
    usage = {"prompt_tokens": 100, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 64}}
    sent, state = translated(
        "messages", "chat", chat_stream([chunk({"content": "x"}), {**chunk({}, "stop"), "usage": usage}])
    )
    final = data(sent)[-2]["usage"]
    assert (final["input_tokens"], final["cache_read_input_tokens"], final["output_tokens"]) == (36, 64, 5)
    assert state.usage.input_tokens == 100


# what only some dialects have


def test_a_signature_goes_through_responses_and_comes_back():
    blocks = (Block("thinking", "hm", signature="sig=="),)
    answer = Answer(id="1", model="m", created_s=None, blocks=blocks, stop=Stop("stop"), usage=None)
    sent, _ = translated("responses", "messages", upstream_bytes(answer, "messages"))
    item = data(sent)[-1]["response"]["output"][0]
    assert item["encrypted_content"] == "messages.sig=="


@settings(max_examples=60, deadline=None)
@given(answers())
def test_responses_events_come_in_their_order(answer: Answer):
    events = data(translated("responses", "chat", upstream_bytes(answer, "chat"))[0])
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert kinds[:2] == ["created", "in_progress"] and kinds[-1] in ("completed", "incomplete")
    expected = {
        "message": ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"],
        "function_call": ["function_call_arguments.delta", "function_call_arguments.done"],
        "reasoning": ["reasoning_summary_part.added", "reasoning_summary_text.delta", "reasoning_summary_text.done",
                      "reasoning_summary_part.done"],
    }  # fmt: skip
    rows = []
    for item in events[-1]["response"]["output"]:
        rows += ["output_item.added", *expected[item["type"]], "output_item.done"]
    assert [kind for kind, _ in itertools.groupby(kinds[2:-1])] == rows
