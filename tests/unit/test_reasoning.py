"""Thinking told apart from the answer: from any pieces, whatever the prompt has opened, nothing lost, in budget."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config.flag_table import FLAG_BY_NAME
from headrace.config.settings import EngineSettings
from headrace.core import EngineCore
from headrace.protocol.ipc import SamplingParams, ThinkingBudget
from headrace.runtime.token_rules import TokenRules
from headrace.text.reasoning import FORMATS, ReasoningSplit, detected, opened_in
from tests.engine_runs import request, run, tokens
from tests.tiny_models import tiny_llama

THINK = FORMATS["qwen3"]


def split(pieces: list[str], *, is_open: bool, format: str = "qwen3") -> tuple[str, str]:
    parser = ReasoningSplit(FORMATS[format], is_open=is_open)
    found = [piece for text in pieces for piece in parser.add(text)] + parser.finish()
    assert all(text for _, text in found)
    kinds = [kind for kind, _ in found]
    assert kinds == sorted(kinds, reverse=True), "reasoning comes before content"
    reasoning, content = (
        "".join(text for kind, text in found if kind == wanted) for wanted in ("reasoning", "content")
    )
    return reasoning, content


CASES = {
    "opened by the prompt": (True, "hm, well\n</think>\n\nYes.", ("hm, well", "Yes.")),
    "opened by the model": (False, "<think>\nhm\n</think>\n\nYes.\n", ("hm", "Yes.\n")),
    "opened after white space": (False, "\n <think>hm</think>Yes.", ("hm", "Yes.")),
    "no thinking": (False, "Yes.", ("", "Yes.")),
    "white space before plain text is kept": (False, "\n\nYes.", ("", "\n\nYes.")),
    "nothing thought": (True, "\n\n</think>\n\nYes.", ("", "Yes.")),
    "never closed": (True, "hm, and so on\n", ("hm, and so on\n", "")),
    "closed only": (True, "hm</think>", ("hm", "")),
    "half a mark at the end": (True, "hm</thi", ("hm</thi", "")),
    "half an opening mark": (False, "<thi", ("", "<thi")),
    "a mark that is another": (False, "<thinking> no", ("", "<thinking> no")),
    "marks in the answer": (True, "a</think>b <think>c</think>", ("a", "b <think>c</think>")),
    "the opening mark again": (True, "a <think> b</think>c", ("a <think> b", "c")),
    "nothing": (False, "", ("", "")),
}


@pytest.mark.parametrize(("is_open", "text", "expected"), CASES.values(), ids=CASES)
def test_thinking_and_answer_from_the_whole_text_and_from_single_characters(
    is_open: bool, text: str, expected: tuple[str, str]
) -> None:
    assert split([text], is_open=is_open) == expected
    assert split(list(text), is_open=is_open) == expected


@settings(max_examples=150, deadline=None)
@given(
    text=st.lists(
        st.sampled_from(["<think>", "</think>", "<thi", "nk>", "</", "a", "<", ">", " ", "\n", "é", "think"]),
        max_size=12,
    ).map("".join),
    places=st.lists(st.integers(0, 60), max_size=12),
    is_open=st.booleans(),
)
def test_the_split_does_not_depend_on_how_the_text_was_cut(text: str, places: list[int], is_open: bool) -> None:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    whole = split([text], is_open=is_open)
    assert split([text[a:b] for a, b in itertools.pairwise(edges)], is_open=is_open) == whole
    num_white = sum(map(str.isspace, text))
    assert len("".join(whole)) >= len(text) - len(THINK.opens + THINK.closes) - num_white


@pytest.mark.parametrize("format", FORMATS)
def test_every_familys_marks_are_known_by_its_template_and_read(format: str) -> None:
    row = FORMATS[format]
    assert detected(f"{{{{ '{row.opens}' + thought + '{row.closes}' }}}}") == row
    text = f"{row.opens} because\n{row.closes}\nYes."
    assert split(list(text), is_open=False, format=format) == ("because", "Yes.")


def test_the_prompts_end_says_whether_the_answer_begins_with_thinking() -> None:
    assert opened_in(THINK, "<|im_start|>assistant\n<think>\n")
    assert not opened_in(THINK, "<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not opened_in(THINK, "<|im_start|>user\nwhat is <think>?<|im_end|>\n<|im_start|>assistant\n")
    assert opened_in(THINK, "anything", continued="<think>so far")
    assert not opened_in(THINK, "anything", continued="<think>so far</think>And")


def test_a_template_without_marks_has_no_thinking_and_the_flag_knows_every_format() -> None:
    assert detected("{{ messages }}") is None
    assert FLAG_BY_NAME["reasoning-parser"].choices == ("auto", "none", *FORMATS)


def forced(generated: list[int], budget: ThinkingBudget) -> list[int] | None:
    rules = TokenRules.of(SamplingParams(max_tokens=99, thinking=budget, bad_words=((5,),)))
    tokens = np.array(generated, np.int32)
    only = rules.only(tokens)
    assert (len(rules.forbidden(tokens, 50)) == 0) == (only is not None)
    return None if only is None else only.tolist()


def test_the_end_of_thinking_comes_when_its_budget_is_spent() -> None:
    budget = ThinkingBudget(3, (5, 6))
    assert forced([1, 2], budget) is None
    assert forced([1, 2, 3], budget) == [5]
    assert forced([1, 2, 3, 5], budget) == [6]
    assert forced([1, 2, 3, 5, 6], budget) is None
    assert forced([1, 2, 3, 5, 6, 7, 8], budget) is None
    assert forced([], ThinkingBudget(0, (5,))) == [5]


def test_thinking_that_has_ended_by_itself_is_left_alone() -> None:
    assert forced([5, 6, 1], ThinkingBudget(3, (5, 6))) is None
    assert forced([5, 6, 1, 5], ThinkingBudget(3, (5, 6))) is None


def test_a_budget_counts_from_the_mark_that_the_model_writes() -> None:
    budget = ThinkingBudget(2, (6,), (4,))
    assert forced([4, 1], budget) is None
    assert forced([4, 1, 1], budget) == [6]
    assert forced([1, 1, 1], budget) is None


def test_the_engine_ends_thinking_and_goes_on_with_its_own_words(tmp_path: Path) -> None:
    core = EngineCore(EngineSettings(model=str(tiny_llama(tmp_path)), dtype="float32", kv_cache_memory_bytes=1 << 22))
    plain = {"max_tokens": 12, "temperature": 1.0, "seed": 3}
    free = tokens(run(core, [request("free", [7, 8, 9], **plain)]))["free", 0]
    budget = ThinkingBudget(4, (200, 201))
    bound = tokens(run(core, [request("bound", [7, 8, 9], **plain, thinking=budget)]))["bound", 0]
    assert bound[:6] == [*free[:4], 200, 201]
    assert len(bound) == 12 and bound.count(200) == 1
