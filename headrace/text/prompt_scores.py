"""What an answer says of its prompt's tokens: their text, their log-probabilities and the alternatives to them."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.protocol.ipc import TokenLogprobs
from headrace.protocol.logprobs import ScoredToken, TokenScore, finite
from headrace.text.detokenizer import Detokenizer
from headrace.text.tokenizer import Tokenizer


def token_score(tokenizer: Tokenizer, token_id: int, logprob: float | None, ids_as_tokens: bool) -> TokenScore:
    name = f"token_id:{token_id}" if ids_as_tokens else tokenizer.token_text(token_id)
    return TokenScore(name, tuple(tokenizer.token_bytes(token_id)), logprob)


class PromptTokens:
    """The tokens of one prompt; `take` tells their log-probabilities."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        token_ids: Sequence[int],
        *,
        echo: str | None = None,
        num_echoed: int = 0,
        num_listed: int | None = None,
        ids_as_tokens: bool = False,
    ) -> None:
        """`echo` is the prompt's text where the answer repeats it, with `num_echoed` alternatives to each token;
        `num_listed` are the alternatives in `prompt_logprobs`, None for no such list."""
        self._tokenizer = tokenizer
        self._token_ids = token_ids
        self._echo = echo
        self._num_echoed = num_echoed
        self._num_listed = num_listed
        self._ids_as_tokens = ids_as_tokens
        self._logprobs: Sequence[TokenLogprobs] = ()

    def take(self, logprobs: Sequence[TokenLogprobs]) -> None:
        self._logprobs = logprobs

    def echoed(self) -> list[ScoredToken]:
        if self._echo is None:
            return []
        return [
            ScoredToken(
                chosen=self._score(token_id, None if report is None else report.logprob),
                top=() if report is None else self._alternatives(report),
                text_offset=offset,
            )
            for token_id, report, offset in zip(
                self._token_ids, (None, *self._logprobs), self._text_offsets(), strict=True
            )
        ]

    def listed(self) -> list[dict[str, object] | None] | None:
        if self._num_listed is None:
            return None
        return [None, *(self._entry(report, self._num_listed) for report in self._logprobs)]

    def _text_offsets(self) -> list[int]:
        """Where each token's text begins in the echo, which may lack a beginning-of-sequence token's."""
        text = Detokenizer(self._tokenizer, skip_special_tokens=False)
        starts, length = [], 0
        for token_id in self._token_ids:
            starts.append(length)
            length += len(text.add([token_id]))
        missing = length + len(text.flush()) - len(self._echo or "")
        return [max(0, start - missing) for start in starts]

    def _alternatives(self, report: TokenLogprobs) -> tuple[TokenScore, ...]:
        best = zip(report.top_token_ids, report.top_logprobs, strict=True)
        return tuple(self._score(token_id, logprob) for token_id, logprob in list(best)[: self._num_echoed])

    def _score(self, token_id: int, logprob: float | None) -> TokenScore:
        return token_score(self._tokenizer, token_id, logprob, self._ids_as_tokens)

    def _entry(self, report: TokenLogprobs, count: int) -> dict[str, object]:
        """The alternatives, and the prompt's own token wherever it ranks."""
        best = zip(report.top_token_ids[:count], report.top_logprobs[:count], range(1, count + 1), strict=False)
        ranked = {token_id: (logprob, rank) for token_id, logprob, rank in best}
        ranked[report.token_id] = (report.logprob, report.rank)
        return {
            str(token_id): {
                "logprob": finite(logprob),
                "rank": rank,
                "decoded_token": self._tokenizer.token_text(token_id),
            }
            for token_id, (logprob, rank) in ranked.items()
        }
