"""Trainings of Accelerate with planned models on two ranks, compared with one process.

python accelerate_ranks.py FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import shardwright as sw

sys.path.insert(0, str(Path(__file__).parents[1]))

from integrations.frameworks_cases import (
    BATCH,
    MAX_NORM,
    OneProcess,
    Run,
    WithLoss,
    assert_equal_runs,
    classifier,
    loader,
    optimizer_of,
    samples,
    schedule_of,
)
from shardwright.errors import DataError, PlanError
from shardwright.integrations.accelerate import prepare
from torchrun import run_checks

COUNT = 72
"""Samples of an epoch, of which the last batch has half as many as the others."""
PLANS: dict[str, dict[str, Any]] = {
    "first batch": {},
    "local batches": {"dataset_strategy": "data_parallel"},
    "tensor parallel": {"mode": "recursive_programming", "mem_coeff": 64.0},
}


def folder() -> Path:
    return Path(sys.argv[1])


class Training:
    """Of Accelerate, as its documentation writes it."""

    def __init__(self, model: Any = None, seed: int | None = None, **options: Any) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        # The optimizer is made before the model is planned; each rank draws other parameters.
        net = model or classifier(dist.get_rank() if seed is None else seed)
        optimizer = optimizer_of(net)
        self.net, self.optimizer, self.loader, self.schedule = prepare(
            self.accelerator, net, optimizer, loader(COUNT), schedule_of(optimizer), **options
        )

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if isinstance(self.net, WithLoss):
            return self.net(x, y)
        return nn.functional.cross_entropy(self.net(x), y)

    def epoch(self) -> Run:
        run, accelerator = Run(), self.accelerator
        for x, y in self.loader:
            with accelerator.accumulate(self.net):
                loss = self.loss(x, y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(self.net.parameters(), MAX_NORM)
                    run.norms.append(float(norm))
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
                if accelerator.sync_gradients:
                    run.rates.append(self.schedule.get_last_lr()[0])
            run.losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        run.state = dict(accelerator.get_state_dict(self.net))
        return run


def reference(epochs: int) -> list[Run]:
    training = OneProcess(COUNT)
    return [training.epoch() for _ in range(epochs)]


def on_rank_0() -> bool:
    return dist.get_rank() == 0


def trains_as_one_process() -> None:
    (wanted,) = reference(1)
    for options in PLANS.values():
        training = Training(**options)
        assert_equal_runs(training.epoch(), wanted, with_state=on_rank_0())


def counts_each_sample_once() -> None:
    for options in (PLANS["first batch"], PLANS["local batches"]):
        training = Training(**options)
        accelerator, counted, right = training.accelerator, 0, 0
        training.net.eval()
        evaluated = prepare_loader(training, options)
        with torch.no_grad():
            for x, y in evaluated:
                outputs = training.net(x).argmax(-1)
                outputs, y = accelerator.gather_for_metrics((outputs, y))
                counted, right = counted + len(y), right + int((outputs == y).sum())
        net, wanted = classifier(0), samples(COUNT - 1).tensors
        assert (counted, right) == (COUNT - 1, int((net(wanted[0]).argmax(-1) == wanted[1]).sum()))
        for dtype in (torch.float32, torch.int64):
            total = accelerator.reduce(torch.full((), 3, dtype=dtype), "sum")
            assert total == (6 if "dataset_strategy" in options else 3)
            assert total.dtype == dtype
        # One rank decides to stop, and all do.
        if accelerator.is_main_process:
            accelerator.set_trigger()
        assert accelerator.check_trigger()


def prepare_loader(training: Training, options: dict[str, Any]) -> Any:
    """A loader whose last batch has an odd number of samples, for a second model of one plan."""
    *_, odd = prepare(training.accelerator, classifier(0), loader(COUNT - 1), **options)
    return odd


class Stream(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter(samples(self.count))

    def __len__(self) -> int:
        return self.count


def local_batches_of_all_loaders_count_each_sample_once() -> None:
    options = PLANS["local batches"]
    odd, size = samples(COUNT - 1), BATCH // dist.get_world_size()
    loaders: list[DataLoader[Any]] = [
        DataLoader(Stream(COUNT - 2), BATCH),
        DataLoader(Stream(COUNT - 1), BATCH, drop_last=True),
        # Its last rank repeats a sample.
        DataLoader(odd, size, sampler=DistributedSampler(odd, shuffle=False)),
        DataLoader(odd, size, sampler=DistributedSampler(odd, shuffle=False, drop_last=True)),
        # Its sampler repeats a sample of the batch that it drops.
        DataLoader(odd, size, sampler=DistributedSampler(odd, shuffle=False), drop_last=True),
    ]
    counts = (COUNT - 2, COUNT // BATCH * BATCH, COUNT - 1, COUNT - 2, COUNT // BATCH * BATCH)
    for plain, count in zip(loaders, counts, strict=True):
        accelerator = Accelerator(cpu=True)
        net, prepared = prepare(accelerator, classifier(0), plain, **options)
        found, objects = [], []
        for x, _ in prepared:
            assert len(x) <= BATCH // dist.get_world_size()
            net(x)
            found.append(accelerator.gather_for_metrics(x))
            objects += accelerator.gather_for_metrics([str(row) for row in x.tolist()])
            # One value of each rank is no sample.
            assert len(accelerator.gather_for_metrics(x.sum())) == 2
            assert len(accelerator.gather_for_metrics([x], use_gather_object=True)) == 2
        assert len(prepared) == len(found)
        assert sorted(objects) == sorted(str(row) for x in found for row in x.tolist())
        wanted = samples(COUNT).tensors[0][:count]
        torch.testing.assert_close(*(torch.cat([*x]).sort(0)[0] for x in (found, wanted[None])))
    *_, prepared = prepare(
        Accelerator(cpu=True), classifier(0), DataLoader(Stream(COUNT - 1), BATCH), **options
    )
    refused(lambda: list(prepared), DataError, "last batch of an iterable dataset has 7 samples")


def resumes_under_another_plan() -> None:
    wanted = reference(2)
    for saved, resumed in (("tensor parallel", "local batches"), ("local batches", "first batch")):
        path = folder() / saved.replace(" ", "_")
        training = Training(**PLANS[saved])
        training.epoch()
        training.accelerator.save_state(str(path))
        dist.barrier()
        fresh = Training(seed=5, **PLANS[resumed])
        if resumed != "first batch":
            # Planned before its state is loaded; otherwise the first call shards what was loaded.
            fresh.net(torch.zeros(BATCH // 2, 16))
        fresh.accelerator.load_state(str(path))
        assert_equal_runs(fresh.epoch(), wanted[1], with_state=on_rank_0())
    fresh.accelerator.save_model(fresh.net, str(folder() / "model"))


def plans_of_files_train() -> None:
    (wanted,) = reference(1)
    shapes = torch.zeros(BATCH, 16), torch.zeros(BATCH, dtype=torch.long)
    path = folder() / "plan.json"
    plan = sw.plan(classifier(0), shapes[:1], devices=2)
    if on_rank_0():
        plan.save(path)
    dist.barrier()
    assert_equal_runs(Training(plan=path).epoch(), wanted, with_state=on_rank_0())


def stages_train_and_resume_as_one_process() -> None:
    wanted, later = reference(2)
    shapes = torch.zeros(BATCH, 16), torch.zeros(BATCH, dtype=torch.long)
    path = folder() / "stages"
    for stages in (2, 1):
        net = classifier(0 if stages == 2 else 5, WithLoss)
        plan = sw.plan(net, shapes, devices=2, stages=stages, micro_batches=2)
        training = Training(net, plan=plan)
        if stages == 2:
            assert_equal_runs(training.epoch(), wanted, with_state=on_rank_0())
            training.accelerator.save_state(str(path))
            dist.barrier()
        training.accelerator.load_state(str(path))
        assert_equal_runs(training.epoch(), later, with_state=on_rank_0())


def computes_in_mixed_precision() -> None:
    wanted_net, (x, y) = classifier(0), samples(BATCH).tensors
    with torch.autocast("cpu", torch.bfloat16):
        wanted = wanted_net(x).float()
    nn.functional.cross_entropy(wanted, y).backward()
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    plan = sw.plan(classifier(0), (x,), devices=2, mode="data_parallel")
    for options in ({}, {"plan": plan}):
        net = prepare(accelerator, classifier(0), **options)
        for _ in range(2):
            found = net(x)
            assert found.dtype == torch.float32
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
        accelerator.backward(nn.functional.cross_entropy(net(x), y))
        gradient = net.head.weight.grad.full_tensor()
        torch.testing.assert_close(gradient, wanted_net.head.weight.grad, rtol=2e-2, atol=1e-3)
        with sw.whole(net) as whole, torch.no_grad():
            assert not torch.equal(whole(x), wanted)
    AcceleratorState._reset_state()


def refused(call: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        call()
    assert text in str(raised.value), raised.value
    assert "\n" in str(raised.value)


def refuses_what_would_be_wrong() -> None:
    accelerator, net = Accelerator(cpu=True), classifier(0)
    data = samples(COUNT)
    divided = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    prepared = accelerator.prepare(loader(COUNT))
    for each in (divided, prepared):
        refused(
            lambda each=each: prepare(accelerator, net, each),
            DataError,
            f"shard {dist.get_rank()} of 2, but the plan needs the full batch on every rank",
        )
    whole = Training().loader
    local = PLANS["local batches"]
    refused(
        lambda: prepare(Accelerator(cpu=True), classifier(0), whole, **local),
        DataError,
        "the loader gives every rank the full batch, but the plan's `dataset_strategy`",
    )
    refused(lambda: prepare(Accelerator(cpu=True), loader(16)), PlanError, "one model, but got 0")
    plan = sw.plan(net, (torch.zeros(BATCH, 16),), devices=2)
    planned = sw.parallelize(net, plan)
    refused(
        lambda: Accelerator(cpu=True).prepare(planned),
        PlanError,
        "shardwright.integrations.accelerate.prepare(accelerator, net, optimizer, loader)",
    )
    refused(
        lambda: prepare(Accelerator(cpu=True), classifier(0), plan=plan, mem_coeff=1.0),
        PlanError,
        "plan=... conflicts with mem_coeff=...: options have no effect on a finished plan",
    )


CHECKS = (
    trains_as_one_process,
    counts_each_sample_once,
    local_batches_of_all_loaders_count_each_sample_once,
    resumes_under_another_plan,
    plans_of_files_train,
    stages_train_and_resume_as_one_process,
    computes_in_mixed_precision,
    refuses_what_would_be_wrong,
)

if __name__ == "__main__":
    run_checks(CHECKS)
