"""What a step of a pooling engine gives in place of tokens: vectors, rows or scores, made of the rows it computed.

A prompt may come in several steps. Means are sums of its rows one after the other in float64, so where the prompt was
cut changes no bit. What is gathered of a sequence is kept when the whole step has gone well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.config.model import ModelConfig
from headrace.config.pooling import Pooler
from headrace.engine.plan import Sampled, SequenceStep
from headrace.kernels.ops import Batch, BatchHandle, Buffer, Float32, Kernels
from headrace.models import Model
from headrace.protocol.ipc import PoolingParams
from headrace.runtime.batch import build_batch
from headrace.runtime.table import SequenceTable

Float64 = NDArray[np.float64]


@dataclass(slots=True)
class _Gathered:
    """Of a sequence, of whose prompt a part has been computed: the sum of its rows, or the rows themselves."""

    total: Float64
    rows: tuple[Float32, ...] = ()


class Pooling:
    """Batches, forward and results of an engine that pools."""

    def __init__(self, pooler: Pooler, config: ModelConfig) -> None:
        self._pooler = pooler
        self._config = config
        self._gathered: dict[int, _Gathered] = {}

    def batch(
        self, table: SequenceTable, rows: NDArray[np.int64], steps: Sequence[SequenceStep], block_size: int
    ) -> Batch:
        if self._config.is_encoder:
            types, positions = self._config.num_token_types, self._config.max_position_embeddings
            return whole_texts(table, rows, steps, positions if types > 1 else 0)
        return build_batch(table, rows, steps, block_size)

    def forward(self, model: Model, kernels: Kernels, batch: BatchHandle) -> Buffer:
        """Scores [texts, 1], or rows [rows, hidden]."""
        return model.forward(kernels, batch) if self._pooler.task == "score" else model.hidden(kernels, batch)

    def results(
        self, values: Float32, table: SequenceTable, steps: Sequence[SequenceStep]
    ) -> tuple[tuple[Sampled, ...], list[int]]:
        """What `forward` gave as results of the sequences that are done; and those of which it is not numbers."""
        sampled, broken = [], []
        gathered: dict[int, _Gathered] = {}
        start = 0
        for place, step in enumerate(steps):
            stop = start + step.num_tokens
            own = values[place : place + 1] if self._pooler.task == "score" else values[start:stop]
            start = stop
            if not np.isfinite(own).all():
                broken.append(step.seq_id)
                continue
            state = table.sampling[table.row(step.seq_id)]
            assert state is not None
            assert state.params.pooling is not None
            params = state.params.pooling
            before = self._gathered.get(step.seq_id) if step.start else None
            now = gathered[step.seq_id] = self._gather(before, own, params)
            if step.samples:
                result = self._result(now, own, params, step.start + step.num_tokens)
                sampled.append(Sampled(step.seq_id, (), pooled=result.astype("<f4").tobytes()))
        if not broken:
            self._gathered = {i: part for i, part in self._gathered.items() if i in table} | gathered
        return tuple(sampled), broken

    def _gather(self, before: _Gathered | None, own: Float32, params: PoolingParams) -> _Gathered:
        now = _Gathered(np.zeros(own.shape[1]) if before is None else before.total.copy())
        if params.task == "token_embed":
            now.rows = (*(before.rows if before is not None else ()), own.copy())
        elif params.every_row:
            for row in own:
                now.total += row
        return now

    def _result(self, now: _Gathered, own: Float32, params: PoolingParams, num_tokens: int) -> Float64:
        if params.task == "score":
            score = float(own[0, 0])
            return np.array([1 / (1 + math.exp(-max(score, -700.0))) if params.activation == "sigmoid" else score])
        if params.task == "token_embed":
            vectors = np.concatenate(now.rows).astype(np.float64)
        elif self._pooler.pooling == "mean":
            vectors = now.total[None] / num_tokens
        else:
            vectors = (own[:1] if self._pooler.pooling == "cls" else own[-1:]).astype(np.float64)
        vectors = vectors[:, : params.dimensions]
        if params.normalize:
            lengths = np.sqrt(np.square(vectors).sum(-1, keepdims=True))
            vectors = vectors / np.maximum(lengths, 1e-12)
        return vectors


def whole_texts(
    table: SequenceTable, rows: NDArray[np.int64], steps: Sequence[SequenceStep], second_position: int
) -> Batch:
    """An encoder's batch: every sequence whole, no blocks, and the first row of each wanted for the head.

    Of a second text `second_position` is added to the positions: the table has its rows behind all those of a first
    one, or, with 0, does not tell them apart. Raises ValueError for a step that is not a whole prompt.
    """
    counts = np.fromiter((step.num_tokens for step in steps), np.int64, len(steps))
    if any(step.start for step in steps) or (counts != table.num_tokens[rows]).any():
        raise ValueError("an encoder computes whole texts; a step is to compute a part of one")
    query_start = np.zeros(len(steps) + 1, np.int64)
    np.cumsum(counts, out=query_start[1:])
    places = np.arange(query_start[-1]) - np.repeat(query_start[:-1], counts)
    second = np.full(len(steps), np.iinfo(np.int64).max)
    for i, row in enumerate(rows.tolist()):
        state = table.sampling[row]
        if state is not None and state.params.pooling is not None and state.params.pooling.second_text_at is not None:
            second[i] = state.params.pooling.second_text_at
    positions = places + second_position * (places >= np.repeat(second, counts))
    return Batch(
        token_ids=table.tokens[np.repeat(rows, counts), places],
        positions=positions.astype(np.int32),
        slot_mapping=np.zeros((1, len(places)), np.int32),
        query_start=query_start.astype(np.int32),
        seq_lens=counts.astype(np.int32),
        block_tables=np.zeros((1, len(steps), 1), np.int32),
        sample_rows=query_start[:-1].astype(np.int32),
    )
