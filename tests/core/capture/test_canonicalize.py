from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sample_models as models
from core.capture.test_capture import Function, assert_equal, in_float64, x
from shardwright.core.capture.capture import capture
from shardwright.core.graph.custom_ops import batch_norm_train, cross_entropy
from shardwright.core.graph.graph import Graph, Op, Origin

aten = torch.ops.aten


def targets(graph: Graph) -> list[str]:
    return [getattr(op.target, "__name__", str(op.target)) for op in graph.ops]


def loss_of(graph: Graph) -> Op:
    return next(op for op in graph.ops if op.target is cross_entropy)


def test_a_bias_is_an_operator_of_its_own() -> None:
    graph = capture(*models.mlp())
    product, bias = graph.by_name["layers.0"], graph.by_name["layers.0.bias"]
    assert product.target is aten.linear.default
    assert [v.shape for v in product.inputs] == [(8, 16), (32, 16)]
    assert bias.target is aten.add.Tensor
    assert bias.inputs[0] is product.output
    assert bias.inputs[1].origin is Origin.PARAMETER


def test_numbers_that_vmap_casts_are_constants() -> None:
    def forward(net: Function, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: (row @ net.weight).exp().sum() / len(row))(x)

    assert_equal(Function(forward), (x(),), {})


def test_the_bias_of_a_convolution_is_added_over_its_channels() -> None:
    graph = capture(*models.resnet())
    assert graph.by_name["conv1"].args[2] is None
    assert [v.shape for v in graph.by_name["conv1.bias"].inputs] == [(4, 8, 32, 32), (8, 1, 1)]


def test_value_names_are_unique_and_operators_are_named_after_modules() -> None:
    for model in (models.resnet(), models.llama(), models.encoder(), models.gpt2()):
        graph = capture(*model)
        names = [value.name for value in graph.values()]
        assert len(set(names)) == len(names)
        assert len(graph.by_name) == len(graph.ops)
    assert graph.by_name["transformer.h.0.attn.c_attn"].target is aten.matmul.default
    assert graph.by_name["transformer.h.0.attn.c_attn"].module == "transformer.h.0.attn.c_attn"
    assert graph.by_name["transformer.h.0.ln_1"].target is aten.layer_norm.default
    assert graph.by_name["transformer.h.0.ln_1"].source.startswith("modeling_gpt2.py:")


def test_the_second_call_of_a_module_has_its_number() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x))

    graph = capture(Twice(), (torch.randn(2, 4),))
    assert list(graph.by_name) == ["layer", "layer.bias", "layer@2", "layer@2.bias"]
    assert graph.by_name["layer@2"].module == "layer"


def test_gpt2_multiplies_no_flattened_activation() -> None:
    graph = capture(*models.gpt2())
    products = [op for op in graph.ops if op.target in (aten.matmul.default, aten.linear.default)]
    assert len(products) == 9
    assert all(len(op.output.shape) == 3 for op in products)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_the_loss_sees_batch_sequence_and_vocabulary(name: str) -> None:
    loss = loss_of(capture(*getattr(models, name)()))
    assert [value.shape for value in loss.inputs] == [(4, 8, 64), (4, 8)]


def test_the_loss_has_the_class_dimension_last() -> None:
    graph = capture(*models.encoder())
    assert [value.shape for value in loss_of(graph).inputs] == [(4, 8, 11), (4, 8)]
    assert graph.producer[loss_of(graph).inputs[0]].name == "head.bias"


def test_multi_head_attention_keeps_batch_and_sequence_apart() -> None:
    graph = capture(*models.encoder())
    for op in graph.ops:
        if op.target is aten.linear.default:
            assert len(op.output.shape) == 3, op
        if op.target is aten.permute.default:
            assert len(op.output.shape) == 4, op


def test_views_are_reshapes_with_known_sizes() -> None:
    for model in (models.llama(), models.encoder(), models.network()):
        graph = capture(*model)
        assert not {"aten.view.default", "aten.unsqueeze.default", "aten.contiguous.default"} & set(
            targets(graph)
        )
        for op in graph.ops:
            if op.target in (aten.reshape.default, aten.expand.default):
                assert tuple(op.args[1]) == op.output.shape


def strided(net: Any, x: Tensor) -> Tensor:
    turned = (x @ net.weight).T.contiguous()
    return turned.as_strided((3, 2), (4, 3), 1) * turned.T[0, 1]


def pairs_as_complex(net: Any, x: Tensor) -> Tensor:
    return torch.view_as_complex((x @ net.weight).view(4, 2, 2).mT.contiguous()).abs()


def bits_of_pairs(net: Any, x: Tensor) -> Tensor:
    return (x @ net.weight) * (x.T.contiguous().view(torch.int32).sum(1) % 7)


@pytest.mark.parametrize("read", [strided, pairs_as_complex, bits_of_pairs])
def test_what_reads_memory_finds_neighbors_as_during_capture(read: Any) -> None:
    assert_equal(Function(read), (x(),), {})


