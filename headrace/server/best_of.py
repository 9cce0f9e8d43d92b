"""`best_of`: more choices are generated than answered; the likeliest are kept."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

import msgspec

from headrace.protocol.answers import Delta
from headrace.server.replies import Tally
from headrace.text.choice import joined


async def best_choices(deltas: AsyncIterator[Delta], *, of: int, keep: int, tally: Tally) -> AsyncIterator[Delta]:
    """Of each prompt's `of` choices the `keep` whose tokens' log-probabilities add up to the most, best first.

    Each comes as one delta, when all are done; equal ones in order of index. The tally counts the others' tokens.
    """
    parts: dict[int, list[Delta]] = {}
    async with aclosing(deltas) as stream:  # type: ignore[type-var]
        async for delta in stream:
            if delta.prompt_logprobs is not None:
                yield msgspec.structs.replace(delta, index=delta.index // of * keep)
            else:
                parts.setdefault(delta.index, []).append(delta)
    choices = [joined(part) for _, part in sorted(parts.items())]
    for start in range(0, len(choices), of):
        ranked = sorted(choices[start : start + of], key=_cumulative_logprob, reverse=True)
        for place, choice in enumerate(ranked[:keep]):
            yield msgspec.structs.replace(choice, index=start // of * keep + place)
        tally.add_unseen(sum(len(choice.token_ids) for choice in ranked[keep:]))


def _cumulative_logprob(choice: Delta) -> float:
    return sum(token.chosen.logprob or 0.0 for token in choice.tokens or ())
