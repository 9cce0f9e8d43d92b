"""JSON Schemas as response formats: of each comes an answer that it allows, or a refusal; never anything else.

The schemas are those of JSON-Schema-Test-Suite (draft 2020-12), and random ones; tests/long runs more of these.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import llguidance
import pytest

from headrace.protocol.errors import ApiError
from headrace.protocol.grammar_text import json_schema_grammar
from headrace.runtime.grammar import GrammarError
from headrace.runtime.grammar_source import GrammarCompiler
from tests.schema_runs import SchemaEngine, check_random_schemas, problem

SUITE = Path(__file__).parents[1] / "data" / "json_schema_test_suite"
ODD_PATTERN = "\ufeff"
"""The suite wants `\\S` not to match it, as in JavaScript; grammars and Python think that it is no blank."""


def groups() -> list[tuple[str, dict[str, Any]]]:
    files = sorted(SUITE.rglob("*.json"))
    return [(file.relative_to(SUITE).as_posix(), group) for file in files for group in json.loads(file.read_text())]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> SchemaEngine:
    return SchemaEngine(tmp_path_factory.mktemp("schemas"))


def test_every_schema_of_the_suite_gives_a_valid_answer_or_a_refusal(engine: SchemaEngine) -> None:
    suite = groups()
    schemas = [group["schema"] for _, group in suite]
    parameters = [{"temperature": 1.0, "seed": number} for number in range(len(suite))]
    outcomes = engine.answers(schemas, parameters, max_tokens=60, bias=30.0)
    wrong = [
        (file, group["description"], outcome.text, reason)
        for (file, group), outcome in zip(suite, outcomes, strict=True)
        if outcome.refused is None and outcome.finished and (reason := problem(group["schema"], outcome.text))
    ]
    assert wrong == []
    accepted = [outcome for outcome in outcomes if outcome.refused is None]
    finished = sum(outcome.finished for outcome in accepted)
    library = sum(isinstance(schema, dict) and library_takes(schema) for schema in schemas)
    print(f"\n{len(accepted)} of {len(suite)} schemas accepted, by the library {library}; {finished} answers ended")
    assert len(accepted) >= library
    assert finished >= 0.9 * len(accepted)


def library_takes(schema: dict[str, Any]) -> bool:
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    return not llguidance.LLMatcher.validate_grammar(grammar, None)


def test_no_invalid_instance_of_the_suite_could_be_an_answer(engine: SchemaEngine) -> None:
    """Far more than answers show: what a schema forbids, its grammar forbids."""
    compiler = GrammarCompiler(engine.tokenizer, engine.tokenizer.vocab_size)
    counts: Counter[tuple[bool, bool]] = Counter()
    wrong = []
    for file, group in groups():
        try:
            grammar = compiler.compile(json_schema_grammar(group["schema"], "schema"))
        except (ApiError, GrammarError):
            continue
        for test in group["tests"]:
            text = json.dumps(test["data"], ensure_ascii=False, separators=(",", ":"))
            matcher, token_ids = grammar.matcher.deep_copy(), engine.tokenizer.encode(text, False)
            taken = matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()
            counts[test["valid"], taken] += 1
            if taken and not test["valid"] and ODD_PATTERN not in text:
                wrong.append((file, group["description"], test["description"]))
    assert wrong == []
    assert counts[True, True] > 350 and counts[False, False] > 250
    print(f"\n{counts[True, True]} valid instances can be said, {counts[True, False]} cannot")


def test_every_answer_to_a_random_schema_is_valid(engine: SchemaEngine) -> None:
    check_random_schemas(engine, range(60))
