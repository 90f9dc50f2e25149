"""2-D and 3-D tensor parallel are layouts and nothing else: their bytes are those of the formulas.

For a pair of matrix products (bs, h)·(h, e)·(e, h) on an x·y grid every device sends
2·bs·[e(x−1) + h(y−1)]/(x·y) elements forward. On x·y·z the weights are stored in z parts and
gathered: 2·[bs·e(x−1) + bs·h(y−1) + h·e(z−1)]/(x·y·z).
(Bian et al. 2021, "Maximizing Parallelism in Distributed Training for Huge Neural Networks".)
"""

from itertools import accumulate

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.core.layout.axes import prime_factors
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.core.partition.decisions import Decisions
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.plan import Plan, make_plan

BATCH, HIDDEN, EXPANDED = 16, 32, 64
ITEMSIZE = 4


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, EXPANDED, bias=False)
        self.down = nn.Linear(EXPANDED, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(torch.tanh(x)))).square().sum()


def plan_on_grid(net: nn.Module, x: Tensor, sizes: tuple[int, ...]) -> Plan:
    """The pair on a grid of `sizes` = (x, y) or (x, y, z)."""
    graph = sw.capture(net, (x,))
    mesh = prime_mesh(torch.Size(sizes).numel())
    ends = tuple(accumulate(len(prime_factors(size)) for size in sizes))
    along = [tuple(range(a, b)) for a, b in zip((0, *ends), ends, strict=False)]
    ax, ay, az = (*along, ())[:3]
    assert mesh.device_matrix == sum((prime_factors(size) for size in sizes), ())
    tanh, up, relu, down = (op.name for op in graph.ops[:4])
    cuts = {
        tanh: {"b": az, "s": (*ax, *ay)},
        up: {"b": az, "k": ax, "j": ay},
        relu: {"b": az, "s": (*ay, *ax)},
        down: {"b": az, "k": ay, "j": ax},
    }
    decisions = Decisions(
        cuts,
        {"up.weight": ((*ay,), (*ax, *az)), "down.weight": ((*ax,), (*ay, *az))},
        {up: ((az, (*ay, *ax)),), down: ((az, (*ax, *ay)),)},
    )
    return make_plan(
        Partitioned(graph, mesh, decisions),
        mode="layouts",
        options={},
        search_seconds=0.0,
        training=True,
    )


@pytest.mark.parametrize("sizes", [(2, 2), (4, 2), (2, 4), (2, 2, 2), (4, 2, 2)])
def test_the_bytes_of_a_grid_are_those_of_the_formula(sizes: tuple[int, ...]) -> None:
    net, x = Pair(), torch.randn(BATCH, HIDDEN)
    plan = plan_on_grid(net, x, sizes)
    assert plan.graph is not None
    flow = plan.partitioned.chunks[0].communication
    pair = {op.name for op in plan.graph.ops if op.name in ("up", "down")}
    values = {v for name in pair for v in plan.graph.by_name[name].inputs}
    values |= {plan.graph.by_name[name].output for name in pair}
    left = {id(t) for route in flow.leading_transfers.values() for t in route}
    read = {id(t) for name in pair for i in (0, 1) for t in flow.routes[name, i]}
    sent = sum(t.forward_bytes for t in flow.transfers if id(t) in left | read)
    nx, ny, nz = (*sizes, 1)[:3]
    elements = BATCH * EXPANDED * (nx - 1) + BATCH * HIDDEN * (ny - 1)
    elements += HIDDEN * EXPANDED * (nz - 1)
    assert sent == 2 * elements * ITEMSIZE // (nx * ny * nz)


@pytest.mark.parametrize("sizes", [(2, 2), (2, 2, 2)])
def test_a_grid_gives_the_gradients_of_one_device(sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    net, x = Pair(), torch.randn(BATCH, HIDDEN)
    assert sw.check(net, (x,), {}, plan_on_grid(net, x, sizes)).passes(1e-9)
