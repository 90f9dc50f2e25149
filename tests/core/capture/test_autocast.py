"""Regions of autocast: what they cast on each kind of device, and where they do nothing."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db

from shardwright.core.capture.autocast import LOWER, SINGLE, WIDEST, Autocast, traced_autocast
from shardwright.core.capture.capture import capture
from shardwright.core.graph.graph import Graph
from shardwright.core.graph.interpreter import interpret
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.tensors import FakeTensorMode
from shardwright.errors import CaptureError

CUDA = Autocast("cuda")

NAMES = {name.partition(".")[0] for name in (*LOWER, *SINGLE, *WIDEST)}
OTHERS = {"add", "mul", "cat", "stack", "mean", "tanh", "amax", "cumsum", "nn.functional.gelu"}
OPERATORS = [
    op
    for op in op_db
    if torch.float32 in op.dtypes and (op.name.rpartition(".")[2] in NAMES or op.name in OTHERS)
]


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """A region of PyTorch's own, for tensors that are said to be of CUDA."""
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.clear_autocast_cache()


@contextmanager
def as_traced() -> Iterator[None]:
    with traced_autocast(CUDA), torch.autocast("cuda", torch.bfloat16):
        yield


def dtypes(op: Any, sample: Any, dtype: torch.dtype, device: str, region: Any) -> list[Any]:
    """Those of the results of an operator on fake tensors; [] if it refuses them."""

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        of = dtype if leaf.dtype == torch.float32 else leaf.dtype
        return torch.empty(leaf.shape, dtype=of, device=device)

    with torch.no_grad(), FakeTensorMode(), region():
        inputs = pytree.tree_map(fake, (sample.input, sample.args, sample.kwargs))
        try:
            results = op(inputs[0], *inputs[1], **inputs[2])
        except (RuntimeError, AssertionError):
            return []
    return [leaf.dtype for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor)]


