"""The memory planner's arithmetic, with the numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from headrace.config.errors import ConfigError
from headrace.config.model import ModelConfig
from headrace.config.settings import EngineSettings
from headrace.planner import host
from headrace.planner.memory import GIB, plan_memory, step_buffer_bytes

SMOLLM2 = ModelConfig(
    family="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_theta=1e5,
)
BLOCK = 2 * 30 * 3 * 64 * 4 * 32  # bytes of a float32 block of 32 tokens


def plan(
    available_gib: float = 16.0,
    config: ModelConfig = SMOLLM2,
    device: str = "cpu",
    host_gib: float = 32,
    kv_cache_dtype: str = "float32",
    **flags,
):
    return plan_memory(
        config,
        EngineSettings(model="m", **flags),
        weight_bytes=540_000_000,
        available_bytes=int(available_gib * GIB),
        kv_cache_dtype=kv_cache_dtype,
        overhead_bytes=300_000_000,
        device=device,
        host_bytes=int(host_gib * GIB),
    )


def test_a_cpu_takes_four_gib_of_whole_blocks_when_nothing_is_asked():
    result = plan()
    assert BLOCK == 1_474_560
    assert result.num_blocks == 4 * GIB // BLOCK == 2912
    assert result.kv_cache_bytes == 2912 * BLOCK
    assert result.kv_cache_tokens == 93_184
    assert result.max_model_len == 8192
    assert result.max_concurrency == 11.375
    assert result.notes == ()


def test_utilization_is_a_ceiling_on_the_available_memory():
    fixed = 840_000_000 + step_buffer_bytes(SMOLLM2, 256, 256)
    result = plan(available_gib=4, gpu_memory_utilization=0.5)
    assert result.num_blocks == (2 * GIB - fixed) // BLOCK == 780


def test_a_gpu_uses_all_that_utilization_allows_in_blocks_of_16():
    fixed = 840_000_000 + step_buffer_bytes(SMOLLM2, 2048, 256)
    result = plan(available_gib=24, device="cuda", gpu_memory_utilization=0.9)
    assert result.block_size == 16
    assert result.num_blocks == (int(0.9 * 24 * GIB) - fixed) // (BLOCK // 2)


def test_kv_cache_memory_bytes_is_exact_down_to_the_block():
    assert plan(kv_cache_memory_bytes=100 * BLOCK).num_blocks == 100
    assert plan(kv_cache_memory_bytes=100 * BLOCK + BLOCK - 1).num_blocks == 100
    assert plan(kv_cache_memory_bytes=8 * GIB).num_blocks == 8 * GIB // BLOCK


def test_kv_cache_memory_beyond_the_machine_is_refused_with_what_fits():
    with pytest.raises(ConfigError, match=r"Use --kv-cache-memory-bytes (\d+)\.") as error:
        plan(available_gib=2, kv_cache_memory_bytes=4 * GIB)
    fits = int(str(error.value).rsplit(" ", 1)[1].rstrip("."))
    assert plan(available_gib=2, kv_cache_memory_bytes=fits).kv_cache_bytes == fits


def test_an_unset_length_is_shortened_to_what_fits_and_says_so():
    result = plan(kv_cache_memory_bytes=100 * BLOCK)
    assert result.max_model_len == 3200
    assert "3,200" in result.notes[0] and "8,192" in result.notes[0]


def test_an_explicit_length_that_does_not_fit_names_the_bytes_that_would():
    with pytest.raises(ConfigError) as error:
        plan(kv_cache_memory_bytes=100 * BLOCK, max_model_len=8192)
    assert "To serve at least one request with the model's max seq len (8192)" in str(error.value)
    assert f"--kv-cache-memory-bytes {256 * BLOCK}" in str(error.value)
    assert plan(kv_cache_memory_bytes=256 * BLOCK, max_model_len=8192).max_concurrency == 1.0


def test_an_explicit_length_that_does_not_fit_names_the_utilization_that_would():
    with pytest.raises(ConfigError, match=r"Use --gpu-memory-utilization (0\.\d\d)\.") as error:
        plan(available_gib=2, gpu_memory_utilization=0.55, max_model_len=8192)
    better = float(str(error.value).rsplit(" ", 1)[1].rstrip("."))
    assert plan(available_gib=2, gpu_memory_utilization=better, max_model_len=8192).num_blocks >= 256
    with pytest.raises(ConfigError):
        plan(available_gib=2, gpu_memory_utilization=better - 0.01, max_model_len=8192)


def test_an_explicit_length_beyond_the_machine_names_the_longest_that_fits():
    with pytest.raises(ConfigError, match=r"use --max-model-len (\d+)\.") as error:
        plan(available_gib=1.1, gpu_memory_utilization=0.9, max_model_len=8192)
    longest = int(str(error.value).rsplit(" ", 1)[1].rstrip("."))
    assert plan(available_gib=1.1, max_model_len=longest).max_model_len == longest


def test_a_length_that_eight_bits_would_hold_is_refused_with_the_flag_for_it():
    with pytest.raises(ConfigError, match=r"use --max-model-len \d+, or --kv-cache-dtype fp8, which holds it\."):
        plan(available_gib=1.25, max_model_len=8192)
    assert plan(available_gib=1.25, max_model_len=8192, kv_cache_dtype="fp8_e4m3").max_model_len == 8192


@pytest.mark.parametrize(("kv_cache_dtype", "per_head"), [("bfloat16", 128), ("int8", 68), ("fp8_e5m2", 68)])
def test_a_block_is_as_large_as_its_numbers_and_their_scales(kv_cache_dtype: str, per_head: int):
    result = plan(kv_cache_dtype=kv_cache_dtype)
    assert result.num_blocks == 4 * GIB // (2 * 30 * 3 * per_head * 32)


def test_an_explicit_long_context_may_take_more_than_four_gib():
    long_model = msgspec.structs.replace(SMOLLM2, max_position_embeddings=131_072)
    assert plan(config=long_model).max_model_len == 93_184
    result = plan(config=long_model, max_model_len=131_072)
    assert (result.num_blocks, result.max_concurrency) == (4096, 1.0)


def test_no_room_for_a_block_is_refused_with_the_utilization_that_gives_room():
    with pytest.raises(ConfigError, match="No available memory for the cache blocks") as error:
        plan(available_gib=4, gpu_memory_utilization=0.2)
    assert "--gpu-memory-utilization 0.2" in str(error.value)
    with pytest.raises(ConfigError, match="smaller or more strongly quantised model"):
        plan(available_gib=0.5)


def test_no_more_requests_run_than_there_are_blocks():
    result = plan(kv_cache_memory_bytes=100 * BLOCK, max_num_seqs=256)
    assert result.max_num_seqs == 100
    assert "max_num_seqs is 100, not 256" in result.notes[-1]


def test_without_chunked_prefill_a_step_holds_a_whole_prompt():
    assert plan(enable_chunked_prefill=False).max_num_batched_tokens == 8192
    assert plan(enable_chunked_prefill=False, max_num_batched_tokens=1024).max_model_len == 1024
    with pytest.raises(ConfigError, match="--max-num-batched-tokens 4096"):
        plan(enable_chunked_prefill=False, max_num_batched_tokens=1024, max_model_len=4096)


def windowed(*kinds: bool, window: int = 512) -> ModelConfig:
    """Layers with a window of 512 where True, of the shape of SMOLLM2's."""
    return msgspec.structs.replace(SMOLLM2, num_layers=len(kinds), sliding_window=window, sliding_layers=kinds)


