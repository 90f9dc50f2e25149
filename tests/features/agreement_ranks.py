"""What `test_agreement.py` runs on every rank: four processes that are not alike."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardwright as sw
from shardwright.errors import DataError
from shardwright.run import BatchSampler

SAMPLES = TensorDataset(
    torch.randn(64, 8, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 4
)
BATCH = SAMPLES[:8]


class Net(nn.Module):
    """Its state has all that is hard to send: ties, strides, expanded and small tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.first.weight
        self.out = nn.Linear(8, 4)
        self.transposed = nn.Parameter(torch.randn(6, 8).t())
        self.register_buffer("shift", torch.randn(1).expand(8))
        self.register_buffer("mask", torch.rand(8) > 0.5)
        self.loss_fn = nn.CrossEntropyLoss()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.norm(torch.relu(self.first(x)) + self.shift)
        hidden = self.tied(hidden * self.mask) @ self.transposed @ self.transposed.t()
        loss: Tensor = self.loss_fn(self.out(hidden), y)
        return loss


def build_unseeded() -> nn.Module:
    torch.manual_seed(dist.get_rank())
    return Net()


def perceptron(width: int = 16) -> nn.Module:
    layers = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4))
    return sw.WithLoss(layers, nn.CrossEntropyLoss())


@contextmanager
def refused(error: type[Exception], *words: str) -> Iterator[None]:
    """On every rank."""
    try:
        yield
    except error as raised:
        assert all(word in str(raised) for word in words), raised
    else:
        raise AssertionError("it was not refused")


def check_ranks_seeded_apart_train_the_model_of_rank_0() -> None:
    for options in ({}, {"mem_coeff": 10.0}, {"stages": 2}):
        net = build_unseeded()
        # Batch norm mixes samples: with stages the losses of micro-batches are what is trained.
        planned = sw.Pipeline(net, 2, loss_reduction="sum") if "stages" in options else net
        parallel = sw.parallelize(net, sw.plan(planned, BATCH, devices=4, **options), copy=True)
        torch.manual_seed(0)
        one = Net()
        for name, tensor in net.state_dict().items():
            assert torch.equal(tensor, one.state_dict()[name]), name
        losses = []
        for module in (one, parallel):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            for _ in range(3):
                if module is one:
                    halves = [[part.chunk(2)[i] for part in BATCH] for i in range(2)]
                    for half in halves if "stages" in options else [BATCH]:
                        one(*half).backward()
                else:
                    parallel.train_step(*BATCH)
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                losses.append(module.eval()(*BATCH))
        wanted = losses[0] * (2 if "stages" in options else 1)
        torch.testing.assert_close(losses[1], wanted, rtol=1e-4, atol=1e-5)


def check_deferred_models_are_drawn_from_rank_0() -> None:
    for draws_before in (False, True):
        torch.manual_seed(dist.get_rank())
        with sw.no_init_parameters():
            if draws_before:
                torch.manual_seed(10 + dist.get_rank())
            net = perceptron()
        parallel = sw.parallelize(net, sw.plan(net, BATCH, devices=4), copy=True)
        own = torch.rand(1)
        torch.manual_seed(10 * draws_before)
        one = perceptron()
        torch.testing.assert_close(parallel(*BATCH), one(*BATCH))
        assert torch.equal(own, torch.rand(1)) == (dist.get_rank() == 0)


def check_sync_can_be_left_out() -> None:
    net = perceptron()
    torch.manual_seed(dist.get_rank())
    nn.init.normal_(net.net[0].weight)
    before = net.net[0].weight.clone()
    sw.parallelize(net, sw.plan(net, BATCH, devices=4), sync=False, copy=True)
    assert torch.equal(net.net[0].weight, before)


def check_another_model_on_one_rank_is_refused_on_all() -> None:
    rank = dist.get_rank()
    for width, words in ((17, ("net.0.weight float32 [17, 8]", "rank 2")), (16, ())):
        net = perceptron(width if rank == 2 else 16)
        plan = sw.plan(net, BATCH, devices=4)
        if words:
            with refused(sw.PlanError, *words):
                sw.parallelize(net, plan, copy=True)
        else:
            sw.parallelize(net, plan, copy=True)
    net = perceptron()
    net.net[0].requires_grad_(rank != 3)
    with refused(sw.PlanError, "rank 3", "frozen"):
        sw.parallelize(net, sw.plan(net, BATCH, devices=4), copy=True)