def test_the_sampled_operators_are_those_that_autocast_casts() -> None:
    assert len({op.name for op in OPERATORS}) > 80


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: f"{op.name} {op.variant_test_name}")
def test_operators_are_cast_as_the_kernels_for_cuda_cast_them(
    op: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    for sample, _ in zip(op.sample_inputs("cpu", torch.float32), range(2), strict=False):
        for dtype in (torch.float32, torch.bfloat16):
            wanted = dtypes(op, sample, dtype, "cuda", as_on_cuda)
            assert not wanted or dtypes(op, sample, dtype, "cpu", as_traced) == wanted


def test_no_kernel_is_left_behind() -> None:
    with as_traced():
        assert torch.softmax(torch.ones(2, 2) @ torch.ones(2, 2), -1).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.softmax(torch.ones(2, 2) @ torch.ones(2, 2), -1).dtype == torch.bfloat16


class Net(nn.Module):
    """A module with any forward."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


X = torch.linspace(-1, 2, 8).reshape(2, 4)


def traced(function: Callable[..., Any], autocast: Autocast = CUDA) -> Graph:
    return capture(Net(function), (X,), autocast=autocast)


def computed(graph: Graph, net: Net) -> Any:
    tensors = net.state_dict()
    parameters = {value.name: tensors[value.name] for value in graph.parameters}
    return interpret(graph, parameters, {v.name: tensors[v.name] for v in graph.buffers}, (X,))


def softmax_of_product(net: Net, x: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        return net.linear(x).softmax(-1).sum()


def plain(net: Net, x: Tensor) -> Tensor:
    return net.linear(x).softmax(-1).sum()


def test_a_region_of_cuda_computes_what_its_casts_do() -> None:
    graph = traced(softmax_of_product)
    result, _ = computed(graph, Net(plain))
    weight = Net(plain).linear.weight
    product = X.bfloat16() @ weight.bfloat16().T
    torch.testing.assert_close(result, product.float().softmax(-1).sum(), rtol=0, atol=0)
    assert graph.autocast_on == "cuda"


@pytest.mark.parametrize("device_type", ["cpu", "mps"])
def test_a_region_of_another_device_does_nothing(device_type: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = traced(softmax_of_product, Autocast(device_type))
    assert graph.fingerprint == traced(plain, Autocast("cpu")).fingerprint
    assert graph.autocast_on == device_type


def test_a_region_is_of_the_device_that_it_names_where_none_is_known() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graph = traced(softmax_of_product, Autocast(None))
    assert graph.fingerprint == traced(softmax_of_product).fingerprint
    assert graph.autocast_on == "cuda"


def test_a_model_that_asks_gets_the_answers_of_its_device() -> None:
    def function(net: Net, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            assert torch.is_autocast_enabled()
            y = net.linear(x)
            with torch.autocast(x.device.type, enabled=False):
                assert not torch.is_autocast_enabled("cuda")
                return y.float() @ net.linear.weight

    graph = traced(function)
    assert [op.output.dtype for op in graph.ops if "matmul" in str(op.target)] == [torch.float32]
    assert not torch.is_autocast_enabled("cuda")


REGION = torch.autocast("cpu", torch.float16)


@REGION
def decorated(net: Net, x: Tensor) -> Tensor:
    return net.linear(x)


def nested(net: Net, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", torch.float16):
        return net.linear(x)


@pytest.mark.parametrize("function", [decorated, nested])
def test_regions_may_be_decorators_and_inside_each_other(function: Callable[..., Any]) -> None:
    assert traced(function).outputs[0].dtype == torch.float16
    assert (REGION.device, REGION._enabled) == ("cpu", True)


def test_a_call_may_be_made_in_a_region() -> None:
    around = capture(Net(plain), (X,), autocast=Autocast("cuda", torch.bfloat16))
    assert around.fingerprint == traced(softmax_of_product).fingerprint


def test_autocast_of_other_accelerators_is_refused() -> None:
    def function(net: Net, x: Tensor) -> Tensor:
        with torch.autocast("mps", torch.bfloat16):
            return net.linear(x)

    with pytest.raises(CaptureError, match=r"autocast for 'mps'\ncast explicitly"):
        traced(function, Autocast("mps"))


def test_normalizations_keep_their_statistics() -> None:
    def function(net: Net, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return net.norm(net.linear(x)).float().square().sum()

    eager, wanted = Net(function), Net(function)
    result, updates = computed(capture(eager, (X,)), eager)
    torch.testing.assert_close(result, wanted(X))
    for name, updated in updates.items():
        torch.testing.assert_close(updated, wanted.get_buffer(name))


def test_losses_in_a_region_are_computed_in_single_precision() -> None:
    def function(net: Net, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return F.cross_entropy(net.linear(x), torch.tensor([1, 2]))

    assert traced(function).outputs[0].dtype == torch.float32


class Recurrent(nn.Module):
    """Whose input has the lower dtype, and whose hidden state may have the other."""

    def __init__(self, hidden: torch.dtype) -> None:
        super().__init__()
        self.before, self.layers, self.cell = nn.Linear(4, 4), nn.GRU(4, 4), nn.GRUCell(4, 4)
        self.hidden = hidden

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.layers(self.before(x))
        return self.cell(states[-1], torch.zeros(3, 4, dtype=self.hidden)).sum()


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_recurrences_are_cast_with_their_parameters(device_type: str) -> None:
    net, x = Recurrent(torch.bfloat16), torch.randn(2, 3, 4)
    graph = capture(net, (x,), autocast=Autocast(device_type, torch.bfloat16))
    result, _ = interpret(graph, dict(net.named_parameters()), {}, (x,))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(result.float(), net(x).float(), rtol=0.02, atol=0)


def test_a_cell_that_is_cast_inside_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"`aten.gru_cell.default` under autocast\ncall it on"):
        autocast = Autocast("cpu", torch.bfloat16)
        capture(Recurrent(torch.float32), (torch.randn(2, 3, 4),), autocast=autocast)
