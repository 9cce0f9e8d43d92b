"""Constrained beside free sequences: the same tokens however they are scheduled, the free ones untouched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.config.settings import EngineSettings
from headrace.core import EngineCore
from headrace.protocol import ipc
from headrace.protocol.grammar_text import LarkRules, json_schema_grammar, lark_grammar
from tests.engine_runs import Sequence, request, run, tokens
from tests.small_models import END_TOKEN_ID
from tests.tiny_models import tiny_llama

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 4},
        "size": {"type": "integer", "minimum": -99, "maximum": 99},
    },
    "required": ["name", "tags", "size"],
    "additionalProperties": False,
}
JSON = json_schema_grammar(SCHEMA, "guided_json")
REGEX = ipc.GrammarSpec(kind="regex", text="([a-f0-9]{2}:){3,5}[a-f0-9]{2}", field="regex")
PROMPT = list(b"Tell me of the wheel, and of the water that turns it, in a few words: ")

Requests = list[ipc.AddRequest]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("constrained"))


def engine(model: Path, *, num_blocks_bytes: int = 4 << 20, **settings: object) -> EngineCore:
    return EngineCore(
        EngineSettings(
            model=str(model),
            device="cpu",
            dtype="float32",
            kv_cache_memory_bytes=num_blocks_bytes,
            block_size=16,
            max_num_seqs=16,
            **settings,  # type: ignore[arg-type]
        )
    )


def constrained() -> Requests:
    own = {"max_tokens": 150, "stop_token_ids": (END_TOKEN_ID,)}
    return [
        request("json greedy", PROMPT, temperature=0.0, grammar=JSON, **own),
        request("json drawn", PROMPT[:20], temperature=1.0, seed=7, n=3, grammar=JSON, **own),
        request("regex", PROMPT[5:], temperature=1.3, seed=9, top_k=40, grammar=REGEX, **own),
        request("penalised", PROMPT, temperature=0.8, seed=1, repetition_penalty=1.3, logprobs=2, grammar=REGEX, **own),
    ]


def free() -> Requests:
    return [
        request("free greedy", PROMPT, temperature=0.0, max_tokens=40),
        request("free drawn", PROMPT[3:], temperature=1.0, seed=3, n=2, max_tokens=40, min_p=0.01),
        request("free biased", PROMPT, temperature=0.9, seed=4, max_tokens=40, logit_bias={65: 3.0}),
        request("free ruled", PROMPT, temperature=0.9, seed=5, max_tokens=40, allowed_token_ids=tuple(range(60, 200))),
    ]


def is_right(key: tuple[str, int], sequence: Sequence) -> bool:
    assert sequence.finish_reason == "stop", (key, sequence)
    text = bytes(token for token in sequence.token_ids if token < 256)
    decoded = text.translate(_BYTES).decode()
    if key[0].startswith("json"):
        value = json.loads(decoded)
        return list(value) == ["name", "tags", "size"] and -99 <= value["size"] <= 99 and 2 <= len(value["tags"]) <= 4
    return 3 <= decoded.count(":") <= 5


def _table() -> bytes:
    """From token ids of the byte tokenizer to the bytes they stand for."""
    from headrace.text.tokenizer import _BYTE_OF_CHARACTER

    return bytes(_BYTE_OF_CHARACTER[character] for character in sorted(_BYTE_OF_CHARACTER))


_BYTES = _table()


@pytest.fixture(scope="module")
def together(model: Path) -> dict[tuple[str, int], Sequence]:
    return run(engine(model), [*constrained(), *free()])


def test_constrained_answers_match_whatever_else_is_asked(together: dict[tuple[str, int], Sequence]) -> None:
    mine = {key: sequence for key, sequence in together.items() if not key[0].startswith("free")}
    assert len(mine) == 6
    assert all(is_right(key, sequence) for key, sequence in mine.items())
    assert len({tuple(together["json drawn", index].token_ids) for index in range(3)}) == 3


def test_free_sequences_have_the_tokens_they_would_have_alone(
    model: Path, together: dict[tuple[str, int], Sequence]
) -> None:
    alone = tokens(run(engine(model), free()))
    assert {key: together[key].token_ids for key in alone} == alone


def test_constrained_sequences_have_the_tokens_they_would_have_alone(
    model: Path, together: dict[tuple[str, int], Sequence]
) -> None:
    core = engine(model)
    for one in constrained():
        alone = tokens(run(core, [one]))
        assert {key: together[key].token_ids for key in alone} == alone


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 16},
        {"enable_prefix_caching": False},
        {"num_blocks_bytes": 130 << 10},
        {"max_num_batched_tokens": 24, "num_blocks_bytes": 130 << 10},
    ],
    ids=["chunked prefill", "no prefix cache", "preemption", "both"],
)
def test_constrained_tokens_do_not_depend_on_scheduling(
    model: Path, together: dict[tuple[str, int], Sequence], settings: dict[str, object]
) -> None:
    mixed = run(engine(model, **settings), [*constrained(), *free()])  # type: ignore[arg-type]
    assert tokens(mixed) == tokens(together)
    if "num_blocks_bytes" in settings:
        assert sum(s.num_preemptions for key, s in mixed.items() if not key[0].startswith("free")) > 0


def test_a_step_that_is_done_in_parts_gives_the_same_tokens(
    model: Path, together: dict[tuple[str, int], Sequence], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = engine(model)
    kernels = core._runner.kernels
    sample, calls = kernels.sample, []

    def sometimes(logits, rows):  # type: ignore[no-untyped-def]
        calls.append(len(rows.temperature))
        if len(rows.temperature) > 1 and len(calls) % 3 == 0:
            raise RuntimeError("a step that fails")
        return sample(logits, rows)

    monkeypatch.setattr(kernels, "sample", sometimes)
    assert tokens(run(core, constrained())) == {
        key: s.token_ids for key, s in together.items() if not key[0].startswith("free")
    }


def test_a_dead_end_ends_its_own_request_only(model: Path, together: dict[tuple[str, int], Sequence]) -> None:
    digits = tuple(token for token in range(256) if chr(_BYTES[token]).isdigit())
    stuck = request(
        "stuck", PROMPT, max_tokens=30, seed=1, allowed_token_ids=digits, stop_token_ids=(END_TOKEN_ID,),
        grammar=ipc.GrammarSpec(kind="regex", text="[0-9]{3}x", field="regex"),
    )  # fmt: skip
    mixed = run(engine(model), [*free(), stuck, *constrained()])
    end = mixed.pop(("stuck", 0))
    assert end.finish_reason == "error" and len(end.token_ids) == 3
    assert end.error is not None and "`allowed_token_ids` and `bad_words` leave none" in end.error
    assert tokens(mixed) == tokens(together)


def test_an_answer_ends_with_its_grammar_also_before_min_tokens_and_past_ignore_eos(model: Path) -> None:
    spec = ipc.GrammarSpec(kind="choice", text='["yes","no"]', field="choice")
    [done] = run(
        engine(model),
        [request("r", PROMPT, max_tokens=30, min_tokens=20, grammar=spec, stop_token_ids=(END_TOKEN_ID,))],
    ).values()
    assert done.finish_reason == "stop"
    assert bytes(done.token_ids).translate(_BYTES) in (b"yes", b"no")


def test_text_before_a_tag_and_after_it_is_free(model: Path) -> None:
    rules = LarkRules("tools", {})
    tag = ("ab", rules.join(rules.json(SCHEMA), rules.literal("!")))
    start = rules.triggered([tag], ["ab"], at_least_one=True, at_most_one=True)
    spec = lark_grammar(rules.grammar(start), "tools")
    letters = {token: 12.0 for token in range(256) if chr(_BYTES[token]) in 'ab{}"'}
    [done] = run(
        engine(model),
        [
            request(
                "r", PROMPT, max_tokens=300, seed=2, grammar=spec, logit_bias=letters, stop_token_ids=(END_TOKEN_ID,)
            )
        ],
    ).values()
    text = bytes(done.token_ids).translate(_BYTES)
    assert done.finish_reason == "stop"
    before, _, tagged = text.partition(b"ab")
    assert b"ab" not in before
    assert list(json.loads(tagged.removesuffix(b"!"))) == ["name", "tags", "size"]


def test_a_request_that_waits_for_its_grammar_holds_up_nobody(model: Path) -> None:
    core = engine(model)
    slow = json_schema_grammar(
        {"type": "object", "properties": {f"a{i}": {"type": "string"} for i in range(1500)}}, "guided_json"
    )
    assert core.add(request("waits", PROMPT, max_tokens=5, grammar=slow)) is None
    assert core.gate.is_waiting and not core.has_work
    assert core.add(request("goes", PROMPT, max_tokens=3)) is None
    done = False
    while not done:
        step = core.step()
        assert step is not None
        done = any(output.request_id == "goes" and output.finish_reason for output in step.outputs)
    assert core.gate.is_waiting
    core.abort("waits")
    assert not core.gate.is_waiting


def test_a_grammar_that_is_none_is_refused_with_the_field(model: Path) -> None:
    core = engine(model)
    bad = ipc.GrammarSpec(kind="regex", text="(", field="guided_regex")
    assert core.add(request("bad", PROMPT, max_tokens=5, grammar=bad)) is None
    core.gate.wait()
    assert core.step() is None
    [(request_id, refusal)] = core.gate.take_refused()
    assert (request_id, refusal.code, refusal.param) == ("bad", "invalid_grammar", "guided_regex")
    assert not core.gate.is_waiting and core.gate.take_refused() == []
