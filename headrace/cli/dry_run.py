"""What would start: the device is chosen and the memory planned as for a real start, and no weight is read."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from headrace.config.load import Launch
    from headrace.config.model_files import ModelFiles
    from headrace.kernels.ops import Kernels
    from headrace.protocol.ipc import EngineInfo

EMBEDDING = "model.embed_tokens.weight"
WORKED_OUT = (
    "device",
    "dtype",
    "kernels",
    "kv_cache_dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "step_time_target_s",
    "threads",
)
"""Settings that a start decides, under the same names in EngineSettings and EngineInfo."""
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def predicted_info(launch: Launch) -> EngineInfo:
    """What the core would say of itself once started. Raises ConfigError when it could not start."""
    from headrace.core import DEFAULT_STEP_TIME_TARGET_S, STEP_TIME_TARGET_S
    from headrace.planner.memory import plan_memory
    from headrace.protocol.ipc import EngineInfo
    from headrace.runtime.devices import choose_kernels, instruction_set, thread_notes
    from headrace.runtime.memory import device_memory_bytes

    engine, files = launch.engine, launch.files
    kernels = choose_kernels(engine, files.config)
    available_bytes, taken_bytes = device_memory_bytes(kernels.device)
    weight_bytes = predicted_weight_bytes(files, kernels)
    plan = plan_memory(
        files.config,
        engine,
        weight_bytes=weight_bytes,
        available_bytes=available_bytes,
        kv_cache_dtype=kernels.kv_cache_dtype,
        overhead_bytes=taken_bytes,
        device="cuda" if kernels.device == "cuda" else "cpu",
        host_bytes=device_memory_bytes("cpu")[0],
    )
    target_s = STEP_TIME_TARGET_S.get(kernels.name, DEFAULT_STEP_TIME_TARGET_S)
    return EngineInfo(
        model=engine.model,
        family=files.config.family,
        device=kernels.device,
        dtype=kernels.dtype,
        kernels=kernels.name,
        instruction_set=instruction_set(kernels.device),
        threads=kernels.threads,
        weight_bytes=weight_bytes,
        kv_cache_bytes=plan.kv_cache_bytes,
        kv_cache_dtype=kernels.kv_cache_dtype,
        block_size=plan.block_size,
        num_blocks=plan.num_blocks,
        kv_cache_tokens=plan.kv_cache_tokens,
        num_host_blocks=plan.num_host_blocks,
        max_model_len=plan.max_model_len,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        step_time_target_s=engine.step_time_target_s or target_s,
        gives="text" if engine.pooler is None else engine.pooler.describe(),
        phase_seconds={},
        notes=[*plan.notes, *thread_notes(kernels)],
    )


def text_notices(launch: Launch) -> list[str]:
    """What the server would say of tokenizer and template. Raises ConfigError when it could not serve with them."""
    from headrace.protocol.generation_defaults import sampling_defaults
    from headrace.server.model_text import model_text

    server = launch.server
    sampling_defaults(launch.files.generation_config, server.generation_config, server.override_generation_config)
    problem = model_text(launch.engine, server, launch.files).problem
    return [] if problem is None else [problem]


def predicted_weight_bytes(files: ModelFiles, kernels: Kernels) -> int:
    """Memory of the weights once the kernels have them; within some percent for the formats with 5 and 6 bits."""
    if kernels.name == "native":
        return _native_weight_bytes(files, kernels.dtype)
    from headrace.kernels.reference.kernels import multiplies_natively

    # Dense matrices in the type they multiply in. On a CPU the embedding stays as it is stored; one that is tied is
    # needed as the output matrix too.
    native = kernels.device != "cpu" or multiplies_natively(kernels.dtype)
    width = DTYPE_BYTES[kernels.dtype] if native else 4
    total = 0
    for name, tensor in files.tensors.items():
        if name != EMBEDDING:
            total += prod(tensor.shape) * (width if len(tensor.shape) == 2 else 4)
            continue
        total += tensor.num_bytes if kernels.device == "cpu" else prod(tensor.shape) * width
        if files.config.tie_word_embeddings:
            total += prod(tensor.shape) * width
    return total


def _native_weight_bytes(files: ModelFiles, dtype: str) -> int:
    """Block formats as they are in the file, but 5 and 6 bits as 8; dense ones rounded to the compute dtype."""
    total = 0
    for tensor in files.tensors.values():
        count = prod(tensor.shape)
        if len(tensor.shape) < 2:
            total += 4 * count
        elif tensor.dtype in ("F32", "F16", "BF16"):
            total += tensor.num_bytes if dtype == "float32" else DTYPE_BYTES[dtype] * count
        else:
            total += tensor.num_bytes if tensor.dtype in ("Q4_0", "Q4_1", "Q4_K", "Q8_0") else count * 5 // 4
    return total


def shown_settings(launch: Launch, info: EngineInfo) -> tuple[dict[str, object], dict[str, object]]:
    """The effective settings of engine and server: what flags leave open as it was worked out, keys hidden and a
    template shortened to its length."""
    engine: dict[str, object] = msgspec.to_builtins(launch.engine)
    engine |= {name: getattr(info, name) for name in WORKED_OUT}
    server: dict[str, object] = msgspec.to_builtins(launch.server)
    server["api_keys"] = [f"{key[:3]}..." if len(key) > 12 else "..." for key in launch.server.api_keys]
    if launch.server.chat_template is not None:
        server["chat_template"] = f"({len(launch.server.chat_template)} characters)"
    return engine, server
