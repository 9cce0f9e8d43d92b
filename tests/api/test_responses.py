"""OpenAI's responses on the engine itself: its SDK's answers and stream helper, items, tools, and what is stored."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from headrace.protocol import errors
from headrace.server.response_store import ResponseStore, input_items, page
from tests.scripted_engine import MODEL, ScriptedEngine, asgi_client, for_ever, make_app, saying, tokenizer

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
THINKS = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
<think>"""
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture
def sdk(url: str, engine: ScriptedEngine) -> Iterator[openai.OpenAI]:
    engine.script, engine.num_cached_tokens, engine.step_s = saying("Hello there!"), 0, 0.0
    engine.requests.clear()
    with openai.OpenAI(base_url=url + "/v1", api_key="EMPTY", max_retries=0) as client:
        yield client


def prompt_of(engine: ScriptedEngine) -> str:
    return tokenizer().decode(engine.requests[-1].token_ids, skip_special_tokens=False)


def test_a_response_has_its_text_usage_and_what_it_was_asked_with(sdk: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.num_cached_tokens = 16
    response = sdk.responses.create(
        model=MODEL, instructions="Be brief.", input="Hi", temperature=0.5, max_output_tokens=20, metadata={"a": "b"}
    )
    assert (response.output_text, response.status, response.model) == ("Hello there!", "completed", MODEL)
    assert (response.instructions, response.temperature, response.metadata) == ("Be brief.", 0.5, {"a": "b"})
    assert response.usage is not None and response.usage.output_tokens == 4
    assert response.usage.input_tokens == len(engine.requests[0].token_ids)
    assert response.usage.input_tokens_details.cached_tokens == 16
    assert "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>" in prompt_of(engine)
    assert engine.requests[0].params.max_tokens == 20


async def events_of(engine: ScriptedEngine, template: str | None = "the model's", **fields: object) -> list[Any]:
    body = {"input": "Hi", "stream": True, "store": False, **fields}
    async with asgi_client(make_app(engine, template=template)) as client:
        answer = await client.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    found = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        EVENT.validate_python(found[-1])
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


async def test_events_come_in_the_order_that_clients_know() -> None:
    events = await events_of(ScriptedEngine(saying(f"So.</think>Let me look.{ROME}")), THINKS, tools=[WEATHER])
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert [kind for place, kind in enumerate(kinds) if kind != kinds[place - 1]] == [
        "created", "in_progress",
        "output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta",
        "reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    response = events[-1]["response"]
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call"]
    assert json.loads(response["output"][2]["arguments"]) == {"city": "Rome"}
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert response["model"] == MODEL and response["store"] is False


def test_the_stream_helper_ends_with_the_whole_response(sdk: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.script = saying(f"Let me look.\n{ROME}")
    with sdk.responses.stream(model=MODEL, input="Hi", tools=[WEATHER]) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == "Let me look."
    call = final.output[1]
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"city": "Rome"})  # type: ignore[union-attr]


def test_a_conversation_goes_on_from_a_stored_response(sdk: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.script = saying(ROME)
    first = sdk.responses.create(model=MODEL, input="Weather in Rome?", tools=[WEATHER])
    (call,) = first.output
    engine.script = saying("It rains.")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}  # type: ignore[union-attr]
    second = sdk.responses.create(model=MODEL, previous_response_id=first.id, input=[result], tools=[WEATHER])
    assert second.previous_response_id == first.id
    engine.script = saying("Yes.")
    sdk.responses.create(model=MODEL, previous_response_id=second.id, input="Really?")
    turns = prompt_of(engine).split("<|im_start|>")[-6:]
    assert [turn.split("\n", 1)[0] for turn in turns] == ["user", "assistant", "user", "assistant", "user", "assistant"]
    assert "Weather in Rome?" in turns[0] and ROME in turns[1] and "Rain." in turns[2]
    assert "It rains." in turns[3] and "Really?" in turns[4]


def test_what_is_stored_can_be_read_listed_and_deleted(sdk: openai.OpenAI) -> None:
    response = sdk.responses.create(model=MODEL, input=[{"role": "user", "content": text} for text in ("One.", "Two.")])
    assert sdk.responses.retrieve(response.id) == response
    newest_first = sdk.responses.input_items.list(response.id).data
    assert [item.content[0].text for item in newest_first] == ["Two.", "One."]  # type: ignore[union-attr]
    listed = sdk.responses.input_items.list(response.id, order="asc", limit=1)
    assert [item.content[0].text for item in listed] == ["One.", "Two."]  # type: ignore[union-attr]
    sdk.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError, match="There is no response"):
        sdk.responses.retrieve(response.id)


