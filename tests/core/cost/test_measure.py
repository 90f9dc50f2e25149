"""What is measured of this machine is what the time model counts."""

from __future__ import annotations

from torch import Tensor, nn

from shardwright.core.capture.capture import capture
from shardwright.core.cost.flops import work_of
from shardwright.core.cost.measure import BLOCKS, CPU, OPERATORS_PER_BLOCK, SmallTransformer


class Blocks(nn.Module):
    def __init__(self, small: SmallTransformer) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(small.blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


def test_a_block_has_as_many_operators_as_the_time_model_counts() -> None:
    small = SmallTransformer(CPU)
    works = [work_of(op) for op in capture(Blocks(small), (small.x,), {}).ops]
    forward = sum(bool(work.forward_bytes) for work in works)
    gradients = sum(work.num_gradients for work in works if work.backward_bytes)
    # The sum at the end is one more of each.
    assert forward + gradients == OPERATORS_PER_BLOCK * BLOCKS + 2


def test_a_small_transformer_trains() -> None:
    small = SmallTransformer(CPU)
    small.train()
    assert small.x.grad is not None and small.x.grad.abs().sum() > 0
