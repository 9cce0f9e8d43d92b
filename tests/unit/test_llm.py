"""headrace.LLM in process, on a tiny random model: names, values, order, bounded memory, mistakes."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace import LLM, GuidedDecodingParams, SamplingParams, StructuredOutputsParams
from headrace.config.errors import ConfigError
from headrace.llm.progress import BatchProgress
from headrace.protocol.ipc import SequenceOutput
from tests.tiny_models import tiny_llama

PROMPTS = ["A wheel", "Water", "The headrace is", "x"]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(str(model), dtype="float32", max_model_len=128, kv_cache_memory_bytes="4M", max_num_seqs=8, seed=7)


def quiet(llm: LLM, prompts: object, params: object = GREEDY) -> list:
    return llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]


def test_outputs_have_vllms_names_and_the_order_of_the_prompts(llm: LLM) -> None:
    answers = quiet(llm, PROMPTS)
    assert [answer.prompt for answer in answers] == PROMPTS
    for answer in answers:
        [best] = answer.outputs
        assert answer.prompt_token_ids == llm.get_tokenizer().encode(answer.prompt, True)
        assert answer.finished and best.finished() and best.index == 0
        assert (len(best.token_ids), best.finish_reason, best.stop_reason) == (8, "length", None)
        assert (best.cumulative_logprob, best.logprobs, answer.prompt_logprobs) == (None, None, None)
        assert llm.get_tokenizer().decode(best.token_ids) == best.text


def test_a_text_its_tokens_and_vllms_dicts_are_the_same_prompt(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("Water", True)
    forms = ["Water", ids, ["Water"], [ids], {"prompt": "Water"}, [{"prompt_token_ids": ids}]]
    assert len({tuple(quiet(llm, form)[0].outputs[0].token_ids) for form in forms}) == 1
    assert quiet(llm, ids)[0].prompt is None


def test_each_prompt_has_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=count) for count in (1, 5, 2, 3)]
    assert [len(answer.outputs[0].token_ids) for answer in quiet(llm, PROMPTS, params)] == [1, 5, 2, 3]
    with pytest.raises(ValueError, match="4 prompts, but 3 sampling_params"):
        quiet(llm, PROMPTS, params[:3])


def test_logprobs_add_up_and_hold_the_token_itself(llm: LLM) -> None:
    [answer] = quiet(llm, "Water", SamplingParams(temperature=0, max_tokens=5, logprobs=2))
    [best] = answer.outputs
    assert [len(table) for table in best.logprobs] == [2] * 5
    chosen = [table[token] for table, token in zip(best.logprobs, best.token_ids, strict=True)]
    assert [score.rank for score in chosen] == [1] * 5, "greedy"
    assert best.cumulative_logprob == pytest.approx(sum(score.logprob for score in chosen))
    assert [score.decoded_token for score in chosen] == [llm.get_tokenizer().token_text(t) for t in best.token_ids]


def test_a_prompt_scored_is_what_generating_it_was_bit_for_bit(llm: LLM) -> None:
    known = list(range(256))  # the model has rows that its tokenizer has no tokens for
    [said] = quiet(llm, "Water", SamplingParams(temperature=0, max_tokens=70, logprobs=3, allowed_token_ids=known))
    whole = said.prompt_token_ids + said.outputs[0].token_ids
    [scored] = quiet(llm, [whole], SamplingParams(max_tokens=1, prompt_logprobs=3))
    assert scored.prompt_logprobs[0] is None and len(scored.prompt_logprobs) == len(whole)
    assert scored.prompt_logprobs[len(said.prompt_token_ids) :] == said.outputs[0].logprobs
    assert scored.num_cached_tokens == 0, "it is computed although it is cached"


def test_listed_tokens_stand_in_for_the_best(llm: LLM) -> None:
    [plain] = quiet(llm, "Water", SamplingParams(temperature=0, max_tokens=3, logprobs=20))
    listed = [*plain.outputs[0].logprobs[0]][4:7]
    [answer] = quiet(llm, "Water", SamplingParams(temperature=0, max_tokens=3, logprob_token_ids=listed))
    first = answer.outputs[0].logprobs[0]
    assert [*first][:3] == listed
    assert [first[t].logprob for t in listed] == [plain.outputs[0].logprobs[0][t].logprob for t in listed]


def test_best_of_keeps_the_likeliest_and_is_reproducible(llm: LLM) -> None:
    drawn = {"seed": 5, "max_tokens": 6, "temperature": 1.5}
    [all_of_them] = quiet(llm, "Water", SamplingParams(n=6, logprobs=0, **drawn))
    [best] = quiet(llm, "Water", SamplingParams(n=2, best_of=6, **drawn))
    ranked = sorted(all_of_them.outputs, key=lambda output: -output.cumulative_logprob)
    assert [output.token_ids for output in best.outputs] == [output.token_ids for output in ranked[:2]]
    assert [output.index for output in best.outputs] == [0, 1] and best.outputs[0].logprobs is None


def test_a_stop_string_ends_the_answer_and_its_work(llm: LLM) -> None:
    [free] = quiet(llm, "Water", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    letters = [c for c in free.outputs[0].text if c.isascii()]
    [cut] = quiet(llm, "Water", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=[letters[3]]))
    assert cut.outputs[0].text == free.outputs[0].text[: free.outputs[0].text.index(letters[3])]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", letters[3])
    assert not llm._core.has_work


def test_any_number_of_prompts_keeps_few_in_work(llm: LLM) -> None:
    """A generator is read as answers come: never more than run and stand ready are out."""
    seen = {"read": 0, "most": 0}
    start = llm._core._scheduler._next_step

    def prompts() -> Iterator[str]:
        for i in range(120):
            seen["read"] += 1
            open_now = len(llm._core._scheduler._requests)
            seen["most"] = max(seen["most"], open_now)
            yield f"{i}"

    answers = quiet(llm, prompts(), SamplingParams(temperature=0, max_tokens=2))
    assert [answer.prompt for answer in answers] == [str(i) for i in range(120)]
    assert seen == {"read": 120, "most": 8 + 32 - 1}
    assert llm._core._scheduler._next_step - start < 120, "they ran together"


def test_an_answer_is_the_same_alone_and_among_others(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=12, bad_words=["e"], repetition_penalty=1.1)
    together = quiet(llm, PROMPTS * 3, params)
    alone = [quiet(llm, prompt, params)[0] for prompt in PROMPTS]
    assert [a.outputs for a in together] == [a.outputs for a in alone] * 3


def test_a_prompt_too_long_is_named_and_the_engine_goes_on(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"prompt 2: .*maximum context length is 128 tokens"):
        quiet(llm, ["a", "b", "c" * 500, "d"])
    assert len(quiet(llm, PROMPTS)) == 4 and not llm._core.has_work
    [cut] = quiet(llm, "c" * 500, SamplingParams(max_tokens=8, truncate_prompt_tokens=-1))
    assert len(cut.prompt_token_ids) == 120


def test_a_prompt_on_which_the_engine_fails_fails_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step = llm._core.step

    def failing() -> object:
        output = step()
        for place, one in enumerate(output.outputs if output else ()):
            if one.request_id == failing_id and one.finish_reason is None:
                llm._core.abort(one.request_id)
                output.outputs[place] = SequenceOutput(  # type: ignore[union-attr]
                    request_id=one.request_id, index=0, token_ids=[], finish_reason="error", error="broken"
                )
        return output

    failing_id = str(next(llm._numbers) + 2)
    monkeypatch.setattr(llm._core, "step", failing)
    answers = quiet(llm, PROMPTS)
    assert [answer.outputs[0].finish_reason for answer in answers] == ["length", "error", "length", "length"]
    assert answers[1].outputs[0].error == "broken"


def test_chat_renders_by_the_models_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    [answer] = llm.chat(messages, GREEDY, use_tqdm=False)
    assert answer.prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    two = llm.chat([messages, messages], GREEDY, use_tqdm=False, chat_template="{{ messages[0].content }}")
    assert [a.prompt for a in two] == ["Hi", "Hi"]
    assert two[0].outputs == quiet(llm, "Hi")[0].outputs
    tools: list[dict[str, object]] = [{"type": "function", "function": {"name": "clock"}}]
    shows = "{{ tools[0].function.name }}"
    [told] = llm.chat(messages, GREEDY, use_tqdm=False, tools=tools, chat_template=shows)
    assert told.prompt == "clock"
    with pytest.raises(ValueError, match=r"tools\[0\]\.function"):
        llm.chat(messages, tools=[{"type": "function"}])
    with pytest.raises(ValueError, match="documents would have no effect"):
        llm.chat(messages, documents=[{"text": "x"}])
    with pytest.raises(ValueError, match=r"prompt 0: .*roles"):
        llm.chat([{"content": "Hi"}], use_tqdm=False)


def test_what_is_left_out_takes_the_model_authors_default(model: Path, llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams()
    override = {"top_k": 1, "max_new_tokens": 3}
    other = LLM(str(model), dtype="float32", max_model_len=64, kv_cache_memory_bytes="1M",
                override_generation_config=override)  # fmt: skip
    assert other.get_default_sampling_params() == SamplingParams(top_k=1, max_tokens=3)
    [answer] = other.generate("Water", use_tqdm=False)
    assert answer.outputs[0].token_ids == quiet(llm, "Water")[0].outputs[0].token_ids[:3], "top_k 1 is greedy"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"top_p": 2}, "top_p"),
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "`n`"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [""]}, "empty string"),
        ({"top_k": "many"}, "top_k"),
        ({"logprobs": -1}, "logprobs"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"repetition_detection": {"max_pattern_size": 3}}, "min_count"),
        ({"repetition_detection": {"most": 3}}, "most"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "exactly one of json, regex"),
        ({"structured_outputs": {"jason": {}}}, "jason"),
        ({"logit_bias": {-5: 1.0}}, "`logit_bias` holds the token id -5; no vocabulary has it"),
    ],
)
def test_sampling_params_are_checked_where_they_are_written(fields: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SamplingParams(**fields)


def test_what_is_not_built_and_what_the_model_is_not_for_is_refused_by_name(llm: LLM) -> None:
    for name in ("classify", "reward"):
        with pytest.raises(NotImplementedError, match="classification"):
            getattr(llm, name)(["x"])
    for ask in (lambda: llm.embed(["x"]), lambda: llm.encode("x"), lambda: llm.score("x", "y")):
        with pytest.raises(ValueError, match='runner="pooling"'):
            ask()


@pytest.mark.parametrize("model", [5, b"model", ["model"], {"model": "m"}])
def test_a_model_that_is_no_name_is_refused_as_such(model: object) -> None:
    with pytest.raises(ConfigError, match="hub id, and not of type"):
        LLM(model)  # type: ignore[arg-type]


def test_a_model_may_be_a_path(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len 1"):
        LLM(model, max_model_len=1)
    with pytest.raises(ConfigError, match="does not exist"):
        LLM(tmp_path / "nothing")


def test_flags_that_cannot_work_are_all_named(model: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(str(model), max_num_seq=4, gpu_memory_utilization=1.5, tensor_parallel_size=2)
    for said in ("max_num_seq", "max-num-seqs", "1.5", "tensor_parallel_size"):
        assert said in str(caught.value)
    for name in ("port", "max_num_queued_tokens"):
        with pytest.raises(ConfigError, match=f"{name} belongs to the server"):
            LLM(str(model), **{name: 8000})


def test_importing_headrace_brings_no_engine() -> None:
    code = "import headrace, sys; assert not {'torch', 'numpy', 'headrace.llm'} & set(sys.modules); print('fine')"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stdout == "fine\n"


def test_progress_off_a_terminal_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr("headrace.llm.progress.LINE_EVERY_S", 0.0)
    with BatchProgress(1000, shown=True, out=out) as progress:
        progress.add_prompt(20)
        progress.add_tokens(5)
    assert out.getvalue().startswith("1 of 1,000 prompts, ")
    with BatchProgress(None, shown=False, out=(silent := io.StringIO())) as progress:
        progress.add_tokens(5)
    assert silent.getvalue() == ""


def test_answers_match_what_their_parameters_demand_beside_free_ones(llm: LLM) -> None:
    params = [
        SamplingParams(max_tokens=20, structured_outputs=StructuredOutputsParams(regex="[ab]{3}!")),
        SamplingParams(max_tokens=20, guided_decoding=GuidedDecodingParams(choice=["left", "right"]), n=2),
        GREEDY,
    ]
    matched, chosen, free = quiet(llm, ["x", "y", "z"], params)
    assert re.fullmatch("[ab]{3}!", matched.outputs[0].text) and matched.outputs[0].finish_reason == "stop"
    assert {output.text for output in chosen.outputs} <= {"left", "right"} and len(chosen.outputs) == 2
    assert free.outputs[0].token_ids == quiet(llm, ["z"])[0].outputs[0].token_ids


def test_a_grammar_that_cannot_be_used_names_its_prompt(llm: LLM) -> None:
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(regex="("))
    with pytest.raises(ValueError, match=r"prompt 1: .*(?s:.*)unclosed group"):
        quiet(llm, ["x", "y"], [GREEDY, bad])
    assert len(quiet(llm, ["x"])) == 1


USER = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda llm: llm.generate(None), "prompts are a text, a list of token ids, or a dict"),
        (lambda llm: llm.generate(b"abc"), "this is of type bytes"),
        (lambda llm: llm.generate([b"abc"]), "prompt 0: a prompt is a text, .* and not of type bytes"),
        (lambda llm: llm.generate(5), "this is of type int"),
        (lambda llm: llm.generate(["a", None]), "prompt 1: a prompt is .* and not None"),
        (lambda llm: llm.generate([[1, 2.5]]), "prompt 0: token ids are integers, but one is of type float"),
        (lambda llm: llm.generate([[True]]), "prompt 0: token ids are integers, but one is of type bool"),
        (lambda llm: llm.generate([["1"]]), "prompt 0: token ids are integers, but one is of type str"),
        (lambda llm: llm.generate({}), "prompt 0: a prompt is a text"),
        (lambda llm: llm.generate({"prompt": 5}), "`prompt` is a text, and not of type int"),
        (lambda llm: llm.generate({"prompt": "a", "multi_modal_data": {}}), "a prompt has no multi_modal_data"),
        (lambda llm: llm.generate("x", {"temperature": 0}), "sampling_params is a SamplingParams, .* type dict"),
        (lambda llm: llm.generate("x", [{"temperature": 0}]), "a SamplingParams for each prompt, not of type dict"),
        (lambda llm: llm.generate("x", "greedy"), "sampling_params is a SamplingParams, .* type str"),
        (lambda llm: llm.chat("hi"), r'messages are a list of dicts such as \{"role": "user"'),
        (lambda llm: llm.chat(None), "this is None"),
        (lambda llm: llm.chat(USER[0]), "this is of type dict"),
        (lambda llm: llm.chat(["hi"]), "conversation 0 is of type str"),
        (lambda llm: llm.chat([*USER, "hi"]), "message 1 is of type str"),
        (lambda llm: llm.chat([USER, 5]), "conversation 1 is of type int"),
        (lambda llm: llm.chat(USER, {"temperature": 0}), "sampling_params is a SamplingParams, .* type dict"),
    ],
)
def test_what_is_no_prompt_conversation_or_parameters_is_refused_naming_the_forms(
    llm: LLM, call: Callable[[LLM], object], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        call(llm)


def test_numbers_and_arrays_of_numpy_are_numbers_and_lists(llm: LLM) -> None:
    params = SamplingParams(
        temperature=np.float32(0),
        max_tokens=np.int64(4),
        seed=np.uint32(7),
        stop_token_ids=np.array([200]),
        logit_bias={np.int64(65): np.float64(2.0)},
        logprobs=np.int32(1),
        n=np.int8(1),
        ignore_eos=np.bool_(True),
    )
    plain = SamplingParams(
        temperature=0, max_tokens=4, seed=7, stop_token_ids=[200], logit_bias={65: 2.0}, logprobs=1, ignore_eos=True
    )
    assert params == plain
    ids = np.array([65, 66, 67])
    assert quiet(llm, [list(ids)], params)[0].outputs == quiet(llm, [[65, 66, 67]], plain)[0].outputs
    assert len(quiet(llm, list(ids), params)) == 1


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_none_is_called_by_its_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"`{name}` must be .*, but it is {value}\."):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("value", [1.5, "2", True, -1])
def test_logprobs_are_counted(value: object) -> None:
    with pytest.raises(ValueError, match="`logprobs` must be between 0"):
        SamplingParams(logprobs=value)  # type: ignore[arg-type]


def test_many_answers_to_many_prompts_fill_no_queue(model: Path) -> None:
    small = LLM(str(model), max_model_len=64, kv_cache_memory_bytes="4M", max_num_seqs=2, max_num_queued_reqs=1)
    answers = small.generate(PROMPTS, SamplingParams(n=6, max_tokens=2, seed=1, ignore_eos=True), use_tqdm=False)
    assert [len(answer.outputs) for answer in answers] == [6] * 4
