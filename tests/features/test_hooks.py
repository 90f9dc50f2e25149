"""Hooks: each works as with the eager module, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import shardwright as sw
from shardwright.errors import CaptureError, PlanError

BATCH = torch.randn(4, 8)


class Net(nn.Module):
    def __init__(self, register: Callable[[Net], Any] = lambda net: None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        register(self)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.body(x).square().mean()
        return loss


def doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def doubled_inputs(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    return (args[0] * 2,)


def clamped(module: nn.Module, args: Any) -> None:
    with torch.no_grad():
        module.weight.clamp_(-0.1, 0.1)  # type: ignore[operator, union-attr]


def scale_when_accumulated(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(parameter.grad.norm())


def on_gradients(net: Net) -> None:
    net.body[0].weight.register_hook(lambda gradient: gradient / gradient.norm())
    net.body[2].weight.register_post_accumulate_grad_hook(scale_when_accumulated)


def with_weight_norm(net: Net) -> None:
    nn.utils.weight_norm(net.body[0])


def pruned(net: Net) -> None:
    prune.l1_unstructured(net.body[0], "weight", 0.5)


BEFORE: dict[str, Callable[[Net], Any]] = {
    "gradients": on_gradients,
    "output": lambda net: net.body[0].register_forward_hook(doubled),
    "input": lambda net: net.body[2].register_forward_pre_hook(doubled_inputs),
    "in place": lambda net: net.body[0].register_forward_pre_hook(clamped),
    "root": lambda net: net.register_forward_hook(doubled),
    "weight norm": with_weight_norm,
    "pruning": pruned,
}
AFTER: dict[str, Callable[[Any], Any]] = {
    "gradients": on_gradients,
    "root": lambda net: net.register_forward_hook(doubled),
    "root's backward": lambda net: net.register_full_backward_pre_hook(lambda m, g: (g[0] * 3,)),
}


def check_gradients(net: nn.Module, parallel: nn.Module, step: bool = False) -> None:
    for _ in range(2):
        net(BATCH).backward()
        if step:
            parallel.train_step(BATCH)
        else:
            parallel(BATCH).backward()
    for (name, wanted), got in zip(net.named_parameters(), parallel.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad, msg=lambda text, n=name: f"{n}: {text}")
        torch.testing.assert_close(got, wanted, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("step", [False, True])
@pytest.mark.parametrize("name", BEFORE)
def test_hooks_that_were_registered_before_planning_work(name: str, step: bool) -> None:
    net = Net(BEFORE[name])
    parallel = sw.parallelize(net, sw.plan(net, (BATCH,), devices=1), copy=True)
    check_gradients(net, parallel, step)


@pytest.mark.parametrize("name", AFTER)
def test_hooks_that_are_registered_after_planning_on_what_is_returned_work(name: str) -> None:
    net = Net()
    parallel = sw.parallelize(net, sw.plan(net, (BATCH,), devices=1), copy=True)
    AFTER[name](net)
    AFTER[name](parallel)
    check_gradients(net, parallel)


def test_a_gradient_hook_that_is_removed_from_the_model_is_removed_from_the_plan() -> None:
    net = Net()
    handle = net.body[0].weight.register_hook(lambda gradient: gradient * 2)
    parallel = sw.parallelize(net, sw.plan(net, (BATCH,), devices=1), copy=True)
    handle.remove()
    check_gradients(net, parallel)


WHERE: dict[str, Callable[[Net], nn.Module]] = {
    "root": lambda net: net,
    "layer": lambda net: net.body[2],
}


@pytest.mark.parametrize("step", [False, True])
@pytest.mark.parametrize("where", WHERE)
def test_a_forward_hook_that_is_removed_after_planning_is_called_no_more(
    where: str, step: bool
) -> None:
    net = Net()
    WHERE[where](net).register_forward_hook(doubled)
    handle = WHERE[where](net).register_forward_pre_hook(doubled_inputs)
    parallel: Any = sw.parallelize(net, sw.plan(net, (BATCH,), devices=1), copy=True)
    check_gradients(net, parallel, step)
    handle.remove()
    check_gradients(net, parallel, step)
    assert len(parallel.execution._train_steps if step else parallel.execution._forwards) == 2


def test_tensors_that_are_moved_for_the_backward_pass_change_nothing() -> None:
    class Moving(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.save_on_cpu():
                return super().forward(x)

    net = Moving()
    check_gradients(net, sw.parallelize(net, sw.plan(net, (BATCH,), devices=1), copy=True))


def test_a_model_may_ask_whether_parameters_have_a_node_of_autograd() -> None:
    class Asking(Net):
        def forward(self, x: Tensor) -> Tensor:
            leaves = [p for p in self.parameters() if p.grad_fn is None]
            return super().forward(x) + sum(p.sum() for p in nn.ParameterList(leaves)[:2])

    net = Asking()
    check_gradients(net, sw.parallelize(net, sw.plan(net, (BATCH,), devices=1), copy=True))


def test_hooks_of_state_dicts_work() -> None:
    net = Net()
    net.register_state_dict_post_hook(lambda module, state, *_: state.update(extra=1))
    parallel = sw.parallelize(net, sw.plan(net, (BATCH,), devices=1), copy=True)
    assert list(parallel.state_dict()) == list(net.state_dict()) != list(Net().state_dict())


class WithTensorHook(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        y.register_hook(lambda gradient: gradient * 2)
        loss: Tensor = y.square().mean()
        return loss


class WithNodeHook(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        y.grad_fn.register_prehook(lambda gradients: gradients)
        loss: Tensor = y.square().mean()
        return loss


class WithPackedTensors(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(Tensor.half, Tensor.float):
            return super().forward(x)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "backward": (
        lambda: Net(lambda net: net.body[0].register_full_backward_hook(lambda *_: None)),
        r"module 'body.0' has a backward hook",
    ),
    "root's backward": (
        lambda: Net(lambda net: net.register_full_backward_pre_hook(lambda *_: None)),
        r"the model has a backward hook",
    ),
    "tensor": (WithTensorHook, r"y.register_hook\(lambda gradient.* registers a hook on a tensor"),
    "node": (
        WithNodeHook,
        r"y.grad_fn.register_prehook.* a hook on a tensor that it computes, or reads its `grad_fn`",
    ),
    "saved tensors": (WithPackedTensors, r"saved_tensors_hooks(?s:.*)around the call of the model"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_hooks_that_a_captured_model_would_drop_are_refused(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(CaptureError, match=message):
        sw.plan(make(), (BATCH,), devices=2)


def test_hooks_for_all_modules_are_refused() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(CaptureError, match="a global module hook is registered"):
            sw.plan(Net(), (BATCH,), devices=2)
    finally:
        handle.remove()


def test_backward_hooks_of_submodules_after_planning_are_refused_at_the_next_call() -> None:
    net = Net()
    parallel = sw.parallelize(net, sw.plan(net, (BATCH,), devices=1), copy=True)
    parallel.body[0].register_full_backward_hook(lambda *_: None)
    message = r"backward hook was registered on module 'body.0' after planning"
    with pytest.raises(PlanError, match=message):
        parallel(BATCH)
    with pytest.raises(PlanError, match=message):
        parallel.train_step(BATCH)


@pytest.mark.parametrize("step", [False, True])
def test_forward_hooks_of_submodules_after_planning_work_until_they_are_removed(step: bool) -> None:
    net, seen, seen_by_plan = Net(), list[Tensor](), list[Tensor]()
    net.body[0].register_forward_hook(doubled)
    parallel: Any = sw.parallelize(net, sw.plan(net, (BATCH,), devices=1), copy=True)
    for _ in range(2):
        handles = [
            net.body[0].register_forward_hook(lambda _, x, y: seen.append(y.detach())),
            parallel.body[0].register_forward_hook(lambda _, x, y: seen_by_plan.append(y.detach())),
        ]
        handles += [body[2].register_forward_hook(doubled) for body in (net.body, parallel.body)]
        check_gradients(net, parallel, step)
        for handle in handles:
            handle.remove()
        torch.testing.assert_close(seen_by_plan, seen)
        check_gradients(net, parallel, step)
    assert len(seen) == 4


def test_hooks_after_planning_see_the_batch_in_micro_batches() -> None:
    net, features = Net(), list[Tensor]()
    plan = sw.plan(net, (BATCH,), devices=1, micro_batches=2)
    parallel = sw.parallelize(net, plan, copy=True)

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        features.append(output.detach())
        return 2 * output

    for model in (net, parallel):
        model.body[0].register_forward_hook(hook)
    check_gradients(net, parallel, step=True)
    # Two steps of each model.
    assert len(features) == 4
    torch.testing.assert_close(features[1::2], features[::2])


def test_hooks_of_the_model_itself_with_effects_run_around_the_program() -> None:
    net, seen = Net(), list[float]()

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        seen.append(output.item())
        return output * len(seen)

    handle = net.register_forward_hook(hook)
    parallel = sw.parallelize(net, sw.plan(net, (BATCH,), devices=1), copy=True)
    losses = []
    for model in (net, parallel):
        seen.clear()
        losses += [model(BATCH) for _ in range(2)]
    torch.testing.assert_close(losses[2:], losses[:2])
    assert seen == [losses[0].item(), losses[0].item()]
    with pytest.raises(PlanError, match="`train_step` does not call the forward hooks"):
        parallel.train_step(BATCH)
    handle.remove()
    check_gradients(net, parallel, step=True)
    assert len(seen) == 2


def number(module: nn.Module, args: Any, output: Tensor) -> float:
    return output.detach().abs().max().item() * 2 + 1


STORED: dict[str, Callable[[nn.Module, Any, Tensor], Any]] = {
    "tensor": lambda module, args, output: output,
    "number": number,
    "text": lambda module, args, output: f"{output.mean().item():.4f} {tuple(output.shape)}",
    "array": lambda module, args, output: output.detach().cpu().numpy(),
}


@pytest.mark.parametrize("name", STORED)
def test_what_hooks_store_is_what_they_see_in_each_call(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def hook(module: Any, args: Any, output: Tensor) -> None:
        stored[name] = module.last = STORED[name](module, args, output)
        print("shape", output.shape)

    stored = dict[str, Any]()
    net = Net(lambda net: net.body[0].register_forward_hook(hook))
    parallel = sw.parallelize(net, sw.plan(net, (BATCH,), devices=1), copy=True)
    for batch in (BATCH, BATCH / 2):
        net(batch)
        wanted = stored.pop(name)
        capsys.readouterr()
        parallel(batch)
        assert capsys.readouterr().out == "shape torch.Size([4, 8])\n"
        assert type(stored[name]) is type(wanted)
        if name == "text":
            assert stored[name] == wanted
        else:
            torch.testing.assert_close(stored[name], wanted)
        assert type(parallel.body[0].last) is type(wanted)


def test_hooks_that_are_registered_between_plan_and_parallelize_change_the_model() -> None:
    net = Net()
    plan = sw.plan(net, (BATCH,), devices=1)
    net.body[0].register_forward_hook(doubled)
    with pytest.raises(PlanError, match="another model"):
        sw.parallelize(net, plan, copy=True)
