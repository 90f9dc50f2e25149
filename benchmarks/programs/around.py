"""What PyTorch itself offers to do with a model and its parameters: optimizers of every kind,
conversions, copies, averages."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from benchmarks.programs.program import (
    STEPS,
    Classifier,
    Parallel,
    Training,
    batch,
    call,
    number,
    program,
    trained,
)


def _trained_by(name: str, make: Callable[[Iterable[Any]], torch.optim.Optimizer]) -> None:
    def training(parallel: Parallel) -> Training:
        net = parallel(Classifier(), *batch())
        return trained(net, call, make(net.parameters()))

    training.__name__ = f"trained_by_{name}"
    program(training)


_trained_by("sgd_for_each", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True))
_trained_by("fused_adamw", lambda p: torch.optim.AdamW(p, lr=0.01, fused=True))
_trained_by("adam_for_each", lambda p: torch.optim.Adam(p, lr=0.01, foreach=True, amsgrad=True))
_trained_by("adagrad", lambda p: torch.optim.Adagrad(p, lr=0.01))
_trained_by("radam", lambda p: torch.optim.RAdam(p, lr=0.01))


def _after_planning(name: str, change: Callable[[Any], Any]) -> None:
    """A model that is changed before it is trained."""

    def training(parallel: Parallel) -> Training:
        net = parallel(Classifier(), *batch())
        change(net)
        return trained(net, call)

    training.__name__ = name
    program(training)


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.constant_(module.weight, 0.1)
        with torch.no_grad():
            module.weight.sub_(module.weight.mean(0) / 2)
        nn.init.zeros_(module.bias)


def _load_whole(net: nn.Module) -> None:
    torch.manual_seed(5)
    net.load_state_dict(Classifier().state_dict())


def _load_from_file(net: nn.Module) -> None:
    """Of whole tensors, as one device saves them."""
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    net.load_state_dict(torch.load(file))


_after_planning("modules_are_initialized_by_apply", lambda net: net.apply(_initialize))
_after_planning("moved_to_the_cpu", lambda net: net.to("cpu"))
_after_planning("frozen_and_unfrozen", lambda net: net.requires_grad_(False).requires_grad_(True))
_after_planning("whole_tensors_are_loaded", _load_whole)
_after_planning("an_own_state_goes_through_a_file", _load_from_file)


@program
def converted_to_double(parallel: Parallel) -> Training:
    net = parallel(Classifier(), *batch()).double()
    return trained(net, lambda net, x, y: net(x.double(), y))


@program
def converted_to_bfloat16(parallel: Parallel) -> Training:
    net = parallel(Classifier(), *batch()).to(torch.bfloat16)
    return trained(net, lambda net, x, y: net(x.bfloat16(), y))


@program
def weight_norm_is_removed_after_planning(parallel: Parallel) -> Training:
    net: Any = Classifier()
    parametrizations.weight_norm(net.first)
    net = parallel(net, *batch())
    parametrize.remove_parametrizations(net.first, "weight")
    return trained(net, call)


@program
def a_deep_copy_is_trained(parallel: Parallel) -> Training:
    net = parallel(Classifier(), *batch())
    yield from trained(net, call)
    return (yield from trained(copy.deepcopy(net), call))


@program
def the_whole_module_is_saved(parallel: Parallel) -> Training:
    net = parallel(Classifier(), *batch())
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return trained(torch.load(file, weights_only=False), call)


@program
def weights_are_averaged(parallel: Parallel) -> Training:
    net = parallel(Classifier(), *batch())
    average = torch.optim.swa_utils.AveragedModel(net)
    for loss in trained(net, call):
        average.update_parameters(net)
        yield loss
    yield number(average(*batch(7)))
    return net


@program
def a_target_network_follows(parallel: Parallel) -> Training:
    """A frozen copy in another mode, with a hook, and a state that it takes."""
    model: Any = Classifier()
    model.first.register_forward_hook(lambda module, args, output: output * 1.1)
    net = parallel(model, *batch())
    target = copy.deepcopy(net).eval().requires_grad_(False)
    for loss in trained(net, call):
        yield loss
        for mine, other in zip(target.parameters(), net.parameters(), strict=True):
            mine.data.mul_(0.9).add_(other.data, alpha=0.1)
        yield number(target(*batch(7)))
    target.load_state_dict(net.state_dict())
    yield number(copy.deepcopy(target)(*batch(7)))
    return net


@program
def called_with_other_parameters(parallel: Parallel) -> Training:
    net = parallel(Classifier(), *batch())
    doubled = {name: 2 * p.detach() for name, p in net.named_parameters()}
    yield number(torch.func.functional_call(net, doubled, batch()))
    return (yield from trained(net, call))


def _penalized(net: nn.Module, *args: Tensor) -> Tensor:
    penalty = sum(p.abs().sum() + p.square().sum() for p in net.parameters())
    return net(*args) + 0.01 * penalty


@program
def a_penalty_on_parameters(parallel: Parallel) -> Training:
    return trained(parallel(Classifier(), *batch()), _penalized)


@program
def a_penalty_runs_backward_of_its_own(parallel: Parallel) -> Training:
    net = parallel(Classifier(), *batch())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(STEPS):
        net(*batch(step)).backward()
        norms = [p.norm() for p in net.parameters()]
        (0.01 * torch.stack(norms).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield number(net(*batch(step)))
    return net


@program
def anomalies_are_detected(parallel: Parallel) -> Training:
    net = parallel(Classifier(), *batch())
    with torch.autograd.set_detect_anomaly(True):
        yield from trained(net, call)
    return net


@program
def a_group_of_parameters_is_added(parallel: Parallel) -> Training:
    net: Any = parallel(Classifier(), *batch())
    optimizer = torch.optim.AdamW(net.first.parameters(), lr=0.01)
    yield from trained(net, call, optimizer)
    optimizer.add_param_group({"params": list(net.second.parameters()), "lr": 0.05})
    return (yield from trained(net, call, optimizer))


@program
def parameters_as_a_vector(parallel: Parallel) -> Training:
    net = parallel(Classifier(), *batch())
    for loss in trained(net, call):
        yield loss
        yield number(nn.utils.parameters_to_vector(net.parameters()).norm())
    return net


@program
def values_of_gradients_are_clipped(parallel: Parallel) -> Training:
    net = parallel(Classifier(), *batch())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for step in range(STEPS):
        loss = net(*batch(step))
        loss.backward()
        nn.utils.clip_grad_value_(net.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        yield number(loss)
    return net
