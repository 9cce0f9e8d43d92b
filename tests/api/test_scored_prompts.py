"""Log-probabilities of prompts from the real server with the real model: what evaluation programs ask for."""

from __future__ import annotations

import httpx

from tests.serving import Server

PROMPT = "The capital of France is"
LONG = "Rome is the capital of Italy, Berlin that of Germany and Paris that of France. " * 3


def complete(server: Server, **body: object) -> dict:
    answer = httpx.post(server.url + "/v1/completions", json={"temperature": 0, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_scored_text_has_the_log_probabilities_it_was_generated_with(server: Server) -> None:
    """Bit for bit, although one way computes a token at a time and the other 64 rows a step, the second time cached."""
    asked = {"logprobs": 2, "ignore_eos": True, "return_token_ids": True, "skip_special_tokens": False}
    said = complete(server, prompt=LONG, max_tokens=24, **asked)["choices"][0]
    whole = [*said["prompt_token_ids"], *said["token_ids"]]
    assert len(whole) > 64
    for _ in range(2):
        answer = complete(server, prompt=whole, max_tokens=0, echo=True, logprobs=2)
        scores = answer["choices"][0]["logprobs"]
        first = len(said["prompt_token_ids"])
        assert scores["tokens"][first:] == said["logprobs"]["tokens"]
        assert scores["token_logprobs"][first:] == said["logprobs"]["token_logprobs"]
        assert scores["top_logprobs"][first:] == said["logprobs"]["top_logprobs"]
        assert answer["choices"][0]["text"] == LONG + said["text"]
        assert answer["usage"]["completion_tokens"] == 0


def test_the_likelier_text_has_the_larger_sum(server: Server) -> None:
    endings = [" Paris.", " Rome.", " banana."]
    answer = complete(server, prompt=[PROMPT + end for end in endings], max_tokens=0, echo=True, logprobs=0)
    sums = [sum(choice["logprobs"]["token_logprobs"][1:]) for choice in answer["choices"]]
    assert sums[0] > sums[1] > sums[2]


def test_a_word_that_is_forbidden_is_not_said(server: Server) -> None:
    assert " Paris" in complete(server, prompt=PROMPT, max_tokens=12)["choices"][0]["text"]
    assert "Paris" not in complete(server, prompt=PROMPT, max_tokens=12, bad_words=["Paris"])["choices"][0]["text"]


def test_only_allowed_tokens_are_said(server: Server) -> None:
    ids = httpx.post(server.url + "/tokenize", json={"prompt": " yes no", "add_special_tokens": False}).json()["tokens"]
    answer = complete(server, prompt=PROMPT, max_tokens=8, allowed_token_ids=ids, temperature=2)
    assert set(answer["choices"][0]["text"].split()) <= {"yes", "no"}


def test_saying_the_same_thing_over_and_over_ends_where_asked(server: Server) -> None:
    rule = {"max_pattern_size": 8, "min_count": 3}
    only = {"prompt": "la la la la", "max_tokens": 64, "allowed_token_ids": [2, 300]}
    answer = complete(server, **only, ignore_eos=True, repetition_detection=rule)["choices"][0]
    assert (answer["finish_reason"], answer["stop_reason"]) == ("repetition", "repetition_detected")
