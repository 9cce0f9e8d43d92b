"""Chooses the device, the compute dtype and the kernels, and knows what this machine's CPU can do.

A CPU runs the native kernels, and torch's reference ones where those were not built. dtype auto is the checkpoint's
own; the reference on a CPU that does not multiply it natively computes in float32, which is exact and there faster.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import platform
from pathlib import Path

from headrace.config.architecture import KNOWN_FAMILIES
from headrace.config.errors import ConfigError
from headrace.config.model import ModelConfig
from headrace.config.other_architecture import OTHER_FAMILY
from headrace.config.settings import EngineSettings
from headrace.kernels.ops import Kernels
from headrace.planner.cpu import cpu_flags

logger = logging.getLogger("headrace.core")

CGROUP_ROOT = Path("/sys/fs/cgroup")
PROCESS_CGROUP = Path("/proc/self/cgroup")


def choose_kernels(settings: EngineSettings, config: ModelConfig) -> Kernels:
    """The kernels for these settings. Raises ConfigError when the device or what it needs is not there."""
    if config.family == OTHER_FAMILY:
        _check_other_family(settings, config)
    wants_gpu = settings.device == "cuda" or (settings.device == "auto" and settings.kernels != "native" and has_gpu())
    if wants_gpu and (kernels := _cuda_kernels(settings, config)) is not None:
        return kernels
    threads = settings.threads or available_threads()
    if config.family == OTHER_FAMILY:
        return _reference_kernels(settings, config, threads, f"For {config.architecture}, in transformers' code,")
    if settings.kernels != "reference":
        try:
            return _native_kernels(settings, config, threads)
        except ImportError as error:
            if settings.kernels == "native":
                raise ConfigError(f"--kernels native cannot work: {error}.") from error
            missing = error
        kernels = _reference_kernels(settings, config, threads, f"{missing}. Without them")
        logger.warning("%s. The reference kernels of torch serve in their place, many times slower.", missing)
        return kernels
    return _reference_kernels(settings, config, threads, "--kernels reference cannot work:")


def _check_other_family(settings: EngineSettings, config: ModelConfig) -> None:
    """Raises ConfigError for what transformers' own code does not do, and where it is not there."""
    if settings.kernels == "native":
        raise ConfigError(
            f"--kernels native cannot work: {config.architecture} runs in transformers' code, on torch. Headrace's own "
            f"families are {', '.join(KNOWN_FAMILIES)}."
        )
    if settings.quantization is not None:
        raise ConfigError(f"--quantization {settings.quantization} works for Headrace's own families only.")
    missing = [name for name in ("torch", "transformers") if not _is_installed(name)]
    if missing:
        raise ConfigError(
            f"{config.architecture} is not one of Headrace's own families ({', '.join(KNOWN_FAMILIES)}). Others run in "
            f"transformers' code, and {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed: "
            f"pip install {' '.join(missing)}."
        )


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


def _native_kernels(settings: EngineSettings, config: ModelConfig, threads: int) -> Kernels:
    """Raises ImportError when csrc/ was not built, or numpy is not installed."""
    from headrace.kernels.native import NativeKernels

    dtype = config.dtype if settings.dtype == "auto" else settings.dtype
    try:
        return NativeKernels(
            dtype, threads, kv_cache_dtype=settings.kv_cache_dtype, int8_weights=settings.quantization == "int8"
        )
    except MemoryError:
        raise ConfigError(
            f"--threads {threads}: so many cannot be started here: a limit of memory or processes is in the way. "
            f"There are {_cpus()}: use --threads {available_threads()}."
        ) from None


def _reference_kernels(settings: EngineSettings, config: ModelConfig, threads: int, wanted_for: str) -> Kernels:
    # Read once, when torch's thread library is loaded. Waiting workers that spin take the core that the server
    # process needs, and on a busy machine every step waits for them.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        from headrace.kernels.reference import ReferenceKernels
        from headrace.kernels.reference.kernels import multiplies_natively
    except ImportError as error:
        raise ConfigError(
            f"{wanted_for} torch is needed and cannot be imported ({error}): pip install 'headrace[engine,torch]'."
        ) from error
    dtype: str = settings.dtype
    if dtype == "auto":
        dtype = config.dtype if multiplies_natively(config.dtype) else "float32"
    return ReferenceKernels(
        "cpu", dtype, threads, kv_cache_dtype=settings.kv_cache_dtype, int8_weights=settings.quantization == "int8"
    )


