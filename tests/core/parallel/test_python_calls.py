"""Python state of a model that changes in each call, on real processes and in error."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from core.parallel.python_calls_ranks import CHECKS, Counter, Net, Returning, batches, trained
from torchrun import checks_on_ranks

log = logging.getLogger(__name__)

test_python_state_changes_as_on_one_device = checks_on_ranks(CHECKS, 2)


def test_state_that_summed_micro_batches_would_change_several_times_is_refused() -> None:
    batch = (batches()[0],)
    net = sw.Pipeline(Counter(), 2, loss_reduction="sum")
    with pytest.raises(sw.StrategyError, match=r"once per batch, .*\n.*micro_batches=1"):
        sw.plan(net, batch, devices=1)


class Spread(Counter):
    """Stores a value that micro-batches do not determine."""

    spread: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.spread = self.hidden(x).detach().std()
        return super().forward(x)


def test_a_value_that_micro_batches_do_not_determine_is_an_error_where_it_is_read() -> None:
    net, eager, batch = Spread(), Spread(), (batches()[0],)
    planned = sw.parallelize(net, sw.plan(net, batch, devices=1, micro_batches=2))
    torch.testing.assert_close(planned.train_step(*batch), eager(*batch).detach())
    with pytest.raises(sw.PlanError, match=r"'std' \(.*\) mixes samples"):
        print(planned.spread + 1)


class Measuring(Counter):
    """Reads a number that micro-batches do not determine."""

    def forward(self, x: Tensor) -> Tensor:
        self.spread = self.hidden(x).detach().std().item()
        return super().forward(x)


def test_a_number_that_micro_batches_do_not_determine_is_refused() -> None:
    with pytest.raises(sw.StrategyError, match=r"aten.std.* mixes samples, and Python code reads"):
        sw.plan(Measuring(), (batches()[0],), devices=1, micro_batches=2)


def test_an_object_that_a_step_with_micro_batches_returns_is_not_needed() -> None:
    net, batch = Returning(), (batches()[0],)
    planned = sw.parallelize(net, sw.plan(net, batch, devices=1, micro_batches=2))
    torch.testing.assert_close(planned.train_step(*batch), Returning()(*batch).loss)


class Flag:
    """An object that code outside of the model's modules reads."""

    is_on, sizes = False, None


FLAG = Flag()
FLAG.is_on, FLAG.sizes = False, None


class Flagging(Counter):
    """Sets a flag for the time of a call only, as `transformers` does to collect outputs."""

    def forward(self, x: Tensor) -> Tensor:
        FLAG.is_on, FLAG.sizes = True, x.shape
        try:
            return (self.hidden(x) if FLAG.is_on else x).square().mean()
        finally:
            FLAG.is_on, FLAG.sizes = False, None


def test_state_that_a_call_restores_does_not_change() -> None:
    net, batch = Flagging(), (batches()[0],)
    for options in ({"micro_batches": 2, "devices": 2}, {"stages": 2, "micro_batches": 2}):
        plan = sw.plan(net, batch, **{"devices": 2, **options})
        assert sw.check(net, batch, None, plan).passes()
    assert not FLAG.is_on


def test_train_step_changes_state_once() -> None:
    net, eager, batch = Counter(), Counter(), (batches()[0],)
    planned = sw.parallelize(net, sw.plan(net, batch, devices=1))
    for _ in range(3):
        torch.testing.assert_close(planned.train_step(*batch), eager(*batch).detach())
    assert planned.calls == eager.calls == 3


class Recording(Net):
    """Keeps its state in a namespace."""

    def __init__(self) -> None:
        super().__init__()
        self.record = SimpleNamespace(calls=0, spread=None)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x)
        self.record.calls += 1
        self.record.spread = hidden.detach().square().mean()
        return hidden.square().mean() * self.record.calls


def test_a_namespace_changes_in_each_call() -> None:
    net, eager, batch = Recording(), Recording(), (batches()[0],)
    planned = sw.parallelize(net, sw.plan(net, batch, devices=1))
    for _ in range(3):
        torch.testing.assert_close(planned(*batch), eager(*batch))
        assert planned.record.calls == eager.record.calls
        torch.testing.assert_close(planned.record.spread, eager.record.spread)


class Hooked(Net):
    """Registers one more hook on a parameter in each call."""

    def forward(self, x: Tensor) -> Tensor:
        self.first.weight.register_hook(lambda gradient: 2 * gradient)
        return self.hidden(x).square().mean()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_hooks_of_parameters_are_registered_in_each_step(micro_batches: int) -> None:
    net, eager, batch = Hooked(), Hooked(), (batches()[0],)
    plan = sw.plan(net, batch, devices=1, micro_batches=micro_batches)
    planned = sw.parallelize(net, plan)
    for _ in range(3):
        for each in (planned, eager):
            each.zero_grad()
        planned.train_step(*batch)
        eager(*batch).backward()
        torch.testing.assert_close(planned.first.weight.grad, eager.first.weight.grad)


