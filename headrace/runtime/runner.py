"""Executes plans on one device: keeps the table of sequences, builds the batch, runs the model, samples.

A step that raises leaves the table as it was before it (the plan's dropped sequences stay dropped, and its saves are
done) and no memory taken, so the same work can be planned again, in smaller parts or without the guilty sequence.
"""

from __future__ import annotations

import ctypes
import time
import traceback
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.config.model_files import ModelFiles
from headrace.config.other_architecture import OTHER_FAMILY
from headrace.engine.plan import NewSequence, Plan, Sampled, Scored, SequenceStep, StepResult
from headrace.kernels.ops import Batch, Forward, InvalidLogits, Kernels, KVCacheLayout
from headrace.models import Model, build_model
from headrace.protocol.ipc import GrammarSpec
from headrace.runtime.batch import build_batch
from headrace.runtime.choosing import ask, results
from headrace.runtime.decodes import Decodes
from headrace.runtime.devices import check_device
from headrace.runtime.grammar import Grammar, GrammarState
from headrace.runtime.host_store import HostStore
from headrace.runtime.pooling import Pooling
from headrace.runtime.table import SequenceTable
from headrace.weights.checkpoint import Checkpoint, Progress


class BrokenSequences(Exception):
    """A step gave these sequences, and not necessarily the others, values that are not numbers."""

    def __init__(self, seq_ids: Sequence[int]) -> None:
        named = ", ".join(map(str, seq_ids))
        super().__init__(f"the model gave logits that are not numbers for sequence {named}")
        self.seq_ids = tuple(seq_ids)


