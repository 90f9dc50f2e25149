"""Kernels of accelerators and CPUs on the meta device: the tensors that they save."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
from shardwright.core.cost.fused_kernels import FusedKernels


def saved_bytes(function: Callable[[], Tensor], on_accelerator: bool) -> int:
    """The bytes that the backward pass of `function` needs, which it also runs."""
    sizes = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage._cdata] = storage.nbytes()
        return tensor

    with FusedKernels(on_accelerator):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = function()
        out.sum().backward()
    return sum(sizes.values())


def parameter(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_of_accelerators_saves_its_input_and_a_number_per_row(dtype: torch.dtype) -> None:
    x, weight = parameter(4, 128, 64, dtype=dtype), parameter(64, dtype=dtype)
    saved = saved_bytes(lambda: F.rms_norm(x, (64,), weight), on_accelerator=True)
    assert saved == x.nbytes + weight.nbytes + 4 * 128 * torch.float32.itemsize
    assert x.grad is not None and x.grad.shape == x.shape
    assert weight.grad is not None and weight.grad.shape == weight.shape
    assert saved_bytes(lambda: F.rms_norm(x, (64,), weight), on_accelerator=False) > 2 * x.nbytes


def test_a_norm_with_a_weight_of_another_dtype_is_decomposed_everywhere() -> None:
    x, weight = parameter(8, 64), parameter(64, dtype=torch.float32)
    decomposed = saved_bytes(lambda: F.rms_norm(x, (64,), weight), on_accelerator=False)
    assert saved_bytes(lambda: F.rms_norm(x, (64,), weight), on_accelerator=True) == decomposed


def test_dropout_of_accelerators_saves_a_mask_of_a_byte_per_element() -> None:
    x = parameter(128, 64, dtype=torch.float32)
    assert saved_bytes(lambda: F.dropout(x, 0.1), on_accelerator=True) == x.numel()
    assert saved_bytes(lambda: F.dropout(x, 0.1), on_accelerator=False) == x.nbytes
    assert saved_bytes(lambda: F.dropout(x, 0.0) * 2, on_accelerator=True) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.1}, {"is_causal": True}], ids=str)
def test_attention_of_accelerators_saves_no_scores(
    options: dict[str, float], dtype: torch.dtype
) -> None:
    q, k, v = (parameter(2, 4, 256, 16, dtype=dtype) for _ in range(3))
    saved = saved_bytes(lambda: F.scaled_dot_product_attention(q, k, v, **options), True)
    statistics = 2 * 4 * 256 * torch.float32.itemsize
    # The random state of dropout takes some bytes.
    assert saved == pytest.approx(4 * q.nbytes + statistics, abs=64)


def test_only_half_precision_has_fused_attention_over_groups_of_heads() -> None:
    for dtype, fused in ((torch.bfloat16, True), (torch.float32, False)):
        q, k = parameter(2, 8, 256, 16, dtype=dtype), parameter(2, 2, 256, 16, dtype=dtype)
        scores = 2 * 8 * 256 * 256 * dtype.itemsize
        saved = saved_bytes(lambda: F.scaled_dot_product_attention(q, k, k, enable_gqa=True), True)  # noqa: B023
        assert (saved < scores) is fused
        assert k.grad is not None and k.grad.shape == k.shape


def test_a_mask_that_is_trained_gets_a_gradient() -> None:
    q, mask = parameter(2, 4, 32, 16), parameter(32, 32)
    saved_bytes(lambda: F.scaled_dot_product_attention(q, q, q, mask), on_accelerator=True)
    assert mask.grad is not None and mask.grad.shape == mask.shape


class Attention(nn.Module):
    """Attention with dropout, which CPUs have no fused kernel for."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1).sum()


def test_the_cluster_decides_whose_kernels_are_predicted() -> None:
    x, scores = torch.randn(4, 512, 32), 4 * 2 * 512 * 512 * 4
    on_gpus = sw.plan(Attention(), (x,), devices=1, cluster="h100")
    assert on_gpus.memory.peak < scores < sw.plan(Attention(), (x,), devices=1).memory.peak
    rehearsed = sw.rehearse(Attention(), (x,), None, on_gpus, ranks=[0], device="meta")
    assert rehearsed.ranks[0].planned_peak < scores