def test_check_refuses_hooks_that_simulated_ranks_would_not_register() -> None:
    net, batch = Hooked(), (batches()[0],)
    plan = sw.plan(net, batch, devices=2)
    with pytest.raises(sw.PlanError, match=r"registers hooks .*\n.*before `plan`"):
        sw.check(net, batch, None, plan)
    net.forward = lambda x: net.hidden(x).square().mean()  # type: ignore[method-assign]
    net.first.weight.register_hook(lambda gradient: 2 * gradient)  # type: ignore[no-untyped-call]
    assert sw.check(net, batch, None, sw.plan(net, batch, devices=2)).passes()


def test_check_compares_calls_from_the_same_state() -> None:
    net, batch = Counter(), (batches()[0],)
    assert sw.check(net, batch, None, sw.plan(net, batch, devices=2)).passes()
    assert net.calls == 0


class Following(Counter):
    """Penalizes the distance to the weights of the last call."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.first.weight
        distance = 0 if self.last is None else (weight - self.last).square().sum()
        self.last = weight.detach().clone()
        return self.hidden(x).square().mean() + distance


def test_a_copy_of_a_parameter_stays_what_it_was() -> None:
    net, eager = Following(), Following()
    planned = sw.parallelize(net, sw.plan(net, (batches()[0],), devices=1))
    torch.testing.assert_close(trained(planned), trained(eager))
    torch.testing.assert_close(planned.last, eager.last)


def in_an_attribute(net: Counter, x: Tensor) -> Tensor:
    return net.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))


def in_a_list(net: Counter, x: Tensor) -> Tensor:
    net.tables[0][:2] = x.detach().mean(0)[:2]
    return net.tables[0]


def as_a_view(net: Counter, x: Tensor) -> Tensor:
    net.view = net.first.bias.detach()
    return net.view[0]


@pytest.mark.parametrize("change", [in_an_attribute, in_a_list, as_a_view])
def test_tensors_that_a_program_could_not_change_are_refused(
    change: Callable[[Any, Tensor], Tensor],
) -> None:
    class Changing(Counter):
        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.hidden(x - change(self, x)).square().mean()

    net = Changing()
    net.mean, net.tables = torch.zeros(8), [torch.zeros(8)]
    with pytest.raises(sw.CaptureError, match="`forward` changes the attribute"):
        sw.plan(net, (batches()[0],), devices=1)


class Counted(Counter):
    """Counts in a buffer, which `+=` assigns to itself, and in a number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.calls += 1
        return self.hidden(x).square().mean() * self.steps


def test_a_buffer_that_is_assigned_to_itself_is_updated() -> None:
    net, eager = Counted(), Counted()
    planned = sw.parallelize(net, sw.plan(net, (batches()[0],), devices=1))
    torch.testing.assert_close(trained(planned), trained(eager))
    assert planned.steps.item() == eager.steps.item() == planned.calls


