import pytest
import torch
from torch import Tensor, rand, randint, randn
from torch.nn import Buffer

from core.rules.oracle import check

aten = torch.ops.aten
F64 = torch.float64


def r(*shape: int) -> Tensor:
    return randn(*shape, dtype=F64)


def signs(*shape: int) -> Tensor:
    return randint(2, shape, dtype=F64) * 2 - 1


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize(
    "target, tensors, options",
    [
        (aten.mse_loss.default, (r(6, 4), r(6, 4)), {}),
        (aten.l1_loss.default, (r(6, 4), r(4)), {}),
        (aten.l1_loss.default, (r(6, 1), r(6, 4)), {}),
        (aten.l1_loss.default, (r(12), r(12)), {}),
        (aten.smooth_l1_loss.default, (r(6, 4), r(6, 4)), {"beta": 0.5}),
        (aten.huber_loss.default, (r(2, 2, 2), r(2, 2, 2)), {"delta": 0.5}),
        (aten.binary_cross_entropy.default, (r(6, 4).sigmoid(), rand(6, 4, dtype=F64)), {}),
        (aten.binary_cross_entropy_with_logits.default, (r(6, 4), rand(6, 4, dtype=F64)), {}),
        (aten.kl_div.default, (r(6, 4).log_softmax(-1), rand(6, 4, dtype=F64)), {}),
        (aten.kl_div.default, (r(6, 4), r(6, 4)), {"log_target": True}),
        (aten.soft_margin_loss.default, (r(6, 4), Buffer(signs(6, 4))), {}),
        (aten.hinge_embedding_loss.default, (r(6, 4), signs(6, 4)), {}),
        (aten.margin_ranking_loss.default, (r(6, 4), r(6, 4), signs(6, 4)), {"margin": 0.2}),
    ],
    ids=lambda value: str(value) if isinstance(value, torch._ops.OpOverload) else "",
)
def test_every_dimension_of_a_loss_of_elements_may_be_cut(
    target, tensors, options, reduction
) -> None:
    found = check(target, *tensors, reduction=reduction, **options)
    assert len(found.factors) == max(tensor.ndim for tensor in tensors)
    assert bool(found.reduced) == (reduction > 0)


def test_poisson_loss() -> None:
    for reduction in (0, 1, 2):
        rest = (True, False, 1e-8, reduction)
        assert len(check(aten.poisson_nll_loss.default, r(6, 4), r(6, 4), *rest).factors) == 2


def test_weights_of_a_binary_loss_are_broadcast() -> None:
    loss = aten.binary_cross_entropy_with_logits.default
    weights = [Buffer(rand(4, dtype=F64)) for _ in range(2)]
    found = check(loss, r(6, 4), rand(6, 4, dtype=F64), *weights)
    assert found.inputs[2] == found.inputs[3] == found.inputs[0][1:]


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_rows_of_margin_losses_may_be_cut(reduction: int) -> None:
    scores, target = r(6, 4), randint(4, (6,))
    check(aten.multi_margin_loss.default, scores, target, reduction=reduction)
    found = check(
        aten.multi_margin_loss.default,
        *(scores, target, 2, 0.5, Buffer(rand(4, dtype=F64)), reduction),
    )
    assert found.factors == ("b",)
    targets = torch.stack([torch.randperm(4) for _ in range(6)])
    check(aten.multilabel_margin_loss.default, scores, targets, reduction)
