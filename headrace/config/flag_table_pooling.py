"""Flags of models that give vectors or scores instead of text; part of `flag_table.FLAGS`."""

from __future__ import annotations

from headrace.config.flags import Flag

EMBEDDINGS = "Embeddings and scores"

POOLING_FLAGS: tuple[Flag, ...] = (
    Flag(
        "runner",
        "text",
        "What the model is served for: generate (text) or pooling (vectors, scores); auto is what its files say.",
        EMBEDDINGS,
        default="auto",
        choices=("auto", "generate", "pooling", "draft"),
        example="pooling",
    ),
    Flag(
        "task",
        "text",
        "The same in older commands: embed and score are pooling.",
        EMBEDDINGS,
        default="auto",
        choices=("auto", "generate", "embed", "score", "classify", "reward", "transcription", "draft"),
        same=(("embedding", "embed"),),
    ),
    Flag(
        "convert",
        "text",
        "Make an embedding model of one that generates text; --runner pooling does so by itself.",
        EMBEDDINGS,
        default="auto",
        choices=("auto", "none", "embed", "classify", "reward"),
    ),
    Flag(
        "override-pooler-config",
        "json",
        "How a vector is made, in place of what the model's files say: pooling_type CLS, LAST or MEAN, and normalize.",
        EMBEDDINGS,
        aliases=("pooler-config",),
        example='\'{"pooling_type": "MEAN", "normalize": true}\'',
    ),
)