class PartlyTrained(Counter):
    """Computes gradients in a region inside of one without."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.hidden(x)
        with torch.inference_mode():
            norm = hidden.norm()
            with torch.inference_mode(False):
                trained = hidden.tanh()
        return (trained + norm).square().mean()


def test_regions_of_inference_mode_have_no_gradients() -> None:
    net, eager = PartlyTrained(), PartlyTrained()
    planned = sw.parallelize(net, sw.plan(net, (batches()[0],), devices=1))
    torch.testing.assert_close(trained(planned), trained(eager))


FILLED: dict[str, float] = {}


def from_an_attribute(net: Any) -> float:
    try:
        return net.cache["scale"]  # type: ignore[no-any-return]
    except AttributeError:
        net.cache = {"scale": 2.0}
        return 1.0


def from_a_dictionary(net: Any) -> float:
    try:
        return FILLED["scale"]
    except KeyError:
        FILLED["scale"] = 2.0
        return 1.0


def from_its_class(net: Any) -> float:
    try:
        return type(net).scale  # type: ignore[no-any-return]
    except AttributeError:
        type(net).scale = 2.0
        return 1.0


def from_a_moved_layer(net: Any) -> float:
    net.calls += 1
    net.first.to(net.second.weight.device)
    return net.calls  # type: ignore[no-any-return]


def from_its_variables(net: Any) -> float:
    calls: int = vars(net).get("number", 0) + 1
    net.number = calls
    return calls


def from_its_dictionary(net: Any) -> float:
    net.__dict__["number"] = net.__dict__.get("number", 0) + 1
    return net.__dict__["number"]  # type: ignore[no-any-return]


def scaled_by(scale: Callable[[Any], float]) -> Callable[[], nn.Module]:
    """A class of a model that multiplies its loss."""

    class Scaled(Counter):
        def forward(self, x: Tensor) -> Tensor:
            return self.hidden(x).square().mean() * scale(self)

    return Scaled


@pytest.mark.parametrize(
    "scale",
    [
        *(from_an_attribute, from_a_dictionary, from_its_class, from_a_moved_layer),
        *(from_its_variables, from_its_dictionary),
    ],
)
def test_what_the_first_call_makes_is_read_by_the_second(scale: Callable[[Any], float]) -> None:
    wanted = trained(scaled_by(scale)())
    FILLED.clear()
    net = scaled_by(scale)()
    planned = sw.parallelize(net, sw.plan(net, (batches()[0],), devices=1))
    assert not FILLED
    torch.testing.assert_close(trained(planned), wanted)
    FILLED.clear()


def from_the_number_of_attributes(net: Any) -> float:
    number = len(vars(net))
    setattr(net, f"number{number}", 1.0)
    return number


def from_a_default_entry(net: Any) -> float:
    net.number = net.__dict__.setdefault("number", 0) + 1
    return net.number  # type: ignore[no-any-return]


@pytest.mark.parametrize("scale", [from_the_number_of_attributes, from_a_default_entry])
def test_reads_that_dynamo_does_not_guard_are_refused(scale: Callable[[Any], float]) -> None:
    with pytest.raises(sw.CaptureError, match="`forward` changes the attribute 'number") as error:
        sw.capture(scaled_by(scale)(), (batches()[0],))
    cause = error.value.__cause__
    assert "which TorchDynamo does not detect" in str(cause and cause.__notes__)


def later_entry(net: Any) -> float:
    net.calls += 1
    return net.__dict__.get("later", 1.0)  # type: ignore[no-any-return]


def later_variable(net: Any) -> float:
    net.calls += 1
    return vars(net)["later"] if "later" in vars(net) else 1.0  # noqa: SIM401 - contains alone


@pytest.mark.parametrize("scale", [later_entry, later_variable])
def test_an_attribute_that_is_set_between_calls_is_read(scale: Callable[[Any], float]) -> None:
    net, eager, (x, *_) = scaled_by(scale)(), scaled_by(scale)(), batches()
    planned = sw.parallelize(net, sw.plan(net, (x,), devices=1))
    for later in (None, 3.0):
        if later is not None:
            net.later = eager.later = later
        for _ in range(2):
            torch.testing.assert_close(planned(x), eager(x))


class WrongScale(torch.autograd.Function):
    """Has another derivative than its operators."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x**2


def transformed(net: Counter, y: Tensor) -> Tensor:
    return torch.func.grad(lambda y: WrongScale.apply(y).square().sum())(y)  # type: ignore[no-any-return]


def seeded(net: Counter, y: Tensor) -> Tensor:
    torch.manual_seed(0)
    return y * torch.rand(8)


def drawn_by_python(net: Counter, y: Tensor) -> Tensor:
    return y * random.random()


def drawn_by_a_generator(net: Counter, y: Tensor) -> Tensor:
    return y * torch.rand(8, generator=net.generator)


def reentrant(net: Counter, y: Tensor) -> Tensor:
    result: Tensor = checkpoint(torch.tanh, y, use_reentrant=True)
    return result


@pytest.mark.parametrize(
    "compute", [transformed, seeded, drawn_by_python, drawn_by_a_generator, reentrant]
)
def test_what_dynamo_would_compute_otherwise_is_refused_and_leaves_nothing_behind(
    compute: Callable[[Any, Tensor], Tensor], capfd: pytest.CaptureFixture[str]
) -> None:
    class Changing(Counter):
        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return compute(self, self.hidden(x)).square().mean()

    net, batch = Changing(), (batches()[0],)
    net.generator = torch.Generator()
    drawn, python = torch.get_rng_state(), random.getstate()
    with pytest.raises(sw.CaptureError):
        sw.plan(net, batch, devices=1)
    assert capfd.readouterr() == ("", "")
    assert net.calls == 0 and random.getstate() == python
    assert torch.equal(torch.get_rng_state(), drawn) and torch.is_grad_enabled()
    # A transform that had stayed active would refuse this.
    assert torch.func.grad(torch.sin)(torch.zeros(())) == 1
    with torch.autograd.graph.save_on_cpu():
        torch.ones(2, requires_grad=True).exp().sum().backward()


