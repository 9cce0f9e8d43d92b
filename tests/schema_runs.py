"""Schemas as response formats of an engine in this process, and whether what comes of them is valid.

The model is tiny and random, with the bundled model's vocabulary. A bias towards what closes lets answers end.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from jsonschema import Draft202012Validator

from headrace.config.model_files import open_model
from headrace.config.settings import EngineSettings
from headrace.core import EngineCore
from headrace.protocol.errors import ApiError
from headrace.protocol.ipc import AddRequest, SamplingParams
from headrace.protocol.sampling import SamplingFields
from headrace.protocol.structured_output import asked_grammar
from headrace.text.tokenizer import Tokenizer
from tests.engine_runs import Sequence as Answer
from tests.engine_runs import collect
from tests.random_schemas import random_schema
from tests.tiny_models import tiny_llama


@dataclass(frozen=True)
class Outcome:
    """`refused` is the message of a 400; else `text` is the answer and `finished` whether it came to its end."""

    text: str = ""
    finished: bool = False
    refused: str | None = None


class SchemaEngine:
    def __init__(self, folder: Path, max_positions: int = 2048) -> None:
        model = tiny_llama(folder, bundled_tokenizer=True, max_positions=max_positions)
        self.tokenizer = Tokenizer.load(open_model(model, {}))
        self.core = EngineCore(
            EngineSettings(
                model=str(model), device="cpu", dtype="float32", kv_cache_memory_bytes=64 << 20, max_num_seqs=64
            )
        )
        closing = ("}", "]", '"', '"}', '"]', "]}", '",', "0", "true")
        self._closing = [i for i in range(self.tokenizer.vocab_size) if self.tokenizer.token_text(i) in closing]

    def answers(
        self, schemas: Sequence[object], parameters: Iterable[dict[str, Any]], max_tokens: int, bias: float
    ) -> list[Outcome]:
        """One answer for each schema, with its sampling parameters. The larger the `bias`, the shorter they are."""
        closing = dict.fromkeys(self._closing, bias) | dict.fromkeys(self.tokenizer.eos_token_ids, 3 * bias)
        outcomes: list[Outcome | None] = [None] * len(schemas)
        sequences: dict[tuple[str, int], Answer] = {}
        for number, (schema, own) in enumerate(zip(schemas, parameters, strict=True)):
            format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
            try:
                grammar = asked_grammar(SamplingFields(response_format=format), {})
            except ApiError as error:
                outcomes[number] = Outcome(refused=error.message)
                continue
            params = SamplingParams(
                max_tokens=max_tokens,
                grammar=grammar,
                logit_bias=closing,
                stop_token_ids=self.tokenizer.eos_token_ids,
                **own,
            )
            prompt = [10, 20, 30 + number % 50]
            request = AddRequest(request_id=str(number), token_ids=prompt, params=params, arrival_s=0)
            assert self.core.add(request) is None
        while self.core.has_work or self.core.gate.is_waiting:
            if not self.core.has_work:
                self.core.gate.wait()
            step = self.core.step()
            for request_id, refusal in self.core.gate.take_refused():
                assert refusal.code == "invalid_grammar"
                outcomes[int(request_id)] = Outcome(refused=refusal.message)
            if step is not None:
                collect(step.outputs, sequences)
        self.core.check_integrity()
        for (request_id, _), answer in sequences.items():
            assert answer.finish_reason in ("stop", "length"), (schemas[int(request_id)], answer)
            text = self.tokenizer.decode(answer.token_ids)
            outcomes[int(request_id)] = Outcome(text, answer.finish_reason == "stop")
        assert None not in outcomes
        return [outcome for outcome in outcomes if outcome is not None]


def problem(schema: Any, text: str) -> str | None:
    """Why a text is no JSON that the schema allows."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"no JSON: {error}"
    checker = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    return next((error.message for error in checker.iter_errors(value)), None)


def sampling(random: Random) -> dict[str, Any]:
    """Sampling parameters at random."""
    own: dict[str, Any] = {"temperature": random.choice((0.0, 0.5, 1.0, 2.0)), "seed": random.randrange(1 << 30)}
    own |= random.choice(({}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}, {"min_tokens": 5}))
    penalties = ({}, {"repetition_penalty": 1.2}, {"frequency_penalty": 1.0}, {"presence_penalty": -1.0})
    return own | random.choice(penalties)


def check_random_schemas(engine: SchemaEngine, seeds: range) -> None:
    schemas = [random_schema(Random(seed)) for seed in seeds]
    outcomes = engine.answers(schemas, [sampling(Random(-seed - 1)) for seed in seeds], max_tokens=1200, bias=4.0)
    wrong = [
        (seed, schema, outcome)
        for seed, schema, outcome in zip(seeds, schemas, outcomes, strict=True)
        if outcome.refused is not None or not outcome.finished or problem(schema, outcome.text) is not None
    ]
    assert wrong == []
