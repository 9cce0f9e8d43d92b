"""Request parameters beyond OpenAI's, over HTTP: what reaches the engine, and what comes back."""

from __future__ import annotations

import json
from collections.abc import Sequence

import httpx
import pytest

from headrace.protocol import ipc
from tests.scripted_engine import (
    END_OF_SEQUENCE,
    ScriptedEngine,
    asgi_client,
    events,
    make_app,
    server_settings,
    tokenizer,
)

QUESTION = [{"role": "user", "content": "Say it."}]


async def post(
    engine: ScriptedEngine, path: str, settings: dict[str, object] | None = None, **body: object
) -> httpx.Response:
    async with asgi_client(make_app(engine, server_settings(**settings or {}))) as client:
        return await client.post(path, json=body)


async def complete(engine: ScriptedEngine, **body: object) -> dict:
    answer = await post(engine, "/v1/completions", **{"prompt": "Water runs", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def chat(engine: ScriptedEngine, settings: dict[str, object] | None = None, **body: object) -> httpx.Response:
    return await post(engine, "/v1/chat/completions", settings, **{"messages": QUESTION, **body})


async def test_token_limits_reach_the_engine_as_tokens() -> None:
    engine = ScriptedEngine()
    fields = {
        "allowed_token_ids": [12, 5, 12],
        "bad_words": ["mill"],
        "repetition_detection": {"max_pattern_size": 4, "min_count": 3},
        "logprobs": 1,
        "logprob_token_ids": [9, 8],
        "prompt_logprobs": 2,
    }
    await complete(engine, **fields)
    [request] = engine.requests
    params = request.params
    assert params.allowed_token_ids == (12, 5)
    words = tokenizer()
    spelled = (words.encode("mill", False), words.encode(" mill", False))
    assert params.bad_words == tuple(tuple(ids) for ids in spelled)
    assert params.repetition_detection == ipc.RepetitionDetection(4, 1, 3)
    assert (params.logprobs, params.logprob_token_ids, params.prompt_logprobs) == (1, (9, 8), 2)


async def test_nothing_asked_for_costs_the_engine_nothing() -> None:
    engine = ScriptedEngine()
    await complete(engine, seed=1, temperature=0)
    assert engine.requests[0].params == ipc.SamplingParams(
        max_tokens=16, temperature=0.0, seed=1, stop_token_ids=engine.requests[0].params.stop_token_ids
    )


async def test_echo_with_logprobs_scores_the_prompt_and_then_the_answer() -> None:
    engine = ScriptedEngine()
    prompt = tokenizer().encode("Water runs", True)
    answer = await complete(engine, echo=True, logprobs=2)
    choice = answer["choices"][0]
    scores = choice["logprobs"]
    assert choice["text"] == "Water runsHello there!"
    assert "".join(scores["tokens"][:-1]) == choice["text"]
    assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
    assert scores["token_logprobs"][1 : len(prompt)] == [max(-float(t), -9999.0) for t in prompt[1:]]
    assert scores["token_logprobs"][len(prompt) :] == [-0.25] * 4
    assert scores["text_offset"][: len(prompt) + 1] == [0, 5, len("Water runs")]
    assert -9999.0 in scores["top_logprobs"][1].values(), "minus infinity as JSON can say it"
    assert len({len(values) for values in scores.values()}) == 1


async def test_echo_with_logprobs_streams_the_prompts_scores_first() -> None:
    answer = await post(ScriptedEngine(), "/v1/completions", prompt="Water runs", echo=True, logprobs=0, stream=True)
    chunks = [json.loads(data) for data in events(answer.text)[:-1]]
    first, *others = [chunk["choices"][0] for chunk in chunks]
    assert first["text"] == "Water runs" and first["logprobs"]["tokens"] == ["Water", " runs"]
    offsets = [offset for choice in others if choice["logprobs"] for offset in choice["logprobs"]["text_offset"]]
    assert offsets[:2] == [10, 15]


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_in_a_chat_puts_the_message_that_is_continued_before_every_answer(stream: bool) -> None:
    asked = {"echo": True, "continue_final_message": True, "n": 2, "stream": stream, "logprobs": True}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [{"type": "text", "text": "Well, "}]},
    ]
    async with asgi_client(make_app(ScriptedEngine())) as client:
        answer = await client.post("/v1/chat/completions", json={"messages": messages, **asked})
        plain = await client.post("/v1/chat/completions", json={"messages": messages, **asked, "echo": False})
    texts = [_texts(a, stream) for a in (answer, plain)]
    assert texts[0] == ["Well, " + text for text in texts[1]] and len(texts[0]) == 2


