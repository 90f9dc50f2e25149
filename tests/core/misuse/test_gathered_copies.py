"""Parts of DTensors that PyTorch gathers are read as ever, and refuse to be written to."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from shardwright.core.api.lone_rank import fake_process_group
from shardwright.core.misuse.gathered_copies import refuse_lost_writes
from shardwright.errors import PlanError

WHOLE = torch.arange(24.0).reshape(4, 6)
Write = Callable[[Tensor], object]

LOST: dict[str, Write] = {
    "a row": lambda p: p[0].fill_(1),
    "a row of its data": lambda p: p.data[0].zero_(),
    "rows": lambda p: p[1:3].mul_(0),
    "a row of a matrix that is transposed": lambda p: p.t()[:, 0].zero_(),
    "a number": lambda p: p.view(-1)[3].fill_(1),
    "a number in brackets": lambda p: p.view(-1).__setitem__(3, torch.tensor(1.0)),
    "the diagonal": lambda p: p.diagonal().fill_(1),
    "a chunk": lambda p: p.chunk(2)[0].zero_(),
    "all chunks": lambda p: torch._foreach_mul_(list(p.split(1)), 2.0),
    "a row in place of an output": lambda p: torch.add(p[0], 1, out=p[1]),
    "a view of a part": lambda p: p[1:3].view(-1).zero_(),
    "a row by `init`": lambda p: nn.init.zeros_(p[0]),
}
KEPT: dict[str, Write] = {
    "everything": lambda p: p.mul_(2),
    "a column": lambda p: p[:, 1].zero_(),
    "columns": lambda p: p.chunk(2, 1)[0].fill_(3),
    "a column of a matrix that is transposed": lambda p: p.t()[1].zero_(),
}


@pytest.fixture
def weight() -> Iterator[DTensor]:
    """Of which this rank of two has the first two rows; the other would have the same."""
    refuse_lost_writes()
    with fake_process_group(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        yield DTensor.from_local(WHOLE[:2].clone(), mesh, [Shard(0)], run_check=False)


@pytest.mark.parametrize("write", LOST.values(), ids=LOST)
def test_a_write_that_would_be_lost_is_refused(weight: DTensor, write: Write) -> None:
    with pytest.raises(PlanError, match="along a sharded dimension"):
        write(weight)
    assert torch.equal(weight.to_local(), WHOLE[:2])


@pytest.mark.parametrize("write", KEPT.values(), ids=KEPT)
def test_a_write_to_what_each_rank_holds_is_made(weight: DTensor, write: Write) -> None:
    expected = WHOLE[:2].clone()
    write(expected)
    write(weight)
    assert torch.equal(weight.to_local(), expected)


def test_copies_are_read_as_any_tensor(weight: DTensor) -> None:
    row = weight[0].full_tensor()
    assert torch.equal(row + 1, weight.to_local()[0] + 1)
    assert row.numpy().tolist() == row.tolist() == weight.to_local()[0].tolist()
    assert type(row * 2) is type(pickle.loads(pickle.dumps(row))) is Tensor
    assert row.clone().zero_().sum() == 0
    assert torch.equal(copy.deepcopy(row), row)


def test_gradients_flow_through_copies(weight: DTensor) -> None:
    weight.requires_grad_()
    (weight[0] * weight[1:3].sum(0)).sum().backward()
    assert weight.grad is not None
    assert weight.grad.shape == weight.shape
