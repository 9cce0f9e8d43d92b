"""Every operation of `kernels.ops` in plain torch, and the KV cache they share.

Sums and exponentials are taken in float32 whatever the compute dtype. Nothing here may use an operation whose
result for an element depends on where in the tensor it lies: torch's own silu and sigmoid do (the last
elements of a thread's share take a scalar path), its exp does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.config import kv_cache_format
from headrace.kernels.int8_weights import quantises, to_int8
from headrace.kernels.ops import Batch, Float32, Int32, KVCacheLayout, SampledRows, SamplingRows
from headrace.kernels.reference import sampling
from headrace.kernels.reference.attention import AttentionPlan, attend, plan_attention
from headrace.kernels.reference.decode import Eager
from headrace.kernels.reference.int8 import Int8Matrix, pack_int8
from headrace.kernels.reference.kv_cache import CachePart, allocate_part
from headrace.kernels.reference.linear import Matrix, TrustedHeights, multiply, pack
from headrace.kernels.weight import Weight


@dataclass(frozen=True, slots=True)
class EmbeddingTable:
    """Host rows in the checkpoint's form, turned to numbers as they are looked up; on a GPU, `dense`."""

    weight: Weight | None
    dense: Tensor | None


@dataclass(frozen=True, slots=True)
class RopeTable:
    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class LoadedBatch:
    """One step's batch on the device. `rotations` keeps each rope table's rows for the step's positions,
    `plans` what `plan` gave for each group of the model's layers and its window."""

    token_ids: Int32
    num_rows: int
    query_start: Int32
    positions: Tensor
    slot_mapping: Tensor
    sample_rows: Tensor
    plan: Callable[[int, int | None], AttentionPlan]
    plans: dict[tuple[int, int | None], AttentionPlan] = field(default_factory=dict)
    rotations: dict[int, RopeTable] = field(default_factory=dict)


