import pytest
import torch
from torch import Tensor, randint, randn, tensor

from core.rules.oracle import check
from shardwright.core.graph.custom_ops import embedding_bag

embedding = torch.ops.aten.embedding.default


def table(rows: int = 12, features: int = 4) -> Tensor:
    return randn(rows, features, dtype=torch.float64)


def test_indices_features_and_rows_may_be_cut() -> None:
    found = check(embedding, table(), randint(12, (6, 4)))
    assert set(found.factors) == {"b", "s", "v", "e"}
    assert found.reduced == {"v"}
    assert found.main is not None
    assert found.main.weight == 0
    assert list(found.main.labels.items()) == [("b", "I"), ("s", "I"), ("e", "J"), ("v", "K")]


def test_one_dimension_of_indices_or_none() -> None:
    assert set(check(embedding, table(), randint(12, (6,))).factors) == {"b", "v", "e"}
    assert set(check(embedding, table(), tensor(7)).factors) == {"v", "e"}


def test_three_dimensions_of_indices() -> None:
    assert len(check(embedding, table(), randint(12, (2, 2, 2))).factors) == 5


def test_the_row_of_padding_has_no_gradient_on_any_device() -> None:
    for padding in (0, 5, 11):
        indices = randint(12, (6, 4))
        indices[::2, 0] = padding
        check(embedding, table(), indices, padding)
        check(embedding, table(), indices, padding_idx=padding)


def test_indices_that_all_fall_to_one_device() -> None:
    check(embedding, table(), tensor([[0, 1], [1, 2], [2, 0], [0, 0]]))


def test_gradients_scaled_by_frequency_let_only_features_be_cut() -> None:
    indices = tensor([[0, 1], [1, 1], [2, 0], [11, 0]])
    assert check(embedding, table(), indices, -1, True).factors == ("e",)


BAGS = {"sum": 0, "mean": 1, "max": 2}


@pytest.mark.parametrize("mode", BAGS)
@pytest.mark.parametrize("padding", [None, 5])
def test_bags_of_one_size_features_and_rows_may_be_cut(mode: str, padding: int | None) -> None:
    indices = randint(12, (6, 4))
    indices[::2, 0] = 5
    found = check(embedding_bag, table(), indices, None, None, mode=BAGS[mode], padding_idx=padding)
    assert set(found.factors) == ({"b", "e"} if mode == "max" else {"b", "e", "v"})


@pytest.mark.parametrize("mode", BAGS)
@pytest.mark.parametrize("last", [False, True])
def test_rows_and_features_of_uneven_and_empty_bags_may_be_cut(mode: str, last: bool) -> None:
    offsets = tensor([0, 3, 3, 4, 10] + [12] * last)
    found = check(
        embedding_bag,
        *(table(), randint(12, (12,)), offsets, None, BAGS[mode], 5, last),
    )
    assert set(found.factors) == ({"e"} if mode == "max" else {"e", "v"})


def test_weights_of_samples_are_cut_with_the_bags() -> None:
    found = check(embedding_bag, table(), randint(12, (6, 4)), None, table(6, 4))
    assert found.inputs[2] == ("b", None)
    check(embedding_bag, table(), randint(12, (12,)), tensor([0, 3, 5]), table(12, 1)[:, 0])


def test_bags_whose_gradients_are_scaled_by_frequency_are_cut_by_features_only() -> None:
    found = check(embedding_bag, table(), randint(12, (6, 4)), scale_grad_by_freq=True)
    assert found.factors == ("e",)
