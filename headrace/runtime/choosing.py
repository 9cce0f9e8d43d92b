"""From a step's logits to its tokens: what the sampler is asked, and what its answer means for each sequence.

The rows of logits are one of each sequence that chooses a token, then those that score tokens of prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.engine.plan import Sampled, Scored, SequenceStep
from headrace.kernels.ops import SampledRows, SamplingRows, TokenLists
from headrace.protocol.ipc import TokenLogprobs
from headrace.runtime.grammar_mask import step_mask
from headrace.runtime.sampling import SequenceSampling, listed_logprobs, sampling_rows, token_logprobs
from headrace.runtime.table import SequenceTable


@dataclass(frozen=True, slots=True)
class Asked:
    """Of each row whose it is and what was asked for; `table_rows` those of the sequences that choose. `dead_ends` says
    of a row why its grammar leaves no token."""

    seq_ids: Sequence[int]
    table_rows: Sequence[int]
    states: Sequence[SequenceSampling]
    rows: SamplingRows
    dead_ends: Mapping[int, str]

    @property
    def constrained(self) -> bool:
        """A grammar has a say."""
        return self.rows.mask is not None

    @property
    def fixed(self) -> bool:
        """The same will be asked for the next token of each, but for the draws."""
        return all(state.fixed for state in self.states)


def ask(
    table: SequenceTable,
    choosing: Sequence[tuple[int, int]],
    scoring: Sequence[SequenceStep],
    vocab_size: int,
) -> Asked:
    """`choosing` are sequences and their rows of the table."""
    table_rows = [row for _, row in choosing]
    states = [_state(table, row) for row in table_rows]
    tokens = [table.tokens[row, : table.num_tokens[row]] for row in table_rows]
    seq_ids = [seq_id for seq_id, _ in choosing]
    given: list[int] = []
    for step in scoring:
        row = table.row(step.seq_id)
        state = SequenceSampling.scoring(_state(table, row).params.prompt_logprobs or 0)
        states += [state] * step.num_scored
        tokens += [table.tokens[row, :0]] * step.num_scored
        seq_ids += [step.seq_id] * step.num_scored
        given += table.tokens[row, step.start + 1 : step.start + 1 + step.num_scored].tolist()
    masks = step_mask(states, tokens, vocab_size)
    rows = sampling_rows(states, tokens, vocab_size, given, masks.mask, masks.masked)
    return Asked(seq_ids, table_rows, states, rows, masks.dead_ends)


def results(
    asked: Asked, chosen: SampledRows, scoring: Sequence[SequenceStep], table: SequenceTable
) -> tuple[tuple[Sampled, ...], tuple[Scored, ...]]:
    """The tokens chosen, which are the sequences' own in `table` from here on, and the scores of `scoring`."""
    count = len(asked.table_rows)
    token_ids = chosen.token_ids.tolist()[:count]
    if asked.rows.num_logprobs is None and not asked.constrained:
        table.append_tokens(asked.table_rows, token_ids)
        return tuple([Sampled(i, (token_id,)) for i, token_id in zip(asked.seq_ids, token_ids, strict=True)]), ()
    reports = [_report(chosen, row, state, asked.rows.scored) for row, state in enumerate(asked.states)]
    table.append_tokens(asked.table_rows, token_ids)
    sampled = tuple(
        Sampled(asked.seq_ids[i], (), dead_end=asked.dead_ends[i])
        if i in asked.dead_ends
        else Sampled(
            asked.seq_ids[i],
            (token_id,),
            None if (report := reports[i]) is None else (report,),
            complete=_is_complete(asked.states[i], table, asked.table_rows[i]),
        )
        for i, token_id in enumerate(token_ids)
    )
    scored = []
    for step in scoring:
        own = reports[count : count + step.num_scored]
        scored.append(Scored(step.seq_id, tuple(report for report in own if report is not None)))
        count += step.num_scored
    return sampled, tuple(scored)


def _report(chosen: SampledRows, row: int, state: SequenceSampling, listed: TokenLists | None) -> TokenLogprobs | None:
    count = state.params.logprobs
    if count is None:
        return None
    if state.params.logprob_token_ids and listed is not None:
        return listed_logprobs(chosen, row, listed)
    return token_logprobs(chosen, row, count)


def _is_complete(state: SequenceSampling, table: SequenceTable, row: int) -> bool:
    """Whether the sequence's grammar allows nothing after the tokens it has now."""
    if state.grammar is None:
        return False
    return state.grammar.is_complete(table.tokens[row, state.num_prompt_tokens : table.num_tokens[row]])


def _state(table: SequenceTable, row: int) -> SequenceSampling:
    state = table.sampling[row]
    assert state is not None
    return state
