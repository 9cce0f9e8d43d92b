"""One token for every row of logits, each row's choice a function of that row alone.

Rows that take the largest logit cost one pass and no more. A draw is by inverse distribution function: the
uniform u picks the first token whose running sum of probabilities exceeds u times their total. Without a
filter the sum runs over the vocabulary in order of token id. With top-k, top-p or min-p it runs over the
kept tokens, most likely first and lower id first among equals:

    logits / temperature, sorted      5: .50   2: .30   9: .15   0: .05
    top-p 0.9 keeps until the sum reaches it: 5 2 9;  u = 0.85 -> 0.85 * 0.95 = 0.8075 > .50 + .30 -> token 9

Only the best CANDIDATES are sorted; a row they cannot decide is sorted whole, with the same result. Sums are
running float64 sums, because torch splits a plain sum of a single long row among threads.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.ops import InvalidLogits, SampledRows, SamplingRows, TokenLists

CANDIDATES = 512
SCORED_AT_ONCE = 32
"""Rows whose log-probabilities are worked out together: the float64 sums take four times the logits' memory."""


def sample(logits: Tensor, rows: SamplingRows) -> SampledRows:
    """Choose tokens from logits [R, vocab] float32. Raises InvalidLogits for rows with NaN."""
    scores = _adjusted(logits, rows)
    best, tokens = scores.max(dim=1)
    # max passes NaN on, so it need not be looked for; an infinite logit would make every probability NaN.
    broken = torch.nonzero(~torch.isfinite(best)).flatten().tolist()
    if broken:
        raise InvalidLogits(broken)
    drawn = np.flatnonzero(rows.temperature > 0)
    if len(drawn):
        tokens = tokens.clone()
        _draw(scores, best, tokens, rows, drawn)
    if rows.given is not None:
        given = torch.from_numpy(rows.given.astype(np.int64)).to(tokens.device)
        tokens = torch.where(given >= 0, given, tokens)
    token_ids = tokens.to("cpu", torch.int32).numpy()
    if rows.num_logprobs is None:
        return SampledRows(token_ids)
    return _with_logprobs(logits, tokens, token_ids, rows.num_logprobs, rows.scored)


def _adjusted(logits: Tensor, rows: SamplingRows) -> Tensor:
    """The logits after the mask, allowed and forbidden tokens, penalties and biases; the same tensor when no row has
    any."""
    device = logits.device
    parts = (rows.mask, rows.allowed, rows.forbidden, rows.seen, rows.generated, rows.logit_bias)
    if all(part is None for part in parts):
        return logits
    scores = logits.clone()
    if rows.mask is not None:
        _apply_mask(scores, rows.mask, rows.masked)
    if rows.allowed is not None:
        row, token, _ = _pairs(rows.allowed, device)
        values = scores[row, token]
        scores[torch.unique(row)] = -torch.inf
        scores[row, token] = values
    if rows.forbidden is not None:
        row, token, _ = _pairs(rows.forbidden, device)
        scores[row, token] = -torch.inf
    if rows.seen is not None and rows.repetition_penalty is not None:
        row, token, _ = _pairs(rows.seen, device)
        penalty = torch.from_numpy(rows.repetition_penalty).to(device)[row]
        values = scores[row, token]
        scores[row, token] = torch.where(values > 0, values / penalty, values * penalty)
    if rows.generated is not None:
        row, token, count = _pairs(rows.generated, device)
        if rows.frequency_penalty is not None:
            scores[row, token] -= torch.from_numpy(rows.frequency_penalty).to(device)[row] * count
        if rows.presence_penalty is not None:
            scores[row, token] -= torch.from_numpy(rows.presence_penalty).to(device)[row]
    if rows.logit_bias is not None:
        row, token, bias = _pairs(rows.logit_bias, device)
        scores[row, token] += bias
    return scores


def _apply_mask(scores: Tensor, mask: np.ndarray, masked: np.ndarray | None) -> None:
    """Every token whose bit is not set gets -inf, in the rows that are masked."""
    rows = np.arange(len(mask)) if masked is None else np.flatnonzero(masked)
    bits = np.unpackbits(np.ascontiguousarray(mask[rows]).view(np.uint8), axis=1, bitorder="little")
    barred = torch.from_numpy(bits[:, : scores.shape[1]] == 0).to(scores.device)
    index = torch.from_numpy(rows).to(scores.device)
    scores[index] = scores[index].masked_fill(barred, -torch.inf)


