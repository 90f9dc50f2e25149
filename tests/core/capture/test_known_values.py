from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
from random_plans import check_random_plan, random_plan
from shardwright.core.capture.capture import capture
from shardwright.errors import CaptureError, PlanError


class Net(nn.Module):
    def __init__(self, function: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.places = torch.arange(8)
        self.mask = nn.Buffer(torch.arange(8) > 3)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def similarity(net: Net, x: Tensor) -> Tensor:
    z = F.normalize(torch.cat([net.linear(x), net.linear(x * 2)]), dim=1)
    return z @ z.T


def positives_and_negatives(net: Net, x: Tensor) -> Tensor:
    """The loss of SimCLR as its most used implementation computes it."""
    labels = torch.cat([torch.arange(len(x)) for _ in range(2)])
    labels = (labels[None] == labels[:, None]).float()
    off = ~torch.eye(len(labels), dtype=torch.bool)
    labels = labels[off].view(len(labels), -1)
    similar = similarity(net, x)[off].view(len(labels), -1)
    positives = similar[labels.bool()].view(len(labels), -1)
    negatives = similar[~labels.bool()].view(len(labels), -1)
    logits = torch.cat([positives, negatives], dim=1) / 0.07
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


def changed_in_place(net: Net, x: Tensor) -> Tensor:
    mask = torch.ones(16, 16, dtype=torch.bool).fill_diagonal_(False)
    for place in range(8):
        mask[place, 8 + place] = False
    return similarity(net, x)[mask].exp().mean()


def upper_triangle(net: Net, x: Tensor) -> Tensor:
    similar = similarity(net, x)
    upper = torch.triu(torch.ones_like(similar), 1)
    rows, columns = torch.where(upper > 0)
    return similar.masked_select(upper.bool()).sin().mean() + similar[columns, rows].exp().mean()


def numbers(net: Net, x: Tensor) -> Tensor:
    for rate in torch.linspace(0, 0.3, 4).tolist():
        x = x + rate * net.linear(x)
    if torch.arange(8).sum() > 3:
        x = x[:, net.places % 2 == 0]
    return x.sin().mean()


def written(net: Net, x: Tensor) -> Tensor:
    even, out = net.places % 2 == 0, torch.zeros(8, 8)
    out[even] = net.linear(x)[:4]
    out[~even, 1:3] = 1.0
    return out.sin().mean()


def sized(net: Net, x: Tensor) -> Tensor:
    """Sizes that stay tensors, as those of images in ViLT, Pixtral and Encodec."""
    four, two = net.mask.sum(), net.places[2]
    x = F.pad(net.linear(x), (two, four - two), value=1.0)[..., :-four]
    x = torch.cat(x.split([four, two, two], dim=1)[::-1], dim=1)
    x = F.interpolate(x[None], size=four)[0].view(four, -1)
    x = x + torch.arange(four)[:, None] + torch.ones(size=(four, 1))
    return x.sin().mean()


@pytest.mark.parametrize(
    "function", [positives_and_negatives, changed_in_place, upper_triangle, numbers, written, sized]
)
def test_shapes_and_branches_that_no_input_determines_are_captured(
    function: Callable[[Net, Tensor], Tensor],
) -> None:
    net, args = Net(function), (torch.randn(8, 8),)
    graph = capture(net, args)
    check_random_plan(net, args, {}, graph, random_plan(graph, 4, 0))


def drawn(net: Net, x: Tensor) -> Tensor:
    return net.linear(x)[torch.rand(8) > 0.5].median()


def drawn_in_place(net: Net, x: Tensor) -> Tensor:
    mask = torch.ones(8).bernoulli_(0.5) > 0
    return net.linear(x)[mask].median()


def permuted(net: Net, x: Tensor) -> Tensor:
    mask = torch.zeros(8, dtype=torch.bool)
    mask[torch.randperm(8)[:4]] = True
    return net.linear(x)[mask].median()


def through_a_view(net: Net, x: Tensor) -> Tensor:
    mask = torch.ones(8, dtype=torch.bool)
    half = mask[:4]
    mask[0] = x[0, 0] > 0
    return net.linear(x)[:4][half].median()


def in_a_slice(net: Net, x: Tensor) -> Tensor:
    start: Any = x.sum().long().abs()
    return net.linear(x)[net.places[start:] > 2].median()


@pytest.mark.parametrize("function", [drawn, drawn_in_place, permuted, through_a_view, in_a_slice])
def test_values_that_are_drawn_or_depend_on_inputs_or_state_are_not_known(
    function: Callable[[Net, Tensor], Tensor],
) -> None:
    with pytest.raises(CaptureError, match="unknown during capture"):
        capture(Net(function), (torch.randn(8, 8),))


def selected_by_buffers(net: Net, x: Tensor) -> Tensor:
    if net.mask[:4].any():
        x = x * 2
    chosen = net.linear(x)[:, ~net.mask | (net.places < 1)]
    first = x[:, : int(net.mask.sum()) // 2].sum(1, keepdim=True)
    return (chosen.sin() + first).mean() + x.masked_select(net.mask).mean()


def test_what_depends_on_the_values_of_buffers_is_another_program_when_they_change() -> None:
    net, x = Net(selected_by_buffers), torch.randn(8, 8)
    graph = capture(net, (x,))
    check_random_plan(net, (x,), {}, graph, random_plan(graph, 4, 0))
    plan, wanted = sw.plan(net, (x,), devices=1), net(x)
    planned = sw.parallelize(net, plan, copy=True)
    torch.testing.assert_close(planned(x), wanted)
    for change in (lambda m: m.roll(1), lambda m: m, lambda m: m[torch.arange(8) ^ 1]):
        for each in (net, planned):
            each.mask.copy_(change(each.mask))
        torch.testing.assert_close(planned(x), net(x))
    assert len(planned.execution._forwards) == 3  # Equal values are one program.
    state = {name: t.flip(0) if name == "mask" else t for name, t in net.state_dict().items()}
    for each in (net, planned):
        each.load_state_dict(state)
        each.mask = each.mask.clone()
    torch.testing.assert_close(planned(x), net(x))
    with pytest.raises(PlanError, match="made for another model"):
        net.mask.fill_(True)
        sw.parallelize(net, plan, copy=True)


def test_buffers_that_forward_updates_or_that_have_no_values_are_not_known() -> None:
    def counting(net: Net, x: Tensor) -> Tensor:
        if net.mask.any():
            x = net.linear(x)
        net.mask[0] = True
        return x.mean()

    with pytest.raises(CaptureError, match="updates the buffer 'mask', and a shape or a branch"):
        capture(Net(counting), (torch.randn(8, 8),))
    with pytest.raises(CaptureError, match="unknown during capture"):
        capture(Net(selected_by_buffers).to("meta"), (torch.randn(8, 8),))


def test_the_generator_is_as_it_was() -> None:
    net, x = Net(drawn), torch.randn(8, 8)
    before = torch.get_rng_state()
    with pytest.raises(CaptureError):
        capture(net, (x,))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_tensor_of_inference_mode_changes_as_ever() -> None:
    def counted(net: Net, x: Tensor) -> Tensor:
        with torch.inference_mode():
            ones = torch.ones(8)
            ones += 1
        return net.linear(x).mean() * float(ones[0])

    (multiplied,) = (op for op in capture(Net(counted), (torch.randn(8, 8),)).ops if 2.0 in op.args)
    assert "mul" in str(multiplied.target)


def test_a_generator_of_ones_own_is_refused_with_the_line() -> None:
    def own(net: Net, x: Tensor) -> Tensor:
        return net.linear(x) + torch.rand(8, generator=torch.Generator().manual_seed(3))

    with pytest.raises(CaptureError, match=r"(?s)net.linear.*torch.Generator.*manual_seed"):
        capture(Net(own), (torch.randn(8, 8),))


def test_numbers_of_repeats_in_a_buffer_give_a_shape() -> None:
    """As the lengths of images, from their grids, in Qwen's attention."""

    def repeated(net: Net, x: Tensor) -> Tensor:
        lengths = torch.repeat_interleave(net.counts, net.counts)
        parts = torch.split(net.linear(x), lengths.tolist())
        return sum((part.mean() for part in parts), torch.zeros(()))

    net = Net(repeated)
    net.register_buffer("counts", torch.tensor([2, 2]))
    graph = capture(net, (torch.randn(8, 8),))
    (split,) = (op for op in graph.ops if "split" in str(op.target))
    assert list(split.args[1]) == [2, 2, 2, 2]


class Images(nn.Module):
    def __init__(self, reads: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.reads = nn.Linear(8, 8), reads

    def forward(self, x: Tensor, sizes: Tensor, labels: Tensor) -> Tensor:
        x = self.linear(x)
        return x[: self.reads(x, sizes, labels)].sin().mean()


class FixedSizes(nn.Module):
    def __init__(self, net: nn.Module, sizes: Tensor) -> None:
        super().__init__()
        self.net, self.sizes = net, nn.Buffer(sizes)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.net(x, sizes=self.sizes, labels=labels)


ARGUMENTS = torch.randn(8, 8), torch.tensor([[2, 2], [1, 4]]), torch.arange(8)


@pytest.mark.parametrize(
    ("reads", "names"),
    [
        (lambda x, sizes, labels: sizes.prod(-1).tolist()[0], "'sizes'"),
        (lambda x, sizes, labels: sizes.prod(-1).float().sqrt().max().long(), "'sizes'"),
        (lambda x, sizes, labels: int(sizes[0, 0] + labels[1]), "'labels' and 'sizes'"),
    ],
)
@pytest.mark.usefixtures("untried_suggestions")
def test_refusals_name_the_integer_inputs_whose_values_are_read(reads, names) -> None:
    net = Images(reads)
    with pytest.raises(CaptureError, match=f"If the values of the input {names} are the same"):
        capture(net, ARGUMENTS)


@pytest.mark.usefixtures("untried_suggestions")
def test_refusals_of_other_values_name_no_input() -> None:
    net = Images(lambda x, sizes, labels: int(sizes[0, 0] * (x.sum() > 0)))
    with pytest.raises(CaptureError) as refusal:
        capture(net, ARGUMENTS)
    assert "values of the input" not in str(refusal.value)


def test_a_buffer_in_place_of_the_input_is_known() -> None:
    x, sizes, labels = ARGUMENTS
    net = FixedSizes(Images(lambda x, sizes, labels: sizes.prod(-1).tolist()[0]), sizes)
    graph = capture(net, (x, labels))
    check_random_plan(net, (x, labels), {}, graph, random_plan(graph, 4, 0))