class Runner:
    """First `load`, then `allocate_kv_cache`, then `execute` as often as wanted."""

    def __init__(
        self,
        files: ModelFiles,
        kernels: Kernels,
        find_grammar: Callable[[GrammarSpec], Grammar | None] = lambda spec: None,
        pooling: Pooling | None = None,
    ) -> None:
        """`find_grammar` gives what is compiled; whoever plans a sequence has seen to it that its grammar is. With
        `pooling` the rows of a step become vectors or scores instead of tokens."""
        self._find_grammar = find_grammar
        self._pooling = pooling
        self.files = files
        self.kernels = kernels
        self._model: Model | None = None
        self._forward: Forward | None = None
        self._block_size = 0
        self._table = SequenceTable(len(files.config.layer_groups))
        self._host = HostStore(kernels)
        self._decodes: Decodes | None = None
        """Of the last step, if it went well and was of decoding sequences only."""

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._table

    @property
    def num_sequences(self) -> int:
        """Sequences in the table: those planned and not dropped."""
        return len(self._table)

    def load(self, progress: Progress = lambda done, total: None, max_positions: int | None = None) -> None:
        """Read the weights. `max_positions` (default: the model's limit) is the longest sequence there will be."""
        config = self.files.config
        if config.family == OTHER_FAMILY:
            # Imported here: it is the only part of a start that needs torch.
            from headrace.runtime.other_model import load_other_model

            self._model = load_other_model(self.files, self.kernels, progress)
            return _return_freed_memory()
        checkpoint = Checkpoint(self.files)
        try:
            limit = config.max_position_embeddings if max_positions is None else max_positions
            self._model = build_model(config, checkpoint, self.kernels, limit, progress)
        finally:
            checkpoint.close()
        _return_freed_memory()

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> None:
        """Make room for `num_blocks` blocks, forgetting what an earlier cache held. RuntimeError before `load`."""
        config, model, kernels = self.files.config, self._model, self.kernels
        if model is None:
            raise RuntimeError("the runner has no model: call load before allocate_kv_cache")
        if not config.is_encoder:
            layers = config.layers_per_group
            kernels.allocate_kv_cache(
                KVCacheLayout(layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
            )
        self._host.clear()
        self._leave_decodes()
        pooling = self._pooling
        self._forward = kernels.capture(
            lambda batch: model.forward(kernels, batch) if pooling is None else pooling.forward(model, kernels, batch)
        )
        self._block_size = block_size

    def release_kv_cache(self) -> None:
        """Give its memory back, and that of what the host tier holds, until the next `allocate_kv_cache`."""
        self._leave_decodes()
        self._forward = None
        self.kernels.release_kv_cache()
        self._host.clear()

    def execute(self, plan: Plan) -> StepResult:
        """Do one step. Raises BrokenSequences, DeviceLost, or whatever the device raised."""
        started_s = time.perf_counter()
        decodes = self._decodes
        try:
            # A plan that was done in parts has left the decodes of the last part.
            continues = decodes is not None and plan.continues and len(decodes.seq_ids) == len(plan.steps)
            if decodes is not None and continues and decodes.grow(plan.steps):
                return self._go_on(plan, decodes, started_s)
            self._leave_decodes()
            return self._do(plan, started_s)
        except BaseException as error:
            self._leave_decodes()
            # The buffers of what failed hang on its frames, and whoever does the work again needs their memory.
            traceback.clear_frames(error.__traceback__)
            check_device(self.kernels.device)
            raise

    def _leave_decodes(self) -> None:
        if self._decodes is not None:
            self._decodes.leave()
            self._decodes = None

    def _go_on(self, plan: Plan, decodes: Decodes, started_s: float) -> StepResult:
        """The next token of each sequence of the last step."""
        if plan.saves:
            self._host.save(plan.saves)
        loaded_s = time.perf_counter()
        token_ids: Sequence[int] = ()
        sampled: tuple[Sampled, ...] = ()
        try:
            if decodes.plain:
                token_ids = decodes.step()
            else:
                asked, chosen = decodes.choose(self.kernels)
                sampled = results(asked, chosen, (), self._table)[0]
        except InvalidLogits as error:
            raise _broken(decodes.seq_ids, error) from error
        done_s = time.perf_counter()
        return StepResult(plan.step, done_s - loaded_s, sampled, saved_s=loaded_s - started_s, token_ids=token_ids)

    def _do(self, plan: Plan, started_s: float) -> StepResult:
        """A plan of its own."""
        table = self._table
        for seq_id in plan.dropped:
            table.drop(seq_id)
        if plan.saves:
            self._host.save(plan.saves)
        saved_s = time.perf_counter()
        for sequence in plan.new:
            table.add(sequence, self._grammar_state(sequence))
        grown: list[tuple[int, NDArray[np.int64]]] = []
        try:
            growing = [step for step in plan.steps if step.loads or any(step.new_block_ids)]
            failed = self._host.load(plan.loads) if growing else frozenset()
            loaded_s = time.perf_counter()
            lost = _without_blocks(plan, failed) if failed else frozenset()
            if plan.block_copies:
                self.kernels.copy_blocks(plan.block_copies)
            for step in growing:
                if step.seq_id not in lost:
                    row = table.row(step.seq_id)
                    grown.append((row, table.num_blocks[:, row].copy()))
                    table.append_blocks(row, step.new_block_ids)
            steps = [step for step in plan.steps if step.seq_id not in lost] if lost else plan.steps
            sampled, scored = self._compute(steps) if steps else ((), ())
        except BaseException:
            for row, num_blocks in grown:
                table.num_blocks[:, row] = num_blocks
            for sequence in plan.new:
                table.drop(sequence.seq_id)
            raise
        for seq_id in lost:
            table.drop(seq_id)
        return StepResult(
            plan.step, time.perf_counter() - loaded_s, sampled, scored, tuple(lost), saved_s - started_s,
            loaded_s - saved_s,
        )  # fmt: skip

    def _compute(self, steps: Sequence[SequenceStep]) -> tuple[tuple[Sampled, ...], tuple[Scored, ...]]:
        """All that can be done before the forward, which sweeps the caches, is done before it."""
        if self._forward is None:
            raise RuntimeError("the runner is not ready: call load and allocate_kv_cache before execute")
        table = self._table
        rows = [table.row(step.seq_id) for step in steps]
        if self._pooling is not None:
            return self._pool(self._pooling.batch(table, np.array(rows), steps, self._block_size), steps), ()
        batch = build_batch(table, np.array(rows), steps, self._block_size)
        scoring = [step for step in steps if step.num_scored]
        choosing = [(step.seq_id, row) for step, row in zip(steps, rows, strict=True) if step.samples]
        vocab_size = self.files.config.vocab_size
        asked = ask(table, choosing, scoring, vocab_size)
        logits = self._forward(batch)
        if not asked.seq_ids:
            return (), ()
        try:
            chosen = self.kernels.sample(logits, asked.rows)
        except InvalidLogits as error:
            raise _broken(asked.seq_ids, error) from error
        taken = results(asked, chosen, scoring, table)
        if not scoring and all(step.num_tokens == 1 and step.samples for step in steps):
            self._decodes = Decodes(table, batch, asked, chosen.token_ids, self._block_size, self._forward, vocab_size)
        return taken

    def _pool(self, batch: Batch, steps: Sequence[SequenceStep]) -> tuple[Sampled, ...]:
        assert self._pooling is not None
        assert self._forward is not None
        values = self.kernels.host_rows(self._forward(batch))
        sampled, broken = self._pooling.results(values, self._table, steps)
        if broken:
            raise BrokenSequences(broken)
        return sampled

    def _grammar_state(self, sequence: NewSequence) -> GrammarState | None:
        spec = sequence.params.grammar
        if spec is None:
            return None
        grammar = self._find_grammar(spec)
        if grammar is None:
            raise RuntimeError("a sequence was planned whose grammar is not compiled")
        return grammar.start()


def _broken(seq_ids: Sequence[int], error: InvalidLogits) -> BrokenSequences:
    return BrokenSequences(list(dict.fromkeys(seq_ids[row] for row in error.rows)))


def _without_blocks(plan: Plan, failed: frozenset[int]) -> frozenset[int]:
    """Sequences that were to have one of these blocks filled, share one with those, or get a copy of one."""
    missing = failed.union(target for source, target in plan.block_copies if source in failed)
    return frozenset(
        step.seq_id
        for step in plan.steps
        if any(block_id in failed for _, block_id in step.loads)
        or any(missing.intersection(own) for own in step.new_block_ids)
    )


def _return_freed_memory() -> None:
    """Loading frees as much as it keeps, in pieces small enough for the C library to hold on to."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
