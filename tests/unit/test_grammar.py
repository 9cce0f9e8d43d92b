"""Grammars at work: which tokens a mask allows, that it follows from the tokens alone, and what it may cost."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.config.model_files import open_model
from headrace.protocol.errors import ApiError
from headrace.protocol.grammar_text import LarkRules, json_schema_grammar, lark_grammar
from headrace.protocol.ipc import GrammarSpec, SamplingParams
from headrace.protocol.structural_tag import structural_tag_grammar
from headrace.runtime.grammar import MASK_S, MASKS_AHEAD_S, DeadEnd, Grammar, GrammarError, GrammarState, TooCostly
from headrace.runtime.grammar_mask import step_mask
from headrace.runtime.grammar_source import GrammarCompiler
from headrace.runtime.grammar_store import KEPT, SHORT_CHARS, GrammarStore
from headrace.runtime.sampling import SequenceSampling
from headrace.runtime.token_rules import TokenRules
from headrace.text.tokenizer import Tokenizer
from tests.small_models import bundled_gguf

VOCAB = 49_152


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(open_model(bundled_gguf(), {}))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB)


def spec_of(kind: str, text: str, after: tuple[int, ...] = ()) -> GrammarSpec:
    return GrammarSpec(kind=kind, text=text, field="f", after_token_ids=after)  # type: ignore[arg-type]


def allowed(state: GrammarState, token_ids: list[int]) -> set[int]:
    mask = state.mask(np.array(token_ids, np.int32))
    assert mask is not None
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def accepts(grammar: Grammar, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the text, however it is cut into tokens, is one of the grammar's."""
    matcher = grammar.matcher.deep_copy()
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def written(grammar: Grammar, tokenizer: Tokenizer, choose: Any, most: int = 200) -> str:
    """The text that comes of choosing a token from every mask until nothing may follow."""
    state, token_ids = grammar.start(), list[int]()
    while len(token_ids) < most and not state.is_complete(np.array(token_ids, np.int32)):
        token_ids.append(choose(sorted(allowed(state, token_ids))))
    return tokenizer.decode(token_ids)


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("regex", "[ab]{2}c?", ["ab", "bbc"], ["a", "abcc", "xab", "abx"]),
        ("regex", r"^a+\$$", ["a$", "aa$"], ["a", "a$$"]),
        ("choice", '["red","blue","é😀\\n\\"x"]', ["red", "blue", 'é😀\n"x'], ["", "re", "redblue"]),
        ("grammar", 'root ::= "a" [0-9]+ ws "!"\nws ::= [ \\t]*\n', ["a1!", "a22 \t!"], ["a!", "1!"]),
        ("grammar", 'root ::= expr\nexpr ::= "(" expr ")" | [a-z] # nested', ["x", "((y))"], ["(x", "()"]),
        ("grammar", 'root ::= [^"\\n]{2,3} "\\u00e9" "/"', ["abé/"], ["aé/", "abcdé/"]),
        ("grammar", '?start: sum\n?sum: NUM ("+" NUM)*\nNUM: /[0-9]+/\n', ["1", "1+22"], ["+", "1+"]),
        ("grammar", "start: WORD+\nWORD: /[a-c]/ | \"-\"\n", ["a-b"], ["", "d"]),
        ("lark", 'start: "q" %json {"enum": [1, 2]}', ["q1", "q2"], ["q3", "1"]),
    ],
)  # fmt: skip
def test_a_grammar_allows_its_texts_and_no_others(
    compiler: GrammarCompiler, tokenizer: Tokenizer, kind: str, text: str, good: list[str], bad: list[str]
) -> None:
    grammar = compiler.compile(spec_of(kind, text))
    assert [accepts(grammar, tokenizer, one) for one in good] == [True] * len(good)
    assert [accepts(grammar, tokenizer, one) for one in bad] == [False] * len(bad)


