"""What `test_python_calls.py` runs on every rank: Python state that changes in each call."""

from __future__ import annotations

import copy
import functools
import os
import sys
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[2]))

import shardwright as sw
from torchrun import run_checks

STEPS, WIDTH = 4, 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def hidden(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Counter(Net):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.hidden(x).square().mean() * self.calls


class Annealed(Net):
    temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.temperature = self.temperature * 0.9
        return (self.hidden(x) / self.temperature).square().mean()


class Masked(Net):
    mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None or len(self.mask) != len(x):
            self.mask = torch.ones(len(x), len(x)).tril()
        return (self.mask @ self.hidden(x)).square().mean()


class Averaging(Net):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x)
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        return (hidden - self.mean).square().mean()


class Result:
    """An object of a class that PyTorch knows nothing of."""

    def __init__(self, loss: Tensor, hidden: Tensor) -> None:
        self.loss, self.hidden = loss, hidden


class Returning(Net):
    def forward(self, x: Tensor) -> Result:
        hidden = self.hidden(x)
        return Result(hidden.square().mean(), hidden)


class Listing(Net):
    def forward(self, x: Tensor, hidden: list[Any]) -> Tensor:
        hidden.append(self.hidden(x))
        return hidden[-1].square().mean()


class Normalized(nn.Module):
    """Reads values in Python, and parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: float) -> Tensor:
        rows = [row / row.norm() if row.norm() > 1 else row for row in self.inner(x)]
        return torch.stack(rows) * scale


def doubled(x: Tensor) -> Tensor:
    return 2 * x if float(x.detach().abs().sum()) > 0 else x


doubled_locally = sw.local_map(doubled, "b _h -> b _h")


class LocalParts(Net):
    """Counts its calls, and has parts that are not traced."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.normalized = sw.local_map(Normalized(), "b _h -> b _h")

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = doubled_locally(self.normalized(self.hidden(x), scale=0.5))
        return hidden.square().mean() * self.calls


SCALE = ContextVar("SCALE", default=1.0)


def scaled(factors: dict[str, float], x: Tensor) -> Tensor:
    return x * factors["now"]


class Reaching(Net):
    """Reads state that is in no attribute of a module."""

    per_class = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.factors = {"now": 1.0}
        self.scaled = functools.partial(scaled, self.factors)
        enclosed = [1.0]
        self.enclosed, self.shifted = enclosed, lambda x: x + enclosed[0]
        SCALE.set(1.0)
        Reaching.per_class = 1.0
        os.environ["SHIFT_OF_TEST"] = "0"

    def change(self, place: int, value: float) -> None:
        if place == 0:
            self.factors["now"] = value
        elif place == 1:
            self.enclosed[0] = value
        elif place == 2:
            SCALE.set(value)
        elif place == 3:
            os.environ["SHIFT_OF_TEST"] = str(value)
        else:
            Reaching.per_class = value

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.shifted(self.scaled(self.hidden(x))) * SCALE.get() * self.per_class
        return (hidden + float(os.environ["SHIFT_OF_TEST"])).square().mean()


def loss_of(result: Any) -> Tensor:
    loss: Tensor = result if isinstance(result, Tensor) else result.loss
    return loss


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def batches() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(16, WIDTH) for _ in range(STEPS)]


