"""Calls that cannot be captured are refused at the door, with what to pass instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import BatchEncoding

import shardwright as sw
from shardwright.core.graph.serialize import dumps, loads


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        y = self.linear(x)
        return (y if mask is None else y * mask).sum()


X = torch.ones(8, 4)


@pytest.mark.parametrize(
    ("net", "args", "kwargs", "problem", "remedy"),
    [
        (Net, (X,), None, "not the class Net", r"pass an instance: Net\(...\)"),
        (torch.relu, (X,), None, "must be an nn.Module, not a builtin", "pass an nn.Module"),
        (None, (X,), None, "not a NoneType", "pass an nn.Module"),
        (Net(), [X], None, "must be a tuple, not a list", r"write `tuple\(args\)`"),
        (
            Net(),
            {"x": X},
            None,
            "must be a tuple, not a dict",
            r"plan\(net, \(\), dict\(batch\), ...\)",
        ),
        (
            Net(),
            BatchEncoding({"x": X}),
            None,
            "must be a tuple, not a BatchEncoding",
            r"dict\(batch\)",
        ),
        (
            Net(),
            DataLoader([X]),
            None,
            "must be a tuple, not a DataLoader",
            r"next\(iter\(loader\)\)",
        ),
        (
            Net(),
            iter((X,)),
            None,
            "must be a tuple, not a tuple_iterator",
            r"tuple\(next\(batches\)\)",
        ),
        (Net(), (), None, "missing a required argument: 'x'", "what the training loop passes"),
        (Net(), (X, X), None, "with 2 positional and 0 named arguments", "training loop"),
        (Net(), (X,), {"masks": X}, "unexpected keyword argument 'masks'", "training loop"),
        (Net(), (X.to_sparse(),), None, r"argument args\[0\] is a sparse tensor", "to_dense"),
        (Net(), (X,), {"mask": X.to_sparse()}, r"argument kwargs\['mask'\] is a", "to_dense"),
        (Net(), (X.numpy(),), None, r"args\[0\] is a numpy array", "from_numpy"),
        (Net(), (MappingProxyType({"x": X}),), None, "is a mappingproxy", r"net\(\*\*batch\)"),
        (
            Net(),
            (BatchEncoding({"x": X}),),
            None,
            "not BatchEncoding",
            "pass a model and arguments",
        ),
    ],
)
def test_a_call_of_another_form_is_refused_with_what_to_pass(
    net: Any, args: Any, kwargs: Any, problem: str, remedy: str
) -> None:
    with pytest.raises(sw.CaptureError, match=f"{problem}.*\n.*{remedy}"):
        sw.plan(net, args, kwargs, devices=2)


def test_the_best_plans_are_asked_for_a_call_of_the_same_form() -> None:
    net: Any = Net
    with pytest.raises(sw.CaptureError, match="not the class Net"):
        sw.best_plans(net, (X,), devices=2, cluster="a100")


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda net: nn.Sequential(nn.DataParallel(net))])
def test_a_wrapped_model_is_refused_by_plan(wrap: Callable[[nn.Module], nn.Module]) -> None:
    with pytest.raises(sw.PlanError, match="wrapped by DataParallel already"):
        sw.plan(wrap(Net()), (X,), devices=2)


def test_a_synchronized_batch_norm_is_planned_as_a_batch_norm() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    images = torch.randn(8, 3, 8, 8)
    synchronized = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    targets = [op.target for op in sw.capture(synchronized, (images,)).ops]
    assert targets == [op.target for op in sw.capture(net, (images,)).ops]


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[2J", "a\x9b", "a\u2028b", "a\ud800"])
@pytest.mark.parametrize("kind", ["module", "parameter", "buffer"])
def test_names_with_control_characters_are_refused_before_a_plan_has_them(
    kind: str, name: str
) -> None:
    net = Net()
    if kind == "module":
        net.linear.add_module(name, nn.Identity())
    elif kind == "parameter":
        net.linear.register_parameter(name, nn.Parameter(X))
    else:
        net.linear.register_buffer(name, X)
    with pytest.raises(sw.CaptureError, match=r"linear: the name .* has control characters"):
        sw.plan(net, (X,), devices=2)


def test_names_with_joiners_and_spaces_of_other_scripts_round_trip(tmp_path: Path) -> None:
    # ZERO WIDTH NON-JOINER, as in Persian words, and NO-BREAK SPACE.
    name = "می\u200cخواهم\xa0"
    net = nn.Sequential()
    net.add_module(name, nn.Linear(4, 4))
    plan = sw.plan(net, (X,), devices=2)
    plan.save(tmp_path / "plan.json")
    assert sw.Plan.load(tmp_path / "plan.json") == plan
    assert plan.graph is not None
    assert loads(dumps(plan.graph)).fingerprint == plan.graph.fingerprint