def check_another_plan_on_one_rank_is_refused_on_all() -> None:
    net = perceptron()
    options = {"mem_coeff": 10.0} if dist.get_rank() == 1 else {"mode": "data_parallel"}
    with refused(sw.PlanError, "rank 1", "plan: mesh"):
        sw.parallelize(net, sw.plan(net, BATCH, devices=4, **options), copy=True)


def check_an_error_on_one_rank_is_raised_on_all() -> None:
    plan = sw.plan(perceptron(), BATCH, devices=4)
    net = perceptron(17 if dist.get_rank() == 1 else 16)
    with refused(sw.PlanError, "17"):
        sw.parallelize(net, plan, copy=True)


def check_tensors_that_are_no_buffers_are_refused_where_they_differ() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            random.seed(dist.get_rank())
            self.inner = perceptron()
            self.scale = torch.tensor([random.random()])

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            loss: Tensor = self.inner(x * self.scale, y)
            return loss

    net = Scaled()
    with refused(sw.PlanError, "rank 1", "no buffer"):
        sw.parallelize(net, sw.plan(net, BATCH, devices=4), copy=True)


def check_a_distributed_sampler_is_refused_in_the_first_call() -> None:
    for options in ({}, {"stages": 2, "micro_batches": 2}):
        net = perceptron()
        parallel = sw.parallelize(net, sw.plan(net, BATCH, devices=4, **options), copy=True)
        (batch, *_) = DataLoader(SAMPLES, 8, sampler=DistributedSampler(SAMPLES))
        with refused(DataError, "rank 1", "data_parallel", "BatchSampler", "call 1"):
            parallel.train_step(*batch)
        assert all(p.grad is None for p in parallel.parameters())


def check_another_element_is_found_a_call_later() -> None:
    net = perceptron()
    parallel = sw.parallelize(net, sw.plan(net, BATCH, devices=4), copy=True)
    inputs, labels = (part.clone() for part in BATCH)
    parallel(inputs, labels)
    if dist.get_rank() == 2:
        inputs[3, 3] += 1e-6
    with refused(DataError, "rank 2", "call 2"):
        for _ in range(3):
            parallel(inputs, labels)
            dist.barrier()


def check_another_batch_is_found_in_the_same_step() -> None:
    large = torch.randn(8, 2**16, generator=torch.Generator().manual_seed(0))
    for inputs, steps in ((BATCH[0], 15), (large, 12)):
        net = sw.WithLoss(nn.Linear(inputs.shape[1], 4), nn.CrossEntropyLoss())
        parallel = sw.parallelize(net, sw.plan(net, (inputs, BATCH[1]), devices=4), copy=True)
        for step in range(steps):
            parallel.train_step(inputs + step, BATCH[1])
        parallel.zero_grad()
        shown = inputs.flip(0) if dist.get_rank() == 2 else inputs
        with refused(DataError, f"call {steps + 1}: rank 2 and rank 0 passed different values"):
            parallel(shown, BATCH[1]).backward()
        with refused(DataError, f"call {steps + 2}: rank 2 and rank 0 passed different values"):
            parallel.train_step(shown, BATCH[1])
        assert all(p.grad is None for p in parallel.parameters())


def check_equal_parts_are_a_warning_unless_a_loader_was_not_divided() -> None:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwright").addHandler(handler)
    net = perceptron()
    plan = sw.plan(net, BATCH, devices=4, dataset_strategy="data_parallel")
    for part, warned in ((slice(0, 2), True), (slice(2 * dist.get_rank(), None), False)):
        parallel = sw.parallelize(net, plan, copy=True)
        messages.clear()
        for _ in range(3):
            parallel.train_step(*(tensor[part][:2] for tensor in BATCH))
        assert len(messages) == warned, messages
        assert not warned or "call 1: all ranks passed equal values" in messages[0]
    logging.getLogger("shardwright").removeHandler(handler)
    parallel = sw.parallelize(net, plan, copy=True)
    with refused(DataError, "call 1: all ranks passed an equal batch of the planned global size"):
        parallel.train_step(*BATCH)
    parallel = sw.parallelize(net, plan, copy=True)
    parallel.train_step(BATCH[0][:2], BATCH[1][:2])
    with refused(DataError, "call 2: all ranks passed equal values", "in an earlier call"):
        parallel.train_step(BATCH[0][2:4], BATCH[1][2:4])
    parallel = sw.parallelize(net, plan, copy=True)
    # Labels of one class are no sign of an equal batch.
    for step in range(2):
        inputs = BATCH[0][:2] + dist.get_rank() + step
        parallel.train_step(inputs, torch.full((2,), step))


