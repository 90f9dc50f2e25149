import pytest
import torch
from torch import Tensor, randn
from torch.testing import assert_close

from core.rules.oracle import check
from shardwright.core.graph.custom_ops import experts, run_steps

SWIGLU = (
    ("aten.split.Tensor", ("%0", 1, -1), ()),
    ("getitem", ("%1", 0), ()),
    ("getitem", ("%1", 1), ()),
    ("aten.silu.default", ("%2",), ()),
    ("aten.mul.Tensor", ("%4", "%3"), ()),
)
RELU = (("aten.relu.default", ("%0",), ()),)
EXPERTS, HIDDEN, INNER, CHOSEN = 6, 5, 4, 2


def r(*shape: int) -> Tensor:
    return randn(*shape, dtype=torch.float64)


def routed(*tokens: int, unused: bool = False) -> tuple[Tensor, Tensor]:
    """Choices of different experts, unevenly; those of the last half by none if `unused`."""
    scores = torch.rand(*tokens, EXPERTS) * torch.arange(EXPERTS, 0, -1)
    scores[..., EXPERTS // 2 :] *= not unused
    return scores.topk(CHOSEN, -1).indices, r(*tokens, CHOSEN)


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_tokens_experts_and_inner_dimension_may_be_cut(interleaved, biased, unused) -> None:
    projected = (INNER, 2) if interleaved else (2, INNER)
    biases = (r(EXPERTS, *projected), r(EXPERTS, HIDDEN)) if biased else (None, None)
    matrices = r(EXPERTS, *projected, HIDDEN), r(EXPERTS, HIDDEN, INNER)
    rule = check(
        experts,
        r(4, 6, HIDDEN),
        *routed(4, 6, unused=unused),
        *matrices,
        *biases,
        SWIGLU,
        interleaved,
    )
    assert set(rule.factors) == {"b", "s", "e", "i"}
    assert rule.reduced == {"e", "i"}


def test_experts_without_a_gate_may_be_cut() -> None:
    matrices = r(EXPERTS, 1, INNER, HIDDEN), r(EXPERTS, HIDDEN, INNER)
    rule = check(experts, r(6, HIDDEN), *routed(6), *matrices, None, None, RELU)
    assert set(rule.factors) == {"b", "e", "i"}


def test_a_token_gets_what_each_chosen_expert_makes_of_it() -> None:
    x, (ids, weights) = r(7, HIDDEN), routed(7)
    gate_up, down = r(EXPERTS, 2, INNER, HIDDEN), r(EXPERTS, HIDDEN, INNER)
    ids[0, 0] = EXPERTS  # There is no such expert.
    expected = torch.zeros_like(x)
    for token in range(7):
        for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
            if expert < EXPERTS:
                gate, up = gate_up[expert] @ x[token]
                inner = torch.nn.functional.silu(gate) * up
                expected[token] += weight * (down[expert] @ inner)
    assert_close(experts(x, ids, weights, gate_up, down, None, None, SWIGLU), expected)


@pytest.mark.parametrize("name", ["aten.__class__.mro", "aten.silu.__init__"])
def test_a_gate_calls_nothing_but_operators(name: str) -> None:
    with pytest.raises(ValueError, match="is not an ATen operator"):
        run_steps(((name, ("%0",), ()),), r(2, 3))
