"""The engine in this process, without a server: `from headrace import LLM, SamplingParams`."""

from __future__ import annotations

from headrace.llm.engine import LLM
from headrace.llm.outputs import CompletionOutput, Logprob, RequestOutput
from headrace.llm.params import SamplingParams
from headrace.llm.pooling import EmbeddingRequestOutput, PoolingParams, PoolingRequestOutput, ScoringRequestOutput
from headrace.llm.structured import GuidedDecodingParams, StructuredOutputsParams

__all__ = [
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
]
