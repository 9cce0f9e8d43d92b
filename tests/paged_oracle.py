"""A device that computes nothing but notices every mistake of the scheduler: the oracle of the engine's tests.

Each slot of its KV cache holds a fingerprint of the whole prefix up to that token, salt included. A step writes
its tokens' slots and then reads, for every sequence, all slots of its prefix: a block shared wrongly, copied
too early, published before it was computed or handed to two writers shows as a wrong fingerprint. The next
token is a function of (fingerprint, seed, index), so every schedule must give a request the same tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

from headrace.engine.plan import Plan, Sampled, Scored, StepResult
from headrace.engine.scheduler import Scheduler
from headrace.protocol.ipc import AddRequest, SamplingParams, SequenceOutput, TokenLogprobs

NUM_TOKENS = 50
"""Sampled tokens lie in [0, NUM_TOKENS)."""


def fingerprint(previous: int, token_id: int) -> int:
    digest = blake2b(previous.to_bytes(8, "little") + token_id.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def root_of(salt: str | None) -> int:
    return int.from_bytes(blake2b(repr(salt).encode(), digest_size=8).digest(), "little")


def next_token(prefix: int, seed: int, index: int) -> int:
    return fingerprint(prefix ^ seed, index) % NUM_TOKENS


def expected_tokens(message: AddRequest, index: int) -> list[int]:
    """What sequence `index` generates when nothing disturbs it; `stop_token_ids` end it, included."""
    params, prefix, tokens = message.params, root_of(message.cache_salt), list[int]()
    for token_id in message.token_ids:
        prefix = fingerprint(prefix, token_id)
    while len(tokens) < params.max_tokens:
        tokens.append(next_token(prefix, params.seed, index))
        prefix = fingerprint(prefix, tokens[-1])
        if tokens[-1] in params.stop_token_ids and len(tokens) > params.min_tokens:
            break
    return tokens


@dataclass
class Row:
    token_ids: list[int]
    prefixes: list[int]
    """Fingerprint after 0, 1, 2 ... tokens."""
    block_tables: list[list[int]]
    params: SamplingParams
    index: int

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.prefixes.append(fingerprint(self.prefixes[-1], token_id))


class PagedOracle:
    """Executes plans as the runtime would, raising AssertionError at the first wrong slot."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        salt_of_seed: Callable[[int], str | None] = lambda _: None,
        windows: tuple[int | None, ...] = (None,),
    ) -> None:
        self.block_size = block_size
        self.windows = windows
        self.host: dict[int, list[int | None]] = {}
        """What lies in the slots of the host tier; a slot whose save failed has nothing."""
        self.fails: Callable[[str], bool] = lambda move: False
        """Does this "save" or "load" of a block fail?"""
        self.move_s = 1e-6
        """What moving a block takes."""
        self.slots: list[int | None] = [None] * (num_blocks * block_size)
        self.rows: dict[int, Row] = {}
        self.salt_of_seed = salt_of_seed
        self.decoded: list[tuple[int, int]] = []
        """Of the last plan, if all of its steps decode: sequences, and the tokens computed of each."""

    def execute(self, plan: Plan, seconds: float = 0.01) -> StepResult:
        for seq_id in plan.dropped:
            self.rows.pop(seq_id, None)
        size = self.block_size
        for block_id, slot in plan.saves:
            self.host.pop(slot, None)
            if not self.fails("save"):
                self.host[slot] = self.slots[block_id * size : (block_id + 1) * size]
        for new in plan.new:
            assert new.seq_id not in self.rows
            row = Row([], [root_of(self.salt_of_seed(new.params.seed))], [], new.params, new.index)
            for token_id in new.token_ids:
                row.append(token_id)
            self.rows[new.seq_id] = row
        missing: set[int] = set()
        for slot, block_id in plan.loads:
            if slot not in self.host or self.fails("load"):
                missing.add(block_id)
            else:
                self.slots[block_id * size : (block_id + 1) * size] = self.host[slot]
        missing.update(target for source, target in plan.block_copies if source in missing)
        lost = {
            step.seq_id
            for step in plan.steps
            if any(missing & {*own} for own in (*step.new_block_ids, [block_id for _, block_id in step.loads]))
        }
        for seq_id in lost:
            del self.rows[seq_id]
        sources, targets = {s for s, _ in plan.block_copies}, [t for _, t in plan.block_copies]
        assert len(set(targets)) == len(targets) and not sources & set(targets), "copies depend on their order"
        for source, target in plan.block_copies:
            self.slots[target * size : (target + 1) * size] = self.slots[source * size : (source + 1) * size]
        assert len({step.seq_id for step in plan.steps}) == len(plan.steps), "a sequence has two entries in one step"
        written: set[int] = set()
        steps = [step for step in plan.steps if step.seq_id not in lost]
        for step in steps:
            row = self.rows[step.seq_id]
            row.block_tables = row.block_tables or [[] for _ in step.new_block_ids]
            for table, own in zip(row.block_tables, step.new_block_ids, strict=True):
                table += own
            assert step.num_tokens > 0 and step.start + step.num_tokens <= len(row.token_ids)
            assert step.samples == (step.start + step.num_tokens == len(row.token_ids))
            for position in range(step.start, step.start + step.num_tokens):
                for table in row.block_tables:
                    slot = table[position // size] * size + position % size
                    assert slot >= 0, "a step writes where no block is"
                    assert slot not in written, "two sequences write one slot"
                    written.add(slot)
                    self.slots[slot] = row.prefixes[position + 1]
        sampled, scored = [], []
        for step in steps:
            if step.num_scored:
                assert step.num_scored <= step.num_tokens
                tokens = self.rows[step.seq_id].token_ids[step.start + 1 : step.start + 1 + step.num_scored]
                scored.append(Scored(step.seq_id, tuple(TokenLogprobs(t, -float(t), 1, [], []) for t in tokens)))
            row, end = self.rows[step.seq_id], step.start + step.num_tokens
            for window, table in zip(self.windows, row.block_tables, strict=True):
                seen = range(0 if window is None else max(0, step.start + 1 - window), end)
                read = [self.slots[table[p // size] * size + p % size] for p in seen]
                assert read == row.prefixes[seen.start + 1 : end + 1], f"{step.seq_id} reads what others wrote"
            if step.samples:
                token_id = next_token(row.prefixes[-1], row.params.seed, row.index)
                row.append(token_id)
                sampled.append(Sampled(step.seq_id, (token_id,)))
        saved_s, loaded_s = self.move_s * len(plan.saves), self.move_s * len(plan.loads)
        decoded = [(s.seq_id, s.start + 1) for s in plan.steps if s.num_tokens == 1 and s.samples and not s.loads]
        if plan.continues:
            assert decoded == [(seq_id, count + 1) for seq_id, count in self.decoded], "it does not continue the last"
            assert decoded and not (plan.dropped or plan.new or plan.block_copies or lost)
        self.decoded = decoded if len(decoded) == len(plan.steps) else []
        if plan.continues:
            tokens = [token_id for entry in sampled for token_id in entry.token_ids]
            return StepResult(plan.step, seconds, (), saved_s=saved_s, token_ids=tokens)
        return StepResult(plan.step, seconds, tuple(sampled), tuple(scored), tuple(lost), saved_s, loaded_s)


class Engine:
    """Scheduler and oracle joined as the core joins scheduler and runtime; checks the books after every step.

    `depth` 2 makes each plan before the result of the one before is known.
    """

    def __init__(self, scheduler: Scheduler, depth: int = 1, step_s: Callable[[Plan], float] = lambda _: 0.01) -> None:
        self.scheduler = scheduler
        self.step_s = step_s
        self.depth = depth
        self.requests: dict[str, AddRequest] = {}
        self.plans: list[Plan] = []
        self.in_flight: deque[tuple[Plan, StepResult]] = deque()
        self.outputs: dict[tuple[str, int], list[SequenceOutput]] = {}
        settings = scheduler.settings
        self.oracle = PagedOracle(settings.num_blocks, settings.block_size, self._salt, settings.windows)
        self._salts: dict[int, str | None] = {}

    def _salt(self, seed: int) -> str | None:
        return self._salts[seed]

    def add(self, request_id: str, token_ids: list[int], max_tokens: int = 4, **more: object) -> AddRequest:
        """Queue a request that the scheduler must accept. The seed is unique, so that salts can be told by it."""
        names = ("priority", "cache_salt", "arrival_s")
        fields = {"arrival_s": 0.0} | {name: more.pop(name) for name in names if name in more}
        params = SamplingParams(max_tokens=max_tokens, seed=len(self._salts), **more)  # type: ignore[arg-type]
        message = AddRequest(request_id=request_id, token_ids=token_ids, params=params, **fields)  # type: ignore[arg-type]
        self._salts[params.seed] = message.cache_salt
        assert self.scheduler.add(message) is None
        self.requests[request_id] = message
        return message

    def step(self) -> Plan | None:
        """One turn of the core's loop; None when nothing was left to schedule or to wait for."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self.plans.append(plan)
            self.in_flight.append((plan, self.oracle.execute(plan, self.step_s(plan))))
            self.scheduler.check_integrity()
        if self.in_flight and (plan is None or len(self.in_flight) >= self.depth):
            done, result = self.in_flight.popleft()
            for output in self.scheduler.update(done, result):
                self.outputs.setdefault((output.request_id, output.index), []).append(output)
            self.scheduler.check_integrity()
            return done
        return plan

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work and not self.in_flight:
                break
            assert self.step() is not None, "there is work, and nothing is scheduled or in flight"
        assert not self.scheduler.has_work, f"not finished after {max_steps} steps"

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        return [token for output in self.outputs.get((request_id, index), []) for token in output.token_ids]

    def assert_tokens_as_if_alone(self, request_id: str) -> None:
        message = self.requests[request_id]
        for index in range(message.params.n):
            assert self.tokens(request_id, index) == expected_tokens(message, index), (request_id, index)

    def assert_nothing_left(self) -> None:
        assert self.scheduler.kv_cache.pool.num_used == 0, "blocks have not come back"
        assert not self.oracle.rows, "the runtime was not told of a sequence that ended"
        assert self.scheduler.num_waiting == 0 and not self.scheduler.has_work
        self.scheduler.check_integrity()
