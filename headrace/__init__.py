"""Headrace: serve open language models on your own machine."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_IN_PROCESS = (
    "LLM",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "GuidedDecodingParams",
    "Logprob",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
)


def __getattr__(name: str) -> Any:
    """`from headrace import LLM`: found when asked for, since it brings the whole engine with it."""
    if name in _IN_PROCESS:
        return getattr(importlib.import_module("headrace.llm"), name)
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_IN_PROCESS])
