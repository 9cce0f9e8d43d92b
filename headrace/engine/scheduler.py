"""Who gets how many tokens of the next step.

There is no prefill phase and no decode phase. Every sequence has tokens known and tokens planned, and a step
gives it some of the difference; when the difference reaches zero, the last row samples the next token. A step
is filled in this order:

1. Decodes: running sequences one token away from their next. They alone may need a new block, so they alone
   preempt: the sequence ranked last gives up its blocks, goes back to the front of the queue and is computed
   again later, from the prefix cache as far as that still holds.
2. Prefill, from what is left of the token budget: running sequences with more to compute and waiting ones.
   While decodes run, its share is what the step-time target leaves (step_time.py), but never nothing; where many wait
   or the decodes need much of the target, a step may last longer (draft.py).

Among prefills the rule is *shortest first, but nobody is passed by more than its own length*. Each sequence
counts the prefill tokens given, before it was done, to others that came later; once these are as many as it
has tokens itself, it is overdue and goes first (of several, the one that came first). So a short prompt need
not wait for a long one, and a long one takes at most twice as long as it would have. Equal lengths are served
first come, first served. When the one whose turn it is cannot be started for want of blocks, no other is: a
large request is not starved by small ones that would fit.

A preempted sequence goes before every newcomer of its priority, and while it waits none of them is admitted.

With `policy` "priority" the better priority (the lower number) goes first, but nobody starves (queue.py).

Background work (batches) comes last whatever the policy: it is preempted first, makes room for a live request that
could not be started, and is in few of the steps that live requests are in (background.py).

Log-probabilities of a prompt are computed a few rows a step (draft.py), as each takes a row as wide as the vocabulary.
The prompt is then computed from its first token, whatever the prefix cache holds.

Plans may be in flight while the next is made. `schedule` uses what is planned, `update` what a plan says, and
a result for a sequence that has ended or been preempted since finds no owner and is dropped. The device is
expected to execute plans in order; that is all that keeps a block safe that was freed with a step in flight.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from typing import Literal

from headrace.engine.accept import failed, scores_of, taken_in, unreported
from headrace.engine.admission import Refusal, SchedulerSettings, refusal, request_of
from headrace.engine.background import BackgroundShare
from headrace.engine.decoding import Decoding, take_tokens
from headrace.engine.draft import Chunks, Draft
from headrace.engine.integrity import check_blocks, check_sequences
from headrace.engine.kv_cache import KVCache, Prefix
from headrace.engine.plan import NewSequence, Plan, SequenceStep, StepResult
from headrace.engine.queue import Queue
from headrace.engine.ranking import Ranking
from headrace.engine.request import Rank, Request, Sequence, SequenceState
from headrace.engine.step_time import StepTimeModel, chunk_pairs
from headrace.engine.tiers import HostTier
from headrace.engine.totals import Totals
from headrace.protocol.ipc import AddRequest, SequenceOutput, StepStats

__all__ = ["Refusal", "Scheduler", "SchedulerSettings"]


class Scheduler:
    """Policy of the engine: requests in, plans out, results in, outputs out. Not thread-safe, does no I/O."""

    def __init__(self, settings: SchedulerSettings, now: Callable[[], float] = time.time) -> None:
        """`now` is the clock of `AddRequest.arrival_s`; it is only used to report queueing time."""
        self.settings = settings
        self.step_time = StepTimeModel()
        self.kv_cache = KVCache(
            settings.num_blocks,
            settings.blocks,
            settings.enable_prefix_caching,
            HostTier(settings.num_host_blocks) if settings.num_host_blocks else None,
            self.step_time.compute_s,
        )
        self._chunks = Chunks(settings, self.step_time)
        self._now = now
        self._requests: dict[str, Request] = {}
        self._forking: dict[str, Request] = {}
        """Those of them that ask for several sequences."""
        self._running = Ranking(lambda seq: seq.rank)
        self._queue = Queue(settings)
        self._background = BackgroundShare()
        self._num_background = 0  # requests
        self._by_id: dict[int, Sequence] = {}
        """Running sequences by the id the runtime knows them by."""
        self._dropped: dict[int, None] = {}
        self._seq_ids = count()
        self._arrivals = count()
        self._next_step = 0
        self._waiting_reason: Literal["", "max_num_seqs", "kv_cache"] = ""
        self._no_blocks: tuple[tuple[int, ...], ...] = ((),) * len(settings.windows)
        self._decoding = Decoding(self._no_blocks)
        self._totals = Totals(self.kv_cache)

    # requests

    @property
    def has_work(self) -> bool:
        """True while a sequence waits or runs, or the runtime has yet to be told of one that ended."""
        return bool(self._requests) or bool(self._dropped)

    @property
    def num_waiting(self) -> int:
        num_waiting = len(self._queue.sequences)
        return num_waiting + sum(len(r.held) for r in self._forking.values()) if self._forking else num_waiting

    def knows(self, request_id: str) -> bool:
        """A sequence of the request waits or runs."""
        return request_id in self._requests

    def add(self, message: AddRequest) -> Refusal | None:
        """Queue a request, or say why it is refused. Sequences 1..n-1 follow once the first has its prompt."""
        settings = self.settings
        if message.request_id in self._requests:
            return Refusal("invalid_request", f"The request id {message.request_id!r} is in use already.")
        could_start = settings.max_running - self._running.num_live
        asks = not (message.is_background or message.is_let_in)
        refused = refusal(message, settings) or (self._queue.refusal(message, could_start) if asks else None)
        if refused is not None:
            return refused
        request = request_of(message, settings, order=next(self._arrivals))
        self._requests[message.request_id] = request
        if message.params.n > 1:
            self._forking[message.request_id] = request
        self._num_background += message.is_background
        self._queue.came(request)
        self._enqueue(request, index=0)
        return None

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Forget a sequence, or with None the whole request, and free its blocks. Unknown ones are no error:
        an abort often crosses the last token on its way."""
        request = self._requests.get(request_id)
        if request is None:
            return
        if index is None:
            self._give_up_held(request)
        elif index in request.held:
            request.held.remove(index)
            self._queue.given_up(request, 1)
        for seq in list(request.sequences.values()):
            if index is None or seq.index == index:
                self._end(seq)

    def _enqueue(self, request: Request, index: int) -> None:
        token_ids = list(request.message.token_ids)
        seq = Sequence(next(self._seq_ids), request, index, token_ids, len(token_ids))
        request.sequences[index] = seq
        self._queue.add(seq)

    def _give_up_held(self, request: Request) -> None:
        self._queue.given_up(request, len(request.held))
        request.held.clear()

    def _release_forks(self, request: Request) -> None:
        """Queue the sequences held back until the first had its prompt computed (or was gone)."""
        held, request.held = request.held, []
        for index in held:
            self._enqueue(request, index)

    def _end(self, seq: Sequence) -> None:
        """Take a sequence out of everything; with the last one, its request."""
        request = seq.request
        if seq.state is SequenceState.RUNNING:
            self._stop_running(seq)
        else:
            self._queue.remove(seq)
        if not self.settings.enable_prefix_caching:
            self.kv_cache.forget(seq)
        seq.state = SequenceState.FINISHED
        del request.sequences[seq.index]
        self._release_forks(request)
        if not request.sequences:
            del self._requests[request.message.request_id]
            self._forking.pop(request.message.request_id, None)
            self._num_background -= request.is_background
            if not request.started:
                self._queue.left(request)

    def _stop_running(self, seq: Sequence) -> None:
        self._running.remove(seq)
        self.kv_cache.free(seq)
        del self._by_id[seq.seq_id]
        self._dropped[seq.seq_id] = None

    # one step

    def schedule(self) -> Plan | None:
        """The next step, or None when there is nothing to do now.

        A plan without `steps` only tells the runtime which sequences to drop; execute and update it as usual.
        """
        if not (self._queue.sequences or self._dropped or self._num_background):
            steps = self._decoding.next_steps(self._running.sequences)
            if steps is not None:
                self._next_step += 1
                return Plan(self._next_step - 1, (), (), (), steps, (), True)
        settings = self.settings
        serves_background = self._num_background == 0 or self._turn_to_background()
        while True:
            draft = Draft(settings.max_num_batched_tokens, settings.step_time_target_s, settings.max_scored_rows)
            draft.serves_background = serves_background
            self._serve_decodes(draft)
            num_running = len(self._running.sequences)
            if self._queue.sequences or draft.num_decodes < num_running:
                may_start = min(len(self._queue.sequences), settings.max_running - num_running)
                draft.target_s = self._chunks.target_s(draft, num_running - draft.num_decodes + may_start)
                self._serve_prefills(draft)
            if not draft.steps and not serves_background:
                serves_background = True  # live requests wait, and nothing can be done for them now
                continue
            if draft.steps or not draft.short_of_blocks:
                break
            # Whoever runs waits for blocks that others hold: windows that moved on from blocks they shared.
            self._preempt(self._running.last())
        if not draft.steps and not self._dropped:
            return None
        dropped, self._dropped = tuple(self._dropped), {}
        copies = tuple(draft.block_copies)
        saves = () if self.kv_cache.tier is None else self.kv_cache.take_saves()
        continues = self._decoding.goes_on(draft) and not dropped
        self._next_step += 1
        return Plan(self._next_step - 1, dropped, tuple(draft.new), copies, tuple(draft.steps), saves, continues)

    def _turn_to_background(self) -> bool:
        """May background work be in this step? It makes room for a live request that the last one could not start."""
        running, queue = self._running, self._queue
        if queue.is_live and self._waiting_reason and running and running.last().request.is_background:
            self._preempt(running.last())
        return not (queue.is_live or running.is_live) or self._background.is_due

    def _serve_decodes(self, draft: Draft) -> None:
        steps = draft.steps
        rows = pairs = 0
        running = self._running.sequences[:]  # it may change while the list is walked
        if not draft.serves_background:
            running = [seq for seq in running if not seq.request.is_background]
        for seq in running:
            num_tokens = seq.num_tokens
            if num_tokens - seq.num_planned_tokens != 1 or num_tokens >= seq.most_tokens:
                continue
            if num_tokens <= seq.num_settled_tokens:
                # What `_give` would come to; nearly every step of an answer is this.
                steps.append(SequenceStep(seq.seq_id, num_tokens - 1, 1, self._no_blocks, True))
                seq.num_planned_tokens = num_tokens
                seq.num_tokens = num_tokens + 1
                rows += 1
                pairs += num_tokens
                continue
            while seq.state is SequenceState.RUNNING and not self.kv_cache.advance(seq):
                self._preempt(self._running.last())
                draft.preempted = True
            if seq.state is SequenceState.RUNNING:
                self._give(draft, seq, 1)
        draft.rows += rows
        draft.pairs += pairs
        draft.room -= rows
        draft.num_decodes = len(steps)

    def _preempt(self, seq: Sequence) -> None:
        """Back to the queue with all its tokens and a new id; whatever a step in flight says of the old id is void
        (the tokens will be drawn again, and the same)."""
        self._stop_running(seq)
        seq.seq_id = next(self._seq_ids)
        seq.state = SequenceState.WAITING
        seq.num_preemptions += 1
        seq.forget_progress()
        self._totals.preempted()
        self._queue.add(seq)

    def _serve_prefills(self, draft: Draft) -> None:
        prefilling = [seq for seq in self._running if seq.remaining_tokens > 1]
        admitting = not draft.preempted
        self._queue.begin_step()
        self._waiting_reason = ""
        if draft.preempted:
            self._waiting_reason = "kv_cache"
        elif len(self._queue) > 0 and len(self._running) >= self.settings.max_running:
            self._waiting_reason = "max_num_seqs"
            admitting = False
        while draft.room > 0:
            candidates = prefilling + (self._queue.admissible() if admitting else [])
            if not draft.serves_background:
                candidates = [seq for seq in candidates if not seq.request.is_background]
            if draft.scored_room == 0:
                candidates = [seq for seq in candidates if not seq.request.scores]
            if not candidates:
                break
            seq = min(candidates, key=_turn)
            if seq.state is SequenceState.RUNNING:
                num_tokens = self._chunk(draft, seq, seq.num_planned_tokens)
                if num_tokens == 0:
                    break
                prefilling.remove(seq)
                if seq.fetching:
                    num_tokens = self._fetch(draft, seq)
                if not self.kv_cache.advance(seq):
                    num_tokens = min(num_tokens, self.kv_cache.room(seq))
                    if num_tokens == 0:
                        draft.short_of_blocks = True
                        continue
            else:
                prefix = self._prefix(draft, seq)
                num_tokens = self._chunk(draft, seq, prefix.num_tokens)
                if num_tokens == 0:
                    break
                if prefix.more:
                    num_tokens = 1
                if not self.kv_cache.allocate(seq, prefix, reserve=len(self._running)):
                    self._waiting_reason = "kv_cache"
                    admitting = False
                    continue
                self._start(draft, seq, prefix)
                if len(self._queue) > 0 and len(self._running) >= self.settings.max_running:
                    self._waiting_reason = "max_num_seqs"
                    admitting = False
            self._give(draft, seq, num_tokens)
            draft.num_prefills += 1
            for other in candidates:
                if other.rank < seq.rank:
                    other.num_passed_tokens += num_tokens

    def _chunk(self, draft: Draft, seq: Sequence, start: int) -> int:
        """How many tokens from `start` on the step can take of a sequence; 0 = none now."""
        if not seq.request.scores:
            return self._chunks.size(draft, seq.num_tokens - start, start)
        # A chunk that ends where the rows to score end, or takes all, as the rows behind the last one are not scored.
        scored = seq.request.num_prompt_tokens - 1 - start
        wanted = seq.num_tokens - start if scored <= draft.scored_room else draft.scored_room
        return min(wanted, self._chunks.size(draft, wanted, start))

    def _fetch(self, draft: Draft, seq: Sequence) -> int:
        """Fetch more of what lies in the host tier; how many tokens to compute behind it, one while there is more."""
        self.kv_cache.extend(seq, self._chunks.most_loads(draft, self.kv_cache.moves.load_s))
        return 1 if seq.fetching else max(1, self._chunk(draft, seq, seq.num_planned_tokens))

    def _prefix(self, draft: Draft, seq: Sequence) -> Prefix:
        """What need not be computed: what the prefix cache holds, or the prompt if a sibling has it, the longer."""
        if seq.request.needs_every_row:
            return self.kv_cache.nothing
        cached = self.kv_cache.cached_prefix(seq, self._chunks.most_loads(draft, self.kv_cache.moves.load_s))
        for sibling in seq.request.sequences.values():
            if sibling.state is SequenceState.RUNNING and sibling.num_computed_tokens >= seq.num_prompt_tokens:
                forked = self.kv_cache.forked_prefix(sibling)
                return forked if forked.num_tokens > cached.num_tokens else cached
        return cached

    def _start(self, draft: Draft, seq: Sequence, prefix: Prefix) -> None:
        """From waiting to running; `seq` has its blocks."""
        request = seq.request
        self._queue.start(seq)
        seq.state = SequenceState.RUNNING
        self._running.add(seq)
        self._by_id[seq.seq_id] = seq
        if seq.queue_s is None:
            seq.queue_s = max(0.0, self._now() - request.message.arrival_s)
        if not request.started:
            request.started = True
            request.num_cached_tokens = prefix.num_tokens
            self._queue.left(request)
            if self.kv_cache.enable_prefix_caching:
                num_loaded = len({place for _, place, _ in prefix.loads}) * self.settings.block_size
                self._totals.looked_up(request.num_prompt_tokens, prefix.num_tokens - num_loaded, num_loaded)
        partial = prefix.num_tokens // self.settings.block_size
        for source, table in zip(prefix.copy_from, seq.block_tables, strict=False):
            draft.block_copies.append((source, table[partial]))
        draft.new.append(
            NewSequence(seq.seq_id, tuple(seq.token_ids), request.num_prompt_tokens, seq.index, request.params)
        )

    def _give(self, draft: Draft, seq: Sequence, num_tokens: int) -> None:
        start = seq.num_planned_tokens
        samples = start + num_tokens == seq.num_tokens
        num_scored = 0
        if seq.request.scores:
            num_scored = max(0, min(num_tokens, seq.num_prompt_tokens - 1 - start))
            draft.scored_room -= num_scored
        announced = zip(seq.block_tables, seq.num_announced_blocks, strict=True)
        new_block_ids = tuple(tuple(table[count:]) for table, count in announced)
        loads, seq.loads = tuple(seq.loads), []
        draft.num_loads += len(loads)
        draft.steps.append(SequenceStep(seq.seq_id, start, num_tokens, new_block_ids, samples, num_scored, loads))
        draft.rows += num_tokens
        draft.pairs += chunk_pairs(num_tokens, start)
        draft.room -= num_tokens
        seq.num_announced_blocks = [len(table) for table in seq.block_tables]
        seq.num_planned_tokens += num_tokens
        seq.num_tokens += samples
        seq.num_settled_tokens = self.kv_cache.settled_tokens(seq)

    # results

    def update(self, plan: Plan, result: StepResult) -> list[SequenceOutput]:
        """Take in what a step gave. Only `plan.steps` counts, so a plan that was executed in parts is updated in
        parts. Raises RuntimeError if the result lacks a token the plan asked for."""
        if self._num_background:
            requests = [self._by_id[step.seq_id].request for step in plan.steps if step.seq_id in self._by_id]
            self._background.step(requests, result.seconds)
        if result.token_ids:
            outputs, pairs = take_tokens(plan.steps, result.token_ids, self._by_id, self.kv_cache, self._end)
            rows = num_decodes = len(plan.steps)
            num_loaded = 0
        else:
            outputs, rows, pairs, num_decodes, num_loaded = self._take_in(plan, result)
        self.step_time.observe((rows, pairs), result.seconds)
        self._totals.stepped(plan.step, rows - num_decodes, num_decodes)
        if plan.saves or num_loaded:
            self.kv_cache.moves.saved(len(plan.saves), result.saved_s)
            self.kv_cache.moves.loaded(num_loaded, result.loaded_s)
            self._totals.moved(len(plan.saves), num_loaded)
        return outputs

    def _take_in(self, plan: Plan, result: StepResult) -> tuple[list[SequenceOutput], int, int, int, int]:
        """The outputs; and of the plan, rows, pairs, decodes and loads that were done."""
        lost, size = result.lost, self.settings.block_size
        sampled = iter(result.sampled)
        scored = {entry.seq_id: entry.logprobs for entry in result.scored} if result.scored else {}
        rows = pairs = num_decodes = num_loaded = 0
        outputs = []
        for step in plan.steps:
            seq_id, start, count = step.seq_id, step.start, step.num_tokens
            seq = self._by_id.get(seq_id)
            if step.loads:
                num_loaded += len(step.loads)
            if seq_id in lost:
                if seq is not None:
                    self.kv_cache.lose(step.loads)
                    self._preempt(seq)
                continue
            rows += count
            pairs += chunk_pairs(count, start)
            entry = next(sampled, None) if step.samples else None
            num_decodes += count == 1 and step.samples
            if seq is None:
                continue
            computed = start + count
            seq.num_computed_tokens = computed
            if computed // size > seq.num_published_blocks:
                self.kv_cache.publish(seq)
            prompt_logprobs = unreported(seq.request, step, scored) if step.num_scored else None
            if start < seq.num_prompt_tokens <= computed:
                self._release_forks(seq.request)
            if step.samples:
                if entry is None or entry.seq_id != seq_id:
                    raise RuntimeError(f"step {plan.step} gave no token for sequence {seq_id}, which samples")
                output = taken_in(seq, entry, prompt_logprobs)
                if output.finish_reason is not None:
                    self._end(seq)
                outputs.append(output)
            elif prompt_logprobs:
                outputs.append(scores_of(seq, prompt_logprobs))
        return outputs, rows, pairs, num_decodes, num_loaded

    def fail(self, plan: Plan, message: str) -> list[SequenceOutput]:
        """The step raised: its sequences, and forks held back behind them, end with finish_reason "error".

        Nothing the step computed is published, nor is what it saved trusted. What the plan dropped is announced again,
        since the runtime may not have come that far; it must take an unknown id there as no error.
        """
        self._dropped.update(dict.fromkeys(plan.dropped))
        self.kv_cache.lose((slot, block_id) for block_id, slot in plan.saves)
        outputs = []
        for step in plan.steps:
            seq = self._by_id.get(step.seq_id)
            if seq is None:
                continue
            indexes = [seq.index, *seq.request.held]
            self._give_up_held(seq.request)
            self._end(seq)
            outputs += [failed(seq, index, message) for index in indexes]
        return outputs

    # what others may know

    def stats(self, step_s: float) -> StepStats:
        """State after the last updated step, which took `step_s` seconds in all."""
        num_swapped = 0 if self.kv_cache.tier is None else sum(map(self.kv_cache.is_swapped, self._queue))
        num_running = len(self._running.sequences)
        return self._totals.stats(step_s, num_running, self.num_waiting, self._waiting_reason, num_swapped)

    def reset_prefix_cache(self) -> int:
        """Forget every cached block that no running sequence holds, also in the host tier; returns how many."""
        return self.kv_cache.reset()

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block, sequence and request is accounted for exactly once."""
        check_blocks(self.kv_cache, self._running, self.settings)
        check_sequences(self._requests, self._running, self._queue, self._by_id, self._dropped, self.settings)


def _turn(seq: Sequence) -> tuple[int, bool, int, Rank]:
    """Sorts prefills, the next to serve first: by priority, overdue before others, then the shortest."""
    overdue = seq.num_passed_tokens >= seq.num_tokens
    return seq.rank[0], not overdue, 0 if overdue else seq.remaining_tokens, seq.rank
