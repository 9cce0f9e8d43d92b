"""How far a model's answers move when its numbers have fewer bits, on English text whose next token is always given.

Two ways to compute one model read the same pieces of text; what they say of every next token is set against each other.
The divergence (Kullback and Leibler's) is the steadiest figure: it looks at all tokens, not at the one that came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.config.model_files import open_model
from headrace.kernels.native import NativeKernels
from headrace.kernels.ops import Batch, Float32, KVCacheLayout
from headrace.models import build_model
from headrace.text.tokenizer import Tokenizer
from headrace.weights.checkpoint import Checkpoint

TEXTS = Path(__file__).parent / "data/text"
PIECE = 512
"""Tokens that are read together."""
ROWS = 128
"""Of a piece, computed in a step: their logits are rows as wide as the vocabulary."""
BLOCK = 32

Reader = Callable[[Sequence[int]], Iterator[Float32]]
"""The logits of a piece's tokens, ROWS at a time."""


@dataclass(frozen=True, slots=True)
class Moved:
    perplexity: float
    change: float
    """Of the perplexity: 0.01 is 1 % more."""
    same_best: float
    """Share of the tokens after which both find the same token most likely."""
    divergence: float
    """nat a token"""


def english(model: Path, count: int) -> list[int]:
    """Tokens of a novel (Carroll, 1865), then of a book on light (Newton, 1704)."""
    tokenizer = Tokenizer.load(open_model(model))
    token_ids = [
        t for name in ("alice.txt", "opticks.txt") for t in tokenizer.encode((TEXTS / name).read_text(), False)
    ]
    assert len(token_ids) > count
    return token_ids[: count + 1]


def reader(model: Path, kernels: NativeKernels) -> Reader:
    files = open_model(model)
    config, blocks = files.config, PIECE // BLOCK
    forward = build_model(config, Checkpoint(files), kernels, PIECE, lambda done, total: None).forward
    kernels.allocate_kv_cache(KVCacheLayout(config.num_layers, blocks, BLOCK, config.num_kv_heads, config.head_dim))
    step = kernels.capture(lambda batch: forward(kernels, batch))

    def read(piece: Sequence[int]) -> Iterator[Float32]:
        for start in range(0, len(piece), ROWS):
            rows = np.arange(start, min(start + ROWS, len(piece)), dtype=np.int32)
            yield step(
                Batch(
                    token_ids=np.array(piece, np.int32)[rows],
                    positions=rows,
                    slot_mapping=rows[None],
                    query_start=np.array([0, len(rows)], np.int32),
                    seq_lens=np.array([rows[-1] + 1], np.int32),
                    block_tables=np.arange(blocks, dtype=np.int32)[None, None],
                    sample_rows=np.arange(len(rows), dtype=np.int32),
                )
            )

    return read


def compare(exact: Reader, others: Mapping[str, Reader], token_ids: Sequence[int]) -> dict[str, Moved]:
    """Each of the others beside `exact`; the last of `token_ids` is foretold only."""
    count, lost_exact = len(token_ids) - 1, 0.0
    lost, same, divergence = (dict.fromkeys(others, 0.0) for _ in range(3))
    for start in range(0, count, PIECE):
        piece = token_ids[start : min(start + PIECE, count)]
        for part, logits in enumerate(zip(exact(piece), *(read(piece) for read in others.values()), strict=True)):
            first = start + part * ROWS
            rows, came = np.arange(len(logits[0])), np.array(token_ids[first + 1 : first + 1 + len(logits[0])])
            expected = _log_softmax(logits[0])
            likely, best = np.exp(expected), expected.argmax(1)
            lost_exact -= float(expected[rows, came].sum(dtype=np.float64))
            for name, theirs in zip(others, logits[1:], strict=True):
                found = _log_softmax(theirs)
                lost[name] -= float(found[rows, came].sum(dtype=np.float64))
                same[name] += int((found.argmax(1) == best).sum())
                divergence[name] += float((likely * (expected - found)).sum(dtype=np.float64))
    return {
        name: Moved(
            perplexity=float(np.exp(lost[name] / count)),
            change=float(np.expm1((lost[name] - lost_exact) / count)),
            same_best=same[name] / count,
            divergence=divergence[name] / count,
        )
        for name in others
    }


def _log_softmax(logits: Float32) -> Float32:
    below = logits - logits.max(1, keepdims=True)
    below -= np.log(np.exp(below).sum(1, keepdims=True))
    return below
