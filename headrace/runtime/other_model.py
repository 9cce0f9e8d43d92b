"""A model of a family that Headrace has no file for, in transformers' own code, over Headrace's paged KV cache.

transformers lets attention be replaced by name. Ours stores keys and values at the batch's slots and attends over
blocks, so such a model is batched, chunked, cached and preempted like any other. What that cannot express (a bias in
the mask, a state besides the KV cache) would give wrong text, so at the start a few tokens are computed both ways and
compared.

It is slower: every operation is a call of torch, and a row's last bits may depend on the batch."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from headrace.config.errors import ConfigError
from headrace.config.model_files import ModelFiles
from headrace.kernels.ops import Batch, Kernels, KVCacheLayout
from headrace.kernels.reference import ReferenceKernels
from headrace.kernels.reference.kernels import LoadedBatch
from headrace.models import Model

if TYPE_CHECKING:
    import transformers

logger = logging.getLogger("headrace.core")

NAME = "headrace_paged"
"""Of our attention among transformers' own."""
PROBE = (5, 3)
"""Tokens of the two sequences that are computed both ways."""
TOLERANCE = 2e-2
"""Of the largest logit: what rounding may make of two orders of the same sums."""
_WITHOUT_EFFECT = frozenset(
    {"dropout", "is_causal", "use_cache", "output_attentions", "position_ids", "cache_position"}
)


@dataclass
class _Step:
    """What the attention layers need and transformers has no argument for; the model's modules hold it."""

    kernels: ReferenceKernels
    batch: LoadedBatch | None = None


class OtherModel:
    """`hidden` and `forward` as of every model. Loads in the constructor; raises ConfigError."""

    def __init__(self, files: ModelFiles, kernels: ReferenceKernels, progress: Callable[[int, int], None]) -> None:
        model_class, register = _transformers()
        register(NAME, _attention)
        config = files.config
        try:
            model: Any = model_class.from_pretrained(
                files.path,
                dtype=getattr(torch, kernels.dtype),
                attn_implementation="eager",
                trust_remote_code=False,
                use_safetensors=True,
                local_files_only=True,
            )
        except Exception as error:
            raise ConfigError(f"{files.path}: transformers cannot load this model: {_first_line(error)}") from error
        self._model = model.to(kernels.device).eval()
        self._step = _Step(kernels)
        for module in self._model.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                module.headrace_step = self._step
        self._keeps_rows = "logits_to_keep" in inspect.signature(self._model.forward).parameters
        size = sum(weight.numel() * weight.element_size() for weight in self._model.parameters())
        kernels.weight_bytes += size
        progress(size, size)
        self._compare(KVCacheLayout(config.num_layers, 4, 16, config.num_kv_heads, config.head_dim), config.vocab_size)
        logger.warning(
            "%s is not one of Headrace's own families: it runs in transformers' code, slower than those.",
            type(self._model).__name__,
        )

    def hidden(self, kernels: ReferenceKernels, batch: LoadedBatch) -> Tensor:
        """[rows, hidden] after the last norm."""
        return cast(Tensor, self._run(batch, output_hidden_states=True).hidden_states[-1][0])

    def forward(self, kernels: ReferenceKernels, batch: LoadedBatch) -> Tensor:
        """Logits [sampling rows, vocab]."""
        if self._keeps_rows:
            return cast(Tensor, self._run(batch, logits_to_keep=batch.sample_rows).logits[0])
        return cast(Tensor, self._run(batch).logits[0][batch.sample_rows])

    @torch.inference_mode()
    def _run(self, batch: LoadedBatch, **more: object) -> Any:
        """All sequences as one of a single row: what tells them apart is the attention and the positions."""
        device = batch.positions.device
        self._step.batch = batch
        try:
            return self._model(
                input_ids=torch.from_numpy(batch.token_ids.astype(np.int64)).to(device)[None],
                position_ids=batch.positions.long()[None],
                use_cache=False,
                **more,
            )
        finally:
            self._step.batch = None

    def _compare(self, layout: KVCacheLayout, vocab_size: int) -> None:
        """Two short sequences in one batch against each alone in transformers' own way. Raises ConfigError."""
        texts = [np.arange(start, start + count) * 37 % vocab_size for start, count in ((1, PROBE[0]), (9, PROBE[1]))]
        kernels, name = self._step.kernels, type(self._model).__name__
        with torch.inference_mode():
            alone = [
                self._model(torch.from_numpy(t)[None].to(kernels.device), use_cache=False).logits[0] for t in texts
            ]
        expected = torch.cat(alone).float()
        try:
            self._model.set_attn_implementation(NAME)
            kernels.allocate_kv_cache(layout)
            got = self.forward(kernels, kernels.load_batch(_probe_batch(texts, layout.block_size))).float()
        except Exception as error:
            raise ConfigError(
                f"{name} is not one of Headrace's own families, and transformers' code for it cannot use a paged KV "
                f"cache: {_first_line(error)}"
            ) from error
        finally:
            kernels.release_kv_cache()
        if got.shape != (sum(PROBE), vocab_size) or not torch.allclose(got, expected, rtol=0, atol=_allowed(expected)):
            raise ConfigError(
                f"{name} is not one of Headrace's own families, and transformers' code for it gives other results with "
                "a paged KV cache than without: it attends in a way of its own. It cannot be served."
            )