def test_an_end_token_may_come_only_where_the_text_is_complete(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    end = tokenizer.eos_token_ids[0]
    state = compiler.compile(spec_of("regex", "ab?")).start()
    a, b = (tokenizer.token_id(letter) for letter in "ab")
    assert a is not None and b is not None
    assert end not in allowed(state, [])
    assert allowed(state, [a]) == {b, end}
    assert not state.is_complete(np.array([a], np.int32))
    assert state.is_complete(np.array([a, b], np.int32))
    assert not any(tokenizer.is_special(token) for token in allowed(state, [a]) - {end})


def test_a_mask_follows_from_the_tokens_alone(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Taken in one by one, all at once, or with gaps: as after a preemption, a fork, or a step done again."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "number"}}}
    grammar = compiler.compile(json_schema_grammar(schema, "f"))
    random = np.random.default_rng(5)
    steady, token_ids = grammar.start(), list[int]()
    for _ in range(25):
        choices = allowed(steady, token_ids)
        assert choices == allowed(grammar.start(), token_ids)
        assert choices == allowed(steady, token_ids)
        if choices == set(tokenizer.eos_token_ids):
            break
        token_ids.append(int(random.choice(sorted(choices - set(tokenizer.eos_token_ids)))))
    late = grammar.start()
    for length in (0, 3, 17, len(token_ids)):
        assert allowed(late, token_ids[:length]) == allowed(grammar.start(), token_ids[:length])


def test_a_grammar_begins_behind_what_it_waits_for(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    mark = tuple(tokenizer.encode("</think>", add_special_tokens=False))
    assert len(mark) > 1
    state = compiler.compile(spec_of("choice", '["yes"]', after=mark)).start()
    thought = tokenizer.encode("it may be no", add_special_tokens=False)
    for place in range(len(thought) + len(mark)):
        assert state.mask(np.array([*thought, *mark][:place], np.int32)) is None
        assert not state.is_complete(np.array([*thought, *mark][:place], np.int32))
    yes = tokenizer.encode("yes", add_special_tokens=False)
    assert allowed(state, [*thought, *mark]) >= {yes[0]}
    assert tokenizer.encode("no", add_special_tokens=False)[0] not in allowed(state, [*thought, *mark])
    assert state.is_complete(np.array([*thought, *mark, *yes], np.int32))


def test_blanks_in_json_are_bounded(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(json_schema_grammar({"type": "array", "items": {"type": "integer"}}, "f"))
    for text in ("[1,2]", "[1, 2]", "[\n  1,\n  2\n]", "[\n\t1\n]"):
        assert accepts(grammar, tokenizer, text), text
    for text in (" [1]", "[1]\n", "[  1]", "[\n\n1]", "[\n" + 17 * " " + "1]"):
        assert not accepts(grammar, tokenizer, text), text

    def blankest(choices: list[int]) -> int:
        return max(choices, key=lambda token: (tokenizer.token_text(token).isspace(), -token))

    text = written(grammar, tokenizer, blankest, most=40)
    assert max(map(len, re.findall(r"\s+", text))) <= 17


@pytest.mark.parametrize("kind", ["integer", "number"])
def test_numbers_in_json_are_bounded(compiler: GrammarCompiler, tokenizer: Tokenizer, kind: str) -> None:
    grammar = compiler.compile(json_schema_grammar({"type": "array", "items": {"type": kind}, "minItems": 2}, "f"))
    [three] = tokenizer.encode("3", add_special_tokens=False)

    def digit_if_any(choices: list[int]) -> int:
        digits = [token for token in choices if tokenizer.token_text(token)[:1].isdigit()]
        return three if three in digits else digits[-1] if digits else choices[0]

    text = written(grammar, tokenizer, digit_if_any, most=80)
    assert re.findall(r"\d+", text)
    assert max(map(len, re.findall(r"\d+", text))) <= 20


def test_exponents_in_json_are_bounded_and_digits_in_strings_are_not(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    def after(schema: object, text: str) -> set[str]:
        state = compiler.compile(json_schema_grammar(schema, "f")).start()
        return {tokenizer.token_text(t) for t in allowed(state, tokenizer.encode(text, add_special_tokens=False))}

    numbers = {"type": "array", "items": {"type": "number"}}
    assert "3" in after(numbers, "[1e2")
    assert "3" not in after(numbers, "[1e-22")
    assert "3" not in after(numbers, "[-" + 20 * "7")
    assert "3" in after(numbers, "[" + 19 * "7")
    assert "3" in after(numbers, "[0." + 11 * "7")
    assert "3" not in after(numbers, "[0." + 12 * "7")
    less = {"type": "number", "minimum": -45, "exclusiveMaximum": -44}
    assert "0" in after(less, "-44.00000000")
    assert "0" not in after(less, "-44.00000000000") and "3" in after(less, "-44.00000000000")
    assert "3" in after({"type": "string"}, '"' + 40 * "7")
    only_digits = compiler.compile(lark_grammar('start: "[" /[0-9]{40}/ "]"', "f")).start()
    assert allowed(only_digits, tokenizer.encode("[" + 25 * "7", add_special_tokens=False))


def test_the_innermost_part_at_fault_is_named(compiler: GrammarCompiler) -> None:
    def fault(schema: object) -> tuple[str, str]:
        with pytest.raises(GrammarError) as caught:
            compiler.compile(json_schema_grammar(schema, "guided_json"))
        return caught.value.field, str(caught.value)

    deep = {"type": "object", "properties": {"a": {"anyOf": [{"type": "string"}, {"items": {"not": {}}}]}}}
    field, message = fault(deep)
    assert field == "guided_json.properties.a.anyOf[1].items.not"
    assert "keyword `not`" in message
    field, message = fault({"$defs": {"s": {"type": "array", "uniqueItems": True}}, "$ref": "#/$defs/s"})
    assert field == "guided_json.$defs.s.uniqueItems"
    field, message = fault({"properties": {"a": {"prefixItems": [{}, {"pattern": "(?=x)"}]}}, "required": ["a"]})
    assert field == "guided_json.properties.a.prefixItems[1]"
    assert "look-around" in message
    field, message = fault({"properties": {"a": {"oneOf": [{"type": "string"}, {"minLength": 2}]}}})
    assert field == "guided_json.properties.a" and "`anyOf` can" in message and "option" not in message
    field, message = fault({"properties": {"a": {"type": "strng"}}})
    assert field == "guided_json.properties.a" and "strng" in message
    field, message = fault({"$defs": {"loop": {"$ref": "#/$defs/loop"}}, "$ref": "#/$defs/loop"})
    assert "allows no text" in message


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("regex", "(", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("grammar", "root ::= x", "Rule 'x' not found"),
        ("grammar", "root ::= " + 5000 * "(" + "x", "nested too deeply"),
        ("grammar", "no grammar", "cannot be used"),
        ("grammar", "root = ::= x", "Expected"),
        ("grammar", "root ::= " + 40_000 * '"a" ', "may have 32,768"),
        ("lark", "start: <nope>", "unknown special token"),
    ],
)
def test_a_text_that_is_no_grammar_is_refused_with_the_reason(
    compiler: GrammarCompiler, kind: str, text: str, said: str
) -> None:
    with pytest.raises(GrammarError, match=re.escape(said)) as caught:
        compiler.compile(spec_of(kind, text))
    assert caught.value.field == "f"


def _nested(levels: int, ref: str) -> dict[str, object]:
    both = {f"d{i}": {ref: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(levels)}
    return {"$defs": {**both, f"d{levels}": {"properties": {"a": {"type": "string"}}}}, "$ref": "#/$defs/d0"}


def _chain(length: int, ref: str) -> dict[str, object]:
    links = {f"d{i}": {"type": "array", ref: {"$ref": f"#/$defs/d{i + 1}"}} for i in range(length)}
    return {"$defs": {**links, f"d{length}": {"type": "string"}}, "$ref": "#/$defs/d0"}


HOSTILE: dict[str, GrammarSpec] = {
    "a chain of references": json_schema_grammar(_chain(9000, "items"), "f"),
    "a chain of rules": spec_of(
        "grammar", "start: r0" + "".join(f"\nr{i}: r{i + 1}" for i in range(2000)) + '\nr2000: "a"'
    ),
    "multiples": json_schema_grammar({"allOf": [{"multipleOf": n} for n in (99991, 99989, 99971, 99961)]}, "f"),
    "many patterns": json_schema_grammar({"patternProperties": {f"^a{i}$": {} for i in range(2000)}}, "f"),
    "a?a?a?": spec_of("regex", "a?" * 16_000),
    "doubling": json_schema_grammar(_nested(30, "allOf"), "f"),
    "doubling items": json_schema_grammar(_nested(30, "prefixItems"), "f"),
    "doubling choices": json_schema_grammar(_nested(30, "anyOf"), "f"),
    "allOf of anyOf": json_schema_grammar(
        {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {"const": j}}} for j in range(6)]} for i in range(6)]}, "f"
    ),
    "many properties": json_schema_grammar(
        {"type": "object", "properties": {f"a{i}": {"type": "string"} for i in range(5000)}}, "f"
    ),
    "a long enum": json_schema_grammar({"enum": [f"v{i}" for i in range(20_000)]}, "f"),
    "recursive": json_schema_grammar(
        {"type": "object", "properties": {"a": {"$ref": "#"}, "b": {"items": {"$ref": "#"}}}}, "f"
    ),
    "endless": json_schema_grammar({"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object"}, "f"),
    "deep": json_schema_grammar(json.loads(45 * '{"items":' + "{}" + 45 * "}"), "f"),
    "(a|b)*a(a|b){30}": spec_of("regex", "(a|b)*a(a|b){30}"),
    "nested repeats": spec_of("regex", "((a{0,100}){0,100}){0,100}"),
    "far away": spec_of("regex", "(.*a.{200})|(.*b.{300}.*)|(.*c.{100})"),
    "(a+)+$": spec_of("regex", "(a+)+(b+)+((a|b)+)+"),
    "wide letters": spec_of("regex", r"(\p{L}|\p{N}){1,500}(\w\W){1,500}"),
    "ambiguous": spec_of("grammar", 'start: s\ns: s s s | s s | "a" | "b" | ""\n'),
    "left recursion": spec_of("grammar", 'start: s\ns: s "a" | s s | s\n'),
    "thousand rules": spec_of(
        "grammar",
        "root ::= " + " | ".join(f"r{i}" for i in range(900)) + "".join(f"\nr{i} ::= [a-z]*" for i in range(900)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_or_costs_little(compiler: GrammarCompiler, name: str) -> None:
    """In processor time of this thread: two and a half seconds to compile at the very worst, and of its masks no more
    than the bound; then its own sequence ends, and nothing else does."""
    started = time.thread_time()
    try:
        grammar = compiler.compile(HOSTILE[name])
    except GrammarError:
        grammar = None
    assert time.thread_time() - started < 2.5
    if grammar is None:
        return
    random = np.random.default_rng(1)
    state, token_ids, spent = grammar.start(), list[int](), 0.0
    for _ in range(40):
        try:
            started = time.thread_time()
            mask = state.mask(np.array(token_ids, np.int32))
            spent += time.thread_time() - started
        except DeadEnd:
            break
        assert mask is not None and mask.any()
        choices = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        token_ids.append(int(random.choice(choices)))
        if state.is_complete(np.array(token_ids, np.int32)):
            break
    assert spent < MASKS_AHEAD_S + MASK_S * len(token_ids) + 0.1


def test_a_grammar_the_library_gives_up_on_is_not_said_to_have_ended(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    state = compiler.compile(spec_of("regex", "[ab]+")).start()
    with pytest.raises(TooCostly, match="the grammar library gave up"):
        state.mask(np.array(tokenizer.encode("c", add_special_tokens=False), np.int32))


def test_an_answer_that_becomes_too_costly_is_said_to_be_that(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    schema = {"type": "string", "pattern": "^.{0,5000}x.{0,5000}y.{0,5000}$"}
    state = sampling_state(compiler.compile(json_schema_grammar(schema, "f")))
    quote = tokenizer.encode('"', add_special_tokens=False)
    words = [token for token in range(VOCAB) if tokenizer.token_bytes(token).isalpha()]
    token_ids, random = quote, np.random.default_rng(1)
    while not isinstance(said := masked_tokens(state, token_ids), str):
        assert len(token_ids) < 1000
        token_ids = [*token_ids, int(random.choice(words))]
    assert said.startswith("The grammar is too costly to be followed any further: ")


# with what else a request asks for


def sampling_state(grammar: Grammar, **params: Any) -> SequenceSampling:
    own = SamplingParams(max_tokens=10, **params)
    return SequenceSampling(own, 0, 0, plain=False, fixed=False, rules=TokenRules.of(own), grammar=grammar.start())


def masked_tokens(state: SequenceSampling, token_ids: list[int]) -> set[int] | str:
    step = step_mask([state], [np.array(token_ids, np.int32)], VOCAB)
    if 0 in step.dead_ends:
        assert step.masked is not None and step.masked[0] == 0
        return step.dead_ends[0]
    assert step.mask is not None and step.masked is not None and step.masked[0] == 1
    return set(np.flatnonzero(np.unpackbits(step.mask[0].view(np.uint8), bitorder="little")).tolist())


def test_what_else_is_asked_for_takes_away_from_what_the_grammar_allows(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    a, b, c = (tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abc")
    end = tokenizer.eos_token_ids[0]
    grammar = compiler.compile(spec_of("regex", "[abc][abc]?"))
    assert masked_tokens(sampling_state(grammar), []) >= {a, b, c}
    assert masked_tokens(sampling_state(grammar, allowed_token_ids=(a, b, end)), []) == {a, b}
    assert masked_tokens(sampling_state(grammar, allowed_token_ids=(a, b), bad_words=((b,),)), []) == {a}
    words = sampling_state(grammar, allowed_token_ids=(a, b, end), bad_words=((a, b),))
    assert masked_tokens(words, [a]) == {a, end}
    said = masked_tokens(sampling_state(grammar, allowed_token_ids=(end,)), [])
    assert isinstance(said, str) and "leave none of the tokens" in said


def test_min_tokens_holds_the_end_back_only_while_something_else_may_come(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    [a] = tokenizer.encode("a", add_special_tokens=False)
    end = tokenizer.eos_token_ids[0]
    state = sampling_state(compiler.compile(spec_of("regex", "a{1,2}")), min_tokens=5, stop_token_ids=(end,))
    assert end not in masked_tokens(state, [a])
    assert masked_tokens(state, [a, a]) == {end}


def test_rows_without_a_grammar_are_left_alone(compiler: GrammarCompiler) -> None:
    free = SequenceSampling(SamplingParams(max_tokens=1), 0, 0, plain=False, fixed=True)
    nothing = np.zeros(0, np.int32)
    step = step_mask([free, free], [nothing, nothing], VOCAB)
    assert step.mask is None and step.masked is None
    step = step_mask([free, sampling_state(compiler.compile(spec_of("regex", "a")))], [nothing, nothing], VOCAB)
    assert step.masked is not None and step.masked.tolist() == [0, 1]


# the store


def stored(store: GrammarStore, spec: GrammarSpec) -> None:
    while not store.take(spec):
        store.wait()
        store.clear_wake()


@pytest.fixture
def counted(compiler: GrammarCompiler) -> Iterator[tuple[GrammarStore, list[str]]]:
    compiled: list[str] = []

    def compile(spec: GrammarSpec) -> Grammar:
        compiled.append(spec.text)
        return compiler.compile(spec)

    store = GrammarStore(lambda: compile)
    yield store, compiled
    store.close()


def test_a_grammar_is_compiled_once_for_all_who_ask(counted: tuple[GrammarStore, list[str]]) -> None:
    store, compiled = counted
    spec = spec_of("regex", "a")
    assert not store.hold("first", spec)
    store.hold("second", spec_of("regex", "a"))
    stored(store, spec)
    assert store.hold("third", spec)
    found = store.find(spec)
    for holder in ("first", "second", "third", "nobody"):
        store.release(holder)
    assert compiled == ["a"]
    assert store.find(spec) is found is not None


def test_the_store_is_bounded_and_keeps_what_is_held(counted: tuple[GrammarStore, list[str]]) -> None:
    store, _ = counted
    held = spec_of("regex", "held")
    store.hold("holder", held)
    stored(store, held)
    specs = [spec_of("regex", f"a{i}") for i in range(KEPT + 10)]
    for spec in specs:
        store.hold(spec.text, spec)
        stored(store, spec)
        store.release(spec.text)
    assert store.find(held) is not None
    assert sum(store.find(spec) is not None for spec in specs) == KEPT
    assert store.find(specs[0]) is None and store.find(specs[-1]) is not None


def test_a_grammar_that_fails_fails_for_all_who_wait_and_leaves_nothing(
    counted: tuple[GrammarStore, list[str]],
) -> None:
    store, _ = counted
    spec = spec_of("regex", "(")
    for holder in ("first", "second"):
        store.hold(holder, spec)
    for holder in ("first", "second"):
        with pytest.raises(GrammarError, match="unclosed"):
            stored(store, spec)
        store.release(holder)
    assert not store._compiling and not store._held and not store._holders


def test_a_compiler_that_breaks_is_the_requests_error(tmp_path: Path) -> None:
    def broken() -> Any:
        raise RuntimeError("no tokenizer")

    store = GrammarStore(broken)
    spec = spec_of("regex", "a")
    store.hold("one", spec)
    with pytest.raises(GrammarError, match="no tokenizer"):
        stored(store, spec)
    store.close()


CALLS = [("<call>", {"const": 1}), ("<call2>", {"const": 2})]


def test_tagged_text_keeps_its_promises(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    def texts(separator: str | None = None, *, at_least_one: bool = False, at_most_one: bool = False) -> list[bool]:
        rules = LarkRules("f", {})
        tags = [(begin, rules.join(rules.json(schema), rules.literal("</call>"))) for begin, schema in CALLS]
        if separator is None:
            start = rules.triggered(tags, ["<call"], at_least_one=at_least_one, at_most_one=at_most_one)
        else:
            start = rules.separated(tags, separator, at_least_one=at_least_one, at_most_one=at_most_one)
        grammar = compiler.compile(lark_grammar(rules.grammar(start), "f"))
        call = "<call>1</call>"
        tried = ["", "hi", call, f"hi {call}", f"hi {call} and <call2>2</call> ok", "hi <call>2", call + call]
        return [accepts(grammar, tokenizer, text) for text in tried]

    assert texts() == [True, True, True, True, True, False, True]
    assert texts(at_least_one=True) == [False, False, True, True, True, False, True]
    assert texts(at_most_one=True) == [True, True, True, True, False, False, False]
    assert texts(at_least_one=True, at_most_one=True) == [False, False, True, True, False, False, False]
    assert texts("") == [True, False, True, False, False, False, True]
    assert texts(";", at_least_one=True) == [False, False, True, False, False, False, False]


def test_special_tokens_are_demanded_as_tokens(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    special = tokenizer.special_token_ids
    start = special["<|im_start|>"]
    tag = {"structures": [{"begin": "<|im_start|>call ", "schema": {"const": 1}}], "triggers": ["<|im_start|>"]}
    state = compiler.compile(structural_tag_grammar(tag, "f", special)).start()
    word = tokenizer.encode("word", add_special_tokens=False)
    assert start in allowed(state, word)
    after = allowed(state, [*word, start])
    assert all("call ".startswith(tokenizer.token_text(t)) or tokenizer.token_text(t).startswith("call") for t in after)


def test_structural_formats_combine(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    def texts(format: dict[str, Any], *tried: str) -> list[bool]:
        grammar = compiler.compile(structural_tag_grammar({"type": "structural_tag", "format": format}, "f"))
        return [accepts(grammar, tokenizer, text) for text in tried]

    one = {"type": "json_schema", "json_schema": {"const": 1}}
    thought = {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}
    both = {"type": "sequence", "elements": [thought, one]}
    assert texts(both, "<t>so / so</t>1", "<t></t>1", "<t>1", "1") == [True, True, False, False]
    either = {
        "type": "or",
        "elements": [{"type": "regex", "pattern": "a/[bc]"}, {"type": "const_string", "value": "x"}],
    }
    assert texts(either, "a/b", "x", "a/d", "") == [True, True, False, False]
    tags = [{"type": "tag", "begin": f"<{name}>", "content": one, "end": [f"</{name}>", "."]} for name in "fg"]
    listed = {"type": "tags_with_separator", "tags": tags, "separator": ", ", "at_least_one": True}
    assert texts(listed, "<f>1</f>", "<f>1., <g>1</g>", "", "<f>1</f><g>1.") == [True, True, False, False]
    once = {"type": "triggered_tags", "triggers": ["<"], "tags": tags, "stop_after_first": True}
    assert texts(once, "so <f>1.", "so", "so <f>1. and", "a < b") == [True, True, False, False]
    with pytest.raises(ApiError, match="only at the end"):
        texts({"type": "sequence", "elements": [{"type": "any_text"}, one]})
    with pytest.raises(ApiError, match="begins none of the tags"):
        texts({"type": "triggered_tags", "triggers": ["<f", "!"], "tags": tags[:1]})


def test_a_grammar_of_our_own_lark(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(lark_grammar('start: "a" | "b"', "f"))
    assert accepts(grammar, tokenizer, "b") and not accepts(grammar, tokenizer, "c")


def test_dates_and_times_are_ones_that_exist(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    def texts(format: str, *tried: str) -> list[bool]:
        schema = {"type": "object", "properties": {"at": {"type": "string", "format": format}}, "required": ["at"]}
        grammar = compiler.compile(json_schema_grammar(schema, "f"))
        return [accepts(grammar, tokenizer, json.dumps({"at": text}, separators=(",", ":"))) for text in tried]

    assert texts("date", "2024-02-29", "2000-02-29", "1999-12-31") == [True, True, True]
    assert texts("date", "2023-02-29", "1900-02-29", "2023-04-31", "0000-01-01", "2023-1-1") == [False] * 5
    assert texts("time", "23:59:59Z", "00:00:00.123456+05:30") == [True, True]
    assert texts("time", "23:59:60Z", "24:00:00Z", "12:00:00") == [False] * 3
    assert texts("date-time", "2024-02-29T00:00:00Z", "2023-02-29T00:00:00Z") == [True, False]


def test_a_short_grammar_does_not_wait_for_a_long_one(compiler: GrammarCompiler) -> None:
    go_on = threading.Event()

    def compile(spec: GrammarSpec) -> Grammar:
        if len(spec.text) > SHORT_CHARS:
            assert go_on.wait(20)
        return compiler.compile(spec)

    store = GrammarStore(lambda: compile)
    long, short = spec_of("regex", "a" * (SHORT_CHARS + 1)), spec_of("regex", "a")
    store.hold("long", long)
    store.hold("short", short)
    stored(store, short)
    assert not store.take(long)
    go_on.set()
    stored(store, long)
    store.close()
