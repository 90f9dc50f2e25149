"""What optimizers keep: asked of PyTorch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwright.core.cost.optimizer_state import TrainedShard, optimizer_bytes, optimizer_name
from shardwright.errors import PlanError

SHAPES = [((10, 10), torch.float32), ((10, 10), torch.float32), ((50,), torch.float32)]


@pytest.mark.parametrize(
    ("kind", "copies", "counters"),
    [("sgd", 0, 0), ("momentum", 1, 0), ("adam", 2, 3), ("adamw", 2, 3)],
)
def test_state_is_so_many_copies_of_the_parameters(kind: str, copies: int, counters: int) -> None:
    found = optimizer_bytes(kind, SHAPES)
    assert found.state == copies * 250 * 4 + counters * 4


def test_a_step_needs_at_most_some_copies_of_the_largest_parameter() -> None:
    small = optimizer_bytes("adamw", SHAPES).temporary
    assert small in (400, 800, 1200)
    assert optimizer_bytes("adamw", SHAPES * 5).temporary == small
    assert optimizer_bytes("sgd", SHAPES).temporary == 0


def test_an_optimizer_can_be_given_in_place_of_a_name() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    given = torch.optim.Adam([parameter], lr=0.1, amsgrad=True)
    assert optimizer_bytes(given, SHAPES).state == 3 * 1000 + 12
    assert optimizer_name(given) == "Adam"
    assert not given.state


def test_an_unknown_name_is_refused_with_the_valid_ones() -> None:
    with pytest.raises(
        PlanError,
        match=r"optimizer='lion': unknown optimizer\nuse one of sgd, momentum, adam, adamw, muon",
    ):
        optimizer_bytes("lion", SHAPES)


@pytest.mark.parametrize("name", ["Adafactor", "ASGD", "Rprop", "Muon", "NAdam", "Adamax"])
def test_the_state_of_any_optimizer_of_pytorch_is_what_it_holds_after_a_step(name: str) -> None:
    parameters = [torch.nn.Parameter(torch.ones(12, 30)), torch.nn.Parameter(torch.ones(48, 12))]
    optimizer = getattr(torch.optim, name)(parameters)
    predicted = optimizer_bytes(optimizer, [(tuple(p.shape), p.dtype) for p in parameters]).state
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tensors = [t for values in optimizer.state.values() for t in values.values()]
    held = sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
    assert predicted == held > 0


def test_parameters_that_an_optimizer_does_not_take_have_no_state_in_it() -> None:
    matrix = torch.nn.Parameter(torch.ones(4, 4))
    assert optimizer_bytes(torch.optim.Muon([matrix]), [((50,), torch.float32)]).state == 0


def test_lbfgs_keeps_two_histories_of_all_parameters_in_full() -> None:
    parameters = [torch.nn.Parameter(torch.ones(4, 4)), torch.nn.Parameter(torch.ones(6))]
    optimizer = torch.optim.LBFGS(parameters, lr=1e-3, history_size=3)
    shards = [TrainedShard((2, 4), torch.float32, (4, 4)), TrainedShard((6,), torch.float32)]
    generator = torch.Generator().manual_seed(0)

    def closure() -> float:
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        return 1.0

    optimizer.step(closure)
    (state,) = optimizer.state.values()
    lists = (v if isinstance(v, list) else [v] for v in state.values())
    tensors = [t for values in lists for t in values if isinstance(t, torch.Tensor)]
    held = sum(tensor.nbytes for tensor in tensors if tensor.numel() > 1)
    assert held <= optimizer_bytes(optimizer, shards).state == (2 * 3 + 2) * 22 * 4


def test_parameters_have_the_options_of_their_groups_and_others_no_state() -> None:
    matrix, bias, unused = (torch.nn.Parameter(torch.ones(s)) for s in ((8, 4), (8,), (3, 3)))
    groups = [{"params": [matrix], "momentum": 0.9}, {"params": [bias]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    shards = [TrainedShard(tuple(p.shape), p.dtype) for p in (matrix, bias, unused)]
    assert optimizer_bytes(optimizer, shards).state == 8 * 4 * 4
    example = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9)
    assert optimizer_bytes(example, shards).state == (32 + 8 + 9) * 4


def test_muon_by_name_keeps_one_momentum_of_matrices_and_two_moments_of_others() -> None:
    f32 = torch.float32
    matrix, bias = TrainedShard((8, 4), f32), TrainedShard((8,), f32)
    table = TrainedShard((16, 4), f32, None, is_table=True)
    assert optimizer_bytes("muon", [matrix]).state == 32 * 4
    for by_adamw in (bias, table):
        assert optimizer_bytes("muon", [by_adamw]) == optimizer_bytes("adamw", [by_adamw])


def test_a_device_collects_the_matrix_that_it_orthogonalizes() -> None:
    shard = TrainedShard((16, 256), torch.float32, (64, 256))
    shared = optimizer_bytes("muon", [shard])
    full = optimizer_bytes("muon", [TrainedShard((64, 256), torch.float32)])
    assert shared.state == full.state // 4
    assert 3 * 64 * 256 * 2 < shared.temporary < full.temporary + 2 * 64 * 256 * 2


class Averaging(torch.optim.Optimizer):
    """Keeps a sharded and a full average of gradients, and a matrix of the number of rows."""

    def __init__(self, parameters: Any, by_values: bool = False) -> None:
        super().__init__(parameters, {"by_values": by_values})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("like", torch.zeros_like(p)).add_(p.grad)
                full = state.setdefault("full", torch.zeros(p.shape, device=p.device))
                full.mul_(0.9).add_(p.grad)
                state.setdefault("rows", torch.eye(len(p), device=p.device))
                if group["by_values"]:
                    p.sub_(float(full.norm()))


@pytest.mark.parametrize("by_values", [False, True])
def test_state_that_is_made_of_a_shape_is_counted_in_full(by_values: bool) -> None:
    optimizer = Averaging([torch.zeros(64, 32)], by_values)
    (shard, full) = ((16, 32), (64, 32))
    found = optimizer_bytes(optimizer, [(shard, torch.float32, full)])
    assert found.state == 4 * (16 * 32 + 64 * 32 + 64 * 64)
    whole = optimizer_bytes(optimizer, [(full, torch.float32)])
    assert whole.state == 4 * (2 * 64 * 32 + 64 * 64)
