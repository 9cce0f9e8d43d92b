"""Which endpoint a path means, whatever prefix the client's base URL has."""

from __future__ import annotations

import pytest

from headrace.gateway import paths
from headrace.gateway.paths import canonical, find, is_api
from headrace.protocol.errors import ApiError


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        "/chat/completions",
        "/api/chat/completions",
        "/api/v1/chat/completions",
        "/api/v1/v1/chat/completions",
        "/v1/v1/v1/chat/completions",
        "/openai/v1/chat/completions",
        "/v1/chat/completions/",
        "//v1//chat/completions"[1:].replace("//", "/"),
    ],
)
def test_every_spelling_of_the_base_url_is_the_same_endpoint(path: str) -> None:
    assert find("POST", canonical(path)).endpoint.name == "chat"


@pytest.mark.parametrize("path", ["/v1/messages", "/messages", "/api/v1/messages", "/anthropic/v1/messages"])
def test_messages_is_the_anthropic_dialect_and_so_are_its_errors(path: str) -> None:
    place = find("POST", canonical(path))
    assert (place.endpoint.name, place.endpoint.form) == ("messages", "anthropic")
    assert paths.error_form(canonical(path)) == "anthropic"


def test_a_model_id_may_have_slashes() -> None:
    place = find("GET", canonical("/api/v1/models/Qwen/Qwen2-7B/"))
    assert (place.endpoint.name, place.id) == ("model", "Qwen/Qwen2-7B")


def test_an_api_prefix_inside_a_name_stays() -> None:
    assert canonical("/apiary/v1") == "/apiary/v1"
    assert canonical("/v10/models") == "/v10/models"


@pytest.mark.parametrize(
    ("method", "path", "name"),
    [
        ("POST", "/v1/responses", "responses"),
        ("GET", "/v1/responses/resp_1", "response"),
        ("DELETE", "/v1/responses/resp_1", "response"),
        ("POST", "/v1/responses/resp_1/cancel", "response_cancel"),
        ("GET", "/v1/responses/resp_1/input_items", "response_input"),
        ("POST", "/v1/messages/count_tokens", "count_tokens"),
        ("POST", "/v1/files", "files"),
        ("GET", "/v1/files/file-1/content", "file_content"),
        ("POST", "/v1/batches/b/cancel", "batch_cancel"),
        ("POST", "/v1/audio/transcriptions", "audio_transcriptions"),
        ("POST", "/v1/images/generations", "images_generations"),
        ("POST", "/v1/rerank", "rerank"),
        ("POST", "/v2/rerank", "rerank"),
        ("POST", "/pooling", "pooling"),
        ("HEAD", "/v1/models", "models"),
        ("GET", "/health/ready", "ready"),
    ],
)
def test_routes(method: str, path: str, name: str) -> None:
    assert find(method, canonical(path)).endpoint.name == name


def test_an_unknown_path_names_the_nearest_one() -> None:
    with pytest.raises(ApiError) as refusal:
        find("POST", canonical("/v1/chat/completion"))
    assert (refusal.value.status, refusal.value.code) == (404, "unknown_endpoint")
    assert "Did you mean /v1/chat/completions?" in refusal.value.message


@pytest.mark.parametrize("path", ["/nope", "/usage", "/v1/usage", "/page", "/complete", "/v1/engines", "/a"])
def test_a_path_like_nothing_gets_no_far_fetched_advice(path: str) -> None:
    with pytest.raises(ApiError) as refusal:
        find("GET", canonical(path))
    assert "Did you mean" not in refusal.value.message


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/embed", "/v1/embeddings"),
        ("/v1/chat", "/v1/chat/completions"),
        ("/v1/message", "/v1/messages"),
        ("/v1/tokenise", "/v1/tokenize"),
        ("/metric", "/metrics"),
        ("/v1/Response", "/v1/responses"),
    ],
)
def test_a_beginning_and_a_slip_name_what_was_meant(path: str, meant: str) -> None:
    with pytest.raises(ApiError) as refusal:
        find("POST", canonical(path), path)
    assert refusal.value.message == f"There is no POST {path} on this gateway. Did you mean {meant}?"


@pytest.mark.parametrize("path", ["/", "/api", "/v1/", "/api/v1", "/openai/v1/"])
def test_a_request_to_the_base_url_itself_is_told_what_belongs_behind_it(path: str) -> None:
    with pytest.raises(ApiError) as refusal:
        find("POST", canonical(path), path)
    assert (refusal.value.status, refusal.value.code) == (404, "unknown_endpoint")
    assert "/v1/chat/completions answers" in refusal.value.message


def test_a_wrong_method_says_which_is_right() -> None:
    with pytest.raises(ApiError) as refusal:
        find("GET", canonical("/v1/responses/"))
    assert refusal.value.status == 405
    assert refusal.value.headers["allow"] == "POST"


def test_pages_get_only_what_cannot_be_the_api() -> None:
    assert is_api("/api/anything") and is_api("/v1/anything") and is_api("/metrics") and is_api("/chat/completions")
    assert not is_api("/console") and not is_api("/chat") and not is_api("/api-keys")
