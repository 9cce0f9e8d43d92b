"""The masks of one step: for each row with a grammar, which tokens its sequence may take.

Order: the grammar, then `allowed_token_ids`, then `bad_words`; each takes away from what is left. `min_tokens` holds
end tokens back as long as anything else is left: where the grammar is complete, the answer is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.runtime.grammar import DeadEnd, Mask, Tokens, TooCostly, mask_of
from headrace.runtime.sampling import SequenceSampling
from headrace.runtime.token_rules import TokenRules


@dataclass(frozen=True, slots=True)
class StepMask:
    """`mask` [rows, ceil(vocabulary / 32)] and `masked` [rows] as `SamplingRows` has them; `dead_ends` says of a row
    why it can take no token. Such a row is not masked, and what it samples is to be thrown away."""

    mask: NDArray[np.uint32] | None = None
    masked: NDArray[np.uint8] | None = None
    dead_ends: Mapping[int, str] = field(default_factory=dict)


NOTHING = StepMask()


def step_mask(states: Sequence[SequenceSampling], tokens: Sequence[Tokens], vocab_size: int) -> StepMask:
    """`tokens[i]` are all tokens of the sequence of `states[i]` so far."""
    constrained = [row for row, state in enumerate(states) if state.grammar is not None]
    if not constrained:
        return NOTHING
    mask = np.zeros((len(states), -(-vocab_size // 32)), np.uint32)
    masked = np.zeros(len(states), np.uint8)
    dead_ends: dict[int, str] = {}
    for row in constrained:
        state = states[row]
        assert state.grammar is not None
        generated = tokens[row][state.num_prompt_tokens :]
        try:
            allowed = state.grammar.mask(generated)
            if allowed is not None and state.rules is not None:
                allowed = _narrowed(allowed, state.rules, generated)
        except TooCostly as error:
            dead_ends[row] = f"The grammar is too costly to be followed any further: {error}."
            continue
        except DeadEnd as error:
            dead_ends[row] = f"The grammar allows nothing more: {error}."
            continue
        if allowed is not None:
            mask[row], masked[row] = allowed, 1
    return StepMask(mask, masked, dead_ends)


def _narrowed(mask: Mask, rules: TokenRules, generated: Tokens) -> Mask:
    """Raises DeadEnd."""
    words = len(mask)
    only = rules.only(generated)
    if only is not None:
        mask = mask & mask_of(only, words)
    if rules.bad_words is not None:
        mask = mask & ~mask_of(np.concatenate(rules.bad_words.forbidden(generated)), words)
    if not mask.any():
        raise DeadEnd("`allowed_token_ids` and `bad_words` leave none of the tokens that it allows")
    if len(generated) < rules.min_tokens:
        longer = mask & ~mask_of(rules.stops[rules.stops < 32 * words], words)
        return longer if longer.any() else mask
    return mask
