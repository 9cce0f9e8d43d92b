"""Keys or values of one layer in the paged cache: stored in the cache's type, read back as float32.

8-bit numbers carry a scale for each token and KV head; config/kv_cache_format.py has the rule.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.config.kv_cache_format import KV_CACHE_FORMATS
from headrace.kernels.ops import KVCacheLayout

SMALLEST_MAGNITUDE = 1e-30
"""Of a head's largest value, for its scale: zeros have one too."""

_FORMS = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@dataclass(frozen=True, slots=True)
class CachePart:
    """`numbers` [slots * KV heads, head_dim] hold `form` (8-bit ones as bytes), `scales` [slots * KV heads]."""

    numbers: Tensor
    form: torch.dtype
    scales: Tensor | None
    largest: float
    num_kv_heads: int

    def store(self, slots: Tensor, x: Tensor) -> None:
        """x [rows, KV heads * head_dim] at `slots` [rows]."""
        if self.scales is None:
            self.numbers.view(-1, x.shape[1])[slots] = x.to(self.form)
            return
        heads = x.reshape(len(slots) * self.num_kv_heads, -1).float()
        scales = heads.abs().amax(-1, keepdim=True).clamp_min(SMALLEST_MAGNITUDE) / self.largest
        codes = heads / scales
        if self.form == torch.int8:
            codes = codes.round()
        self.numbers.view(-1, x.shape[1])[slots] = codes.to(self.form).view(torch.uint8).view(x.shape)
        self.scales.view(-1, self.num_kv_heads)[slots] = scales.view(len(slots), -1)

    def read(self, rows: Tensor) -> Tensor:
        """[rows, head_dim] of float32, at rows of `numbers`."""
        numbers = self.numbers.index_select(0, rows).view(self.form).float()
        if self.scales is None:
            return numbers
        return numbers.mul_(self.scales.index_select(0, rows).unsqueeze(1))

    def blocks(self, num_blocks: int) -> list[Tensor]:
        """The part as bytes [blocks, bytes of a block]."""
        held = [self.numbers] if self.scales is None else [self.numbers, self.scales]
        return [tensor.view(num_blocks, -1).view(torch.uint8) for tensor in held]


def allocate_part(layout: KVCacheLayout, kv_cache_dtype: str, device: str) -> CachePart:
    """Mapped, untouched but for one more block of zeros, which absent positions are read from."""
    rows = (layout.num_blocks + 1) * layout.block_size * layout.num_kv_heads
    kv_format = KV_CACHE_FORMATS[kv_cache_dtype]
    form = _FORMS.get(kv_cache_dtype) or getattr(torch, kv_cache_dtype)
    scales = None
    if kv_format.largest is not None:
        scales = torch.empty(rows, device=device)
    held = torch.uint8 if scales is not None else form
    numbers = torch.empty(rows, layout.head_dim, dtype=held, device=device)
    for tensor in (numbers, scales):
        if tensor is not None:
            tensor[-layout.block_size * layout.num_kv_heads :] = 0
    return CachePart(numbers, form, scales, kv_format.largest or 0.0, layout.num_kv_heads)
