"""`sw.check` compares a plan with the user's own module, trained in float64."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
from random_plans import check_random_plan, random_plan
from shardwright.core.api.check import TOLERANCE
from shardwright.core.api.trained_steps import difference
from shardwright.core.parallel.simulate_ranks import Outcome, simulate

SEEDED = torch.Tag.nondeterministic_seeded


class Program(nn.Module):
    """A linear layer, an embedding, and what `function` makes of them."""

    def __init__(self, function: Callable[[Program, Tensor], Any], sparse: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.table = nn.Embedding(8, 8, sparse=sparse)
        self.cell = nn.LSTMCell(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.phase = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def x() -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(0))


def checked(net: nn.Module, **options: Any) -> sw.Check:
    return sw.check(net, (x(),), None, sw.plan(net, (x(),), devices=4, mem_coeff=10.0, **options))


def cells(net: Program, x: Tensor) -> Tensor:
    hidden = cell = torch.zeros(8, 8)
    for step in x.unbind(1):
        hidden, cell = net.cell(step[:, None].expand(8, 8), (hidden, cell))
    return hidden.square().mean()


def masked(net: Program, x: Tensor) -> Tensor:
    """As a masked autoencoder makes its mask."""
    mask = torch.ones(8, 8)
    mask[:, :4] = 0
    return ((net.linear(x) - x).square() * mask).sum() / mask.sum()


def outputs(net: Program, x: Tensor) -> dict[str, Any]:
    hidden = net.norm(net.linear(x))
    return {"values": hidden.sin(), "loss": hidden.square().mean(), "all": x, "number": 3}


EXACT: dict[str, Callable[[Program, Tensor], Any]] = {
    "cells in a loop": cells,
    "a mask of ones": masked,
    "several outputs": outputs,
    "eye": lambda net, x: (net.linear(x) @ torch.eye(8)).square().mean(),
    "a number in a tensor": lambda net, x: (net.linear(x) * torch.tensor(0.1)).cos().mean(),
    "the root of a number in single precision": lambda net, x: (
        (net.linear(x) / torch.tensor(8, dtype=torch.float32).sqrt()).cos().mean()
    ),
    "a number of the dtype": lambda n, x: (
        (n.linear(x) + 1e5 * torch.finfo(x.dtype).eps).cos().mean()
    ),
    "casts": lambda net, x: F.silu(net.linear(x).float()).to(torch.bfloat16).to(x.dtype).mean(),
    "complex": lambda net, x: (x.to(torch.complex64) @ net.phase).abs().mean(),
    "fft": lambda net, x: torch.view_as_real(torch.fft.fft(net.linear(x))).square().mean(),
    "conjugated views": lambda net, x: (
        torch.view_as_real(torch.fft.ihfft(net.linear(x)).clone()).sin().mean()
        + torch.view_as_real(torch.fft.fft(net.linear(x)).conj().resolve_conj()).cos().mean()
    ),
    "complex outputs": lambda net, x: (
        torch.fft.ihfft(net.linear(x)),
        x.to(torch.cfloat) @ net.phase,
    ),
    "a mask as an output": lambda net, x: (net.linear(x).sum(), net.linear(x) > 0),
    "whole numbers become floats": lambda net, x: torch.conv1d(
        (x.long().float() + (x > 0).to(torch.float32) + (x < 1).half())[:, None],
        *(net.linear.weight[:, None], net.linear.bias),
    ).mean(),
    "no loss": lambda net, x: (net.linear(x), net.linear.weight),
}


@pytest.mark.parametrize("name", EXACT)
def test_a_plan_equals_the_eager_module(name: str) -> None:
    result = checked(Program(EXACT[name]))
    assert result.passes(), result
    assert not result.cause and not result.random_operators


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda net, x: net.table(x.argmax(-1)).mean(), "(?s)sparse gradients .* `sparse=False`"),
        (lambda net, x: torch.func.linearize(net.linear, x)[1](x), "use .*`jvp`.*`linearize`"),
        (lambda net, x: (net.linear(x).to_sparse() * 2).to_dense().mean(), "sparse tensor"),
    ],
)
def test_what_cannot_run_on_shards_is_refused(function: Any, message: str) -> None:
    with pytest.raises(sw.CaptureError, match=message):
        checked(Program(function, sparse=True))


def test_a_sparse_buffer_is_refused_by_name() -> None:
    net = Program(lambda net, x: net.linear(net.edges @ x).mean())
    net.register_buffer("edges", torch.eye(8).to_sparse())
    with pytest.raises(sw.CaptureError, match="edges: a sparse tensor"):
        checked(net)


def test_a_model_without_values_is_refused() -> None:
    with torch.device("meta"):
        net = nn.Linear(8, 8)
    with pytest.raises(sw.PlanError, match="'weight' is on the meta device"):
        checked(net)


def test_random_operators_are_named_and_their_values_not_compared() -> None:
    net = Program(lambda net, x: net.drop(net.linear(x)).square().mean())
    result = checked(net)
    assert result.random_operators == ("drop",)
    assert result.passes(), result
    net.drop.p = 0.0
    assert not checked(net).random_operators
    net.drop.p = 0.5
    assert not checked(net.eval()).random_operators


def test_random_operators_of_which_only_gradients_depend_are_named() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    nn.init.zeros_(net[2].weight)
    x = torch.randn(16, 8)
    result = sw.check(net, (x,), {}, sw.plan(net, (x,), devices=2))
    assert result.random_operators == ("1",)
    assert result.passes(), result


def test_a_plan_for_training_is_not_checked_in_eval() -> None:
    net = Program(outputs)
    plan = sw.plan(net, (x(),), devices=4)
    with pytest.raises(sw.PlanError, match="the plan was made for another model"):
        sw.check(net.eval(), (x(),), None, plan)


def test_state_that_capture_does_not_see_is_found_by_the_eager_module(tmp_path: Path) -> None:
    """The second step shows what the first one does not; the captured graph is to blame."""
    file = tmp_path / "calls"

    def scaled(net: Program, x: Tensor) -> Tensor:
        with file.open("a") as calls:
            calls.write("a call\n")
        calls_so_far = len(file.read_text().splitlines())
        return net.linear(x).square().mean() * (2.0 + calls_so_far // 3)

    result = checked(Program(scaled))
    assert not result.passes()
    assert result.cause == "capture"


def test_an_update_that_is_lost_shows_in_the_buffers() -> None:
    net = Program(outputs)
    plan = sw.plan(net, (x(),), devices=4)
    assert plan.graph is not None
    graph = replace(plan.graph, updates=())
    result = sw.check(net, (x(),), None, replace(plan, graph=graph, fingerprint=graph.fingerprint))
    assert result.loss_difference < 1e-9
    assert result.worst_state.startswith("norm.")
    assert (result.passes(), result.cause) == (False, "capture")


@pytest.mark.parametrize("what", ["gradients", "outputs"])
def test_an_error_of_the_split_is_said_to_be_one(what: str, monkeypatch: Any) -> None:
    def wrong(*args: Any, **kwargs: Any) -> Outcome:
        outcome = simulate(*args, **kwargs)
        if what == "gradients":
            del outcome.gradients["linear.bias"]
            return outcome
        return replace(
            outcome, outputs=[t * 1.001 if torch.is_tensor(t) else t for t in outcome.outputs]
        )

    monkeypatch.setattr(sys.modules["shardwright.core.api.check"], "simulate", wrong)
    result = checked(Program(outputs))
    assert (result.passes(), result.cause) == (False, "split")


class IllConditioned(nn.Module):
    """Divides by differences of nearly equal numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8, eps=1e-30)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.head(self.norm(1.0 + 1e-9 * self.linear(x)).tanh()).square().mean()
        return loss


