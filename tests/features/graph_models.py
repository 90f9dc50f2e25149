"""Graph networks in static form, as PyTorch Geometric computes them: gather, then scatter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwright as sw
from shardwright.core.plan import make_plan

GRAPHS = 4
aten = torch.ops.aten
SUMS = (aten.scatter_add.default, aten.index_add.default)


class GCN(nn.Module):
    """Kipf and Welling 2017, with self-loops."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.linear, self.bias = nn.Linear(width, out, bias=False), nn.Parameter(torch.ones(out))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges[0], edges[1]
        ones = torch.ones_like(target, dtype=x.dtype)
        degrees = torch.zeros(len(x), dtype=x.dtype).scatter_add(0, target, ones) + 1
        scale, h = degrees.rsqrt(), self.linear(x)
        messages = h[source] * (scale[source] * scale[target])[:, None]
        gathered = torch.zeros_like(h).index_add(0, target, messages)
        return gathered + h * (scale * scale)[:, None] + self.bias


class SAGE(nn.Module):
    """Hamilton et al. 2017, the mean of neighbors."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.neighbors, self.own = nn.Linear(width, out), nn.Linear(width, out, bias=False)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        rows, index = x.index_select(0, source), target[:, None].expand(-1, x.shape[1])
        mean = torch.zeros_like(x).scatter_reduce(0, index, rows, "mean", include_self=False)
        return self.neighbors(mean) + self.own(x)


class GAT(nn.Module):
    """Veličković et al. 2018: a softmax over the edges of each node, of `out` features in heads."""

    def __init__(self, width: int, out: int, heads: int = 2) -> None:
        super().__init__()
        self.shape = heads, out // heads
        self.linear = nn.Linear(width, out, bias=False)
        self.left, self.right = (nn.Parameter(torch.randn(self.shape)) for _ in range(2))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        h = self.linear(x).view(len(x), *self.shape)
        scores = (h * self.left).sum(-1)[source] + (h * self.right).sum(-1)[target]
        scores, index = F.leaky_relu(scores, 0.2), target[:, None].expand(-1, self.shape[0])
        empty = torch.full((len(x), self.shape[0]), -torch.inf, dtype=x.dtype)
        largest = empty.scatter_reduce(0, index, scores.detach(), "amax")
        weights = (scores - largest[target]).exp()
        sums = torch.zeros_like(empty).scatter_add(0, index, weights)
        messages = h[source] * (weights / (sums[target] + 1e-16))[:, :, None]
        return torch.zeros_like(h).index_add(0, target, messages).flatten(1)


class NodeClasses(nn.Module):
    """Two layers and the loss of each node's class."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.first, self.second = layer(8, 16), layer(16, 8)

    def forward(self, x: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.second(F.relu(self.first(x, edges)), edges), labels)


class SchNet(nn.Module):
    """Schütt et al. 2017: continuous filters of distances, and a sum over each molecule's atoms."""

    def __init__(self, width: int = 16, centers: int = 8) -> None:
        super().__init__()
        self.atoms = nn.Embedding(10, width)
        self.filters = nn.Sequential(nn.Linear(centers, width), nn.Softplus())
        self.before, self.after = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.energy = nn.Linear(width, 1)
        self.register_buffer("centers", torch.linspace(0, 5, centers))

    def forward(
        self, atoms: Tensor, positions: Tensor, edges: Tensor, molecules: Tensor, energies: Tensor
    ) -> Tensor:
        source, target = edges
        h = self.atoms(atoms)
        distances = (positions[source] - positions[target]).norm(dim=-1)
        weights = self.filters(torch.exp(-((distances[:, None] - self.centers) ** 2)))
        cutoff = 0.5 * (torch.cos(distances * torch.pi / 5) + 1)
        messages = self.before(h)[source] * weights * cutoff[:, None]
        h = h + self.after(torch.zeros_like(h).index_add(0, target, messages))
        sums = torch.zeros(GRAPHS, 1, dtype=h.dtype).index_add(0, molecules, self.energy(h))
        return F.mse_loss(sums, energies)


def graph_model(
    name: str, nodes: int = 24, edges: int = 96
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model in double precision and its batch, equal in each call."""
    torch.manual_seed(0)
    source = torch.randint(nodes, (edges,))
    pairs = torch.stack([source, (source + torch.randint(1, nodes, (edges,))) % nodes])
    if name == "SchNet":
        atoms, positions = torch.randint(10, (nodes,)), torch.randn(nodes, 3).double()
        molecules, energies = torch.arange(nodes) % GRAPHS, torch.randn(GRAPHS, 1).double()
        return SchNet().double(), (atoms, positions, pairs, molecules, energies)
    x, labels = torch.randn(nodes, 8).double(), torch.randint(8, (nodes,))
    return NodeClasses({"GCN": GCN, "SAGE": SAGE, "GAT": GAT}[name]).double(), (x, pairs, labels)


def plan_of_edges(net: nn.Module, args: tuple[Tensor, ...], devices: int) -> sw.Plan:
    """A plan in which all devices share the rows of each sum over edges."""
    plan = sw.plan(net, args, devices=devices, mode="data_parallel")
    axes = tuple(range(len(plan.mesh.device_matrix)))
    adding = [op.name for op in plan.partitioned.graph.ops if op.target in SUMS]
    assert adding
    cuts = {**plan.cuts, **{name: {"e": axes} for name in adding}}
    partitioned = replace(plan.partitioned, decisions=replace(plan.decisions, cuts=cuts))
    return make_plan(partitioned, mode="edges", options={}, search_seconds=0.0, training=True)
