"""Calls bind by the signature of `forward`, and each new situation is captured when it comes."""

from __future__ import annotations

import logging
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.core.parallel import model_calls
from shardwright.errors import DataError


class Scored(nn.Module):
    """Logits, or the loss if there are labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        labels: Tensor | None = None,
        scale: float = 1.0,
        **extra: Any,
    ) -> Any:
        logits = self.layer(x) * scale
        if mask is not None:
            logits = logits * mask
        if "offset" in extra:
            logits = logits + extra["offset"]
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


X, MASK, LABELS = torch.randn(6, 4), torch.ones(6, 1), torch.arange(6) % 3


def planned(*args: Any, **kwargs: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    net = Scored()
    return net, sw.parallelize(net, sw.plan(net, args, kwargs, devices=1), copy=True)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((X,), {"labels": LABELS}),
        ((X, None, LABELS), {}),
        ((), {"labels": LABELS, "x": X}),
        ((X, None), {"scale": 1.0, "labels": LABELS}),
    ],
)
def test_any_way_to_give_the_planned_arguments_is_the_planned_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    net, parallel = planned(X, labels=LABELS)
    other, swapped = planned(*args, **kwargs)
    with caplog.at_level(logging.INFO, "shardwright"):
        assert torch.equal(parallel(*args, **kwargs)["loss"], net(X, labels=LABELS)["loss"])
        assert torch.equal(swapped(labels=LABELS, x=X)["loss"], other(X, labels=LABELS)["loss"])
        parallel.train_step(*args, **kwargs)
    assert "captured" not in caplog.text


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"mask": MASK},
        {"labels": LABELS, "mask": MASK},
        {"labels": LABELS, "scale": 2.0},
        {"labels": LABELS, "offset": torch.ones(3)},
    ],
)
def test_other_arguments_than_planned_are_captured_once(
    kwargs: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    net, parallel = planned(X, labels=LABELS)
    with caplog.at_level(logging.INFO, "shardwright"):
        for arguments in ({"x": X, **kwargs}, {**kwargs, "x": X}):
            got, wanted = parallel(**arguments), net(**arguments)
            assert got.keys() == wanted.keys()
            for name in wanted:
                torch.testing.assert_close(got[name], wanted[name])
            assert torch.equal(parallel(X, **kwargs)["logits"], got["logits"])
    assert caplog.text.count("captured the model") == 1


def test_nan_as_an_argument_is_captured_once(caplog: pytest.LogCaptureFixture) -> None:
    _, parallel = planned(X, labels=LABELS)
    with caplog.at_level(logging.INFO, "shardwright"):
        for _ in range(2):
            assert parallel(X, scale=float("nan"))["logits"].isnan().all()
    assert caplog.text.count("captured the model") == 1


@pytest.mark.parametrize("region", [torch.no_grad, torch.inference_mode])
def test_a_training_step_without_gradients_is_refused(region: Any) -> None:
    _, parallel = planned(X, labels=LABELS)
    with region(), pytest.raises(sw.PlanError, match="`train_step` runs a backward pass"):
        parallel.train_step(X, labels=LABELS)


def test_what_is_captured_in_inference_mode_can_be_trained() -> None:
    net, parallel = planned(X, labels=LABELS)
    net.eval(), parallel.eval()
    with torch.inference_mode():
        x = X * 2
        assert torch.equal(parallel(x, labels=LABELS)["loss"], net(x, labels=LABELS)["loss"])
    for each in (net, parallel):
        each(X[:3], labels=LABELS[:3])["loss"].backward()
        each(X, labels=LABELS)["loss"].backward()
    assert torch.equal(net.get_parameter("layer.weight").grad, parallel.layer.weight.grad)


def test_a_call_without_a_loss_cannot_be_trained_and_the_planned_one_goes_on() -> None:
    net, parallel = planned(X, labels=LABELS)
    with pytest.raises(sw.PlanError, match="loss"):
        parallel.train_step(X)
    assert torch.equal(parallel.train_step(X, labels=LABELS), net(X, labels=LABELS)["loss"])


def test_of_many_shapes_the_one_not_used_for_longest_is_forgotten_and_captured_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(model_calls, "MAX_CACHED_PROGRAMS", 3)
    net, parallel = planned(X, labels=LABELS)
    for rows in (1, 2, 3, 4, 3, 1, 3, 6):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(parallel(x)["logits"], net(x)["logits"])
        assert len(parallel.execution._forwards) <= 3
    assert caplog.text.count("captured the model") == 6
    assert parallel.program


@pytest.mark.parametrize(
    ("argument", "problem", "remedy"),
    [
        (X.to_sparse(), "is a sparse tensor", "to_dense"),
        (X.numpy(), "is a numpy array", "from_numpy"),
        (MappingProxyType({"x": X}), "is a mappingproxy", r"net\(\*\*batch\)"),
        (bytearray(2), r"is an object of unsupported type bytearray", "pass its fields"),
    ],
)
def test_an_argument_that_is_no_dense_tensor_is_refused(
    argument: Any, problem: str, remedy: str
) -> None:
    _, parallel = planned(X, labels=LABELS)
    with pytest.raises(sw.PlanError, match=f"an argument of the model {problem}.*\n.*{remedy}"):
        parallel(argument, labels=LABELS)


def test_a_batch_on_the_meta_device_is_refused() -> None:
    net, batch = torch.nn.Linear(4, 4), torch.ones(2, 4)
    planned = sw.parallelize(net, sw.plan(net, (batch,), devices=1))
    with pytest.raises(DataError, match=r"shape \(2, 4\) is on the meta device"):
        planned(batch.to("meta"))