def _texts(answer: httpx.Response, stream: bool) -> list[str]:
    """The content of each choice."""
    if not stream:
        return [choice["message"]["content"] for choice in answer.json()["choices"]]
    found: dict[int, str] = {}
    for event in events(answer.text)[:-1]:
        for choice in json.loads(event)["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + (choice["delta"].get("content") or "")
    return [text for _, text in sorted(found.items())]


async def test_max_tokens_zero_scores_a_prompt_and_generates_nothing() -> None:
    engine = ScriptedEngine()
    answer = await complete(engine, echo=True, logprobs=0, max_tokens=0)
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]["tokens"]) == (
        "Water runs",
        "length",
        ["Water", " runs"],
    )
    assert answer["usage"]["completion_tokens"] == 0
    refused = await post(engine, "/v1/completions", prompt="x", max_tokens=0)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "max_tokens"


async def test_prompt_logprobs_have_the_alternatives_and_the_prompts_own_token_by_id() -> None:
    prompt = tokenizer().encode("Water runs", True)
    answer = await complete(ScriptedEngine(), prompt_logprobs=2)
    none, entry = answer["choices"][0]["prompt_logprobs"]
    assert none is None
    assert entry[str(prompt[1])] == {"logprob": max(-float(prompt[1]), -9999.0), "rank": 1, "decoded_token": " runs"}
    assert entry[str(prompt[1] + 1)]["logprob"] == -9999.0
    body = (await chat(ScriptedEngine(), prompt_logprobs=0)).json()
    engine = ScriptedEngine()
    await chat(engine)
    assert len(body["prompt_logprobs"]) == len(engine.requests[0].token_ids)
    assert "prompt_logprobs" not in (await chat(ScriptedEngine())).json()
    streamed = await chat(ScriptedEngine(), prompt_logprobs=1, stream=True)
    assert streamed.status_code == 400 and streamed.json()["error"]["param"] == "prompt_logprobs"


def numbered(prompt: list[int], params: ipc.SamplingParams, index: int) -> Sequence[int]:
    return [*tokenizer().encode(f" number {index}", False), END_OF_SEQUENCE]


async def test_best_of_answers_with_the_likeliest_and_counts_all() -> None:
    engine = ScriptedEngine(script=numbered, logprobs_of={0: -3.0, 1: -0.5, 2: -1.0, 3: -2.0})
    answer = await complete(engine, n=2, best_of=4)
    assert [(c["index"], c["text"], c["logprobs"]) for c in answer["choices"]] == [
        (0, " number 1", None),
        (1, " number 2", None),
    ]
    assert engine.requests[0].params.n == 4
    one = len(numbered([], engine.requests[0].params, 0))
    assert answer["usage"]["completion_tokens"] == 4 * one
    both = await complete(engine, prompt=["a", "b"], best_of=3)
    assert [(c["index"], c["text"]) for c in both["choices"]] == [(0, " number 1"), (1, " number 1")]
    said = (await chat(engine, best_of=3)).json()["choices"]
    assert [choice["message"]["content"] for choice in said] == [" number 1"]
    streamed = await chat(engine, best_of=2, stream=True)
    assert streamed.status_code == 400 and "streamed" in streamed.json()["message"]


async def test_a_truncated_prompt_is_what_the_engine_sees_and_echo_repeats() -> None:
    whole = tokenizer().encode("Water runs down the hill", True)
    engine = ScriptedEngine()
    answer = await complete(engine, prompt="Water runs down the hill", truncate_prompt_tokens=2, echo=True)
    assert engine.requests[-1].token_ids == whole[-2:]
    assert answer["choices"][0]["text"].startswith(" the hill") and answer["usage"]["prompt_tokens"] == 2
    await complete(engine, prompt=whole, truncate_prompt_tokens=2, truncation_side="right")
    assert engine.requests[-1].token_ids == whole[:2]
    await complete(engine, prompt=whole * 200, truncate_prompt_tokens=-1, max_tokens=12)
    assert len(engine.requests[-1].token_ids) == 512 - 12
    await chat(
        engine, messages=[{"role": "user", "content": "far too long " * 900}], truncate_prompt_tokens=-1, max_tokens=20
    )
    assert len(engine.requests[-1].token_ids) == 512 - 20


