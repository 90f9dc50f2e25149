"""What `test_hybrid_matrix.py` runs on every one of eight ranks: every combination of stages,
schedule, optimizer parallel, recomputation and dtype, next to one device."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardwright as sw
from features.hybrid_cases import CASES, MICRO_BATCHES, ROWS, STEPS, Case
from shardwright.core.graph.graph import Graph
from shardwright.core.layout.layout import Layout
from shardwright.core.parallel.module import ParallelModule, parallel_module
from shardwright.core.runtime.devices import Devices


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Four blocks between a table and a head that are one parameter."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(4))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.table.weight
        if recompute:
            sw.recompute(self.blocks)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def build(case: Case) -> nn.Module:
    """In double precision unless it is to be computed in bfloat16."""
    torch.manual_seed(0)
    net = Net(case.recompute)
    return net if case.dtype == "bf16" else net.double()


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 32, (ROWS, 4), generator=torch.Generator().manual_seed(1))
    labels = ids.roll(1, 1).clone()
    labels[:3, 1:] = -100
    return ids, labels


class Reference:
    """Losses and final parameters of one device, once for each dtype of the parameters."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[list[float], dict[str, Tensor]]] = {}

    def of(self, case: Case) -> tuple[list[float], dict[str, Tensor]]:
        if case.dtype not in self.known:
            net, losses = build(case), []
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
            for _ in range(STEPS):
                loss = net(*batch())
                loss.backward()
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            self.known[case.dtype] = losses, dict(net.named_parameters())
        return self.known[case.dtype]


class Setting:
    """What cases share: captured graphs, and devices with their process groups."""

    def __init__(self) -> None:
        self.graphs: dict[tuple[bool, str], Graph] = {}
        self.devices: dict[tuple[int, Layout], Devices] = {}

    def graph(self, case: Case) -> Graph:
        key = (case.recompute, case.dtype)
        if key not in self.graphs:
            dtype = torch.bfloat16 if case.dtype == "bf16" else None
            plan = sw.plan(
                build(case), batch(), devices=1, micro_batches=MICRO_BATCHES, compute_dtype=dtype
            )
            assert plan.graph is not None
            self.graphs[key] = plan.graph
        return self.graphs[key]

    def parallel(self, case: Case) -> ParallelModule:
        hsdp = None
        if case.level != "off":
            hsdp = sw.OptimizerParallel(case.level, threshold=0)
        graph = self.graph(case)
        plan = sw.plan(
            graph,
            devices=8,
            stages=case.stages,
            micro_batches=MICRO_BATCHES,
            schedule=case.schedule,
            hsdp=hsdp,
            mem_coeff=1.0,
        )
        key = (case.stages, plan.mesh)
        if key not in self.devices:
            cpu = torch.device("cpu")
            self.devices[key] = Devices.of_process(plan.mesh, cpu, case.stages)
        return parallel_module(build(case), plan.partitioned, self.devices[key])


def run(case: Case, setting: Setting, reference: Reference) -> None:
    parallel = setting.parallel(case)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        losses.append(parallel.train_step(*batch()).item())
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    wanted, parameters = reference.of(case)
    near = 3e-2 if case.dtype == "bf16" else 1e-9
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=near, atol=near)
    for name, parameter in parallel.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        torch.testing.assert_close(whole, parameters[name], rtol=near, atol=near)


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    torch.set_num_threads(1)
    setting, reference = Setting(), Reference()
    chosen = [case for case in CASES if not sys.argv[1:] or case.name in sys.argv[1:]]
    for case in chosen:
        run(case, setting, reference)
        if dist.get_rank() == 0:
            print(f"passed {case.name};", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
