import torch
from torch import Tensor, randint, randn, tensor

from rules.oracle import check

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
