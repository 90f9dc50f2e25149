from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop

from core.capture.test_capture import Function, x
from shardwright.core.capture.capture import capture
from shardwright.core.graph.interpreter import interpret
from shardwright.core.runtime.micro_batches import micro_batch
from shardwright.errors import CaptureError, PlanError

pytestmark = pytest.mark.usefixtures("untried_suggestions")


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return -x


class Item(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.sum().item()


class Masked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].cumsum(0)


class CustomBackward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        return Doubled.apply(x)


class Expanded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        y.expand(2, 4, 4)[0].add_(1)
        return y


class IntoOut(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        values, indices = torch.empty_like(x[0]), torch.empty(4, dtype=torch.long)
        torch.max(x, 1, out=(values, indices))
        return values


class Diagonal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 2).fill_diagonal_(1, wrap=True)


class Beyond(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 2)[1].as_strided((3, 2), (4, 1), 0)


class Raising(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("no such head")


class Drawing(nn.Module):
    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.draw() < 0.5 else x


@pytest.mark.parametrize("draw", [random.random, lambda: np.random.rand()])
def test_numbers_that_forward_draws_outside_of_torch_are_refused(draw: Callable[[], float]) -> None:
    with pytest.raises(CaptureError, match=r"`forward` of Drawing.*draws from `random`"):
        capture(Drawing(draw), (torch.randn(3, 4),))


class Seeding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return nn.functional.dropout(x)


class Forked(Seeding):
    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            return super().forward(x)


@pytest.mark.parametrize("net", [Seeding(), Forked()])
def test_seeding_in_forward_is_refused_also_if_it_is_undone(net: nn.Module) -> None:
    state = torch.get_rng_state()
    with pytest.raises(CaptureError, match=r"`forward` seeds .*`torch.manual_seed`.*\nseed in"):
        capture(net, (torch.randn(3, 4, generator=torch.Generator()),))
    assert torch.equal(torch.get_rng_state(), state)


class Generating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(4, generator=self.generator)


def test_draws_from_a_generator_of_the_module_are_refused_and_leave_it_as_it_was() -> None:
    net = Generating()
    state = net.generator.get_state()
    with pytest.raises(CaptureError, match=r"draws from a `torch.Generator`.*\ndraw without a gen"):
        capture(net, (torch.randn(3, 4),))
    assert torch.equal(net.generator.get_state(), state)


@pytest.mark.parametrize(
    ("net", "line", "advice"),
    [
        (Branch(), "if x.sum() > 0:", "torch.where"),
        (Item(), "return x * x.sum().item()", "remove `.item()`"),
        (Masked(), "return x[x > 0]", "multiply by the mask"),
        (CustomBackward(), "return Doubled.apply(x)", "torch.library.custom_op"),
        (Expanded(), "y.expand(2, 4, 4)[0].add_(1)", "returns a new tensor"),
        (
            IntoOut(),
            "torch.max(x, 1, out=(values, indices))",
            "use the operator that returns a new tensor",
        ),
        (
            Diagonal(),
            "return (x * 2).fill_diagonal_(1, wrap=True)",
            "compute the result with `torch.where`",
        ),
        (Beyond(), "return (x * 2)[1].as_strided((3, 2), (4, 1), 0)", "use `unfold`, slices"),
        (Raising(), 'raise ValueError("no such head")', "ValueError: no such head"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_the_error_names_the_users_line_and_what_to_change(
    net: nn.Module, line: str, advice: str
) -> None:
    with pytest.raises(CaptureError) as error:
        capture(net, (x(),))
    message = str(error.value)
    assert "test_capture_errors.py:" in message
    assert f"`{line}`" in message
    assert advice in message


def jagged(net: nn.Module, x: Tensor) -> Tensor:
    rows = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, 4]))
    result: Tensor = (rows @ net.weight).values()
    return result


def test_nested_tensors_are_refused_with_what_to_use() -> None:
    with pytest.raises(
        CaptureError, match=r"(?s)nested_tensor_from_jagged.*pad samples to the longest"
    ):
        capture(Function(jagged), (x(),))
    rows = torch.nested.nested_tensor([x()[:1], x()[1:]], layout=torch.jagged)
    with pytest.raises(
        CaptureError, match=r"(?s)^an argument: nested tensors .*\npad samples to the longest"
    ):
        capture(Function(jagged), (rows,))
    with pytest.raises(PlanError, match="a nested tensor, which cannot be split"):
        micro_batch([rows], 0, 2)


def functionalized(net: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = torch.func.functionalize(lambda x: (x @ net.weight).add_(1))(x)
    return result


def branched(net: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = torch.cond(x.sum() > 0, lambda x: x @ net.weight, lambda x: x.sin(), (x,))
    return result


def looped(net: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = while_loop(lambda x: x.sum() < 9, lambda x: (x @ net.weight,), (x,))[0]
    return result


@pytest.mark.parametrize(
    ("function", "advice"),
    [
        (functionalized, "call the function without `functionalize`"),
        (branched, "compute both branches and select by `torch.where`"),
        (looped, "loop in Python a known number of times"),
    ],
)
def test_functions_of_functions_are_refused_with_what_to_use(
    function: Callable[..., Tensor], advice: str
) -> None:
    with pytest.raises(CaptureError, match=f"(?s)test_capture_errors.py:.*{advice}"):
        capture(Function(function), (x(),))


def test_data_cannot_become_a_tensor_of_another_shape() -> None:
    def shrink(net: nn.Module, x: Tensor) -> Tensor:
        net.weight.data = net.weight.data[:2]
        return x @ net.weight.t()

    with pytest.raises(
        CaptureError, match=r"`.data` that changes \(4, 4\) torch.float64 to \(2, 4\)"
    ):
        capture(Function(shrink), (x(),))


def test_values_that_go_to_numpy_are_refused_with_the_line() -> None:
    def sorted_by_numpy(net: nn.Module, x: Tensor) -> Tensor:
        return x[torch.from_numpy(np.argsort(x[:, 0].detach().numpy()))]

    with pytest.raises(
        CaptureError, match=r"return x\[torch.from_numpy.*converts a tensor to numpy"
    ):
        capture(Function(sorted_by_numpy), (x(),))


def test_a_lazy_parameter_must_be_initialized_first() -> None:
    with pytest.raises(CaptureError, match=r"weight: .* no shape yet\nrun the module once"):
        capture(nn.LazyLinear(4), (x(),))


@torch.library.custom_op("capture_errors::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


class WithoutFake(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return doubled(x)


@pytest.mark.parametrize(
    ("net", "advice"),
    [
        (WithoutFake(), r"(?s)return doubled\(x\).*needs a fake implementation.*register_fake"),
    ],
)
def test_what_tracing_lacks_is_said_with_the_line(net: nn.Module, advice: str) -> None:
    with pytest.raises(CaptureError, match=advice):
        capture(net, (x(),))


def test_a_scripted_part_is_named() -> None:
    net = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    with pytest.raises(
        CaptureError, match=r"(?s)1 is scripted .*\nuse the module that it was made from"
    ):
        capture(net.double(), (x(),))


def test_a_module_that_cannot_be_copied_is_named() -> None:
    net = nn.Linear(4, 4)
    net.stream = (i for i in range(3))  # type: ignore[assignment]
    with pytest.raises(CaptureError, match="deepcopy` of Linear failed"):
        capture(net, (x(),))


def test_custom_functions_work_again_after_a_capture() -> None:
    with pytest.raises(CaptureError):
        capture(CustomBackward(), (x(),))
    given = x().requires_grad_()
    CustomBackward()(given).sum().backward()
    assert given.grad is not None
    assert given.grad.eq(torch.arange(1.0, 5.0)[:, None]).all()


def test_a_graph_refuses_another_call() -> None:
    graph = capture(nn.Flatten(), (x(),))
    with pytest.raises(CaptureError, match=r"shape \(4, 4\), but called with \(2, 4\)"):
        interpret(graph, {}, {}, (torch.ones(2, 4),))
    with pytest.raises(CaptureError, match="was captured for arguments of structure"):
        interpret(graph, {}, {}, (), {"input": x()})


@pytest.mark.parametrize("of_tensor", [True, False])
def test_a_backward_pass_in_forward_is_refused_with_the_line(of_tensor: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            loss = self.linear(x).sum()
            loss.backward() if of_tensor else torch.autograd.backward(loss)
            return x

    with pytest.raises(
        CaptureError, match=r"test_capture_errors.py:\d+: .*`forward` calls `backward`"
    ):
        capture(Net(), (torch.randn(3, 4),))


def test_a_layer_under_torch_compile_is_captured() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x, wanted = torch.randn(3, 4), [op.target for op in capture(net, (torch.randn(3, 4),)).ops]
    net[0] = torch.compile(net[0])  # type: ignore[assignment]
    assert [op.target for op in capture(net, (x,)).ops] == wanted


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (torch.ones(2, 3), None, "must be a tuple, not a Tensor"),
        ([torch.ones(2, 3)], None, "must be a tuple, not a list"),
        ((torch.ones(2, 3),), torch.ones(2), "must be a mapping of names, not a Tensor"),
        ((torch.ones(2, 3),), {3: torch.ones(2)}, "must be strings, not 3"),
    ],
)
def test_arguments_that_are_not_those_of_a_call_are_refused(
    args: Any, kwargs: Any, message: str
) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(nn.Linear(3, 3), args, kwargs)


@pytest.mark.parametrize(
    ("arguments", "raised"),
    [
        ((torch.ones(4, 7), torch.zeros(4, dtype=torch.long)), "same reduction dim"),
        ((torch.ones(4, 8), torch.zeros(4)), "dtype int32/int64"),
        ((torch.ones(4, 8), torch.zeros(3, dtype=torch.long)), "to match target batch_size"),
    ],
)
def test_an_error_of_the_model_itself_is_said_to_be_its_own(
    arguments: tuple[Tensor, Tensor], raised: str
) -> None:
    class Classifier(nn.Linear):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
            return nn.functional.cross_entropy(super().forward(x), labels)

    with pytest.raises(CaptureError, match=rf"the model itself raises an error .*{raised}.*\npass"):
        capture(Classifier(8, 5), arguments)


@pytest.mark.parametrize(
    "error",
    [AttributeError("no 'start'"), KeyError("start"), AssertionError("start"), Exception("start")],
)
def test_an_error_of_any_class_is_said_to_be_the_models_own(error: Exception) -> None:
    class Failing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if x.ndim == 2:
                raise error
            return super().forward(x)

    with pytest.raises(CaptureError, match=f"the model itself raises .*{type(error).__name__}"):
        capture(Failing(8, 5), (torch.ones(2, 8),))