def test_no_operator_is_bound_to_a_device() -> None:
    for op in capture(*models.llama()).ops:
        assert not {"device", "layout", "pin_memory"} & set(op.kwargs), op


def test_a_tensor_that_supplies_only_the_dtype_is_not_read() -> None:
    def fill(net: Any, x: Tensor) -> Tensor:
        joined = x.new_empty(3, 8)
        joined[:, :4] = x @ net.weight
        joined[:, 4:] = x.new_full((3, 4), 2.0) + x.new_ones(4) + x.new_zeros(3, 1)
        return joined

    net, args = Function(fill), (torch.randn(3, 4, dtype=torch.float64),)
    graph = capture(net, args)
    creations = [op for op in graph.ops if "scatter" not in str(op.target) and not op.inputs]
    assert [str(op.target).split(".")[1] for op in creations] == ["empty", "full", "ones", "zeros"]
    assert_equal(net, args, {})


def test_nothing_dead_and_no_detach_without_a_gradient_remains() -> None:
    graph = capture(*models.llama())
    ends = {*graph.output_values, *(new for _, new in graph.updates)}
    assert all(graph.consumers[op.output] or op.output in ends for op in graph.ops)
    assert "aten.detach.default" not in targets(graph)


def test_batch_norm_returns_its_new_statistics() -> None:
    graph = capture(*models.resnet())
    norm = graph.by_name["bn1"]
    assert norm.target is batch_norm_train
    assert [value.shape for value in norm.outputs] == [(4, 8, 32, 32), (8,), (8,)]
    updates = {buffer.name: new for buffer, new in graph.updates}
    assert updates["bn1.running_mean"] is norm.outputs[1]
    assert updates["bn1.running_var"] is norm.outputs[2]
    assert "bn1.num_batches_tracked" in updates
    assert [value.requires_grad for value in norm.outputs] == [True, False, False]


def test_batch_norm_in_evaluation_is_left() -> None:
    net, args, kwargs = models.resnet()
    graph = capture(net.eval(), args, kwargs)
    assert graph.by_name["bn1"].target is aten.batch_norm.default
    assert graph.updates == ()


