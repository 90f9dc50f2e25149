"""Products of rows with the matrix of their segment, and their gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from shardwright.core.graph.segment_matmul import segment_matmul


def by_mask(rows: Tensor, matrices: Tensor, ends: list[int]) -> Tensor:
    segment = torch.tensor([sum(row >= end for end in ends) for row in range(len(rows))])
    one_hot = torch.nn.functional.one_hot(segment, len(ends)).to(rows.dtype)
    return torch.einsum("rg,rk,gkn->rn", one_hot, rows, matrices)


@pytest.mark.parametrize("ends", [[2, 2, 7], [0, 7, 7], [3, 5, 7]])
def test_each_row_meets_the_matrix_of_its_segment(ends: list[int]) -> None:
    rows = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    matrices = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    out = segment_matmul(rows, matrices.mT, torch.tensor(ends, dtype=torch.int32))
    assert_close(out, by_mask(rows, matrices.mT, ends))
    weight = torch.randn_like(out)
    gradients = torch.autograd.grad((out * weight).sum(), (rows, matrices))
    expected = (by_mask(rows, matrices.mT, ends) * weight).sum()
    for gradient, wanted in zip(
        gradients, torch.autograd.grad(expected, (rows, matrices)), strict=True
    ):
        assert_close(gradient, wanted)


def test_rows_behind_the_last_segment_give_nothing() -> None:
    rows = torch.randn(7, 5, requires_grad=True)
    matrices = torch.randn(2, 5, 4, requires_grad=True)
    ends = torch.tensor([2, 4], dtype=torch.int32)
    inside = segment_matmul(rows[:4], matrices, ends)
    out = segment_matmul(rows, matrices, ends, tail=True)
    assert_close(out, torch.cat([inside, torch.zeros(3, 4)]))
    wanted = torch.autograd.grad(inside.pow(2).sum(), (rows, matrices))
    assert_close(
        torch.autograd.grad((out + 1).pow(2).sum() - 2 * out.sum(), (rows, matrices)), wanted
    )


def test_there_may_be_no_rows_at_all() -> None:
    matrices = torch.randn(3, 5, 4, requires_grad=True)
    out = segment_matmul(torch.randn(0, 5), matrices, torch.zeros(3, dtype=torch.int32))
    assert out.shape == (0, 4)
    out.sum().backward()
    assert matrices.grad is not None and not matrices.grad.any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_grouped_product_of_a_gpu_computes_the_same() -> None:
    rows = torch.randn(64, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    matrices = torch.randn(3, 32, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ends = [24, 24, 64]
    out = segment_matmul(rows, matrices, torch.tensor(ends, dtype=torch.int32, device="cuda"))
    out.float().pow(2).sum().backward()
    cpu = [t.detach().cpu().double().requires_grad_() for t in (rows, matrices)]
    expected = by_mask(cpu[0], cpu[1], ends)
    expected.pow(2).sum().backward()
    options = {"check_dtype": False, "rtol": 0.05, "atol": 0.5}
    assert_close(out.cpu(), expected, **options)
    for tensor, wanted in zip((rows, matrices), cpu, strict=True):
        assert tensor.grad is not None
        assert_close(tensor.grad.cpu(), wanted.grad, **options)