def trained(net: nn.Module, *more: Callable[[], Any]) -> list[float]:
    """The losses of a few steps."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for x in batches():
        loss = loss_of(net(x, *(make() for make in more)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(full(loss.detach()).item())
    return losses


def check_equal(make: type[Net], *more: Callable[[], Any]) -> nn.Module:
    """Asserts that losses, parameters and plain attributes are those of one device."""
    eager, net = make(), make()
    sw.shard(net.first, in_strategy=((1, 1), (2, 1)))
    planned = sw.parallelize(net, sw.plan(net, (batches()[0], *(m() for m in more)), devices=2))
    losses = trained(planned, *more)
    torch.testing.assert_close(losses, trained(eager, *more), rtol=1e-4, atol=1e-5)
    assert any(isinstance(parameter, DTensor) for parameter in planned.parameters())
    for wanted, parameter in zip(eager.parameters(), planned.parameters(), strict=True):
        torch.testing.assert_close(full(parameter), wanted, rtol=1e-4, atol=1e-5)
    for name in ("calls", "temperature", "mask", "mean"):
        wanted, value = getattr(eager, name, None), getattr(planned, name, None)
        value = full(value) if isinstance(value, Tensor) else value
        torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-5)
    return planned


def numbers_of_attributes() -> None:
    for make in (Counter, Annealed):
        planned = check_equal(make)
        # The number of the class, that of the object, and then one that is an input.
        assert len(planned.execution._forwards) == 3


def tensors_in_attributes() -> None:
    check_equal(Masked)
    check_equal(Averaging)


def parts_that_are_not_traced() -> None:
    planned = check_equal(LocalParts)
    graph = planned.execution.partitioned.graph
    assert [op.name for op in graph.ops if "local_map" in str(op.target)] == [
        "normalized",
        "local_map",
    ]


def objects_and_arguments() -> None:
    planned = check_equal(Returning)
    assert type(planned(batches()[0])) is Result
    check_equal(Listing, list)


class Hooked(Net):
    """Stores hidden activations, their statistics and the loss by hooks."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.features, self.maxima = dict[str, Tensor](), dict[str, float]()
        self.second.register_forward_hook(self.store)
        self.register_forward_hook(self.count)

    def store(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.features["second"] = output
        self.maxima["second"] = output.abs().max().item()

    def count(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.calls += 1

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden(x).square().mean()


def hooks_that_store() -> None:
    eager, net, (x, *_) = Hooked(), Hooked(), batches()
    sw.shard(net.first, in_strategy=((1, 1), (2, 1)))
    planned = sw.parallelize(net, sw.plan(net, (x,), devices=2))
    for later in (False, True):
        for each in (eager, planned):
            if later:  # Registered after planning.
                each.first.register_forward_hook(lambda module, args, output: output / 2)
            each.zero_grad()
            loss = each(x) + each.features["second"].abs().mean()
            loss.backward()
        torch.testing.assert_close(full(planned.features["second"]), eager.features["second"])
        torch.testing.assert_close(planned.maxima, eager.maxima)
        for wanted, own in zip(eager.parameters(), planned.parameters(), strict=True):
            torch.testing.assert_close(full(own.grad), wanted.grad)
    assert planned.calls == eager.calls == 2


def evaluation_and_copies() -> None:
    planned = check_equal(Counter)
    planned.eval()
    with torch.no_grad():
        planned(batches()[0][:6])
    assert planned.calls == STEPS + 1
    copied = copy.deepcopy(planned)
    copied(batches()[0])
    assert (planned.calls, copied.calls) == (STEPS + 1, STEPS + 2)


def state_that_is_in_no_attribute() -> None:
    for place in range(5):
        eager, net, (x, *_) = Reaching(), Reaching(), batches()
        sw.shard(net.first, in_strategy=((1, 1), (2, 1)))
        planned = sw.parallelize(net, sw.plan(net, (x,), devices=2))
        for value in (1.0, 2.0, 2.0, 3.0):
            for each in (planned, eager):
                each.change(place, value)
                each.zero_grad()
            losses = [full(planned(x)), eager(x)]
            torch.testing.assert_close(*losses)
            for loss in losses:
                loss.backward()
            for wanted, own in zip(eager.parameters(), planned.parameters(), strict=True):
                torch.testing.assert_close(full(own.grad), wanted.grad)


class History:
    def __init__(self) -> None:
        self.scale, self.losses = 2.0, [0.0]


class Recording(Net):
    def __init__(self) -> None:
        super().__init__()
        history = self.history = History()
        self.scaled = lambda x: x * history.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self.hidden(x)).square().mean()


def state_of_one_rank_that_is_not_read() -> None:
    eager, net, (x, *_) = Recording(), Recording(), batches()
    sw.shard(net.first, in_strategy=((1, 1), (2, 1)))
    planned = sw.parallelize(net, sw.plan(net, (x,), devices=2))
    for _ in range(3):
        loss = full(planned(x))
        torch.testing.assert_close(loss, eager(x))
        loss.backward()
        if dist.get_rank() == 0:
            net.history.losses.append(loss.item())


class Histories(Net):
    """Stores numbers, results and activations, and reads an average of earlier batches."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.losses, self.mean = 0, list[float](), torch.zeros(WIDTH)
        self.features: dict[str, Tensor] = {}
        self.result: Result | None = None
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Result:
        self.calls += 1
        hidden = self.hidden(x)
        loss = (hidden - self.mean - self.average).square().mean() * self.calls
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        self.average.lerp_(hidden.detach().square().mean(0), 0.1)
        self.losses.append(loss.item())
        self.features["hidden"] = hidden.detach()
        self.result = Result(loss.detach(), hidden.detach())
        return Result(loss, hidden)


def steps_of_micro_batches_and_stages() -> None:
    plans: tuple[dict[str, Any], ...] = (
        {"micro_batches": 2},
        {"micro_batches": 16},
        {"micro_batches": 2, "dataset_strategy": "data_parallel"},
        {"micro_batches": 2, "stages": 2},
    )
    for options in plans:
        eager, net, (x, *_) = Histories(), Histories(), batches()
        planned = sw.parallelize(net, sw.plan(net, (x,), devices=2, **options))
        rows = slice(None)
        if "dataset_strategy" in options:
            rows = slice(8 * dist.get_rank(), 8 * (dist.get_rank() + 1))
        for x in batches():
            eager(x).loss.backward()
            loss = planned.train_step(x[rows])
            torch.testing.assert_close(loss, eager.result.loss)
            for name, own in planned.named_parameters():
                torch.testing.assert_close(full(own.grad), eager.get_parameter(name).grad)
        assert planned.calls == eager.calls == STEPS
        torch.testing.assert_close(planned.losses, eager.losses)
        torch.testing.assert_close(planned.mean, eager.mean)
        torch.testing.assert_close(planned.features["hidden"], eager.features["hidden"][rows])
        torch.testing.assert_close(planned.result.hidden, eager.result.hidden[rows])
        # Only the stage that reads a buffer has it.
        if planned.average is not None:
            torch.testing.assert_close(planned.average, eager.average)


class BuffersOfStages(Net):
    """Updates buffers that the other stage, the prologue of a step or Python code reads."""

    def __init__(self, stores: bool) -> None:
        super().__init__()
        self.stores, self.means, self.counts = stores, list[Tensor](), list[Tensor]()
        for name in ("scale", "mean", "count"):
            self.register_buffer(name, torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        # The prologue computes both for the batch.
        weight = x.std() * self.mean
        self.scale.lerp_(x.abs().mean(), 0.5)
        hidden = self.hidden(x * self.mean) - self.scale
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean()
        self.count += 1
        if self.stores:
            # One is the buffer itself, the others are values of their steps.
            self.counts.append(self.count)
            self.means.append(self.mean)
        return hidden.square().mean() * weight


def buffers_of_several_stages() -> None:
    for stores in (False, True):
        eager, net, (x, *_) = BuffersOfStages(stores), BuffersOfStages(stores), batches()
        planned = sw.parallelize(net, sw.plan(net, (x,), devices=2, micro_batches=2, stages=2))
        for x in batches():
            loss = eager(x)
            loss.backward()
            torch.testing.assert_close(planned.train_step(x), loss.detach())
        for name, own in planned.named_parameters():
            torch.testing.assert_close(full(own.grad), eager.get_parameter(name).grad)
        for name, buffer in planned.named_buffers():
            torch.testing.assert_close(buffer, eager.get_buffer(name))
        torch.testing.assert_close(planned.means, eager.means)
        torch.testing.assert_close(planned.counts, eager.counts)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), 1.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * self.scale
        return y


class Weighted(nn.Module):
    """Reads numbers from its arguments, an attribute and a submodule, and changes none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.beta = Scaled(), 1.0
        self.gamma = nn.Buffer(torch.tensor(1.0))

    def forward(self, x: Tensor, alpha: Any = 1.0) -> Tensor:
        y: Tensor = self.inner(x).mean() * (alpha * self.beta * self.gamma)
        return y


def numbers_that_vary() -> None:
    net, eager, (x, *_) = Weighted(), Weighted(), batches()
    planned = sw.parallelize(net, sw.plan(net, (x, 0.5), devices=2))
    for step in range(6):
        eager.beta = planned.beta = step / 5
        loss, wanted = planned(x, step / 7), eager(x, step / 7)
        torch.testing.assert_close(loss, wanted)
        loss.backward()
        wanted.backward()
        for name, own in planned.named_parameters():
            torch.testing.assert_close(full(own.grad), eager.get_parameter(name).grad)


CHECKS = (
    numbers_that_vary,
    buffers_of_several_stages,
    state_that_is_in_no_attribute,
    state_of_one_rank_that_is_not_read,
    numbers_of_attributes,
    tensors_in_attributes,
    parts_that_are_not_traced,
    objects_and_arguments,
    evaluation_and_copies,
    hooks_that_store,
    steps_of_micro_batches_and_stages,
)

if __name__ == "__main__":
    run_checks(CHECKS)
