"""The runner: its table of sequences, the batches it builds, and steps that fail without a trace."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from headrace.config.errors import ConfigError  # noqa: E402
from headrace.config.model_files import open_model  # noqa: E402
from headrace.config.settings import EngineSettings  # noqa: E402
from headrace.engine.plan import NO_BLOCK, NewSequence, Plan, SequenceStep  # noqa: E402
from headrace.kernels.ops import InvalidLogits  # noqa: E402
from headrace.kernels.reference import ReferenceKernels  # noqa: E402
from headrace.protocol.ipc import SamplingParams  # noqa: E402
from headrace.runtime import devices  # noqa: E402
from headrace.runtime.batch import build_batch  # noqa: E402
from headrace.runtime.runner import BrokenSequences, Runner  # noqa: E402
from headrace.runtime.table import SequenceTable  # noqa: E402
from tests.tiny_models import tiny_llama  # noqa: E402

BLOCK_SIZE = 4


def sequence(seq_id: int, tokens: range | tuple[int, ...], **params: object) -> NewSequence:
    asked = SamplingParams(**{"max_tokens": 9, "temperature": 0.0, **params})  # type: ignore[arg-type]
    return NewSequence(seq_id, tuple(tokens), len(tokens), 0, asked)


def plan(
    *steps: SequenceStep,
    new: tuple[NewSequence, ...] = (),
    dropped: tuple[int, ...] = (),
    copies: tuple[tuple[int, int], ...] = (),
) -> Plan:
    return Plan(step=1, dropped=dropped, new=new, block_copies=copies, steps=steps)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def runner(model_path: Path) -> Runner:
    runner = Runner(open_model(model_path), ReferenceKernels())
    runner.load()
    runner.allocate_kv_cache(64, BLOCK_SIZE)
    return runner


def generate(runner: Runner, new: NewSequence, blocks: tuple[int, ...], count: int) -> list[int]:
    """Prompt in one step, then one token a step."""
    length = len(new.token_ids)
    result = runner.execute(plan(SequenceStep(new.seq_id, 0, length, (blocks,), True), new=(new,)))
    tokens = list(result.sampled[0].token_ids)
    while len(tokens) < count:
        step = SequenceStep(new.seq_id, length + len(tokens) - 1, 1, (), True)
        tokens += runner.execute(plan(step)).sampled[0].token_ids
    return tokens


def test_a_batch_is_laid_out_as_documented() -> None:
    table = SequenceTable()
    table.add(sequence(1, range(10, 15)))
    table.add(sequence(2, range(20, 27)))
    rows = np.array([table.row(1), table.row(2)])
    table.append_blocks(rows[0], ((7, 3),))
    table.append_blocks(rows[1], ((5,),))
    table.append_blocks(rows[1], ((9,),))
    steps = (SequenceStep(1, 2, 3, ((),), False), SequenceStep(2, 6, 1, ((),), True))
    batch = build_batch(table, rows, steps, BLOCK_SIZE)
    assert batch.token_ids.tolist() == [12, 13, 14, 26]
    assert batch.positions.tolist() == [2, 3, 4, 6]
    assert batch.slot_mapping.tolist() == [[30, 31, 12, 38]]
    assert batch.query_start.tolist() == [0, 3, 4] and batch.seq_lens.tolist() == [5, 7]
    assert batch.block_tables.tolist() == [[[7, 3], [5, 9]]] and batch.sample_rows.tolist() == [3]


def test_a_step_beyond_the_known_tokens_or_blocks_is_an_error() -> None:
    table = SequenceTable()
    table.add(sequence(1, range(6)))
    rows = np.array([table.row(1)])
    table.append_blocks(rows[0], ((0,),))
    with pytest.raises(ValueError, match="sequence 1 is to compute 7 tokens from 0, but has 6 tokens"):
        build_batch(table, rows, (SequenceStep(1, 0, 7, ((),), True),), BLOCK_SIZE)
    with pytest.raises(ValueError, match="has 4 tokens of blocks"):
        build_batch(table, rows, (SequenceStep(1, 0, 6, ((),), True),), BLOCK_SIZE)


def test_rows_are_reused_and_the_table_grows_past_its_first_size() -> None:
    table = SequenceTable()
    for seq_id in range(40):
        table.add(sequence(seq_id, range(seq_id + 1)))
        table.append_blocks(table.row(seq_id), (tuple(range(100 + seq_id, 120 + seq_id)),))
    assert len(table) == 40 and len({table.row(i) for i in range(40)}) == 40
    table.add(sequence(50, range(1000)))
    assert table.tokens[table.row(39), :40].tolist() == list(range(40))
    assert table.blocks[0, table.row(3), :20].tolist() == list(range(103, 123))
    freed = table.row(7)
    table.drop(7)
    table.add(sequence(60, (1,)))
    assert table.row(60) == freed and table.num_blocks[0, freed] == 0
    with pytest.raises(KeyError, match="sequence 7 is not in"):
        table.row(7)


def test_a_reused_rows_old_blocks_do_not_reach_the_batch() -> None:
    table = SequenceTable()
    table.add(sequence(1, range(12)))
    table.append_blocks(table.row(1), ((30, 31, 32),))
    table.drop(1)
    table.add(sequence(2, range(12)))
    table.add(sequence(3, range(2)))
    rows = np.array([table.row(2), table.row(3)])
    table.append_blocks(rows[0], ((4, 5, 6),))
    table.append_blocks(rows[1], ((7,),))
    steps = (SequenceStep(2, 0, 12, ((),), True), SequenceStep(3, 0, 2, ((),), True))
    assert build_batch(table, rows, steps, BLOCK_SIZE).block_tables.tolist() == [[[4, 5, 6], [7, 0, 0]]]


def test_every_group_of_layers_has_block_tables_of_its_own() -> None:
    table = SequenceTable(num_groups=2)
    table.add(sequence(1, range(6)))
    rows = np.array([table.row(1)])
    table.append_blocks(rows[0], ((4, 5), (7,)))
    steps = (SequenceStep(1, 3, 3, ((), ()), True),)
    with pytest.raises(ValueError, match="has 4 tokens of blocks"):
        build_batch(table, rows, steps, BLOCK_SIZE)
    table.append_blocks(rows[0], ((), (1,)))
    batch = build_batch(table, rows, steps, BLOCK_SIZE)
    assert batch.block_tables.tolist() == [[[4, 5]], [[7, 1]]]
    assert batch.slot_mapping.tolist() == [[19, 20, 21], [31, 4, 5]]


def test_where_a_window_has_no_block_a_batch_has_any_number_and_nothing_is_computed() -> None:
    table = SequenceTable(num_groups=2)
    table.add(sequence(1, range(10)))
    rows = np.array([table.row(1)])
    table.append_blocks(rows[0], ((4, 5, 6), (NO_BLOCK, 7, 1)))
    batch = build_batch(table, rows, (SequenceStep(1, 8, 2, ((), ()), True),), BLOCK_SIZE)
    assert batch.block_tables.tolist() == [[[4, 5, 6]], [[0, 7, 1]]]
    with pytest.raises(ValueError, match="before the window"):
        build_batch(table, rows, (SequenceStep(1, 3, 7, ((), ()), True),), BLOCK_SIZE)


def test_dropped_sequences_are_forgotten_also_by_a_plan_without_steps(runner: Runner) -> None:
    generate(runner, sequence(1, range(5)), (0, 1), 2)
    assert runner.num_sequences == 1
    result = runner.execute(plan(dropped=(1, 99)))
    assert runner.num_sequences == 0 and result.sampled == ()


def test_a_sequence_resumed_from_its_tokens_goes_on_as_it_would_have(runner: Runner) -> None:
    for params in ({}, {"temperature": 1.0, "seed": 3}):
        new = sequence(1, range(9), **params)
        tokens = generate(runner, new, (0, 1, 2, 3), 7)
        known = (*new.token_ids, *tokens[:3])
        again = NewSequence(2, known, new.num_prompt_tokens, new.index, new.params)
        assert generate(runner, again, (9, 8, 7, 6), 4) == tokens[3:]


def test_a_copied_block_continues_its_sequence(runner: Runner) -> None:
    new = sequence(1, range(7), temperature=0.8, seed=5)
    tokens = generate(runner, new, (0, 1, 2), 1)
    fork = NewSequence(2, new.token_ids, 7, 0, new.params)
    step = SequenceStep(2, 6, 1, ((0, 40, 41),), True)
    assert list(runner.execute(plan(step, new=(fork,), copies=((1, 40),))).sampled[0].token_ids) == tokens


def test_logprobs_are_given_to_those_who_asked_each_with_its_own_number(runner: Runner) -> None:
    new = tuple(sequence(i, range(i + 2), logprobs=wanted) for i, wanted in enumerate((None, 0, 3)))
    steps = tuple(SequenceStep(i, 0, i + 2, ((i,),), True) for i in range(3))
    first, second, third = runner.execute(plan(*steps, new=new)).sampled
    assert first.logprobs is None and second.logprobs is not None and third.logprobs is not None
    assert second.logprobs[0].top_token_ids == [] and len(third.logprobs[0].top_logprobs) == 3
    assert third.logprobs[0].token_id == third.token_ids[0] == third.logprobs[0].top_token_ids[0]
    assert third.logprobs[0].rank == 1 and third.logprobs[0].logprob == third.logprobs[0].top_logprobs[0] < 0


def test_chunks_sample_only_at_their_end(runner: Runner) -> None:
    new = sequence(1, range(10))
    assert runner.execute(plan(SequenceStep(1, 0, 6, ((0, 1),), False), new=(new,))).sampled == ()
    result = runner.execute(plan(SequenceStep(1, 6, 4, ((2,),), True)))
    assert result.sampled[0].token_ids == tuple(generate(runner, sequence(2, range(10)), (5, 6, 7), 1))
    assert result.seconds > 0


def test_a_failed_step_can_be_done_again(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = generate(runner, sequence(1, range(6)), (0, 1), 3)
    runner.execute(plan(dropped=(1,)))
    old = sequence(2, range(6))
    first = generate(runner, old, (2, 3), 1)
    new = sequence(3, range(6))
    attempt = plan(SequenceStep(2, 6, 1, ((4,),), True), SequenceStep(3, 0, 6, ((5, 6),), True), new=(new,))
    with monkeypatch.context() as patch:
        patch.setattr(runner.kernels, "sample", _raising(MemoryError("no room")))
        with pytest.raises(MemoryError):
            runner.execute(attempt)
        assert runner.num_sequences == 1
    again = runner.execute(attempt)
    assert [s.token_ids for s in again.sampled] == [(expected[1],), (expected[0],)]
    assert first == expected[:1]


def _raising(error: Exception) -> object:
    def raises(*_: object) -> None:
        raise error

    return raises


def test_broken_logits_name_their_sequences(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.kernels, "sample", _raising(InvalidLogits([1])))
    steps = (SequenceStep(11, 0, 3, ((0,),), True), SequenceStep(12, 0, 3, ((1,),), True))
    with pytest.raises(BrokenSequences, match="not numbers for sequence 12") as caught:
        runner.execute(plan(*steps, new=(sequence(11, range(3)), sequence(12, range(3)))))
    assert caught.value.seq_ids == (12,)


def test_a_step_before_loading_says_what_to_call(model_path: Path) -> None:
    runner = Runner(open_model(model_path), ReferenceKernels())
    with pytest.raises(RuntimeError, match="call load and allocate_kv_cache"):
        runner.execute(plan(SequenceStep(1, 0, 3, ((0,),), True), new=(sequence(1, range(3)),)))


def test_loading_reports_progress_up_to_the_total(model_path: Path) -> None:
    files = open_model(model_path)
    heard: list[tuple[int, int]] = []
    Runner(files, ReferenceKernels()).load(lambda done, total: heard.append((done, total)))
    assert heard == sorted(heard) and len(heard) == 3 and heard[-1] == (files.total_bytes, files.total_bytes)


def test_the_references_dtype_is_the_checkpoints_where_the_cpu_can_and_float32_elsewhere(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.kernels.reference import kernels as reference

    config = open_model(model_path, {"torch_dtype": "bfloat16", "dtype": "bfloat16"}).config
    settings = EngineSettings(model=str(model_path), device="cpu", kernels="reference", threads=torch.get_num_threads())
    for native, expected in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(reference, "multiplies_natively", lambda dtype, n=native: n or dtype == "float32")
        assert devices.choose_kernels(settings, config).dtype == expected
    asked = msgspec.structs.replace(settings, dtype="float16")
    assert devices.choose_kernels(asked, config).dtype == "float16"


def test_a_cpu_runs_the_native_kernels_in_the_checkpoints_dtype(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "has_gpu", lambda: False)
    config = open_model(model_path, {"torch_dtype": "float16", "dtype": "float16"}).config
    kernels = devices.choose_kernels(EngineSettings(model=str(model_path), threads=1), config)
    assert (kernels.name, kernels.device, kernels.dtype, kernels.threads) == ("native", "cpu", "float16", 1)
    asked = EngineSettings(model=str(model_path), dtype="float32", threads=2)
    assert devices.choose_kernels(asked, config).dtype == "float32"


def test_without_the_native_kernels_the_reference_serves_and_says_so(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from headrace.kernels.native import library

    monkeypatch.setattr(devices, "has_gpu", lambda: False)
    monkeypatch.setattr(library, "PATH", model_path / "libheadrace.so")
    library.load.cache_clear()
    library.variants.cache_clear()
    try:
        config = open_model(model_path).config
        settings = EngineSettings(model=str(model_path), threads=torch.get_num_threads())
        assert devices.choose_kernels(settings, config).name == "reference"
        assert "the CPU kernels were not built when headrace was installed" in caplog.text
        assert "many times slower" in caplog.text
        with pytest.raises(ConfigError, match=r"--kernels native cannot work: .*apt-get install g\+\+"):
            devices.choose_kernels(msgspec.structs.replace(settings, kernels="native"), config)
        monkeypatch.setitem(sys.modules, "headrace.kernels.reference", None)
        with pytest.raises(
            ConfigError, match=r"were not built .*Without them torch is needed .*headrace\[engine,torch\]"
        ):
            devices.choose_kernels(settings, config)
    finally:
        library.load.cache_clear()
        library.variants.cache_clear()


def test_a_gpu_that_is_not_there_is_refused_with_the_flag_that_works(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"--device cuda cannot work: .*--device cpu"):
        devices.choose_kernels(EngineSettings(model="m", device="cuda"), open_model(model_path).config)


@pytest.mark.parametrize(
    ("limits", "quota"),
    [
        ({"a/b": "max 100000", "a": "150000 100000", "": "max 100000"}, 1.5),
        ({"a/b": "50000 100000", "a": "400000 100000"}, 0.5),
        ({"a": "max 100000"}, None),
    ],
)
def test_the_tightest_cpu_quota_on_the_way_up_counts(
    limits: dict[str, str], quota: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    (root / "a" / "b").mkdir(parents=True)
    for place, text in limits.items():
        (root / place / "cpu.max").write_text(text + "\n")
    membership.write_text("0::/a/b\n")
    monkeypatch.setattr(devices, "CGROUP_ROOT", root)
    monkeypatch.setattr(devices, "PROCESS_CGROUP", membership)
    assert devices.cpu_quota() == quota
    assert devices.available_threads() >= 1


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("sse2 avx avx2 fma", "AVX2"),
        ("avx2 avx512f avx512_vnni avx512_bf16", "AVX-512 BF16 VNNI"),
        ("avx512f avx512_fp16 amx_tile", "AVX-512 FP16 AMX"),
        ("asimd asimddp i8mm", "NEON DOTPROD I8MM"),
    ],
)
def test_the_instruction_set_is_named_by_its_widest_vectors(flags: str, name: str) -> None:
    assert devices.describe_flags(frozenset(flags.split())) == name
