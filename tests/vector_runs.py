"""Run texts through a pooling engine in this process and collect what it makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.config.load import load
from headrace.core import EngineCore
from headrace.protocol.ipc import AddRequest, PoolingParams, SamplingParams

Vector = NDArray[np.float32]


def pooling_core(path: Path, *flags: str) -> EngineCore:
    """As `headrace serve PATH FLAGS` would start it, float32 unless the flags say otherwise."""
    dtype = () if "--dtype" in flags else ("--dtype", "float32")
    return EngineCore(load([str(path), *dtype, *flags]).engine)


def vectors(core: EngineCore, texts: Sequence[list[int]], **params: Any) -> list[Vector]:
    """What is made of each text, all of them added at once. Every block must have come back."""
    pooler = core.settings.pooler
    assert pooler is not None
    params = {"task": pooler.task, "every_row": pooler.pooling == "mean", "normalize": pooler.normalize, **params}
    for number, token_ids in enumerate(texts):
        own = PoolingParams(**{n: v[number] if isinstance(v, list) else v for n, v in params.items()})
        request = AddRequest(
            request_id=str(number),
            token_ids=token_ids,
            params=SamplingParams(max_tokens=1, pooling=own),
            arrival_s=float(number),
        )
        assert (refusal := core.add(request)) is None, refusal
    results: dict[int, Vector] = {}
    while core.has_work:
        step = core.step()
        for output in step.outputs if step is not None else ():
            assert output.finish_reason == "stop", output
            assert output.pooled is not None
            results[int(output.request_id)] = np.frombuffer(output.pooled, "<f4")
    core.check_integrity()
    return [results[number] for number in range(len(texts))]


@contextmanager
def transformers_quiet() -> Iterator[None]:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
