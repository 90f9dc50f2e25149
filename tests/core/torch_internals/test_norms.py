"""Norms by `torch.nn.utils` are extended, however its functions were imported."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from shardwright.core.torch_internals.norms import extend_norms, module_of_parameters

Seen = list[tuple[str, int, nn.Module | None]]


class Seeing:
    """Sees calls, answers those of order 7, and has a group for each tensor."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen

    def total(
        self,
        function: str,
        listed: Sequence[Tensor],
        measured: Sequence[Tensor],
        source: nn.Module | None,
        norm_type: float,
    ) -> Tensor | None:
        self.seen.append((function, len(listed), source))
        return torch.tensor(math.inf if norm_type == 8 else 10.0) if norm_type > 6 else None

    def clipped(self, parameters: Sequence[Tensor], max_norm: float) -> None:
        """Part of the interface; `runtime/test_total_norms.py` tests what is recorded."""

    def groups(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        return [[tensor] for tensor in tensors]

    def trained(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        return list(parameters)


@pytest.fixture
def norms() -> Iterator[Seen]:
    """The calls that were seen; the functions are as they were afterwards."""
    cells = []
    for function in (clip_grad_norm_, get_total_norm, clip_grads_with_norm_):
        closure = function.__closure__
        assert closure is not None
        cell = closure[function.__code__.co_freevars.index("func")]
        cells.append((cell, cell.cell_contents))
        cell.cell_contents = getattr(cell.cell_contents, "__wrapped__", cell.cell_contents)
    seen: Seen = []
    extend_norms(Seeing(seen))
    yield seen
    for cell, contents in cells:
        cell.cell_contents = contents


def linear() -> nn.Linear:
    net = nn.Linear(3, 2)
    (3 * net(torch.ones(1, 3)).sum()).backward()
    return net


def gradients(net: nn.Module) -> list[Tensor]:
    return [p.grad for p in net.parameters() if p.grad is not None]


CALLS: dict[str, Callable[[nn.Module], Any]] = {
    "a generator": lambda net: clip_grad_norm_((p for p in net.parameters()), 1.0),
    "a list": lambda net: clip_grad_norm_(list(net.parameters()), 1.0),
    "by keyword": lambda net: clip_grad_norm_(max_norm=1.0, parameters=list(net.parameters())),
    "another norm": lambda net: clip_grad_norm_(list(net.parameters()), 1.0, float("inf")),
    "in a loop": lambda net: clip_grad_norm_(list(net.parameters()), 1.0, foreach=False),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_is_seen_once_and_clips_as_ever(norms: Seen, call: Any) -> None:
    net, other = linear(), linear()
    norm = call(net)
    assert norms == [("clip_grad_norm_", 2, None)]
    assert norm > 1
    assert get_total_norm(gradients(net)) < norm
    assert norms[1:] == [("get_total_norm", 2, None)]
    assert get_total_norm(tensors=gradients(other)) > 1


def test_the_module_is_known_whose_parameters_are_given(norms: Seen) -> None:
    net = linear()
    clip_grad_norm_(net.parameters(), 1.0)
    clip_grad_norm_(net.parameters(recurse=False), 1.0)
    assert norms == [("clip_grad_norm_", 2, net), ("clip_grad_norm_", 2, None)]


def test_the_norm_of_one_tensor_is_pytorchs(norms: Seen) -> None:
    net = linear()
    norm = clip_grad_norm_(net.weight, 1.0)
    torch.testing.assert_close(norm, torch.tensor(54.0).sqrt())
    assert net.weight.grad is not None
    torch.testing.assert_close(get_total_norm(net.weight.grad), torch.tensor(1.0))
    assert norms == []


def test_an_answer_is_the_norm_that_gradients_are_scaled_by(norms: Seen) -> None:
    net = linear()
    assert clip_grad_norm_(net.parameters(), 1.0, norm_type=7) == 10
    for gradient in gradients(net):
        torch.testing.assert_close(gradient, torch.full_like(gradient, 0.3))
    assert get_total_norm(gradients(net), 7.0) == 10
    with pytest.raises(RuntimeError, match=r"order 8\.0 for gradients .* is non-finite"):
        get_total_norm(gradients(net), 8, error_if_nonfinite=True)
    clip_grads_with_norm_(net.parameters(), 1.0, torch.tensor(10.0))
    for gradient in gradients(net):
        torch.testing.assert_close(gradient, torch.full_like(gradient, 0.03))
    assert [name for name, *_ in norms] == ["clip_grad_norm_", "get_total_norm", "get_total_norm"]


def test_the_first_extension_stays(norms: Seen) -> None:
    extend_norms(Seeing([]))
    get_total_norm([torch.ones(2)])
    assert norms == [("get_total_norm", 1, None)]


def test_an_empty_generator_warns_as_ever(norms: Seen) -> None:
    with pytest.warns(UserWarning, match="empty generator"):
        assert clip_grad_norm_(iter_nothing(), 1.0) == 0


def iter_nothing() -> Iterable[Tensor]:
    yield from ()


def test_no_other_generator_is_taken_for_the_parameters_of_a_module() -> None:
    net = linear()
    assert module_of_parameters(net.parameters()) is net
    for other in (net.buffers(), [*net.parameters()], (p for p in net.parameters()), None):
        assert module_of_parameters(other) is None