def _cuda_kernels(settings: EngineSettings, config: ModelConfig) -> Kernels | None:
    """None where `--device auto` finds that torch cannot use the GPU."""
    asked = settings.device == "cuda"
    try:
        import torch

        from headrace.kernels.reference import ReferenceKernels
    except ImportError as error:
        if not asked:
            logger.warning("A GPU is there and torch is not (%s): the CPU serves.", error)
            return None
        raise ConfigError(
            f"--device cuda needs torch, which cannot be imported ({error}): pip install 'headrace[engine,torch]'."
        ) from error
    if not torch.cuda.is_available():
        reason = "this torch is built for CPUs only" if torch.version.cuda is None else "no NVIDIA GPU is visible"
        if not asked:
            logger.warning("A GPU is there and torch cannot use it (%s): the CPU serves.", reason)
            return None
        raise ConfigError(f"--device cuda cannot work: {reason}. --device cpu (or auto) runs on the CPU.")
    dtype = config.dtype if settings.dtype == "auto" else settings.dtype
    # torch takes it anywhere, and without instructions for it is many times slower.
    if dtype == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        if settings.dtype != "auto":
            raise ConfigError(f"{torch.cuda.get_device_name()} has no bfloat16: use --dtype float16.")
        dtype = "float16"
    return ReferenceKernels(
        "cuda",
        dtype,
        settings.threads or available_threads(),
        kv_cache_dtype=settings.kv_cache_dtype,
        int8_weights=settings.quantization == "int8",
    )


class DeviceLost(Exception):
    """The device computes nothing more in this process, whoever asks. Another process may be luckier."""


def check_device(device: str) -> None:
    """After something failed: raises DeviceLost if all that follows would fail too."""
    if device == "cpu":
        return
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise DeviceLost(f"the GPU is lost to this process: {error}") from error


def has_gpu() -> bool:
    """Whether the system shows an NVIDIA GPU, without importing torch to ask."""
    return any(Path(place).exists() for place in ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg"))


def thread_notes(kernels: Kernels) -> list[str]:
    """What is to be said of more threads than CPUs."""
    if kernels.device != "cpu" or kernels.threads <= available_threads():
        return []
    return [
        f"--threads {kernels.threads} on {_cpus()}: threads that wait for one another's CPU make every step slower. "
        f"--threads {available_threads()} is as many as help."
    ]


def _cpus() -> str:
    number = available_threads()
    return f"{number} CPU" if number == 1 else f"{number} CPUs"


def available_threads() -> int:
    """CPUs this process may use at once: its affinity, or less where the cgroup has a quota. At least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def cpu_quota() -> float | None:
    """CPUs worth of time that the tightest cgroup around this process grants; None without a limit."""
    try:
        memberships = PROCESS_CGROUP.read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = CGROUP_ROOT
        elif "cpu" in controllers.split(","):
            base = CGROUP_ROOT / "cpu"
        else:
            continue
        group = base / path.lstrip("/")
        for place in (group, *group.parents):
            quotas.append(_quota_of(place))
            if place == base:
                break
    found = [quota for quota in quotas if quota is not None]
    return min(found, default=None)


def _quota_of(group: Path) -> float | None:
    """CPUs granted by one cgroup directory, of version 2 (cpu.max) or 1 (cpu.cfs_*)."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text().strip()
            period = (group / "cpu.cfs_period_us").read_text().strip()
        if quota in ("max", "-1"):
            return None
        return int(quota) / int(period)
    except (OSError, ValueError):
        return None


def instruction_set(device: str) -> str:
    """One line on what the kernels can use: "AVX-512 BF16 VNNI", "AVX2", a GPU's name, ..."""
    if device != "cpu":
        import torch

        major, minor = torch.cuda.get_device_capability()
        return f"{torch.cuda.get_device_name()} (compute capability {major}.{minor})"
    return describe_flags(cpu_flags())


def describe_flags(flags: frozenset[str]) -> str:
    """The widest vector set first, then the extensions for low precision."""
    if "avx512f" in flags:
        base = "AVX-512"
    elif "avx2" in flags:
        base = "AVX2"
    elif "sve" in flags:
        base = "SVE"
    elif "asimd" in flags:
        base = "NEON"
    else:
        return platform.machine() or "unknown"
    extensions = (
        ("avx512_bf16", "BF16"),
        ("avx512_fp16", "FP16"),
        ("avx512_vnni", "VNNI"),
        ("avx_vnni", "VNNI"),
        ("amx_tile", "AMX"),
        ("bf16", "BF16"),
        ("asimddp", "DOTPROD"),
        ("i8mm", "I8MM"),
    )
    found = [name for flag, name in extensions if flag in flags]
    return " ".join(dict.fromkeys([base, *found]))