class ReferenceKernels:
    """`device` is cpu or cuda, `dtype` float32, bfloat16 or float16; `threads` None leaves torch's number.

    With `int8_weights` dense weights but for embeddings become int8 as they are prepared (kernels/int8_weights.py).
    A CPU that cannot multiply `dtype` natively multiplies in float32: values are rounded to `dtype` wherever a
    buffer is written, as elsewhere.
    """

    name = "reference"

    def __init__(
        self,
        device: str = "cpu",
        dtype: str = "float32",
        threads: int | None = None,
        *,
        kv_cache_dtype: str = "auto",
        int8_weights: bool = False,
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.kv_cache_dtype = kv_cache_format.kv_cache_dtype(kv_cache_dtype, dtype)
        self.int8_weights = int8_weights
        self.weight_bytes = 0
        if threads is not None:
            torch.set_num_threads(threads)
        self.threads = torch.get_num_threads()
        self._dtype: torch.dtype = getattr(torch, dtype)
        native = device != "cpu" or multiplies_natively(dtype)
        self._multiply_dtype = self._dtype if native else torch.float32
        self._trusted_heights: TrustedHeights = {}
        self._layout: KVCacheLayout | None = None
        self._keys: list[CachePart] = []
        self._values: list[CachePart] = []

    # set-up

    def prepare_weight(self, weight: Weight, exact: bool = False) -> Matrix | Int8Matrix:
        matrix: Matrix | Int8Matrix
        if self.int8_weights and not exact and quantises(weight):
            matrix = pack_int8(to_int8(weight), self.device)
        else:
            matrix = pack(weight, self.device, self._dtype, self._multiply_dtype, self._trusted_heights)
        self.weight_bytes += matrix.num_bytes
        return matrix

    def prepare_embedding(self, weight: Weight) -> EmbeddingTable:
        if self.device != "cpu":
            dense = torch.from_numpy(weight.to_float32()).to(self.device, self._dtype)
            self.weight_bytes += dense.numel() * dense.element_size()
            return EmbeddingTable(None, dense)
        if not weight.values.flags.owndata:
            # A view of a mapped file would turn a replaced checkpoint into a crash while serving.
            weight = weight.rows(np.arange(weight.shape[0]))
        self.weight_bytes += weight.num_bytes
        return EmbeddingTable(weight, None)

    def prepare_tied(self, table: EmbeddingTable) -> Matrix | Int8Matrix:
        if table.weight is not None:
            return self.prepare_weight(table.weight)
        assert table.dense is not None
        dense = table.dense.float().cpu().numpy()
        return self.prepare_weight(Weight((dense.shape[0], dense.shape[1]), dense))

    def prepare_experts(self, weights: Iterable[Weight]) -> tuple[Matrix | Int8Matrix, ...]:
        return tuple(self.prepare_weight(weight) for weight in weights)

    def prepare_vector(self, values: NDArray[np.generic], exact: bool = False) -> Tensor:
        """Kept in float32, unless `exact` with the values `dtype` can hold."""
        vector = torch.from_numpy(values.astype(np.float32)).to(self.device)
        if not exact:
            vector = vector.to(self._dtype).float()
        self.weight_bytes += vector.numel() * vector.element_size()
        return vector

    def prepare_rope(self, cos: Float32, sin: Float32) -> RopeTable:
        return RopeTable(torch.from_numpy(cos).to(self.device), torch.from_numpy(sin).to(self.device))

    def allocate_kv_cache(self, layout: KVCacheLayout) -> None:
        self.release_kv_cache()
        for parts in (self._keys, self._values):
            parts += [allocate_part(layout, self.kv_cache_dtype, self.device) for _ in range(layout.num_layers)]
        self._layout = layout

    def release_kv_cache(self) -> None:
        self._keys.clear()
        self._values.clear()
        self._layout = None
        if self.device != "cpu":
            torch.cuda.empty_cache()  # torch keeps freed memory to itself

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        if not pairs:
            return
        sources = torch.tensor([s for s, _ in pairs], device=self.device)
        targets = torch.tensor([t for _, t in pairs], device=self.device)
        for blocks in self._blocks():
            blocks[targets] = blocks[sources]

    def read_blocks(self, block_ids: Sequence[int]) -> NDArray[np.uint8]:
        """Keys of every layer, then values of every layer."""
        chosen = torch.tensor(block_ids, dtype=torch.int64, device=self.device)
        return np.concatenate([blocks[chosen].cpu().numpy() for blocks in self._blocks()], axis=1)

    def write_blocks(self, block_ids: Sequence[int], content: NDArray[np.uint8]) -> None:
        targets = torch.tensor(block_ids, dtype=torch.int64, device=self.device)
        start = 0
        for blocks in self._blocks():
            stop = start + blocks.shape[1]
            blocks[targets] = torch.from_numpy(content[:, start:stop].copy()).to(self.device)
            start = stop

    def _blocks(self) -> list[Tensor]:
        """Every part of the cache as bytes [blocks, bytes of this part of a block]."""
        num_blocks = self._cache_layout().num_blocks + 1
        return [blocks for part in (*self._keys, *self._values) for blocks in part.blocks(num_blocks)]

    # a step

    def capture(self, forward: Callable[[LoadedBatch], Tensor]) -> Eager:
        return Eager(lambda batch: forward(self.load_batch(batch)), self.sample)

    def load_batch(self, batch: Batch) -> LoadedBatch:
        def plan(group: int, window: int | None) -> AttentionPlan:
            layout = self._cache_layout()
            return plan_attention(
                batch,
                num_kv_heads=layout.num_kv_heads,
                block_size=layout.block_size,
                empty_slot=layout.num_blocks * layout.block_size,
                device=self.device,
                group=group,
                window=window,
            )

        def index(values: Int32) -> Tensor:
            return torch.from_numpy(values.astype(np.int64)).to(self.device)

        return LoadedBatch(
            token_ids=batch.token_ids,
            num_rows=len(batch.token_ids),
            query_start=batch.query_start,
            positions=index(batch.positions),
            slot_mapping=index(batch.slot_mapping),
            sample_rows=index(batch.sample_rows),
            plan=plan,
        )

    def embedding(self, table: EmbeddingTable, batch: LoadedBatch) -> Tensor:
        return self._table_rows(table, batch.token_ids)

    def position_embedding(self, table: EmbeddingTable, batch: LoadedBatch) -> Tensor:
        return self._table_rows(table, batch.positions.cpu().numpy())

    def _table_rows(self, table: EmbeddingTable, index: NDArray[np.integer]) -> Tensor:
        if table.dense is not None:
            return table.dense[torch.from_numpy(index.astype(np.int64)).to(self.device)]
        assert table.weight is not None
        return torch.from_numpy(table.weight.rows(index).to_float32()).to(self._dtype)

    def linear(self, x: Tensor, weight: Matrix | Int8Matrix, bias: Tensor | None) -> Tensor:
        return multiply(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.reshape(-1, weight.shape[0]).float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
        return (wide * scale).mul_(weight).to(x.dtype).view(x.shape)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        wide = x.float()
        distance = wide - wide.mean(-1, keepdim=True)
        scale = torch.rsqrt(distance.square().mean(-1, keepdim=True).add_(eps))
        return (distance * scale).mul_(weight).add_(bias).to(x.dtype)

    def split(self, x: Tensor, widths: tuple[int, ...]) -> tuple[Tensor, ...]:
        return x.split(widths, dim=-1)

    def rope(self, x: Tensor, table: RopeTable, head_dim: int, batch: LoadedBatch) -> Tensor:
        rotation = batch.rotations.get(id(table))
        if rotation is None:
            rotation = RopeTable(table.cos[batch.positions].unsqueeze(1), table.sin[batch.positions].unsqueeze(1))
            batch.rotations[id(table)] = rotation
        half = table.cos.shape[1]
        heads = x.reshape(x.shape[0], -1, head_dim)
        first, second = heads[..., :half].float(), heads[..., half : 2 * half].float()
        out = torch.empty(heads.shape, dtype=x.dtype, device=x.device)
        out[..., :half] = first * rotation.cos - second * rotation.sin
        out[..., half : 2 * half] = second * rotation.cos + first * rotation.sin
        out[..., 2 * half :] = heads[..., 2 * half :]
        return out.view(x.shape)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        group: int,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        scale: float,
        batch: LoadedBatch,
        window: int | None = None,
    ) -> Tensor:
        keys, values = self._keys[layer], self._values[layer]
        keys.store(batch.slot_mapping[group], k)
        values.store(batch.slot_mapping[group], v)
        plan = batch.plans.get((group, window))
        if plan is None:
            plan = batch.plans[group, window] = batch.plan(group, window)
        return attend(q, keys, values, plan, num_kv_heads=num_kv_heads, scale=scale)

    def encoder_attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, num_heads: int, scale: float, batch: LoadedBatch
    ) -> Tensor:
        """Sequence by sequence, so that every product has the shape of the sequence alone."""
        out = torch.empty_like(q)
        for first, stop in pairwise(batch.query_start.tolist()):
            own = (part[first:stop].float().view(stop - first, num_heads, -1).transpose(0, 1) for part in (q, k, v))
            queries, keys, values = (part.contiguous() for part in own)
            scores = torch.bmm(queries * scale, keys.transpose(1, 2))
            weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
            attended = torch.bmm(weights, values).div_(weights.sum(-1, keepdim=True))
            out[first:stop] = attended.transpose(0, 1).reshape(stop - first, -1).to(q.dtype)
        return out

    def gelu(self, x: Tensor) -> Tensor:
        # By Abramowitz and Stegun 7.1.26, because torch's own erf is one of those that depend on the place.
        wide = x.float()
        size = wide.abs()
        z = size * math.sqrt(0.5)
        t = 1 / (z * 0.3275911).add_(1)
        series = torch.full_like(t, 1.061405429)
        for factor in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
            series.mul_(t).add_(factor)
        complement = series.mul_(t).mul_(torch.exp(-z * z))
        return (wide.clamp(min=0) - (size * 0.5).mul_(complement)).to(x.dtype)

    def tanh(self, x: Tensor) -> Tensor:
        return (1 - 2 / torch.exp(x.float() * 2).add_(1)).to(x.dtype)

    def silu_mul(self, x: Tensor) -> Tensor:
        gate, up = x.float().chunk(2, dim=-1)
        return (gate / torch.exp(-gate).add_(1)).mul_(up).to(x.dtype)

    def gelu_mul(self, x: Tensor) -> Tensor:
        gate, up = x.float().chunk(2, dim=-1)
        # tanh(z) = 1 - 2 / (exp(2z) + 1), because torch's own tanh is one of those that depend on the place.
        inner = (gate + gate * gate * gate * 0.044715).mul_(2 * math.sqrt(2 / math.pi))
        tanh = 1 - 2 / torch.exp(inner).add_(1)
        return (gate * 0.5).mul_(tanh.add_(1)).mul_(up).to(x.dtype)

    def experts(
        self,
        x: Tensor,
        router: Tensor,
        gate_up: Sequence[Matrix | Int8Matrix],
        down: Sequence[Matrix | Int8Matrix],
        *,
        top_k: int,
        normalize: bool,
    ) -> Tensor:
        chosen, weights = route(router, top_k, normalize)
        parts = torch.empty(*chosen.shape, x.shape[1], dtype=torch.float32, device=x.device)
        for expert in chosen.unique().tolist():
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            inner = self.silu_mul(multiply(x[rows], gate_up[expert], None))
            parts[rows, places] = multiply(inner, down[expert], None).float() * weights[rows, places, None]
        total = parts[:, 0]
        for place in range(1, top_k):
            total = total + parts[:, place]
        return total.to(x.dtype)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x * torch.tensor(factor, dtype=x.dtype)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def sample_rows(self, x: Tensor, batch: LoadedBatch) -> Tensor:
        return x[batch.sample_rows]

    def sample(self, logits: Tensor, rows: SamplingRows) -> SampledRows:
        return sampling.sample(logits.float(), rows)

    def host_rows(self, rows: Tensor) -> Float32:
        return rows.float().cpu().numpy().copy()

    def _cache_layout(self) -> KVCacheLayout:
        if self._layout is None:
            raise RuntimeError("no KV cache is allocated: call allocate_kv_cache before the first step")
        return self._layout


def route(router: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """(experts, weights), both [rows, top_k], the heaviest first; of equal ones the first in the list."""
    scores = router.float()
    weights = (scores - scores.amax(-1, keepdim=True)).exp_()
    weights.div_(weights.sum(-1, keepdim=True))
    weights, order = weights.sort(dim=-1, descending=True, stable=True)
    weights = weights[:, :top_k].contiguous()
    if normalize:
        weights.div_(weights.sum(-1, keepdim=True))
    return order[:, :top_k], weights.to(router.dtype).float()


def multiplies_natively(dtype: str) -> bool:
    """Whether this CPU has instructions for products of `dtype`; without them they are slow in torch."""
    if dtype == "bfloat16":
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and torch.backends.mkldnn.is_available()
    if dtype == "float16":
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported()) and torch.backends.mkldnn.is_available()
    return True