async def test_an_answer_that_repeats_itself_says_so() -> None:
    class Repeating(ScriptedEngine):
        def _output(self, *arguments: object) -> ipc.SequenceOutput:
            output = super()._output(*arguments)  # type: ignore[arg-type]
            reason = "repetition" if output.finish_reason is not None else None
            return ipc.SequenceOutput(
                request_id=output.request_id, index=0, token_ids=output.token_ids, finish_reason=reason
            )  # type: ignore[arg-type]

    [choice] = (await complete(Repeating()))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")


async def test_listed_tokens_are_the_alternatives_of_each_token() -> None:
    class Listing(ScriptedEngine):
        def _score(self, token_id: int, logprob: float, count: int) -> ipc.TokenLogprobs:
            return ipc.TokenLogprobs(token_id, logprob, 1, [300, 301], [-1.5, float("-inf")])

    body = (await chat(Listing(), logprobs=True, logprob_token_ids=[300, 301])).json()
    first = body["choices"][0]["logprobs"]["content"][0]
    assert [top["logprob"] for top in first["top_logprobs"]] == [-1.5, -9999.0]
    assert [top["token"] for top in first["top_logprobs"]] == [tokenizer().token_text(t) for t in (300, 301)]


TEMPLATE = "{% for d in documents %}[{{ d.text }}]{% endfor %}{{ messages[0].content }}"


async def test_documents_reach_a_template_that_quotes_them() -> None:
    engine = ScriptedEngine()
    async with asgi_client(make_app(engine, template=TEMPLATE)) as client:
        body = {"messages": QUESTION, "documents": [{"text": "one"}, {"text": "two"}]}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    assert tokenizer().decode(engine.requests[0].token_ids) == "[one][two]Say it."


async def test_a_requests_own_template_is_used_only_where_it_is_trusted() -> None:
    engine, own = ScriptedEngine(), "{{ messages[0].content }} {{ tone }}"
    refused = await chat(engine, chat_template=own)
    assert refused.status_code == 400 and "--trust-request-chat-template" in refused.json()["message"]
    trusted: dict[str, object] = {"trust_request_chat_template": True}
    answer = await chat(engine, trusted, chat_template=own, chat_template_kwargs={"tone": "loud"})
    assert answer.status_code == 200 and tokenizer().decode(engine.requests[-1].token_ids) == "Say it. loud"
    for wrong in ("{% if %}", "x" * 70_000, "{{ ''.__class__.__mro__[1].__subclasses__() }}"):
        answer = await chat(engine, trusted, chat_template=wrong)
        assert answer.status_code == 400, wrong


async def test_every_stream_tells_its_usage_where_the_server_is_told_so() -> None:
    forced: dict[str, object] = {"force_include_usage": True}
    for options in (None, {"include_usage": False}):
        answer = await chat(ScriptedEngine(), forced, stream=True, stream_options=options)
        last = json.loads(events(answer.text)[-2])
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 4
    assert (await chat(ScriptedEngine(), forced)).json()["usage"]["completion_tokens"] == 4


async def test_usage_so_far_comes_with_every_chunk_if_asked() -> None:
    answer = await chat(ScriptedEngine(), stream=True, stream_options={"continuous_usage_stats": True})
    counts = [json.loads(data)["usage"]["completion_tokens"] for data in events(answer.text)[:-1]]
    assert counts == sorted(counts) and counts[-1] == 4


@pytest.mark.parametrize(("most", "status"), [(3, 400), (30, 200)])
async def test_the_most_logprobs_are_the_servers_choice(most: int, status: int) -> None:
    for body in ({"logprobs": True, "top_logprobs": 25}, {"prompt_logprobs": 25}):
        answer = await chat(ScriptedEngine(), {"max_logprobs": most}, **body)
        assert answer.status_code == status
        assert status == 200 or "between 0 and 3" in answer.json()["message"]


async def test_the_documentation_pages_can_be_closed() -> None:
    for serve_docs, status in ((True, 200), (False, 404)):
        async with asgi_client(make_app(ScriptedEngine(), server_settings(serve_docs=serve_docs))) as client:
            for path in ("/docs", "/openapi.json"):
                assert (await client.get(path)).status_code == status
