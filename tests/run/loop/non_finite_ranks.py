"""What `test_non_finite.py` runs on every rank: steps that are not finite, and gradient scaling."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[2]))

import shardwright as sw
from shardwright.errors import NonFiniteError
from shardwright.run.data.data import Batches
from shardwright.run.loop.loop import train
from shardwright.run.loop.non_finite import check_finite_state
from shardwright.run.loop.step_log import StepRecord
from torchrun import run_checks

CPU = torch.device("cpu")


class Net(nn.Module):
    """A loss that is nan for large inputs, and a gradient that is nan for weights of 0."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.second = nn.Linear(16, 4)
        self.loss_fn = nn.CrossEntropyLoss()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.norm(torch.relu(self.first(torch.log(1000 - x))))
        loss: Tensor = self.loss_fn(self.second(hidden), y)
        # Its value is finite; its gradient for weights of 0 is not.
        return loss + self.second.weight.abs().sqrt().mean()


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def plans() -> list[dict[str, Any]]:
    if world() == 1:
        return [{}]
    return [{"mem_coeff": 10.0}, {"mode": "data_parallel"}, {"stages": 2}]


def parallelized(net: nn.Module, batch: Any, **options: Any) -> nn.Module:
    """Batch norm mixes samples: with stages the losses of micro-batches are what is trained."""
    planned = sw.Pipeline(net, 2, loss_reduction="sum") if "stages" in options else net
    return sw.parallelize(net, sw.plan(planned, batch, devices=world(), **options), copy=True)


def samples(bad: float | None = None, row: int = 21) -> Batches:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(48, 8, generator=generator)
    if bad is not None:
        x[row, 2] = bad
    return Batches((x, torch.randint(4, (48,), generator=generator)), batch_size=8)


def trained(
    batches: Batches, policy: str, net: nn.Module | None = None, **options: Any
) -> tuple[nn.Module, list[float]]:
    torch.manual_seed(0)
    net = net or Net()
    parallel = parallelized(net, next(batches.epoch(0)), **options)
    records: list[StepRecord] = []
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
    train(
        parallel,
        optimizer,
        batches,
        epochs=1,
        device=CPU,
        on_step=records.append,
        non_finite=policy,
    )
    return parallel, [record.loss for record in records]


def state_of(net: nn.Module) -> dict[str, Tensor]:
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in net.state_dict().items()
        if tensor is not None
    }


def check_a_step_that_is_not_finite_ends_the_run() -> None:
    """Before its optimizer step, and with the operator where it began."""
    for options in plans():
        with pytest.raises(NonFiniteError) as raised:
            trained(samples(2000.0), "stop", **options)
        text = str(raised.value)
        assert "the loss is nan" in text, text
        assert "nan first in the output of" in text, text
        assert "aten.log" in text, text
        assert "epoch 0, batch" in text, text
        with pytest.raises(NonFiniteError, match="of input 0 contains nan"):
            trained(samples(float("nan")), "stop", **options)


def check_the_gradient_where_it_began_is_named() -> None:
    for options in plans():
        torch.manual_seed(0)
        net = Net()
        with torch.no_grad():
            net.second.weight[0, 0] = 0.0
        with pytest.raises(NonFiniteError) as raised:
            trained(samples(), "stop", net, **options)
        text = str(raised.value)
        assert "the gradient norm nan" in text, text
        assert "step 1 " in text, text
        assert "in the gradient of `" in text, text
        assert "sqrt" in text, text


def check_skipped_steps_leave_nothing_behind() -> None:
    """The parameters and statistics are those of a run that never saw the batch."""
    for options in plans():
        bad = samples(float("nan"))
        skipped, losses = trained(bad, "skip", **options)
        steps = [number for number, loss in enumerate(losses) if loss != loss]
        assert len(steps) == 1
        good = samples()
        rows = [batch for n, batch in enumerate(good.epoch(0)) if n not in steps]
        torch.manual_seed(0)
        net = Net()
        parallel = parallelized(net, rows[0], **options)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
        for batch in rows:
            parallel.train_step(*batch)
            optimizer.step()
            optimizer.zero_grad()
        wanted = state_of(parallel)
        for name, tensor in state_of(skipped).items():
            assert torch.equal(tensor, wanted[name]), name


def check_parameters_that_are_not_finite_are_named() -> None:
    for options in plans():
        torch.manual_seed(0)
        net, batch = Net(), next(samples().epoch(0))
        parallel = parallelized(net, batch, **options)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
        parallel.train_step(*batch)
        optimizer.step()
        check_finite_state(parallel, optimizer, "after step 1")
        for parameter in parallel.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if world() == 1 or dist.get_rank() == world() - 1:
                local.detach().view(-1)[-1] = float("inf")
        with pytest.raises(NonFiniteError, match=r"after step 1: parameter .* contains inf"):
            check_finite_state(parallel, optimizer, "after step 1")


class Half(nn.Module):
    """Computed in float16, in which gradients of this loss overflow if it is scaled too much."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            logits = self.layers(x)
        return nn.functional.cross_entropy(logits.float(), y)


def check_a_gradient_scaler_works_as_on_one_device() -> None:
    """Steps whose gradients overflow are left out on all ranks, and the scale is the same."""
    torch.manual_seed(0)
    batches = list(samples().epoch(0))
    for options in ({"mem_coeff": 10.0}, {"mode": "data_parallel"}, {"hsdp": {"level": "level3"}}):
        results = []
        for devices in (1, world()):
            torch.manual_seed(0)
            net = Half()
            kept = options if devices > 1 else {}
            parallel = sw.parallelize(
                net, sw.plan(net, batches[0], devices=devices, **kept), copy=True
            )
            optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, backoff_factor=2.0**-20)
            scales = []
            for batch in batches:
                scaler.scale(parallel(*batch)).backward()
                scaler.unscale_(optimizer)
                parallel.clip_grad_norm_(1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                scales.append(scaler.get_scale())
            results.append((scales, state_of(parallel)))
        (scales, wanted), (got_scales, got) = results
        assert got_scales == scales == [2.0**10] * len(batches), (got_scales, scales)
        for name, tensor in wanted.items():
            torch.testing.assert_close(got[name], tensor, rtol=1e-2, atol=1e-3, msg=name)


CHECKS: tuple[Callable[[], None], ...] = (
    check_a_step_that_is_not_finite_ends_the_run,
    check_the_gradient_where_it_began_is_named,
    check_skipped_steps_leave_nothing_behind,
    check_parameters_that_are_not_finite_are_named,
)
DISTRIBUTED_CHECKS = (*CHECKS, check_a_gradient_scaler_works_as_on_one_device)


if __name__ == "__main__":
    run_checks(DISTRIBUTED_CHECKS)