class Weighted(Counter):
    """Weighs its loss by a number that changes, and divides by one of numpy, after logging it."""

    weight = 3.0

    def forward(self, x: Tensor) -> Tensor:
        self.weight *= 0.9
        if log.isEnabledFor(logging.DEBUG):
            log.debug("weight %s", self.weight)
        loss = self.hidden(x).square().mean() * self.weight / np.sqrt(x.shape[-1])
        return loss + torch.where(loss > self.weight, self.weight, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_times_a_number_that_changes_keeps_its_dtype(dtype: torch.dtype) -> None:
    net, eager, x = Weighted().to(dtype), Weighted().to(dtype), batches()[0].to(dtype)
    planned = sw.parallelize(net, sw.plan(net, (x,), devices=1))
    for _ in range(3):
        torch.testing.assert_close(planned(x), eager(x))
    assert planned.weight == eager.weight


def test_a_model_with_state_is_called_in_a_region_of_autocast() -> None:
    net, eager, x = Weighted(), Weighted(), batches()[0].float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        planned = sw.parallelize(net, sw.plan(net, (x,), devices=1))
        for _ in range(3):
            torch.testing.assert_close(planned(x), eager(x))
    torch.testing.assert_close(planned(x), eager(x))


class Turning(Counter):
    """Branches on a value from the third call on."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        loss = self.hidden(x).square().mean()
        return 2 * loss if self.calls > 2 and loss > 0 else loss


def test_a_later_state_that_cannot_be_captured_is_refused_with_a_way_out() -> None:
    net, batch = Turning(), (batches()[0],)
    planned = sw.parallelize(net, sw.plan(net, batch, devices=1))
    planned(*batch)
    planned(*batch)
    words = "loss > 0", "current Python state", r"local_map\(net"
    with pytest.raises(sw.CaptureError, match=r"(.|\n)*".join(words)):
        planned(*batch)


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.seen: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append("x" * len(self.seen))
        return self.linear(x).sum() * len("".join(self.seen))


def test_state_that_never_repeats_ends_with_an_error_that_names_it() -> None:
    net = Growing()
    planned = sw.parallelize(net, sw.plan(net, (batches()[0],), devices=1))
    with pytest.raises(sw.PlanError, match=r"differs between calls: .*seen.*\n.*register_buffer"):
        for _ in range(12):
            planned(batches()[0])


class Storing(Counter):
    """Stores and returns what it assigns to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.average, self.averages = nn.Buffer(torch.zeros(8)), list[Tensor]()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.hidden(x)
        self.average = 0.5 * self.average + hidden.detach().mean(0)
        self.averages.append(self.average)
        return {"loss": hidden.square().mean(), "average": self.average}


def test_what_is_assigned_to_a_buffer_and_stored_keeps_its_value() -> None:
    for options in ({}, {"micro_batches": 2}):
        eager, net, (x, *_) = Storing(), Storing(), batches()
        buffer = net.average
        planned = sw.parallelize(net, sw.plan(net, (x,), devices=1, **options))
        results = [(planned(x), eager(x)) for x in batches()]
        for own, wanted in results:
            torch.testing.assert_close(own, wanted)
        planned.train_step(x)
        eager(x)
        torch.testing.assert_close(planned.averages, eager.averages)
        torch.testing.assert_close(planned.average, eager.average)
        assert planned.average is buffer


class Deviating(Net):
    """Adds to a value that micro-batches do not determine."""

    def __init__(self) -> None:
        super().__init__()
        self.deviation = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x)
        self.deviation = self.deviation + hidden.detach().std()
        return hidden.square().mean()


def test_a_read_of_a_value_that_micro_batches_do_not_determine_says_why() -> None:
    net, (x, *_) = Deviating(), batches()
    planned = sw.parallelize(net, sw.plan(net, (x,), devices=1, micro_batches=2))
    planned.train_step(x)
    with pytest.raises(sw.PlanError, match="mixes samples, so that micro-batches do not determine"):
        planned.train_step(x)


class MaskedByLength(nn.Module):
    """Caches the mask of an `nn.TransformerEncoder`, which looks for causal masks by their values,
    as PyTorch's word language model does."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0)
        self.encoder, self.decoder = nn.TransformerEncoder(layer, 1), nn.Linear(8, 8)
        self.mask: Tensor | None = None

    def forward(self, x: Tensor, is_causal: bool | None = None) -> Tensor:
        if self.mask is None or self.mask.size(0) != len(x):
            self.mask = torch.log(torch.tril(torch.ones(len(x), len(x))))
        hidden = self.encoder(x, mask=self.mask, is_causal=is_causal)
        return self.decoder(hidden).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("hint", [None, True, False])
def test_a_causal_mask_that_forward_caches_by_length_is_read(hint: bool | None) -> None:
    net = MaskedByLength()
    eager = MaskedByLength()
    eager.load_state_dict(net.state_dict())
    planned = sw.parallelize(net, sw.plan(net, (torch.randn(6, 4, 8), hint), devices=1))
    for length in (6, 5, 6):
        x = torch.randn(length, 4, 8)
        torch.testing.assert_close(planned(x, hint), eager(x, hint))
        torch.testing.assert_close(planned.mask, eager.mask)