@pytest.mark.parametrize("stream", [False, True])
def test_with_store_false_nothing_is_kept(sdk: openai.OpenAI, stream: bool) -> None:
    answer = sdk.responses.create(model=MODEL, input="Hi", store=False, stream=stream)
    response = list(answer)[-1].response if stream else answer  # type: ignore[union-attr,arg-type]
    assert response.store is False
    with pytest.raises(openai.NotFoundError) as caught:
        sdk.responses.create(model=MODEL, previous_response_id=response.id, input="And?")
    assert caught.value.code == "response_not_found"


async def wait_for(client: httpx.AsyncClient, response_id: str, status: str) -> dict[str, Any]:
    async with asyncio.timeout(5):
        while (found := (await client.get(f"/v1/responses/{response_id}")).json())["status"] != status:
            await asyncio.sleep(0.01)
    return found


async def test_a_response_in_the_background_is_generated_without_its_client() -> None:
    engine = ScriptedEngine(step_s=0.01)
    async with asgi_client(make_app(engine)) as client:
        begun = (await client.post("/v1/responses", json={"input": "Hi", "background": True})).json()
        assert begun["status"] == "queued" and begun["background"] is True and begun["output"] == []
        too_early = await client.post("/v1/responses", json={"input": "Hi", "previous_response_id": begun["id"]})
        assert too_early.status_code == 400
        done = await wait_for(client, begun["id"], "completed")
        assert done["output"][0]["content"][0]["text"] == "Hello there!"
        refused = await client.post(f"/v1/responses/{begun['id']}/cancel")
        assert refused.status_code == 400 and "completed" in refused.json()["message"]


async def test_a_response_in_the_background_can_be_cancelled_and_fails_by_itself() -> None:
    engine = ScriptedEngine(for_ever, step_s=0.01)
    async with asgi_client(make_app(engine)) as client:
        begun = (await client.post("/v1/responses", json={"input": "Hi", "background": True})).json()
        await asyncio.sleep(0.05)
        cancelled = (await client.post(f"/v1/responses/{begun['id']}/cancel")).json()
        assert cancelled["status"] == "cancelled" and cancelled["id"] == begun["id"]
        assert engine.aborted and not engine.running
        assert (await client.post(f"/v1/responses/{begun['id']}/cancel")).json() == cancelled
        engine.fails_after, engine.failure = 2, errors.engine_error("The engine failed on this request.")
        begun = (await client.post("/v1/responses", json={"input": "Hi", "background": True})).json()
        failed = await wait_for(client, begun["id"], "failed")
        assert "engine failed" in failed["error"]["message"]


async def test_tools_that_nobody_runs_are_named_and_left_out() -> None:
    engine = ScriptedEngine(saying("No."))
    tools = [WEATHER, {"type": "web_search"}, {"type": "local_shell"}, {"type": "custom", "name": "patch"}]
    async with asgi_client(make_app(engine)) as client:
        body = {"input": "Hi", "tools": tools, "client_metadata": {"a": 1}, "text": {"verbosity": "low"}}
        answer = await client.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    ignored = answer.headers["x-headrace-ignored"].split(",")
    assert {"tools.web_search", "tools.local_shell", "client_metadata", "verbosity"} <= set(ignored)
    assert '"name": "weather"' in prompt_of(engine) and '"name": "patch"' in prompt_of(engine)


def test_the_format_of_the_text_is_the_engines_business(sdk: openai.OpenAI, engine: ScriptedEngine) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    sdk.responses.create(
        model=MODEL, input="Hi", text={"format": {"type": "json_schema", "name": "answer", "schema": schema}}
    )
    grammar = engine.requests[0].params.grammar
    assert grammar is not None and grammar.kind == "json_schema" and '"integer"' in grammar.text


