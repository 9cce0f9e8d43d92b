"""The outputs of one request between the core and the handler that reads them.

One merged output per sequence waits for a reader that falls behind, so memory is bounded by `n` outputs of at most
`max_tokens` tokens. Whether the request may be done again after the core's death is known here: yes, as long as
nothing of it has left this process. What the reader has had already is then compared and left out.
"""

from __future__ import annotations

import asyncio

import msgspec

from headrace.protocol import errors, ipc
from headrace.protocol.errors import ApiError
from headrace.server.metrics import RequestRecord


class RequestStream:
    """`open` are the sequences without an end. `streamed`: what is read goes to the client at once."""

    def __init__(self, message: ipc.AddRequest, record: RequestRecord, *, streamed: bool) -> None:
        self.message = message
        self.open = set(range(message.params.n))
        self.record = record
        self.error: ApiError | None = None
        self.refused = False
        self.in_core = False
        """The core has the request, as opposed to: it waits for its turn to be sent."""
        self.num_deaths = 0
        """Cores that died with this request in their hands."""
        self.num_received = 0
        """Tokens and prompt scores that this life of the core gave."""
        self.num_received_before = 0
        """The same of the life before: where it died."""
        self._streamed = streamed
        self._unread: dict[int, ipc.SequenceOutput] = {}
        self._had: dict[int, list[int]] = {}
        """The tokens that the reader has had, by sequence."""
        self._num_scores_had = 0
        self._skipped: dict[int, int] = {}
        """Of `_had`, how many this life has given again."""
        self._num_scores_skipped = 0
        self._reader: asyncio.Future[None] | None = None

    async def next(self) -> ipc.SequenceOutput | None:
        """The oldest unread output; None when all sequences have ended. Raises the stream's ApiError."""
        while True:
            if self._unread:
                return self._hand_out(next(iter(self._unread)))
            if self.error is not None:
                raise self.error
            if not self.open:
                return None
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None

    def push(self, output: ipc.SequenceOutput) -> ipc.SequenceOutput | None:
        """Take what the core gave an open sequence. What is new of it; None: the reader has had all of it."""
        self.num_received += len(output.token_ids) + len(output.prompt_logprobs or ())
        fresh = self._fresh(output)
        if fresh is None:
            return None
        unread = self._unread.get(fresh.index)
        self._unread[fresh.index] = fresh if unread is None else merge(unread, fresh)
        if fresh.finish_reason is not None:
            self.open.discard(fresh.index)
        self._wake()
        return fresh

    def close_sequence(self, index: int) -> bool:
        """The reader wants no more of a sequence. False if it has ended already."""
        if index not in self.open:
            return False
        self.open.discard(index)
        self._unread.pop(index, None)
        self._wake()
        return True

    def refuse(self, error: ApiError) -> None:
        self.refused = True
        self.fail(error)

    def fail(self, error: ApiError) -> None:
        if self.open and self.error is None:
            self.error = error
            self._wake()

    # the core died

    @property
    def repeatable(self) -> bool:
        """Nothing of it has been sent, so nobody will see that it is done again."""
        return not self._streamed or not (self._had or self._num_scores_had)

    @property
    def is_over(self) -> bool:
        """It has ended, failed, or lost its reader."""
        return not self.open or self.error is not None

    @property
    def passed_its_death(self) -> bool:
        """It has got further than where the core died before, or is over: whatever killed it, it was not this."""
        return self.is_over or self.num_received > self.num_received_before

    def rewind(self) -> None:
        """Forget what was not read of open sequences; it will come again."""
        self.in_core = False
        self.num_received_before, self.num_received = max(self.num_received, self.num_received_before), 0
        for index in self.open:
            self._unread.pop(index, None)
        self._skipped = dict.fromkeys(self._had, 0)
        self._num_scores_skipped = 0
        self.record.sequences = {
            index: (count, last)
            for index, (_, last) in self.record.sequences.items()
            if (count := len(self._had.get(index, ())))
        }

    def _hand_out(self, index: int) -> ipc.SequenceOutput:
        output = self._unread.pop(index)
        if output.token_ids:
            self._had.setdefault(index, []).extend(output.token_ids)
        num_scores = len(output.prompt_logprobs or ())
        self._num_scores_had += num_scores
        self._num_scores_skipped += num_scores  # They were given in this life, and do not come again in it.
        return output

    def _fresh(self, output: ipc.SequenceOutput) -> ipc.SequenceOutput | None:
        """What the reader has not had, after a rewind. Fails the stream where the tokens are not those it has had."""
        index, scores, token_ids = output.index, output.prompt_logprobs, output.token_ids
        if scores and self._num_scores_skipped < self._num_scores_had:
            again = min(len(scores), self._num_scores_had - self._num_scores_skipped)
            self._num_scores_skipped += again
            output = msgspec.structs.replace(output, prompt_logprobs=scores[again:] or None)
        at = self._skipped.get(index)
        if at is not None:
            had = self._had[index]
            again = min(len(token_ids), len(had) - at)
            if token_ids[:again] != had[at : at + again]:
                self.fail(errors.unavailable("engine_restarting", "The engine died before this request was done."))
                return None
            self._skipped[index] = at + again
            if self._skipped[index] == len(had):
                del self._skipped[index]
            logprobs = output.logprobs[again:] if output.logprobs is not None else None
            output = msgspec.structs.replace(output, token_ids=token_ids[again:], logprobs=logprobs)
        gives = output.token_ids or output.prompt_logprobs or output.finish_reason is not None
        return output if gives else None

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def merge(first: ipc.SequenceOutput, second: ipc.SequenceOutput) -> ipc.SequenceOutput:
    """Two outputs of one sequence, in order, as one."""
    logprobs = None
    if first.logprobs is not None or second.logprobs is not None:
        logprobs = [*(first.logprobs or ()), *(second.logprobs or ())]
    prompt_logprobs = [*(first.prompt_logprobs or ()), *(second.prompt_logprobs or ())]
    return msgspec.structs.replace(
        second,
        token_ids=[*first.token_ids, *second.token_ids],
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs or None,
        num_cached_tokens=max(first.num_cached_tokens, second.num_cached_tokens),
        queue_s=max(first.queue_s, second.queue_s),
    )
