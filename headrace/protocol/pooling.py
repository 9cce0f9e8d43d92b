"""The dialects of models that give vectors and scores: OpenAI's embeddings, vLLM's pooling and score, Jina's and
Cohere's rerank.

A text is a string or token ids; one alone or a list of them is the same but for how many come back.
"""

from __future__ import annotations

import array
import base64
import math
import sys
from collections.abc import Sequence
from typing import Literal

import msgspec

from headrace.config.pooling import Pooler
from headrace.protocol import errors
from headrace.protocol.answers import AnswerHead
from headrace.protocol.ipc import PoolingParams
from headrace.protocol.token_limits import TruncationSide

MAX_TEXTS = 2048
"""In one request, as OpenAI has it."""

Text = str | list[int]
Texts = str | list[str | int | list[int]]
Encoding = Literal["float", "base64"]


class PoolingFields(msgspec.Struct, frozen=True, kw_only=True):
    """What every request of this kind may have."""

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: TruncationSide | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    user: str | None = None


class EmbeddingFields(PoolingFields, frozen=True, kw_only=True):
    input: Texts
    encoding_format: Encoding | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None


class PoolFields(EmbeddingFields, frozen=True, kw_only=True):
    task: Literal["embed", "token_embed", "score"] | None = None


class ScoreFields(PoolingFields, frozen=True, kw_only=True):
    """`queries` and `documents` are newer names of `text_1` and `text_2`."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None


class RerankDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: str


class RerankFields(PoolingFields, frozen=True, kw_only=True):
    query: str
    documents: list[str | RerankDocument]
    top_n: int | None = None
    return_documents: bool | None = None


def texts(value: Texts, param: str) -> list[Text]:
    """The texts, none of them empty. Raises ApiError (400) naming the one at fault."""
    if isinstance(value, str):
        found: list[Text] = [value]
    else:
        ids = [item for item in value if isinstance(item, int)]
        if ids and len(ids) < len(value):
            raise errors.invalid_value(
                param, f"`{param}` mixes token ids with texts or lists; send a list of one kind."
            )
        found = [ids] if ids else [item for item in value if not isinstance(item, int)]
    if not found:
        raise errors.invalid_value(param, f"`{param}` is an empty list; send a text, token ids, or a list of either.")
    if len(found) > MAX_TEXTS:
        raise errors.invalid_value(param, f"`{param}` has {len(found)} texts; at most {MAX_TEXTS} are allowed.")
    for place, text in enumerate(found):
        if not text:
            where = param if isinstance(value, str) else f"{param}[{place}]"
            raise errors.invalid_value(where, f"`{where}` is empty; there is nothing to read.")
    return found


def embedding_params(
    pooler: Pooler, fields: EmbeddingFields, task: Literal["embed", "token_embed"], width: int
) -> PoolingParams:
    """For vectors of `width` numbers. Raises ApiError (400) for `dimensions` that the model was not trained for."""
    asked, allowed = fields.dimensions, pooler.dimensions
    if asked is not None and not 1 <= asked <= width:
        raise errors.out_of_range("dimensions", asked, f"between 1 and the vectors' own length, {width}")
    if asked is not None and asked != width and allowed is not None and asked not in allowed:
        known = f"it can be {', '.join(map(str, allowed))}" if allowed else "its vectors have one length only"
        raise errors.invalid_value(
            "dimensions",
            f"`dimensions` {asked}: this model was not trained for shorter vectors of that length; {known}. Leave it "
            "out; a server can be told otherwise with "
            f"--hf-overrides '{{\"matryoshka_dimensions\": [{asked}]}}'.",
        )
    return PoolingParams(
        task=task,
        every_row=task == "token_embed" or pooler.pooling == "mean",
        normalize=pooler.normalize if fields.normalize is None else fields.normalize,
        dimensions=asked,
    )


def score_pairs(fields: ScoreFields) -> tuple[list[str], list[str]]:
    """The first and the second texts: as many, or one first text for all. Raises ApiError (400)."""
    first, second = (
        _side(old, new, *names)
        for old, new, names in (
            (fields.text_1, fields.queries, ("text_1", "queries")),
            (fields.text_2, fields.documents, ("text_2", "documents")),
        )
    )
    if len(first) not in (1, len(second)):
        message = f"`text_1` has {len(first)} texts and `text_2` {len(second)}; send one, or as many."
        raise errors.invalid_value("text_1", message)
    return first, second


def _side(old: str | list[str] | None, new: str | list[str] | None, old_name: str, new_name: str) -> list[str]:
    if old is not None and new is not None:
        raise errors.invalid_value(new_name, f"`{old_name}` and `{new_name}` mean the same; send one of them.")
    name = old_name if new is None else new_name
    value = old if new is None else new
    if value is None:
        raise errors.missing_field(old_name, "send a text or a list of texts.")
    found = texts(value, name) if isinstance(value, str) else texts(list(value), name)
    return [text for text in found if isinstance(text, str)]


def rerank_documents(fields: RerankFields) -> list[str]:
    """Raises ApiError (400) for an empty text or list, and a negative `top_n`."""
    if not fields.query:
        raise errors.invalid_value("query", "`query` is empty; there is nothing to compare with.")
    if fields.top_n is not None and fields.top_n < 0:
        raise errors.out_of_range("top_n", fields.top_n, "0 (all) or more")
    plain: list[str | int | list[int]] = [d.text if isinstance(d, RerankDocument) else d for d in fields.documents]
    return [text for text in texts(plain, "documents") if isinstance(text, str)]


# answers


def floats(raw: bytes) -> array.array[float]:
    """The numbers of what the engine gave."""
    values = array.array("f", raw)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def cosines(ones: Sequence[Sequence[float]], twos: Sequence[Sequence[float]]) -> list[float]:
    """Of each pair of vectors, between -1 and 1; a lone first one goes with every second one. 0 for a vector of zeros.

    Vectors of length 1 in float32 are a little longer or shorter, which is divided out.
    """
    squares_one, squares_two = ([_dot(vector, vector) for vector in vectors] for vectors in (ones, twos))
    found = []
    for place, two in enumerate(twos):
        first = place % len(ones)
        lengths = math.sqrt(squares_one[first] * squares_two[place])
        found.append(max(-1.0, min(1.0, _dot(ones[first], two) / lengths)) if lengths else 0.0)
    return found


def _dot(one: Sequence[float], two: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(one, two, strict=True))


def written(raw: bytes, encoding: Encoding | None) -> object:
    """A vector as a list, or, as the OpenAI SDK asks for it, its float32 numbers in base64."""
    return base64.b64encode(raw).decode() if encoding == "base64" else floats(raw).tolist()


def written_rows(raw: bytes, num_rows: int, encoding: Encoding | None) -> list[object]:
    width = len(raw) // num_rows
    return [written(raw[start : start + width], encoding) for start in range(0, len(raw), width)]


def listing(head: AnswerHead, kind: str, data: Sequence[tuple[str, object]], num_tokens: int) -> dict[str, object]:
    """`data` are the name and value of each entry; `kind` is what an entry calls itself."""
    return {
        "id": head.id,
        "object": "list",
        "created": head.created,
        "model": head.model,
        "data": [{"object": kind, "index": index, name: value} for index, (name, value) in enumerate(data)],
        "usage": usage(num_tokens),
    }


def ranking(
    head: AnswerHead,
    scores: Sequence[float],
    documents: Sequence[str],
    top_n: int | None,
    *,
    shown: bool,
    num_tokens: int,
) -> dict[str, object]:
    """The best first, of equal ones the first in the list; `top_n` 0 and None are all."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    results = []
    for index in order[: top_n or None]:
        result: dict[str, object] = {"index": index, "relevance_score": scores[index]}
        if shown:
            result["document"] = {"text": documents[index]}
        results.append(result)
    return {"id": head.id, "model": head.model, "results": results, "usage": usage(num_tokens)}


def usage(num_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