def _allowed(expected: Tensor) -> float:
    return TOLERANCE * max(1e-3, float(expected.abs().max()))


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **more: object,
) -> tuple[Tensor, None]:
    """Queries, keys and values [1, heads, rows, head_dim] to [1, rows, heads, head_dim], over the step's blocks."""
    meant = [name for name, value_of in more.items() if value_of is not None and name not in _WITHOUT_EFFECT]
    if meant:
        raise ValueError(f"its attention has `{meant[0]}`, which the paged one does not know")
    step = cast(_Step, module.headrace_step)
    assert step.batch is not None
    _, heads, rows, head_dim = query.shape

    def flat(x: Tensor) -> Tensor:
        return x[0].transpose(0, 1).reshape(rows, -1).contiguous()

    out = step.kernels.attention(
        flat(query),
        flat(key),
        flat(value),
        group=0,
        layer=cast(int, module.layer_idx),
        num_heads=heads,
        num_kv_heads=key.shape[1],
        scale=head_dim**-0.5 if scaling is None else scaling,
        batch=step.batch,
        window=sliding_window,
    )
    return out.view(1, rows, heads, head_dim), None


def _probe_batch(texts: list[np.ndarray[Any, Any]], block_size: int) -> Batch:
    """Sequence i has block i."""
    counts = [len(text) for text in texts]
    positions = np.concatenate([np.arange(count) for count in counts])
    blocks = np.repeat(np.arange(len(texts)), counts)
    return Batch(
        token_ids=np.concatenate(texts).astype(np.int32),
        positions=positions.astype(np.int32),
        slot_mapping=(blocks * block_size + positions).astype(np.int32)[None],
        query_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        seq_lens=np.array(counts, np.int32),
        block_tables=np.arange(len(texts), dtype=np.int32)[None, :, None],
        sample_rows=np.arange(len(positions), dtype=np.int32),
    )


def _transformers() -> tuple[type[transformers.AutoModelForCausalLM], Callable[[str, Any], None]]:
    """The class that loads a model, and what registers an attention under a name. Raises ConfigError."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError(
            f"models of families other than Headrace's own need transformers, which cannot be imported ({error}): "
            "pip install transformers."
        ) from error

    def register(name: str, attention: Any) -> None:
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, lambda *arguments, **more: None)

    return AutoModelForCausalLM, register


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__


def load_other_model(files: ModelFiles, kernels: Kernels, progress: Callable[[int, int], None]) -> Model:
    """Raises ConfigError for kernels that are not torch's, and as `OtherModel` does."""
    if not isinstance(kernels, ReferenceKernels):
        raise ConfigError("transformers' code runs on torch: --kernels reference.")
    return cast(Model, OtherModel(files, kernels, progress))