def test_with_windows_more_tokens_fit_the_same_memory():
    """Of 8192 tokens 20 of the 30 layers keep 512, those of a step, and what blocks of 32 add: (512 + 256 + 30) // 32
    + 1 blocks each of two groups of ten layers, where a group that sees everything takes 256."""
    held = 256 + 2 * 25
    result = plan(config=windowed(*(True, True, False) * 10))
    assert result.kv_cache_bytes == result.num_blocks * BLOCK // 3 == 4 * GIB // (BLOCK // 3) * BLOCK // 3
    assert result.kv_cache_tokens == result.num_blocks * 8192 // held
    assert result.kv_cache_tokens / plan().kv_cache_tokens == pytest.approx(3 * 256 / held, rel=1e-3)
    assert result.notes == ()


def test_a_window_longer_than_what_is_served_saves_nothing_and_costs_nothing():
    far = plan(config=windowed(*(True, False) * 15, window=8192))
    assert far.kv_cache_tokens // 32 == plan().kv_cache_tokens // 32


def test_the_longest_request_is_bounded_by_the_layers_that_see_everything():
    long_model = msgspec.structs.replace(windowed(*(True, False) * 15), max_position_embeddings=131_072)
    result = plan(config=long_model, max_model_len=131_072, kv_cache_memory_bytes=(4096 + 25) * BLOCK // 2)
    assert (result.num_blocks, result.max_concurrency) == (4121, 1.0)
    with pytest.raises(ConfigError, match=rf"Use --kv-cache-memory-bytes {(4096 + 25) * BLOCK // 2}\."):
        plan(config=long_model, max_model_len=131_072, kv_cache_memory_bytes=(4096 + 24) * BLOCK // 2)
    shorter = plan(config=long_model, kv_cache_memory_bytes=(2048 + 25) * BLOCK // 2)
    assert shorter.max_model_len == 2048 * 32
    only_windows = msgspec.structs.replace(windowed(*(True,) * 30), max_position_embeddings=131_072)
    assert plan(config=only_windows, kv_cache_memory_bytes=25 * BLOCK).max_model_len == 131_072


@pytest.mark.parametrize("config", [SMOLLM2, windowed(*(True, True, False) * 10), windowed(*(True,) * 30)])
@pytest.mark.parametrize("block_size", [None, 1, 16])
@pytest.mark.parametrize("length", [None, 2, 100])
def test_a_cache_that_holds_no_request_is_refused_with_the_least_that_does(
    config: ModelConfig, block_size: int | None, length: int | None
) -> None:
    flags = {"config": config, "block_size": block_size, "max_model_len": length}
    with pytest.raises(ConfigError, match="takes at least") as error:
        plan(**flags, kv_cache_memory_bytes=1)
    said = str(error.value)
    enough = int(said.split("Use --kv-cache-memory-bytes ")[1].split()[0])
    assert f"takes at least {enough} bytes" in said
    assert plan(**flags, kv_cache_memory_bytes=enough).max_model_len >= 2
    with pytest.raises(ConfigError, match=rf"Use --kv-cache-memory-bytes {enough}\b"):
        plan(**flags, kv_cache_memory_bytes=enough - 1)


def test_a_small_share_of_the_memory_is_told_as_it_is():
    with pytest.raises(ConfigError, match=r"that gpu_memory_utilization 0\.001 allows"):
        plan(gpu_memory_utilization=0.001)


def test_a_step_that_holds_no_prompt_and_answer_is_refused_without_chunked_prefill():
    flags = {"enable_chunked_prefill": False, "max_num_seqs": 1}
    with pytest.raises(ConfigError, match=r"need 2 tokens at least\. Use --max-num-batched-tokens 256"):
        plan(**flags, max_num_batched_tokens=1)
    assert plan(**flags, max_num_batched_tokens=2).max_model_len == 2


def test_swap_space_is_real_memory_beside_a_gpu_and_in_whole_blocks():
    gpu = {"device": "cuda", "available_gib": 24}
    assert plan(**gpu).num_host_blocks == 4 * GIB // (BLOCK // 2)
    assert plan(**gpu, swap_space_bytes=8 * GIB).num_host_blocks == 8 * GIB // (BLOCK // 2)
    assert plan(**gpu, swap_space_bytes=0).num_host_blocks == 0
    assert plan(**gpu, swap_space_bytes=8 * GIB).num_blocks == plan(**gpu).num_blocks


def test_swap_space_that_the_host_has_not_is_refused_with_what_it_has():
    with pytest.raises(ConfigError, match=r"--swap-space 64 is 64\.00 GiB .* use --swap-space (\S+)\.$") as error:
        plan(device="cuda", swap_space_bytes=64 * GIB)
    fits = float(str(error.value).rsplit(" ", 1)[1].rstrip("."))
    assert fits == 22.39, "seven tenths of 32"
    assert plan(device="cuda", swap_space_bytes=int(fits * GIB)).num_host_blocks > 0


def test_the_default_swap_space_is_smaller_on_a_small_host():
    result = plan(device="cuda", host_gib=2)
    assert result.num_host_blocks * (BLOCK // 2) <= 1.4 * GIB
    assert "swap space is 1.40 GiB, not 4.00" in result.notes[-1]


def test_on_a_cpu_swap_space_is_taken_from_the_same_memory_and_so_off_unless_asked_for():
    assert plan().num_host_blocks == 0
    result = plan(available_gib=4, swap_space_bytes=GIB)
    assert result.num_host_blocks == GIB // BLOCK
    assert plan(available_gib=4).num_blocks - result.num_blocks in (GIB // BLOCK, GIB // BLOCK + 1)
    assert "--kv-cache-memory-bytes is the better place" in result.notes[-1]
    with pytest.raises(ConfigError, match=r"use --swap-space (\S+)\.$") as error:
        plan(available_gib=4, swap_space_bytes=8 * GIB)
    fits = float(str(error.value).rsplit(" ", 1)[1].rstrip("."))
    assert plan(available_gib=4, swap_space_bytes=int(fits * GIB)).num_blocks >= 1
    with pytest.raises(ConfigError, match=r"use --swap-space 0\."):
        plan(available_gib=4, swap_space_bytes=8 * GIB, kv_cache_memory_bytes=16 * GIB)


def test_swap_space_smaller_than_a_block_is_told():
    assert "holds no block" in plan(swap_space_bytes=1 << 20).notes[-1]


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_available_memory_is_the_tightest_of_machine_and_nested_cgroups_v2(tmp_path):
    root = write(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 33554432 kB\nMemAvailable: 16777216 kB\n",
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/cgroup.controllers": "memory",
            "sys/fs/cgroup/a/memory.max": f"{8 * GIB}",
            "sys/fs/cgroup/a/memory.current": f"{3 * GIB}",
            "sys/fs/cgroup/a/memory.stat": f"anon 1\ninactive_file {GIB}\n",
            "sys/fs/cgroup/a/b/memory.max": "max",
            "sys/fs/cgroup/a/b/memory.current": f"{2 * GIB}",
        },
    )
    assert host.machine_available_bytes(root) == 16 * GIB
    assert host.cgroup_v2_available_bytes(root) == 6 * GIB
    assert host.available_memory_bytes(root) == 6 * GIB


def test_available_memory_reads_cgroup_v1_also_where_the_path_is_hidden_by_a_container(tmp_path):
    root = write(
        tmp_path,
        {
            "proc/meminfo": "MemAvailable: 16777216 kB\n",
            "proc/self/cgroup": "4:memory:/docker/abc\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}",
            "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {GIB // 2}\n",
        },
    )
    assert host.cgroup_v1_available_bytes(root) == GIB * 3 // 2
    unlimited = write(tmp_path, {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"})
    assert host.cgroup_v1_available_bytes(unlimited) is None