def test_batch_norm_without_running_statistics_and_instance_norm_are_equal() -> None:
    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.batch = nn.BatchNorm1d(3, track_running_stats=False)
            self.instance = nn.InstanceNorm1d(3, affine=True, track_running_stats=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.instance(self.batch(x) * 2).square().sum()

    graph = assert_equal(Norms().double(), (torch.randn(4, 3, 5, dtype=torch.float64),), {})
    assert len(graph.by_name["batch"].outputs) == 1
    assert {"instance.running_mean", "instance.running_var"} <= {b.name for b, _ in graph.updates}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("probabilities", [False, True])
def test_cross_entropy_over_images_equals_torch(reduction: str, probabilities: bool) -> None:
    def forward(net: Function, x: Tensor, labels: Tensor) -> Tensor:
        logits = (x @ net.weight).reshape(2, 2, 2, 2)
        return F.cross_entropy(logits, labels, reduction=reduction, label_smoothing=0.1)

    torch.manual_seed(3)
    labels = torch.randint(0, 2, (2, 2, 2))
    if probabilities:
        labels = torch.rand(2, 2, 2, 2, dtype=torch.float64)
    graph = assert_equal(Function(forward), (x(), labels), {})
    assert loss_of(graph).inputs[0].shape == (2, 2, 2, 2)


def test_flattening_moves_past_row_wise_operators_and_into_the_loss() -> None:
    def forward(net: Function, x: Tensor, labels: Tensor) -> Tensor:
        rows = x.view(-1, 4) @ net.weight
        rows = F.layer_norm(rows.relu() + rows, (4,))
        rows = rows.log_softmax(-1) * rows.mean(-1, keepdim=True)
        return F.cross_entropy(rows, labels)

    labels = torch.tensor([0, 1, 2, 3, 0, 1])
    inputs = torch.randn(2, 3, 4, dtype=torch.float64)
    graph = assert_equal(Function(forward), (inputs, labels), {})
    shapes = {op.output.shape for op in graph.ops if op.target is not cross_entropy}
    assert shapes == {(2, 3, 4), (2, 3, 1), (2, 3)}


def test_flattening_stays_before_operators_that_mix_rows() -> None:
    def forward(net: Function, x: Tensor) -> Tensor:
        rows = x.view(-1, 4)
        return rows.softmax(0) @ net.weight + rows[1] + rows.sum(0) + rows.T @ rows.sum(1)

    assert_equal(Function(forward), (torch.randn(2, 2, 4, dtype=torch.float64),), {})


def test_a_batched_product_of_flattened_heads_is_apart_again() -> None:
    def forward(net: Function, x: Tensor) -> Tensor:
        heads = (x @ net.weight).view(2, 3, 2, 2).transpose(1, 2)
        q = heads.reshape(4, 3, 2)
        scores = torch.bmm(q, q.transpose(1, 2)).softmax(-1)
        return torch.bmm(scores, q).view(2, 2, 3, 2)

    graph = assert_equal(Function(forward), (torch.randn(2, 3, 4, dtype=torch.float64),), {})
    products = [op for op in graph.ops if op.target is aten.matmul.default]
    assert products[-1].output.shape == (2, 2, 3, 2)


def test_gradients_flow_only_between_parameters_and_the_loss() -> None:
    graph = capture(*models.llama())
    assert graph.loss is not None
    assert graph.loss.requires_grad
    assert all(value.requires_grad for value in graph.parameters)
    for op in graph.ops:
        for value in op.outputs:
            assert not (value.requires_grad and not value.dtype.is_floating_point)
    assert not graph.by_name["model.rotary_emb.cos"].output.requires_grad
    assert not any(value.requires_grad for value in graph.input_values)


def test_what_the_loss_does_not_read_requires_no_gradient() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.a(x)
            return y.sum(), self.b(y.detach())

    graph = capture(Two(), (torch.randn(2, 4),))
    assert graph.loss is graph.outputs[0]
    assert graph.by_name["a"].output.requires_grad
    assert not graph.by_name["b"].output.requires_grad
    assert not next(v for v in graph.parameters if v.name == "b.weight").requires_grad


def test_without_a_scalar_all_outputs_are_sources_of_gradients() -> None:
    graph = capture(nn.Linear(4, 3), (torch.randn(2, 4),))
    assert graph.loss is None
    assert all(value.requires_grad for value in graph.parameters)


def test_an_input_that_requires_a_gradient_has_one() -> None:
    graph = capture(nn.Linear(4, 3), (torch.randn(2, 4, requires_grad=True),))
    assert graph.input_values[0].requires_grad


def test_float64_models_lose_no_cast() -> None:
    graph = capture(*in_float64(models.llama()))
    assert graph.by_name["model.norm.to"].output.dtype is torch.float32


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (lambda y, x: y > 0, lambda net, x: 0.0),
        (lambda y, x: x[:, 0] > 0, lambda net, x: 0.0),
        (lambda y, x: x[:, 0] > 0, lambda net, x: net.weight[0]),
        (lambda y, x: (slice(None), x[0] > 0), lambda net, x: net.weight[0, 0] * 2),
    ],
)
def test_writing_one_value_by_a_mask_is_a_choice(place: Any, value: Any) -> None:
    def forward(net: Function, x: Tensor) -> Tensor:
        y = x @ net.weight
        y[place(y, x)] = value(net, x)
        return y * net.weight

    graph = assert_equal(Function(forward), (x(),), {})
    assert "where.self" in targets(graph)
    assert "index_put.default" not in targets(graph)


def test_writing_many_values_by_a_mask_is_left() -> None:
    def forward(net: Function, x: Tensor) -> Tensor:
        y = x @ net.weight
        y[torch.arange(4) % 2 == 0] = net.weight[:2]
        return y

    assert "index_put.default" in targets(assert_equal(Function(forward), (x(),), {}))


def detached_spectrum(net: Function, x: Tensor) -> Tensor:
    return torch.fft.fft(x @ net.weight).detach().abs()


def spectrum_of_region(net: Function, x: Tensor) -> Tensor:
    y = x @ net.weight
    with torch.no_grad():
        spectrum = torch.fft.fft(y)
    return spectrum.abs()


def spectrum_written(net: Function, x: Tensor) -> Tensor:
    spectrum = torch.zeros(4, 4, dtype=torch.complex128)
    with torch.no_grad():
        spectrum.copy_(torch.fft.fft(x @ net.weight))
    return spectrum.abs()


@pytest.mark.parametrize("constant", [detached_spectrum, spectrum_of_region, spectrum_written])
def test_no_gradient_flows_through_complex_numbers_without_autograd(constant: Any) -> None:
    def forward(net: Function, x: Tensor) -> Tensor:
        return (x @ net.weight * constant(net, x)).sum()

    assert_equal(Function(forward), (x(),), {})


class Bags(nn.Module):
    def __init__(self, step: int, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(10, 4, dtype=torch.float64))
        self.step, self.options = step, options

    def forward(self, ids: Tensor) -> Tensor:
        offsets = torch.arange(0, len(ids), self.step)
        return F.embedding_bag(ids, self.weight, offsets, mode="sum", **self.options)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("step", [2, 3, 4])
def test_bags_begin_at_each_step_and_the_last_is_shorter(step: int, last: bool) -> None:
    graph = assert_equal(Bags(step, include_last_offset=last), (torch.arange(6),), {})
    bags = graph.ops[-1].inputs
    # Only bags of equal size are a dimension that can be sharded.
    assert (len(bags) == 2) == (6 % step == 0 and not last)
