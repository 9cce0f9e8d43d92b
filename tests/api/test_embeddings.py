"""Vectors and scores over HTTP, from real servers: MiniLM, a tiny cross-encoder, a tiny chat model with --runner."""

from __future__ import annotations

import base64
import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from headrace import LLM
from headrace.cli.startup import vector_example_lines
from headrace.config.model_files import open_model
from headrace.text.tokenizer import Tokenizer
from tests.encoder_models import minilm, write_random_encoder
from tests.scripted_engine import ScriptedEngine, asgi_client, make_app, server_settings, until
from tests.serving import Server, running_server

MILL = "A water wheel turns the mill."
STOCKS = "Stock prices fell today."
LONG = "water " * 300
FLAGS = ("--served-model-name", "vectors", "--dtype", "float32", "--threads", "1")


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("embedder") / "server.log"
    with running_server(log, (str(minilm()), *FLAGS)) as running:
        yield running


@pytest.fixture(scope="module")
def client(embedder: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=embedder.base_url, api_key="x", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def http(embedder: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=embedder.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(open_model(minilm()))


def refusal(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def test_every_form_of_input_gives_the_same_vector(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(MILL, add_special_tokens=True)
    forms: list[Any] = [MILL, [MILL], ids, [ids]]
    answers = [client.embeddings.create(model="vectors", input=form) for form in forms]
    for answer in answers:
        assert answer.object == "list" and answer.model == "vectors"
        assert [(entry.index, entry.object) for entry in answer.data] == [(0, "embedding")]
        assert answer.data[0].embedding == answers[0].data[0].embedding
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (len(ids), len(ids))
    assert np.linalg.norm(answers[0].data[0].embedding) == pytest.approx(1, abs=1e-6)
    many = client.embeddings.create(model="vectors", input=[STOCKS, MILL, ids and MILL])
    assert [entry.index for entry in many.data] == [0, 1, 2]
    assert many.data[1].embedding == many.data[2].embedding == answers[0].data[0].embedding
    assert many.data[0].embedding != many.data[1].embedding


def test_base64_holds_the_numbers_that_a_list_has(client: openai.OpenAI, http: httpx.Client) -> None:
    listed = client.embeddings.create(model="vectors", input=MILL, encoding_format="float").data[0].embedding
    assert client.embeddings.create(model="vectors", input=MILL).data[0].embedding == listed, "the SDK asks for base64"
    answer = http.post("/v1/embeddings", json={"input": MILL, "encoding_format": "base64"}).json()
    raw = base64.b64decode(answer["data"][0]["embedding"])
    np.testing.assert_array_equal(np.frombuffer(raw, "<f4"), np.array(listed, np.float32))


def test_a_text_that_is_too_long_is_named_before_anything_is_computed(http: httpx.Client, tokenizer: Tokenizer) -> None:
    error = refusal(http.post("/v1/embeddings", json={"input": [MILL, LONG, MILL]}))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input[1]")
    assert "256 tokens" in error["message"] and "has 302" in error["message"]
    assert "truncate_prompt_tokens" in error["message"]
    assert refusal(http.post("/v1/embeddings", json={"input": [[101] * 257]}))["param"] == "input"
    assert http.post("/v1/embeddings", json={"input": MILL}).status_code == 200


def test_a_text_that_may_be_cut_keeps_the_tokens_that_are_added_to_it(http: httpx.Client, tokenizer: Tokenizer) -> None:
    words = "river mill stone grain wheel".split()
    first, last = (tokenizer.encode(" ".join(part), add_special_tokens=True) for part in (words[:3], words[-3:]))

    def vector(text: Any, **fields: Any) -> tuple[list[float], int]:
        answer = http.post("/v1/embeddings", json={"input": text, **fields}).json()
        return answer["data"][0]["embedding"], answer["usage"]["prompt_tokens"]

    text = " ".join(words)
    assert vector(text, truncate_prompt_tokens=5) == vector([first]) == (vector([first])[0], 5)
    assert vector(text, truncate_prompt_tokens=5, truncation_side="left") == vector([last])
    assert vector(text, truncate_prompt_tokens=200) == vector(text)
    assert vector(LONG, truncate_prompt_tokens=-1)[1] == 256
    assert vector([first], truncate_prompt_tokens=2) == vector([first[:2]])
    error = refusal(http.post("/v1/embeddings", json={"input": text, "truncate_prompt_tokens": 257}))
    assert "between 1 and 256" in error["message"]
    assert (
        "more than 1"
        in refusal(http.post("/v1/embeddings", json={"input": text, "truncate_prompt_tokens": 1}))["message"]
    )


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({}, "input", "missing"),
        ({"input": ""}, "input", "nothing to read"),
        ({"input": []}, "input", "an empty list"),
        ({"input": ["a", ""]}, "input[1]", "nothing to read"),
        ({"input": ["a", []]}, "input[1]", "nothing to read"),
        ({"input": ["a", 5]}, "input", "mixes token ids with texts"),
        ({"input": [5, 30522]}, "input", "vocabulary is 0 to 30521"),
        ({"input": [[5], [-1]]}, "input[1]", "vocabulary"),
        ({"input": [1.5]}, "input[0]", "must be"),
        ({"input": {"text": "a"}}, "input", "must be"),
        ({"input": ["a"] * 2049}, "input", "at most 2048"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "hex"),
        ({"input": "a", "dimensions": 0}, "dimensions", "between 1 and the vectors' own length, 384"),
        ({"input": "a", "dimensions": 385}, "dimensions", "384"),
        ({"input": "a", "dimensions": 64}, "dimensions", "matryoshka_dimensions"),
        ({"input": "a", "priority": 3}, "priority", "--scheduling-policy priority"),
        ({"input": "a", "truncation_side": "middle"}, "truncation_side", "middle"),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_field(
    http: httpx.Client, fields: dict[str, Any], param: str, said: str
) -> None:
    error = refusal(http.post("/v1/embeddings", json=fields))
    assert error["param"] == param
    assert said in error["message"]


def test_fields_without_effect_are_named_and_the_own_length_may_be_asked_for(http: httpx.Client) -> None:
    answer = http.post("/v1/embeddings", json={"input": "a", "dimensions": 384, "user": "u", "temperature": 0.5})
    assert answer.status_code == 200
    assert answer.headers["x-headrace-ignored"] == "temperature"
    error = http.post("/v1/embeddings", json={"input": "a", "model": "vektors"})
    assert error.status_code == 404 and "`vectors`" in error.json()["error"]["message"]


def test_a_model_for_vectors_does_not_chat(http: httpx.Client) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    for path, body in (("chat/completions", chat), ("completions", {"prompt": "Hi"}), ("responses", {"input": "Hi"})):
        error = refusal(http.post(f"/v1/{path}", json=body))
        assert error["code"] == "unsupported_by_model"
        assert "no text: ask /v1/embeddings" in error["message"]
    answer = http.post("/v1/messages", json=chat)
    assert answer.status_code == 400 and answer.json()["type"] == "error"


def test_a_ranking_has_the_best_document_first(http: httpx.Client) -> None:
    body: dict[str, Any] = {"query": "What turns a mill?", "documents": [STOCKS, {"text": MILL}, "Bananas are yellow."]}
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        answer = http.post(path, json=body).json()
        assert answer["results"][0]["index"] == 1
        scores = [result["relevance_score"] for result in answer["results"]]
        assert scores == sorted(scores, reverse=True) and scores[0] > 0.5
        assert answer["results"][0]["document"] == {"text": MILL}
        assert answer["id"].startswith("rerank-") and answer["model"] == "vectors"
        assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] > 20
    short = http.post("/v1/rerank", json={**body, "top_n": 1, "return_documents": False}).json()
    assert [set(result) for result in short["results"]] == [{"index", "relevance_score"}]
    assert len(http.post("/v1/rerank", json={**body, "top_n": 9}).json()["results"]) == 3


def test_scores_are_cosines_of_the_vectors(http: httpx.Client, client: openai.OpenAI) -> None:
    data = client.embeddings.create(model="vectors", input=[MILL, STOCKS, "a mill"]).data
    mill, stocks, other = (np.array(entry.embedding) for entry in data)

    def scores(**body: Any) -> list[float]:
        answer = http.post("/v1/score", json=body).json()
        assert answer["object"] == "list" and {entry["object"] for entry in answer["data"]} == {"score"}
        return [entry["score"] for entry in answer["data"]]

    assert scores(text_1=MILL, text_2=[STOCKS, "a mill"]) == pytest.approx([mill @ stocks, mill @ other], abs=1e-6)
    assert scores(queries=[MILL, STOCKS], documents=["a mill", "a mill"]) == pytest.approx(
        [mill @ other, stocks @ other], abs=1e-6
    )
    assert scores(text_1=[MILL, STOCKS], text_2=[MILL, STOCKS]) == [1.0, 1.0], "a text with itself, and never more"
    assert http.post("/score", json={"text_1": "a", "text_2": "b"}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/v1/score", {"text_1": "a", "queries": "a", "text_2": "b"}, "queries"),
        ("/v1/score", {"text_1": "a", "text_2": ["b", ""]}, "text_2[1]"),
        ("/v1/score", {"text_1": "a", "text_2": ["b", LONG]}, "text_2[1]"),
        ("/v1/score", {"queries": "a", "documents": ["b", LONG]}, "documents[1]"),
        ("/v1/rerank", {"query": "a"}, "documents"),
        ("/v1/rerank", {"query": "", "documents": ["b"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b", LONG]}, "documents[1]"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": [{"text": "b", "title": "c"}]}, "documents[0]"),
        ("/pooling", {"input": "a", "task": "score"}, "task"),
        ("/pooling", {"input": "a", "task": "classify"}, "task"),
        ("/pooling", {"input": [[101] * 256] * 90, "task": "token_embed"}, "input"),
    ],
)
def test_rankings_and_scores_refuse_by_the_field(
    http: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    assert refusal(http.post(path, json=body))["param"] == param


def test_pooling_gives_vectors_and_the_rows_of_all_tokens(http: httpx.Client) -> None:
    vector = http.post("/v1/embeddings", json={"input": MILL}).json()["data"][0]["embedding"]
    answer = http.post("/pooling", json={"input": [MILL, "a"]}).json()
    assert [(entry["object"], entry["index"]) for entry in answer["data"]] == [("pooling", 0), ("pooling", 1)]
    assert answer["data"][0]["data"] == vector
    rows = http.post("/pooling", json={"input": MILL, "task": "token_embed", "normalize": False}).json()
    table = np.array(rows["data"][0]["data"])
    assert table.shape == (rows["usage"]["prompt_tokens"], 384)
    mean = table.mean(0)
    np.testing.assert_allclose(mean / np.linalg.norm(mean), vector, atol=1e-6)


def test_many_texts_at_once_come_back_in_order(client: openai.OpenAI) -> None:
    texts = [f"{word} {number}" for number in range(80) for word in ("mill", "river", "stone")]
    answer = client.embeddings.create(model="vectors", input=texts)
    assert [entry.index for entry in answer.data] == list(range(240))
    for place in (0, 100, 239):
        alone = client.embeddings.create(model="vectors", input=texts[place])
        assert alone.data[0].embedding == answer.data[place].embedding


def test_what_is_read_is_counted(http: httpx.Client) -> None:
    def read() -> float:
        lines = http.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith("vllm:prompt_tokens_total")).split()[-1])

    before = read()
    used = http.post("/v1/embeddings", json={"input": [MILL, STOCKS]}).json()["usage"]["prompt_tokens"]
    assert read() - before == used


def test_a_client_that_leaves_stops_its_texts_and_no_others(embedder: Server, client: openai.OpenAI) -> None:
    def open_texts() -> int:
        lines = httpx.get(f"{embedder.url}/metrics").text.splitlines()
        wanted = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
        return sum(int(float(line.split()[-1])) for line in lines if line.startswith(wanted))

    def num_read() -> float:
        lines = httpx.get(f"{embedder.url}/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith("vllm:prompt_tokens_total")).split()[-1])

    before = num_read()
    body = json.dumps({"input": [f"{LONG[:1400]} {number}" for number in range(500)]}).encode()
    head = f"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", embedder.port)) as leaving:
        leaving.sendall(head + body)
        assert until(lambda: num_read() > before, 20)
        assert all(1 <= open_texts() < 6 for _ in range(20)), "never none, nor more than two steps of 512 tokens read"
        assert len(client.embeddings.create(model="vectors", input=MILL).data) == 1
    assert until(lambda: open_texts() == 0, 5), "500 texts would take longer"
    lines = httpx.get(f"{embedder.url}/metrics").text.splitlines()
    (aborted,) = (float(line.split()[-1]) for line in lines if "success_total" in line and '"abort"' in line)
    assert aborted > 0


def test_a_cross_encoder_reads_query_and_document_together(tmp_path: Path) -> None:
    path = write_random_encoder(tmp_path / "model", "BertForSequenceClassification", num_labels=1)
    query, documents = "what does the mill do", ["the mill grinds grain", "banana " * 30, "yellow river"]
    expected = [output.outputs.score for output in LLM(str(path), threads=1).score(query, documents)]
    with (
        running_server(tmp_path / "server.log", (str(path), *FLAGS)) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        ranked = http.post("/v1/rerank", json={"query": query, "documents": documents}).json()["results"]
        assert [r["relevance_score"] for r in sorted(ranked, key=lambda r: r["index"])] == expected
        scored = http.post("/v1/score", json={"text_1": query, "text_2": documents}).json()["data"]
        assert [entry["score"] for entry in scored] == expected
        too_long = {"query": query, "documents": ["grain", "banana " * 120]}
        assert refusal(http.post("/v1/rerank", json=too_long))["param"] == "documents[1]"
        assert len(http.post("/v1/rerank", json={**too_long, "truncate_prompt_tokens": -1}).json()["results"]) == 2
        error = refusal(http.post("/v1/embeddings", json={"input": "grain"}))
        assert "ask /v1/rerank" in error["message"]
        assert refusal(http.post("/v1/completions", json={"prompt": "a"}))["code"] == "unsupported_by_model"


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/v1/score", "/pooling"])
async def test_a_chat_model_names_the_flag_by_which_it_would_give_vectors(path: str) -> None:
    async with asgi_client(make_app(ScriptedEngine())) as client:
        error = refusal(await client.post(path, json={"input": "a"}))
    assert error["code"] == "unsupported_by_model" and "--runner pooling" in error["message"]


def test_invocations_tell_what_is_meant_by_the_body(http: httpx.Client) -> None:
    answers = [
        http.post("/invocations", json=body).json()
        for body in (
            {"input": MILL},
            {"query": MILL, "documents": [STOCKS]},
            {"text_1": MILL, "text_2": STOCKS},
        )
    ]
    assert [sorted(answer)[1:3] for answer in answers]
    assert "embedding" in answers[0]["data"][0] and "results" in answers[1] and "score" in answers[2]["data"][0]
    assert refusal(http.post("/invocations", json={"prompt": "a"}))["code"] == "unsupported_by_model"


def test_the_example_that_a_start_shows_works_when_pasted(embedder: Server) -> None:
    settings = server_settings(served_model_names=("vectors",))
    (curl,) = (line for line in vector_example_lines(settings, embedder.base_url) if line.startswith("curl"))
    shown = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, check=True, timeout=60).stdout
    assert len(json.loads(shown)["data"]) == 2


def test_the_server_says_what_it_gives(http: httpx.Client, embedder: Server) -> None:
    (card,) = http.get("/v1/models").json()["data"]
    assert card["metadata"]["gives"] == "vectors: the mean of all rows, length 1"
    assert card["max_model_len"] == 256
    info = http.get("/server_info").json()
    assert info["engine"]["vector_width"] == 384
    assert "Gives" in embedder.log() and "KV cache" not in embedder.log().split("Started in")[0]
    assert json.loads(http.get("/openapi.json").text)["paths"]["/v1/embeddings"]
