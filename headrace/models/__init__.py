"""One short file per family: its architecture and weight names. `FAMILIES` lists them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from headrace.config.errors import ConfigError
from headrace.config.model import ModelConfig
from headrace.kernels.ops import BatchHandle, Buffer, Kernels
from headrace.models import bert, gemma3, llama, mistral, mixtral, phi3, qwen2, qwen3, qwen3_moe
from headrace.weights.checkpoint import Checkpoint, Progress


class Model(Protocol):
    def hidden(self, kernels: Kernels, batch: BatchHandle) -> Buffer:
        """[rows, hidden] after the last norm."""
        ...

    def forward(self, kernels: Kernels, batch: BatchHandle) -> Buffer:
        """Logits [sampling rows, vocab]; of an encoder what its classification head gives, [sampling rows, labels]."""
        ...


FAMILIES: dict[str, Callable[[ModelConfig, Checkpoint, Kernels, int, Progress], Model]] = {
    "llama": llama.load,
    "mistral": mistral.load,
    "mixtral": mixtral.load,
    "qwen2": qwen2.load,
    "qwen3": qwen3.load,
    "qwen3_moe": qwen3_moe.load,
    "phi3": phi3.load,
    "gemma3": gemma3.load,
    "bert": bert.load,
    "roberta": bert.load,
}


def build_model(
    config: ModelConfig, checkpoint: Checkpoint, kernels: Kernels, max_positions: int, progress: Progress
) -> Model:
    """Read all weights into `kernels`. `max_positions` sizes the rotary tables; `progress(done, total)` is in
    bytes of the checkpoint."""
    load = FAMILIES.get(config.family)
    if load is None:
        raise ConfigError(f"the model family {config.family!r} is not known; known are {', '.join(FAMILIES)}.")
    if config.quantization not in (None, "gguf"):
        raise ConfigError(
            f"the checkpoint is quantised with {config.quantization!r}, which is not supported yet: "
            "use the plain checkpoint or a GGUF file of the same model."
        )
    return load(config, checkpoint, kernels, max_positions, progress)
