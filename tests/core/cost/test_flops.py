"""Floating point operations and bytes of operators, against torch's own counter where it counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

from core.rules.oracle import op_of
from sample_models import encoder, gpt2, llama, mlp, resnet
from shardwright.core.capture.capture import capture
from shardwright.core.cost.flops import _compute_work, is_view, work_of
from shardwright.core.graph.custom_ops import masked_attention, windowed_attention
from shardwright.core.graph.graph import Graph
from shardwright.core.rules.notation import from_notation


def counted(net: nn.Module, args: Any, kwargs: Any) -> int:
    """What one training step of `net` takes, as torch counts it."""
    counter = FlopCounterMode(display=False)
    with counter:
        out = net(*args, **kwargs)
        loss = out if isinstance(out, torch.Tensor) else out.loss
        loss.backward()
    return counter.get_total_flops()


def planned(graph: Graph) -> float:
    found = [work_of(op) for op in graph.ops]
    return sum(work.forward_flops + work.backward_flops for work in found)


@pytest.mark.parametrize("model", [mlp, resnet], ids=lambda m: m.__name__)
def test_products_and_convolutions_are_counted_as_torch_counts_them(model: Any) -> None:
    net, args, kwargs = model()
    assert planned(capture(net, args, kwargs)) == counted(net, args, kwargs)


@pytest.mark.parametrize("model", [llama, gpt2, encoder], ids=lambda m: m.__name__)
def test_attention_is_two_products_forward_and_five_backward(model: Any) -> None:
    net, args, kwargs = model()
    # In two layers, each of 4 samples, 4 heads, 8 positions.
    head = 4 if model is encoder else 8
    attention = 2 * (2 + 5) * 2 * (4 * 4 * 8 * 8 * head)
    # Until 2.13 at least, torch does not count the kernel that the CPU takes; 2.15 does.
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    uncounted = 0 if kernel in flop_registry else attention
    # torch counts the pairs that a causal mask leaves out.
    left_out = 0 if model is encoder else attention / 2
    assert planned(capture(net, args, kwargs)) + left_out == counted(net, args, kwargs) + uncounted


@pytest.mark.parametrize("window", [1, 5, 12, 30])
def test_of_a_window_only_its_pairs_are_counted(window: int) -> None:
    query, key = (torch.empty(2, heads, 12, 8, device="meta") for heads in (4, 2))
    op = op_of(windowed_attention, query, key, key, window)
    pairs = sum(min(window, position + 1) for position in range(12))
    assert work_of(op).forward_flops == 2 * 2 * 4 * pairs * (8 + 8)


def test_a_query_of_causal_attention_reads_half_of_the_keys_in_the_mean() -> None:
    def keys(causal: bool) -> float:
        class Attention(nn.Module):
            def forward(self, q: Tensor) -> Tensor:
                return F.scaled_dot_product_attention(q, q, q, is_causal=causal)

        (op,) = capture(Attention(), (torch.zeros(1, 2, 64, 8),)).ops
        (size, _), (head_size, _) = work_of(op).product_sizes
        assert head_size == 8
        return size

    assert (keys(causal=False), keys(causal=True)) == (64, 32)


def test_of_a_mask_that_is_not_held_all_pairs_are_counted_or_half_if_it_is_causal() -> None:
    query, document = torch.empty(2, 4, 12, 8), torch.arange(12)
    options = ((document[:, None], document[None]), "eq 0 1")
    found = [op_of(masked_attention, query, query, query, *options, c) for c in (False, True)]
    flops = 2 * 2 * 4 * 12 * 12 * (8 + 8)
    assert [work_of(op).forward_flops for op in found] == [flops, flops / 2]


@torch.library.custom_op("test_flops::doubled_product", mutates_args=())
def doubled_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return 2 * (x @ y)


@doubled_product.register_fake
def _(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], y.shape[1])


@register_flop_formula(torch.ops.test_flops.doubled_product)
def _(x: tuple[int, ...], y: tuple[int, ...], **options: Any) -> int:
    return 2 * x[0] * x[1] * y[1]


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16, 8))
        self.frozen = nn.Parameter(torch.zeros(4, 16), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x, self.weight).relu(), self.frozen).t().sum()


@pytest.fixture
def graph() -> Graph:
    return capture(Product(), (torch.zeros(32, 8),))


def test_only_gradients_that_are_wanted_are_computed(graph: Graph) -> None:
    first, second = (work_of(op) for op in graph.ops if "linear" in str(op.target))
    # The first gives its weight a gradient, the second only its input.
    assert (first.forward_flops, first.backward_flops) == (2 * 32 * 8 * 16, 2 * 32 * 8 * 16)
    assert (second.forward_flops, second.backward_flops) == (2 * 32 * 16 * 4, 2 * 32 * 16 * 4)


def test_bytes_are_those_of_inputs_outputs_and_gradients(graph: Graph) -> None:
    relu = next(work_of(op) for op in graph.ops if "relu" in str(op.target))
    tensor = 32 * 16 * 4
    assert sum(size for size, _ in relu.forward_bytes) == 2 * tensor
    assert sum(size for size, _ in relu.backward_bytes) == 3 * tensor


def test_views_move_nothing(graph: Graph) -> None:
    views = [op for op in graph.ops if is_view(op)]
    assert [str(op.target) for op in views] == ["aten.transpose.int"]
    assert work_of(views[0]).forward_bytes == ()


def test_an_embedding_reads_only_the_rows_that_it_looks_up() -> None:
    net = nn.Embedding(1000, 8)
    graph = capture(net, (torch.zeros(4, dtype=torch.long),))
    assert sum(size for size, _ in work_of(graph.ops[0]).forward_bytes) == 4 * 8 + 2 * 4 * 8 * 4


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers", "5.0")
        sizes = {"hidden_size": 8, "intermediate_size": 12, "num_local_experts": 4}
        options = {"num_experts_per_tok": 2, "experts_implementation": "batched_mm"}
        config = transformers.MixtralConfig(**sizes, **options)
        self.block = transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x).sum()


def test_experts_take_what_those_that_each_token_chose_take() -> None:
    net, x = Experts(), torch.randn(2, 6, 8, requires_grad=True)
    assert planned(capture(net, (x,))) == counted(net, (x,), {})


def test_experts_move_copies_of_tokens_beside_their_products() -> None:
    graph = capture(Experts(), (torch.randn(2, 6, 8, requires_grad=True),))
    work = next(work for op in graph.ops if (work := work_of(op)).forward_moved)
    copies = 2 * 6 * 2 * 4
    assert [size for _, size, _ in work.forward_moved] == [7 * copies * 8, 5 * copies * 12]
    assert [size for _, size, _ in work.backward_moved] == [9 * copies * 8, 9 * copies * 12]


def test_an_operator_without_a_rule_takes_what_torch_counts() -> None:
    class Chunked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return doubled_product(x, x)

    (op,) = capture(Chunked(), (torch.zeros(8, 8),)).ops
    assert work_of(op).forward_flops == 2 * 8**3


@torch.library.custom_op("test_flops::opaque", mutates_args=())
def opaque(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.matrix_power(x, 9)


@opaque.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_no_operator_without_a_rule_is_free() -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return opaque(x)

    (op,) = capture(Net(), (torch.ones(4, 4),)).ops
    work = work_of(op)
    assert (work.forward_flops, work.category) == (16 + 16, "other operators")


@torch.library.custom_op("test_flops::power", mutates_args=())
def power(x: torch.Tensor) -> torch.Tensor:
    return x @ x


@power.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@register_flop_formula(torch.ops.test_flops.power)
def _power_flops(x: Any, *_: Any, **__: Any) -> int:
    return 2 * x[0] ** 3


def test_a_product_of_one_tensor_with_a_rule_takes_what_is_registered() -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return power(x)

    (op,) = capture(Net(), (torch.zeros(8, 8),)).ops
    work = _compute_work(op, from_notation("_ _ -> _ _", op), (False,), False)
    assert (work.forward_flops, work.product_sizes) == (2 * 8**3, ())


def test_bilinear_layers_are_counted_as_torch_counts_them() -> None:
    graph = capture(nn.Bilinear(3, 5, 4, bias=False), (torch.zeros(6, 3), torch.zeros(6, 5)))
    with FlopCounterMode(display=False) as counter:
        nn.Bilinear(3, 5, 4, bias=False)(torch.zeros(6, 3), torch.zeros(6, 5))
    assert work_of(graph.ops[-1]).forward_flops == counter.get_total_flops()


class AddedToProduct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(6, 4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.offset, x, x.mT @ x).mean()


def test_the_gradient_of_an_added_tensor_is_no_product() -> None:
    graph = capture(AddedToProduct(), (torch.randn(6, 4, 8, requires_grad=True),))
    (work,) = (work_of(op) for op in graph.ops if op.short_name == "baddbmm")
    assert work.backward_flops == 2 * work.forward_flops == 2 * 2 * 6 * 4 * 8 * 8
    assert [size for size, _ in work.product_sizes] == [4, 8, 8]
