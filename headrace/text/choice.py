"""From the engine's token ids to text: the one path on which every answer is made, served or in process.

    tokens ──► Detokenizer (whole characters) ──► StopChecker (holds back a possible stop) ──► Delta

A token whose text is still held back gives no delta; its text, id and score join the next one. A whole answer
is the sum of its deltas.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.protocol.answers import AnswerPart, Content, Delta, Reasoning
from headrace.protocol.ipc import SamplingParams, SequenceOutput, TokenLogprobs
from headrace.protocol.logprobs import ScoredToken, TokenScore
from headrace.protocol.sampling import TextRules
from headrace.text.detokenizer import Detokenizer
from headrace.text.prompt_scores import token_score
from headrace.text.stop import StopChecker
from headrace.text.tokenizer import Tokenizer


def joined(deltas: Sequence[Delta]) -> Delta:
    """The deltas of one choice, in order, as one."""
    last = deltas[-1]
    tokens = None
    if any(delta.tokens is not None for delta in deltas):
        tokens = tuple(token for delta in deltas for token in delta.tokens or ())
    return Delta(
        index=last.index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        tokens=tokens,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        cached_tokens=max(delta.cached_tokens for delta in deltas),
        parts=_joined_parts(deltas),
        reasoning_tokens=sum(delta.reasoning_tokens for delta in deltas),
    )


def _joined_parts(deltas: Sequence[Delta]) -> tuple[AnswerPart, ...] | None:
    if all(delta.parts is None for delta in deltas):
        return None
    parts: list[AnswerPart] = []
    for part in (part for delta in deltas for part in delta.parts or ()):
        last = parts[-1] if parts else None
        if isinstance(last, Content) and isinstance(part, Content):
            parts[-1] = Content(last.text + part.text)
        elif isinstance(last, Reasoning) and isinstance(part, Reasoning):
            parts[-1] = Reasoning(last.text + part.text)
        else:
            parts.append(part)
    return tuple(parts)


class Choice:
    """The text of one choice so far: what is decoded, what is held back, whether it is over."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        params: SamplingParams,
        rules: TextRules,
        *,
        stop_token_ids: frozenset[int] = frozenset(),
        ids_as_tokens: bool = False,
    ) -> None:
        """`stop_token_ids` are those the client named: ending on one of them is reported as the stop reason, ending
        on the model's own end-of-sequence token is not. `ids_as_tokens` names tokens `token_id:N`."""
        self.finished = False
        self._index = index
        self._tokenizer = tokenizer
        self._params = params
        self._rules = rules
        self._stop_token_ids = stop_token_ids
        self._ids_as_tokens = ids_as_tokens
        self._detokenizer = Detokenizer(
            tokenizer, rules.skip_special_tokens, rules.spaces_between_special_tokens, rules.kept_token_ids
        )
        self._stops = StopChecker(rules.stop, rules.include_stop) if rules.stop else None
        self._num_tokens = 0
        self._num_chars = 0
        self._cached_tokens = 0
        self._held_ids: list[int] = []
        self._held_scores: list[ScoredToken] = []

    def add(self, output: SequenceOutput) -> list[Delta]:
        self._cached_tokens = max(self._cached_tokens, output.num_cached_tokens)
        deltas: list[Delta] = []
        for place, token_id in enumerate(output.token_ids):
            is_last = place == len(output.token_ids) - 1
            score = output.logprobs[place] if output.logprobs is not None else None
            ends = is_last and output.stop_token_id is not None
            text = self._token(token_id, score, hidden=ends and not self._rules.include_stop)
            text, hit = self._checked(text)
            if hit is not None:
                self.finished = True
                deltas.append(self._delta(text, "stop", hit))
                return deltas
            if is_last and output.finish_reason is not None:
                deltas.append(self._last(text, output))
            elif text:
                deltas.append(self._delta(text))
        if not output.token_ids and output.finish_reason is not None:
            deltas.append(self._last("", output))
        return deltas

    def _token(self, token_id: int, score: TokenLogprobs | None, *, hidden: bool) -> str:
        self._num_tokens += 1
        self._held_ids.append(token_id)
        if score is not None:
            self._held_scores.append(self._scored(score))
        text = "" if hidden else self._detokenizer.add([token_id])
        self._num_chars += len(text)
        return text

    def _checked(self, text: str) -> tuple[str, str | None]:
        if self._stops is None:
            return text, None
        return self._stops.add(text, check=self._num_tokens > self._rules.min_tokens)

    def _last(self, text: str, output: SequenceOutput) -> Delta:
        """The end as the engine saw it: nothing more can complete a character or a stop string."""
        self.finished = True
        rest, hit = self._checked(self._detokenizer.flush())
        text += rest
        if hit is not None:
            return self._delta(text, "stop", hit)
        if self._stops is not None:
            text += self._stops.flush()
        stop_token_id = output.stop_token_id
        reason = stop_token_id if stop_token_id in self._stop_token_ids else None
        if output.finish_reason == "repetition":
            return self._delta(text, "repetition", "repetition_detected")
        return self._delta(text, output.finish_reason, reason)

    def _delta(self, text: str, finish_reason: str | None = None, stop_reason: str | int | None = None) -> Delta:
        token_ids, self._held_ids = tuple(self._held_ids), []
        scores, self._held_scores = tuple(self._held_scores), []
        return Delta(
            index=self._index,
            text=text,
            token_ids=token_ids,
            tokens=scores if self._params.logprobs is not None else None,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            cached_tokens=self._cached_tokens,
        )

    def _scored(self, logprobs: TokenLogprobs) -> ScoredToken:
        params = self._params
        wanted = len(logprobs.top_token_ids) if params.logprob_token_ids else params.logprobs or 0
        best = zip(logprobs.top_token_ids[:wanted], logprobs.top_logprobs[:wanted], strict=True)
        return ScoredToken(
            chosen=self._score(logprobs.token_id, logprobs.logprob),
            top=tuple(self._score(token_id, logprob) for token_id, logprob in best),
            text_offset=self._num_chars,
        )

    def _score(self, token_id: int, logprob: float) -> TokenScore:
        return token_score(self._tokenizer, token_id, logprob, self._ids_as_tokens)