def test_what_rounding_explains_is_no_difference() -> None:
    net, batch = IllConditioned(), (torch.randn(8, 8, generator=torch.Generator().manual_seed(0)),)
    check = sw.check(net, batch, None, sw.plan(net, batch, devices=4, mode="data_parallel"))
    assert TOLERANCE < check.gradient_difference < 100 * check.rounding
    assert check.passes() and not check.cause
    assert not replace(check, loss_difference=1e-3).passes()


@torch.library.custom_op("check::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


@torch.library.custom_op("check::said_noisy", mutates_args=(), tags=(SEEDED,))
def said_noisy(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


@torch.library.custom_op("check::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return torch.cat([x, x], 1)


@torch.library.custom_op("check::signs", mutates_args=())
def signs(x: Tensor) -> Tensor:
    return x.sign().long()


@torch.library.custom_op("check::rounded", mutates_args=())
def rounded_to_half(x: Tensor) -> Tensor:
    return x.half()


signs.register_fake(lambda x: torch.empty_like(x, dtype=torch.int32))
rounded_to_half.register_fake(torch.empty_like)
for op in (noisy, said_noisy):
    op.register_fake(torch.empty_like)
    op.register_autograd(lambda context, gradient: gradient)
doubled.register_fake(lambda x: x.new_empty(x.shape[0]))
doubled.register_autograd(lambda context, gradient: gradient[:, :8] + gradient[:, 8:])


def test_gradients_of_inputs_are_counted() -> None:
    net = Program(lambda net, x: net.linear(net.linear(x).sin()).square().mean())
    x = torch.randn(8, 8, requires_grad=True)
    graph = sw.plan(net, (x,), devices=4).graph
    assert graph is not None
    check_random_plan(net, (x,), {}, graph, random_plan(graph, 4, 0))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_gradients_of_inputs_are_counted_in_each_micro_batch(micro_batches: int) -> None:
    net = Program(lambda net, x: net.linear(net.linear(x).sin()).square().mean())
    batch = (torch.randn(8, 8, requires_grad=True),)
    plan = sw.plan(net, batch, devices=4, mode="data_parallel", micro_batches=micro_batches)
    assert plan.graph is not None and plan.graph.input_values[0].requires_grad
    result = sw.check(net, batch, None, plan)
    assert result.passes() and sum(result.counted_bytes) > 0, str(result)


class Products(nn.Module):
    """Matrix products of its inputs, without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = sw.shard(torch.matmul, ((4, 1), (1, 1)))
        self.columns = sw.shard(torch.matmul, ((1, 1), (1, 4)))

    def forward(self, x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return self.columns(self.rows(x, w), v)


def test_gradients_of_inputs_are_counted_without_parameters() -> None:
    call = tuple(torch.randn(8, 8, requires_grad=trained) for trained in (False, True, True))
    result = sw.check(
        Products(), call, None, sw.plan(Products(), call, devices=4, mode="semi_auto")
    )
    assert result.passes() and result.counted_bytes[1] > 0, str(result)


def test_statistics_of_inputs_have_no_gradient_to_reduce() -> None:
    net, call = sw.WithLoss(nn.BatchNorm1d(8), nn.MSELoss()), (x(), x())
    result = sw.check(net, call, None, sw.plan(net, call, devices=4, mode="data_parallel"))
    assert result.passes() and result.counted_bytes[0] > 0, str(result)


def test_tensors_that_a_model_makes_in_float32_are_checked_in_float64() -> None:
    def function(net: nn.Module, x: Tensor) -> Tensor:
        rows = torch.zeros(8, dtype=torch.int64)
        total = torch.zeros(8, dtype=torch.float32).scatter_add_(0, rows, net.linear(x).sum(1))
        return total.square().mean()

    assert checked(Program(function)).passes()


class GroupedRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.experts = nn.Linear(16, 16), nn.Parameter(torch.randn(4, 16, 16))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        h = torch._grouped_mm(self.linear(x), self.experts, offs=ends)
        return (h * torch.finfo(h.dtype).eps + h).square().mean()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped_products_which_have_no_float64_kernel_are_checked(dtype: torch.dtype) -> None:
    net, rows = GroupedRows().to(dtype), torch.randn(32, 16, dtype=dtype)
    call = (rows, torch.tensor([8, 8, 30, 32], dtype=torch.int32))
    result = sw.check(net, call, None, sw.plan(net, call, devices=2, mode="data_parallel"))
    assert result.passes() and result.counted_bytes[1] > 0, str(result)


def test_an_operator_that_does_not_say_that_it_draws_random_numbers_is_refused_by_name() -> None:
    message = r"`check\.noisy\.default` draws random .*\n.*tags=torch"
    with pytest.raises(sw.PlanError, match=message):
        checked(Program(lambda net, x: noisy(net.linear(x)).square().mean()))
    assert checked(Program(lambda net, x: said_noisy(net.linear(x)).mean())).passes()


def test_what_fails_for_a_micro_batch_is_said_to_be_one() -> None:
    net = Program(lambda net, pair: net.linear(pair[0])[pair[1]].square().mean())
    pair = (x(), torch.arange(4, 8))
    assert sw.check(net, (pair,), None, sw.plan(net, (pair,), devices=2)).passes()
    pieces = sw.Pipeline(net, 2, loss_reduction="sum")
    plan = sw.plan(pieces, (pair,), devices=2)
    with pytest.raises(sw.PlanError, match=r"one of 2 micro-batches \(tensors are split"):
        sw.check(net, (pair,), None, plan)
    net.function = lambda net, pair: (net.linear(pair[0]).view(4, 16) * pair[1]).square().mean()
    pair = (x(), torch.ones(4, 16))
    with pytest.raises(sw.StrategyError, match=r"not for a micro-batch: .*test_check"):
        sw.plan(net, (pair,), devices=2, micro_batches=2)


def test_a_fake_implementation_that_says_another_shape_is_refused_with_both() -> None:
    said = r"check.doubled.default.*returns \(8,\), but the operator returns \(8, 16\)"
    with pytest.raises(sw.CaptureError, match=said):
        checked(Program(lambda net, x: doubled(net.linear(x)).sin().mean()))


def test_a_fake_implementation_that_says_another_dtype_is_refused_with_both() -> None:
    net = Program(lambda net, x: (net.linear(x) * signs(x)).mean())
    with pytest.raises(sw.CaptureError, match=r"check.signs.*int32, but the operator .*int64"):
        checked(net)
    x = torch.randn(8, 8)
    net = Program(lambda net, x: (net.linear(x) * rounded_to_half(x)).mean())
    planned = sw.parallelize(net, sw.plan(net, (x,), devices=1), copy=True)
    with pytest.raises(sw.CaptureError, match=r"torch.float32, but the operator .*float16"):
        planned(x)


def test_an_operator_without_float64_is_said_not_to_be_checked() -> None:
    def rounded(net: Program, x: Tensor) -> Tensor:
        scale, zero = torch.full((8,), 0.1), torch.zeros(8, dtype=torch.int32)
        return torch.fake_quantize_per_channel_affine(net.linear(x), scale, zero, 1, 0, 9).mean()

    with pytest.raises(sw.PlanError, match=r"this module does not run: .*Scale must be Float"):
        checked(Program(rounded))


class Called(nn.Module):
    """Has a `__call__` that passes other arguments to `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def __call__(self, x: Tensor) -> Any:
        return super().__call__(2 * x)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.linear(x).square().mean()
        return loss


def test_forward_is_compared_where_the_model_has_a_call_of_its_own() -> None:
    net, args = Called(), (torch.randn(4, 8),)
    assert sw.check(net, args, None, sw.plan(net, args, devices=2)).passes()
    planned = sw.parallelize(net, sw.plan(net, args, devices=1), copy=True)
    torch.testing.assert_close(planned(*args), net(*args))


class PowerOfAScalar(nn.Module):
    """Powers whose gradients overflow, and a transpose of a tensor without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.linspace(1.0, 1e5, 16).reshape(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.base).pow(60).sum().transpose(0, -1)


def test_gradients_that_overflow_are_compared_where_they_do_not() -> None:
    net, batch = PowerOfAScalar(), (torch.rand(8, 4),)
    assert sw.check(net, batch, {}, sw.plan(net, batch, devices=2)).passes()
    huge = torch.tensor([torch.inf, 1e200], dtype=torch.float64)
    assert difference(huge * (1 + 1e-15), huge) < TOLERANCE
    assert difference(huge * 1.5, huge) > TOLERANCE
    assert difference(torch.tensor([1.0, 1.0]), torch.tensor([torch.inf, 1.0])) == torch.inf


class AssignedBuffer(nn.Module):
    """Assigns a new tensor to its buffer, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(6, 4), 0
        self.register_buffer("center", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(x)
        loss = ((z.detach() - self.center).softmax(-1) * z).mean()
        self.center = self.center * 0.9 + z.detach().mean(0) * 0.1
        self.calls += 1
        return loss


def test_a_buffer_that_forward_assigns_beside_python_state_has_its_value_in_the_next_step() -> None:
    net, batch = AssignedBuffer(), (torch.randn(4, 6),)
    assert sw.check(net, batch, None, sw.plan(net, batch, devices=2)).passes()
    assert net.calls == 0 and not net.center.any()


class StoredFeatures(nn.Module):
    """A hook stores the features of a layer in the model, which `forward` reads."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.features = nn.Linear(6, 8), nn.Linear(8, 4), {}
        self.body.register_forward_hook(lambda *call: self.features.update(body=call[-1]))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu()).square().mean() + self.features["body"].mean()


def test_features_that_a_hook_stores_in_the_model_are_those_of_the_copy_that_is_trained() -> None:
    net, batch = StoredFeatures(), (torch.randn(4, 6),)
    assert sw.check(net, batch, None, sw.plan(net, batch, devices=2)).passes()
    assert not net.features


class Flow(nn.Module):
    """The likelihood under a prior in an attribute, whose tensors are neither parameters nor
    buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(4, 4)
        normal = torch.distributions.MultivariateNormal(torch.zeros(4), torch.eye(4))
        shift = torch.distributions.AffineTransform(torch.ones(4), 2 * torch.ones(4))
        self.prior = torch.distributions.TransformedDistribution(normal, [shift])

    def forward(self, x: Tensor) -> Tensor:
        return -self.prior.log_prob(self.scale(x)).mean()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_distributions_in_attributes_are_checked_in_float64(micro_batches: int) -> None:
    net, batch = Flow(), (torch.randn(8, 4),)
    plan = sw.plan(net, batch, devices=2, micro_batches=micro_batches)
    assert sw.check(net, batch, None, plan).passes()
    assert net.prior.base_dist.loc.dtype == torch.float32


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).exp()


@pytest.mark.parametrize("shape", [(0, 3), (1, 0, 3)])
def test_empty_batches_are_compared(shape: tuple[int, ...]) -> None:
    graph = sw.capture(Scaled(), (torch.zeros(shape),))
    check_random_plan(Scaled(), (torch.zeros(shape),), {}, graph, random_plan(graph, 4, seed=0))


class Signs(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sgn(x * self.scale)


def test_gradients_without_memory_are_zeros() -> None:
    x = torch.randn(4, 3)
    for seed in range(4):
        graph = sw.capture(Signs(), (x,))
        check_random_plan(Signs(), (x,), {}, graph, random_plan(graph, 4, seed=seed))
