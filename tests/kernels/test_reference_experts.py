"""A mixture of experts against its formula, and the same bits for a row whatever the others choose."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from headrace.kernels.ops import KVCacheLayout  # noqa: E402
from headrace.kernels.reference import ReferenceKernels  # noqa: E402
from headrace.kernels.weight import Weight  # noqa: E402

EXPERTS, HIDDEN, FFN = 5, 24, 20


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


class Mixture:
    def __init__(self, dtype: str = "float32") -> None:
        self.kernels = ReferenceKernels("cpu", dtype)
        self.kernels.allocate_kv_cache(KVCacheLayout(1, 1, 1, 1, 8))
        self.gate_up = [random(2 * FFN, HIDDEN, seed=e) / 5 for e in range(EXPERTS)]
        self.down = [random(HIDDEN, FFN, seed=10 + e) / 5 for e in range(EXPERTS)]
        self.handles = [
            self.kernels.prepare_experts(Weight((w.shape[0], w.shape[1]), w) for w in weights)
            for weights in (self.gate_up, self.down)
        ]

    def __call__(self, x: torch.Tensor, router: torch.Tensor, top_k: int, normalize: bool) -> torch.Tensor:
        return self.kernels.experts(x, router, *self.handles, top_k=top_k, normalize=normalize)

    def exact(self, x: np.ndarray, router: np.ndarray, top_k: int, normalize: bool) -> np.ndarray:
        out = np.zeros_like(x, np.float64)
        for row, scores in enumerate(router.astype(np.float64)):
            weights = np.exp(scores) / np.exp(scores).sum()
            best = np.argsort(-weights, kind="stable")[:top_k]
            share = weights[best] / (weights[best].sum() if normalize else 1)
            for expert, weight in zip(best, share, strict=True):
                gate, up = np.split(self.gate_up[expert].astype(np.float64) @ x[row], 2)
                out[row] += weight * (self.down[expert] @ (gate / (1 + np.exp(-gate)) * up))
        return out


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("top_k", [1, 2, EXPERTS])
def test_a_row_goes_through_its_best_experts(top_k: int, normalize: bool) -> None:
    mixture, x, router = Mixture(), random(40, HIDDEN, seed=3), random(40, EXPERTS, seed=4)
    out = mixture(torch.from_numpy(x), torch.from_numpy(router), top_k, normalize)
    np.testing.assert_allclose(out.numpy(), mixture.exact(x, router, top_k, normalize), atol=1e-5)


def test_of_equal_scores_the_first_expert_counts() -> None:
    mixture, x, router = Mixture(), random(3, HIDDEN), np.zeros((3, EXPERTS), np.float32)
    out = mixture(torch.from_numpy(x), torch.from_numpy(router), 2, True)
    np.testing.assert_allclose(out.numpy(), mixture.exact(x, router, 2, True), atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_whatever_the_others_choose(dtype: str) -> None:
    mixture = Mixture(dtype)
    x = torch.from_numpy(random(150, HIDDEN)).to(getattr(torch, dtype))
    router = torch.from_numpy(random(150, EXPERTS, seed=1)).to(x.dtype)
    router[50:90, 2] += 9
    whole = mixture(x, router, 2, True)
    for start, stop in ((0, 1), (1, 2), (49, 53), (50, 90), (60, 150), (149, 150)):
        assert torch.equal(mixture(x[start:stop], router[start:stop], 2, True), whole[start:stop])


def test_no_rows_give_no_rows() -> None:
    assert Mixture()(torch.empty(0, HIDDEN), torch.empty(0, EXPERTS), 2, True).shape == (0, HIDDEN)


def test_the_gate_of_gelu_is_its_approximation_with_tanh() -> None:
    x = torch.from_numpy(random(9, 34)) * 3
    expected = torch.nn.functional.gelu(x[:, :17].double(), approximate="tanh") * x[:, 17:]
    torch.testing.assert_close(ReferenceKernels().gelu_mul(x).double(), expected, atol=2e-6, rtol=1e-5)
    extreme = torch.tensor([[1e4, -1e4, 0.0, 2.0, 2.0, 2.0]])
    assert ReferenceKernels().gelu_mul(extreme).tolist() == [[2e4, 0.0, 0.0]]


def test_rows_of_head_norms_and_gelu_have_the_same_bits_wherever_they_stand() -> None:
    kernels, x = ReferenceKernels(), torch.from_numpy(random(301, 7 * 86))
    weight = kernels.prepare_vector(random(86, seed=1))
    heads, gated = kernels.rms_norm(x, weight, 1e-5), kernels.gelu_mul(x)
    each = x.view(301, 7, 86)
    expected = each / (each.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(heads, expected.view(301, -1))
    for part in (slice(0, 1), slice(3, 4), slice(17, 90), slice(300, 301)):
        assert torch.equal(kernels.rms_norm(x[part], weight, 1e-5), heads[part])
        assert torch.equal(kernels.rms_norm(x[part].split((86, 516), 1)[1], weight, 1e-5), heads[part][:, 86:])
        assert torch.equal(kernels.gelu_mul(x[part]), gated[part])


def test_a_scale_is_rounded_to_the_compute_dtype() -> None:
    x = torch.tensor([[1.0, 3.0]], dtype=torch.bfloat16)
    factor = torch.tensor(24.0**0.5, dtype=torch.bfloat16)
    assert torch.equal(ReferenceKernels("cpu", "bfloat16").scale(x, 24.0**0.5), x * factor)


def test_an_exact_vector_keeps_what_low_precision_would_lose() -> None:
    kernels, values = ReferenceKernels("cpu", "bfloat16"), np.array([1.001, 1.002], np.float32)
    assert kernels.prepare_vector(values, exact=True).tolist() == values.tolist()
    assert kernels.prepare_vector(values).tolist() == [1.0, 1.0]