def check_own_parts_pass_and_holders_of_one_part_are_compared() -> None:
    for options in ({}, {"stages": 2, "micro_batches": 2}):
        net = perceptron()
        plan = sw.plan(net, BATCH, devices=4, dataset_strategy="data_parallel", **options)
        parallel = sw.parallelize(net, plan, copy=True)
        sampler = BatchSampler(len(SAMPLES), plan, dist.get_rank(), 8)
        for batch in DataLoader(SAMPLES, batch_sampler=sampler):
            parallel.train_step(*batch)
        if options:
            inputs, labels = batch
            with refused(DataError, "rank 3", "rank 1", "dataset_strategy"):
                for _ in range(2):
                    parallel.train_step(inputs + (dist.get_rank() == 3), labels)
                    dist.barrier()


def check_parts_of_different_sizes_are_refused() -> None:
    net = perceptron()
    plan = sw.plan(net, BATCH, devices=4, dataset_strategy="data_parallel")
    parallel = sw.parallelize(net, plan, copy=True)
    rows = 1 if dist.get_rank() == 3 else 2
    with refused(DataError, "rank 3 passed a batch of 1", "BatchSampler"):
        parallel.train_step(*(part[:rows] for part in BATCH))


def check_smaller_last_batches_on_all_ranks_train() -> None:
    net = perceptron()
    parallel = sw.parallelize(net, sw.plan(net, BATCH, devices=4), copy=True)
    for batch in DataLoader(SAMPLES, 24, shuffle=True, generator=torch.Generator().manual_seed(0)):
        torch.testing.assert_close(parallel.train_step(*batch), net(*batch))


CHECKS: tuple[Callable[[], None], ...] = (
    check_ranks_seeded_apart_train_the_model_of_rank_0,
    check_deferred_models_are_drawn_from_rank_0,
    check_sync_can_be_left_out,
    check_another_model_on_one_rank_is_refused_on_all,
    check_another_plan_on_one_rank_is_refused_on_all,
    check_an_error_on_one_rank_is_raised_on_all,
    check_tensors_that_are_no_buffers_are_refused_where_they_differ,
    check_a_distributed_sampler_is_refused_in_the_first_call,
    check_another_element_is_found_a_call_later,
    check_another_batch_is_found_in_the_same_step,
    check_equal_parts_are_a_warning_unless_a_loader_was_not_divided,
    check_own_parts_pass_and_holders_of_one_part_are_compared,
    check_parts_of_different_sizes_are_refused,
    check_smaller_last_batches_on_all_ranks_train,
)


def smaller_last_batch(parallel: nn.Module) -> None:
    """One rank is given fewer rows, long after contents are compared for the last time."""
    for step in range(20):
        rows = 4 if step == 14 and dist.get_rank() == 2 else 8
        parallel(*(part[:rows] for part in BATCH)).backward()


def evaluation_on_one_rank(parallel: nn.Module) -> None:
    for step in range(20):
        parallel.train(step != 14 or dist.get_rank() != 2)
        parallel(*BATCH).backward()


ENDINGS: tuple[Callable[[nn.Module], None], ...] = (smaller_last_batch, evaluation_on_one_rank)
"""Where ranks meet in different collectives: each says so when it, or another rank, ends."""


def main(names: list[str]) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for check in CHECKS if not names else ():
        torch.manual_seed(0)
        check()
        if dist.get_rank() == 0:
            print(f"passed {check.__name__}", flush=True)
    for ending in ENDINGS:
        if ending.__name__ in names:
            net = perceptron()
            parallel = sw.parallelize(
                net, sw.plan(net, BATCH, devices=4, mem_coeff=10.0), copy=True
            )
            try:
                ending(parallel)
            except DataError as error:
                print(f"rank {dist.get_rank()} says: {error}\n", end="", flush=True)
            return
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
