"""POST /v1/score, and /v1/rerank, which orders documents by the same scores in Jina's and Cohere's words."""

from __future__ import annotations

from headrace.protocol.pooling import RerankFields, ScoreFields, listing, ranking, rerank_documents, score_pairs
from headrace.server.http import Exchange
from headrace.server.pooling import pair_scores, read_fields
from headrace.server.replies import watched
from headrace.server.serving import Serving


async def score(serving: Serving, exchange: Exchange) -> None:
    fields = await read_fields(serving, exchange, ScoreFields)
    first, second = score_pairs(fields)
    names = ("text_1" if fields.queries is None else "queries", "text_2" if fields.documents is None else "documents")
    head = serving.head("score")

    async def send() -> None:
        scores, num_tokens = await pair_scores(serving, exchange, head, fields, first, second, names)
        await exchange.answer_json(listing(head, "score", [("score", value) for value in scores], num_tokens))

    with serving.generating():
        await watched(exchange, send(), b"")


async def rerank(serving: Serving, exchange: Exchange) -> None:
    fields = await read_fields(serving, exchange, RerankFields)
    documents = rerank_documents(fields)
    head = serving.head("rerank")

    async def send() -> None:
        scores, num_tokens = await pair_scores(
            serving, exchange, head, fields, [fields.query], documents, ("query", "documents")
        )
        shown = fields.return_documents is not False
        answer = ranking(head, scores, documents, fields.top_n, shown=shown, num_tokens=num_tokens)
        await exchange.answer_json(answer)

    with serving.generating():
        await watched(exchange, send(), b"")
