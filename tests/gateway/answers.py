"""Random answers, and the streams in which upstreams of each dialect would send them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

from headrace.protocol.translate.events import Answer, Block, Dialect, Stop, Usage, events_of
from headrace.protocol.translate.exchange import Exchange
from headrace.protocol.translate.translator import _WRITERS
from headrace.protocol.translate.wire import Json

texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=30)
scalars = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | texts
objects = st.dictionaries(
    texts, st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3)),
    max_size=4,
)  # fmt: skip
names = st.from_regex(r"[a-z_]{1,12}", fullmatch=True)

usages = st.builds(
    lambda cached, fresh, out, thought: Usage(
        input_tokens=cached + fresh, output_tokens=out + thought, cached_tokens=cached, reasoning_tokens=thought
    ),
    *[st.integers(0, 10**6)] * 2,
    st.integers(1, 10**5),
    st.integers(0, 10**4),
)


@st.composite
def answers(draw: st.DrawFn) -> Answer:
    """What every dialect can say: perhaps thinking, perhaps text, perhaps tool calls."""
    blocks = [Block("thinking", draw(texts))] if draw(st.booleans()) else []
    blocks += [Block("text", draw(texts))] if draw(st.booleans()) else []
    for place, (name, arguments) in enumerate(draw(st.lists(st.tuples(names, objects), max_size=3))):
        blocks.append(Block("call", json.dumps(arguments), f"call_{place}", name))
    calls = any(block.kind == "call" for block in blocks)
    stop = Stop("tool_calls") if calls else draw(st.sampled_from([Stop("stop"), Stop("length")]))
    return Answer(id="abc", model="up", created_s=1, blocks=tuple(blocks), stop=stop, usage=draw(usages))


def exchange(client: Dialect, upstream: Dialect, **fields: Any) -> Exchange:
    known = {"model": "asked", "request_id": "req-1", "created_s": 1_700_000_000, "wants_usage": True, **fields}
    return Exchange(client=client, upstream=upstream, **known)


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    """The bytes in pieces that end at these places."""
    ends = [0, *sorted({place % (len(data) + 1) for place in places}), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(ends)]


def chat_stream(chunks: Sequence[Json]) -> bytes:
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


def chunk(delta: Json, reason: str | None = None) -> Json:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "up", "choices": [choice]}


THOUGHT_AND_CALLS = Answer(
    id="abc",
    model="up",
    created_s=1,
    blocks=(
        Block("thinking", "Which city? Paris."),
        Block("text", "Let me look. ☂"),
        Block("call", '{"city": "Paris", "days": [1, 2]}', "call_a", "weather"),
        Block("call", "{}", "call_b", "now"),
    ),
    stop=Stop("tool_calls"),
    usage=Usage(input_tokens=30, output_tokens=12, cached_tokens=10, reasoning_tokens=4),
)


def upstream_bytes(answer: Answer, upstream: Dialect) -> bytes:
    """The bytes in which an upstream of this dialect streams the answer."""
    writer = _WRITERS[upstream](exchange(upstream, upstream))
    return b"".join(outgoing.encode() for event in events_of(answer) for outgoing in writer.write(event))


def data_lines(stream: bytes) -> Iterator[Json]:
    """The objects of a stream of events."""
    for line in stream.decode().split("\n"):
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))
