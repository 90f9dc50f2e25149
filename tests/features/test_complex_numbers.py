"""Complex numbers are cut like others, and what is written into parts of them keeps gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from random_plans import check_random_plan, random_plan


class Spectral(nn.Module):
    """A Fourier operator: the lowest frequencies are mixed, and written into zeros."""

    def __init__(self, write: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, 3, dtype=torch.complex64))
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x)
        result = torch.zeros_like(spectrum)
        self.write(result, torch.einsum("bix,iox->box", spectrum[..., :3], self.weight))
        return torch.fft.irfft(result, n=x.shape[-1]).square().mean()


def a_slice(result: Tensor, low: Tensor) -> None:
    result[:, :, :3] = low


def conjugates_at_the_end(result: Tensor, low: Tensor) -> None:
    result[..., -3:] = low.conj()


def a_column(result: Tensor, low: Tensor) -> None:
    result[:, 1] = low.sum(-1).sum(-1)[:, None]


def numbers_and_reals(result: Tensor, low: Tensor) -> None:
    result[:, :, 0] = 1.5
    result[:, :, 1:4] = low.abs()
    result[:, ::2, :3] += low[:, :2]


def imaginary_multiples(result: Tensor, low: Tensor) -> None:
    result[:, :, :3] = 1j * low.abs()


@pytest.mark.parametrize(
    "write",
    [a_slice, conjugates_at_the_end, a_column, numbers_and_reals, imaginary_multiples],
)
def test_what_is_written_into_a_spectrum_has_its_gradients(
    write: Callable[[Tensor, Tensor], None],
) -> None:
    torch.manual_seed(0)
    net, args = Spectral(write), (torch.randn(8, 4, 10),)
    graph = sw.capture(net, args)
    for seed, devices in enumerate((2, 4)):
        check_random_plan(net, args, {}, graph, random_plan(graph, devices, seed))
