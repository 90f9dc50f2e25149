"""Captured in bfloat16: what is cast, what stays, and that losses are in single precision."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sample_models as models
import shardwright as sw
from shardwright.core.graph.interpreter import interpret

BF16 = torch.bfloat16


def test_parameters_and_inputs_are_read_in_bfloat16_and_stay_in_single_precision() -> None:
    net, args, _ = models.mlp()
    graph = sw.capture(net, args, compute_dtype=BF16)
    for value in (*graph.parameters, *graph.input_values):
        assert value.dtype == BF16
        assert value.stored_dtype == torch.float32
    assert all(p.dtype == torch.float32 for p in net.parameters())
    assert graph.loss is not None
    assert graph.loss.dtype == torch.float32


@pytest.mark.parametrize("loss", [F.cross_entropy, F.mse_loss, F.l1_loss])
def test_losses_are_computed_in_single_precision(loss: object) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return loss(self.layer(x), y)

    graph = sw.capture(Net(), (torch.randn(2, 4), torch.rand(2, 4)), compute_dtype=BF16)
    assert graph.loss is not None
    op = graph.producer[graph.loss]
    assert {value.dtype for value in (*op.inputs, *op.outputs)} == {torch.float32}


def test_a_batch_norm_keeps_its_parameters_with_its_statistics() -> None:
    net, args, _ = models.resnet(blocks=(1,))
    graph = sw.capture(net, args, compute_dtype=BF16)
    dtypes = {value.name: value.dtype for value in graph.parameters}
    assert dtypes["bn1.weight"] == torch.float32
    assert dtypes["conv1.weight"] == BF16


@pytest.mark.parametrize("build", [models.mlp, models.llama, models.gpt2])
def test_the_loss_is_near_that_of_single_precision(build: object) -> None:
    net, args, kwargs = build()
    graph = sw.capture(net, args, kwargs, compute_dtype=BF16)
    parameters = {n: p.detach() for n, p in net.named_parameters(remove_duplicate=False)}
    buffers = dict(net.named_buffers())
    result, _ = interpret(graph, parameters, buffers, args, kwargs)
    wanted = net(*args, **kwargs)
    got = result if isinstance(result, Tensor) else result["loss"]
    torch.testing.assert_close(
        got, wanted if isinstance(wanted, Tensor) else wanted.loss, rtol=1e-2, atol=1e-2
    )


def test_a_plan_shows_the_dtype_of_storage_and_is_read_again() -> None:
    net, args, kwargs = models.llama(layers=1)
    plan = sw.plan(net, args, kwargs, devices=2, mode="data_parallel", compute_dtype="bfloat16")
    assert {dtype for _, dtype in plan.parameters.values()} == {"float32"}
    assert sw.Plan.from_json(plan.to_json()).compute_dtype == "bfloat16"
    whole = sw.plan(net, args, kwargs, devices=2, mode="data_parallel")
    assert plan.parameter_bytes == whole.parameter_bytes
    gradients = sum(p.numel() for p in net.parameters())
    assert whole.bytes - plan.bytes == 2 * gradients
    assert sw.check(net, args, kwargs, sw.Plan.from_json(plan.to_json())).passes(1e-9)


def test_other_dtypes_are_refused() -> None:
    net, args, _ = models.mlp()
    with pytest.raises(sw.StrategyError, match=r"compute_dtype='float16'.*float32, bfloat16"):
        sw.plan(net, args, devices=2, compute_dtype="float16")
    graph = sw.capture(net, args)
    with pytest.raises(sw.StrategyError, match="captured with compute_dtype=None"):
        sw.plan(graph, devices=2, compute_dtype="bfloat16")