def test_an_answer_cut_by_its_limit_is_incomplete(sdk: openai.OpenAI) -> None:
    response = sdk.responses.create(model=MODEL, input="Hi", max_output_tokens=2)
    assert response.status == "incomplete" and response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    with sdk.responses.stream(model=MODEL, input="Hi", max_output_tokens=2) as stream:
        assert list(stream)[-1].type == "response.incomplete"


def test_a_stream_that_breaks_ends_with_a_failed_response(sdk: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.fails_after, engine.failure = 2, errors.engine_error("The engine failed on this request.")
    try:
        last = list(sdk.responses.create(model=MODEL, input="Hi", stream=True))[-1]
    finally:
        engine.fails_after, engine.failure = None, None
    assert last.type == "response.failed" and "engine failed" in last.response.error.message  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": [{"type": "message", "role": "boss", "content": "x"}]}, "input[0].role"),
        ({"input": "Hi", "background": True, "store": False}, "background"),
        ({"input": "Hi", "background": True, "stream": True}, "background"),
        ({"input": "Hi", "store": "yes"}, "store"),
        ({"input": "Hi", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "Hi", "n": 2}, "n"),
        ({"input": "Hi", "max_output_tokens": 10_000}, "max_output_tokens"),
        ({"input": "Hi", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "Hi", "model": "gpt-9"}, "model"),
        ({"input": "Hi", "conversation": "conv_1"}, "conversation"),
    ],
)
async def test_what_cannot_be_answered_is_refused_by_field(fields: dict[str, object], param: str) -> None:
    async with asgi_client(make_app(ScriptedEngine())) as client:
        answer = await client.post("/v1/responses", json=fields)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param


async def test_tokens_are_counted_as_they_are_generated_from() -> None:
    engine = ScriptedEngine()
    asked = {"input": "Hi", "instructions": "Be brief.", "tools": [WEATHER]}
    async with asgi_client(make_app(engine)) as client:
        counted = (await client.post("/v1/responses/input_tokens", json=asked)).json()
        await client.post("/v1/responses", json=asked)
    assert counted == {"object": "response.input_tokens", "input_tokens": len(engine.requests[0].token_ids)}


def test_the_store_keeps_the_newest_that_fit() -> None:
    store = ResponseStore(max_responses=3, max_bytes=1000)
    for number in range(4):
        store.put({"id": f"r{number}", "output": []}, [])
        store.get("r0") if number < 3 else None
    with pytest.raises(errors.ApiError):
        store.get("r1")
    assert store.get("r0").items == []
    store.put({"id": "large", "output": ["x" * 960]}, [])
    assert store.get("large")
    with pytest.raises(errors.ApiError):
        store.get("r0")


def test_input_becomes_items_with_ids_that_stay() -> None:
    (said,) = input_items("Hi")
    assert (said["type"], said["role"], said["content"]) == ("message", "user", [{"type": "input_text", "text": "Hi"}])
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "fc_1"}
    assert input_items([call]) == [call]
    items = [{"id": str(number)} for number in range(5)]
    shown = page(items, limit=2, newest_first=True, after="3")
    assert ([item["id"] for item in shown["data"]], shown["has_more"]) == (["2", "1"], True)


async def test_models_come_in_the_shape_that_the_client_reads() -> None:
    async with asgi_client(make_app(ScriptedEngine())) as client:
        plain = (await client.get("/v1/models")).json()
        codex = (await client.get("/v1/models?client_version=1.2.3")).json()
        version = {"anthropic-version": "2023-06-01"}
        other = (await client.get("/v1/models?limit=5", headers=version)).json()
        one = (await client.get(f"/v1/models/{MODEL}", headers=version)).json()
        missing = await client.get("/v1/models/nobody", headers=version)
    assert plain["data"][0]["object"] == "model" and "models" not in plain
    assert plain["data"][0]["metadata"]["tool_call_parser"] == "hermes"
    assert codex["data"] == plain["data"] and codex["models"] == []
    assert other["data"][0]["type"] == "model" and other["first_id"] == other["last_id"] == MODEL
    assert other["has_more"] is False and one == other["data"][0]
    assert missing.status_code == 404 and missing.json()["error"]["type"] == "not_found_error"
