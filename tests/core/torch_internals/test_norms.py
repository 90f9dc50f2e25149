"""What `torch.nn.utils` computes one norm of is seen before, however it was imported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

from shardwright.core.torch_internals.norms import before_norms, module_of_parameters

Seen = list[tuple[str, int, nn.Module | None]]


@pytest.fixture
def norms() -> Iterator[Seen]:
    """The calls that were seen; the functions are as they were afterwards."""
    cells = []
    for function in (clip_grad_norm_, get_total_norm):
        closure = function.__closure__
        assert closure is not None
        cell = closure[function.__code__.co_freevars.index("func")]
        cells.append((cell, cell.cell_contents))
        cell.cell_contents = getattr(cell.cell_contents, "__wrapped__", cell.cell_contents)
    seen: Seen = []

    def check(name: str, tensors: Sequence[Tensor], module: nn.Module | None) -> None:
        seen.append((name, len(tensors), module))

    before_norms(check)
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


def test_the_norm_of_one_tensor_is_not_checked(norms: Seen) -> None:
    net = linear()
    norm = clip_grad_norm_(net.weight, 1.0)
    torch.testing.assert_close(norm, torch.tensor(54.0).sqrt())
    assert net.weight.grad is not None
    torch.testing.assert_close(get_total_norm(net.weight.grad), torch.tensor(1.0))
    assert norms == []


def test_the_first_check_stays(norms: Seen) -> None:
    def refused(*_: object) -> None:
        raise AssertionError

    before_norms(refused)
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