def _pairs(lists: TokenLists, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(row, token, number) of every pair; a (row, token) appears once."""
    row = np.repeat(np.arange(len(lists.starts) - 1), np.diff(lists.starts))
    token = torch.from_numpy(lists.token_ids.astype(np.int64))
    return torch.from_numpy(row).to(device), token.to(device), torch.from_numpy(lists.numbers).to(device)


def _draw(scores: Tensor, best: Tensor, tokens: Tensor, rows: SamplingRows, drawn: np.ndarray) -> None:
    """Write the tokens of the rows `drawn`, those with a temperature."""
    vocab = scores.shape[1]
    top_k = np.full(len(drawn), vocab) if rows.top_k is None else rows.top_k[drawn].astype(np.int64)
    top_k = np.where((top_k <= 0) | (top_k > vocab), vocab, top_k)
    top_p = np.ones(len(drawn)) if rows.top_p is None else rows.top_p[drawn].astype(np.float64)
    min_p = np.zeros(len(drawn)) if rows.min_p is None else rows.min_p[drawn].astype(np.float64)
    filtered = (top_k < vocab) | (top_p < 1) | (min_p > 0)
    device = scores.device
    for subset, filters in ((np.flatnonzero(~filtered), False), (np.flatnonzero(filtered), True)):
        if not len(subset):
            continue
        index = torch.from_numpy(drawn[subset]).to(device)
        temperature = torch.from_numpy(rows.temperature[drawn[subset]]).to(device)
        uniforms = torch.from_numpy(rows.uniforms[drawn[subset]].astype(np.float64)).to(device)
        # Shifted before it is divided, so that a tiny temperature gives -inf and never inf - inf.
        shifted = (scores[index] - best[index, None]) / temperature[:, None]
        if filters:
            limits = (torch.from_numpy(a[subset]).to(device) for a in (top_k, top_p, min_p))
            tokens[index] = _draw_filtered(shifted, uniforms, *limits)
        else:
            sums = torch.exp(shifted).double().cumsum(1)
            tokens[index] = _first_above(sums, uniforms * sums[:, -1])


def _first_above(sums: Tensor, targets: Tensor) -> Tensor:
    """[R] index of the first running sum above its row's target; there is one, as a target is u < 1 of a sum."""
    return torch.searchsorted(sums, targets[:, None], right=True)[:, 0]


def _draw_filtered(shifted: Tensor, uniforms: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Tokens of rows with a filter; shifted [R, vocab] has its largest value at 0."""
    vocab = shifted.shape[1]
    # Without top-k the share that top-p asks for is of the whole row.
    totals = torch.exp(shifted).double().cumsum(1)[:, -1]
    limited = top_k < vocab
    width = CANDIDATES
    if bool(limited.any()):
        width = max(width, int(top_k[limited].max()) + 1)
    tokens = torch.empty(len(shifted), dtype=torch.int64, device=shifted.device)
    undecided = torch.arange(len(shifted), device=shifted.device)
    while len(undecided):
        width = min(width, vocab)
        part = shifted[undecided]
        values, ids = _best(part, width)
        weights = torch.exp(values).double()
        sums = weights.cumsum(1)
        k = top_k[undecided].clamp(max=width)
        of_top_k = sums.gather(1, k[:, None] - 1)[:, 0]
        total = torch.where(limited[undecided], of_top_k, totals[undecided])
        rank = torch.arange(width, device=part.device)
        p = top_p[undecided, None]
        # The most likely token is always kept, whatever the limits say.
        kept = (rank < k[:, None]) & ((sums - weights < p * total[:, None]) | (p >= 1))
        kept &= weights >= min_p[undecided, None]
        kept[:, 0] = True
        num_kept = kept.sum(1)
        last = num_kept[:, None] - 1
        # A row whose kept tokens may go on, or whose last kept value has equals beyond, is not decided yet.
        decided = (num_kept < width) & (values.gather(1, last)[:, 0] > values[:, -1])
        if width == vocab:
            decided[:] = True
        place = _first_above(sums, uniforms[undecided] * sums.gather(1, last)[:, 0])
        chosen = ids.gather(1, place[:, None])[:, 0]
        tokens[undecided[decided]] = chosen[decided]
        undecided = undecided[~decided]
        width = vocab
    return tokens


def _best(values: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` largest of each row and their ids: largest first, lower id first among equals."""
    if width == values.shape[1]:
        ordered = values.sort(dim=1, descending=True, stable=True)
        return ordered.values, ordered.indices
    ids = values.topk(width, dim=1, sorted=False).indices.sort(dim=1).values
    ordered = values.gather(1, ids).sort(dim=1, descending=True, stable=True)
    return ordered.values, ids.gather(1, ordered.indices)


def _with_logprobs(
    logits: Tensor, tokens: Tensor, token_ids: np.ndarray, num_logprobs: int, scored: TokenLists | None
) -> SampledRows:
    width = min(num_logprobs, logits.shape[1])
    parts = [
        _scores(logits[at : at + SCORED_AT_ONCE], tokens[at : at + SCORED_AT_ONCE], width)
        for at in range(0, len(logits), SCORED_AT_ONCE)
    ]
    normaliser, logprobs, ranks, ids, top = (torch.cat(column) for column in zip(*parts, strict=True))
    scored_logprobs = None
    if scored is not None:
        row, token, _ = _pairs(scored, logits.device)
        scored_logprobs = (logits[row, token] - normaliser[row]).float().cpu().numpy()
    return SampledRows(
        token_ids=token_ids,
        logprobs=logprobs.cpu().numpy(),
        ranks=ranks.to("cpu", torch.int32).numpy(),
        top_token_ids=ids.to("cpu", torch.int32).numpy(),
        top_logprobs=top.cpu().numpy(),
        scored_logprobs=scored_logprobs,
    )


def _scores(logits: Tensor, tokens: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of each row: log of the exponentials' sum, the token's log-probability and rank, the best ids and theirs."""
    largest = logits.amax(1, keepdim=True)
    sums = torch.exp(logits - largest).double().cumsum(1)[:, -1:]
    normaliser = largest.double() + torch.log(sums)
    chosen = logits.gather(1, tokens[:, None])
    ranks = (logits > chosen).sum(1) + 1
    values, ids = _best(logits, width)
    return normaliser[:, 0], (chosen - normaliser)[:, 0].float(), ranks, ids, (values - normaliser).float()
