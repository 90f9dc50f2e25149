from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn, randn

from core.rules.oracle import check, op_of, operator_name
from shardwright.core.rules import rule_of

aten = torch.ops.aten


def matrices(*batch: int, size: int = 3) -> Tensor:
    """Symmetric positive ones, whose eigenvalues differ."""
    x = randn(*batch, size, size, dtype=torch.float64)
    return x @ x.mT + torch.diag(torch.arange(1.0, size + 1, dtype=torch.float64)) * 4


def vectors(*shape: int) -> Tensor:
    return randn(*shape, dtype=torch.float64)


LU = torch.linalg.lu_factor(matrices(4, 6))
REAL = (
    *((aten.linalg_det.default, ()), (aten.linalg_inv.default, ()), (aten.logdet.default, ())),
    *((aten.linalg_cholesky.default, ()), (aten.cholesky_inverse.default, ())),
    *((aten.linalg_eigvalsh.default, ()), (aten.linalg_svdvals.default, ())),
    *((aten.linalg_slogdet.default, ()), (aten.linalg_matrix_power.default, (3,))),
    *((aten.matrix_exp.default, ()), (aten.linalg_lu.default, ()), (aten.linalg_qr.default, ())),
    *((aten.linalg_pinv.atol_rtol_tensor, ()), (aten._linalg_svd.default, ())),
    *((aten._linalg_det.default, ()), (aten._linalg_slogdet.default, ())),
)


@pytest.mark.parametrize(("target", "args"), REAL, ids=operator_name)
def test_matrices_of_a_batch_may_be_cut(target: Any, args: tuple[Any, ...]) -> None:
    assert check(target, matrices(4, 6), *args).factors == ("b", "s")


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.linalg_solve.default, (matrices(4, 6), vectors(4, 6, 3))),
        (aten._linalg_solve_ex.default, (matrices(4, 6), vectors(4, 6, 3))),
        (aten.linalg_householder_product.default, (vectors(4, 6, 3, 2), vectors(4, 6, 2))),
        (aten.lu_unpack.default, LU),
    ],
    ids=operator_name,
)
def test_systems_of_a_batch_may_be_cut(target: Any, args: tuple[Any, ...]) -> None:
    assert set(check(target, *args).factors) == {"b", "s"}


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.linalg_solve.default, (matrices(4, 6), vectors(4, 6, 3, 2))),
        (aten.linalg_solve.default, (matrices(4, 6), vectors(6, 3, 2))),
        (aten.cholesky_solve.default, (vectors(4, 6, 3, 2), matrices(4, 6).tril())),
        (aten.linalg_lu_solve.default, (LU[0], LU[1], vectors(4, 6, 3, 2))),
    ],
    ids=operator_name,
)
def test_columns_of_right_hand_sides_may_be_cut(target: Any, args: tuple[Any, ...]) -> None:
    assert set(check(target, *args).factors) == {"b", "s", "j"}


@pytest.mark.parametrize("left", [True, False])
def test_the_right_hand_sides_of_a_triangular_system_may_be_cut(left: bool) -> None:
    rhs = vectors(2, 3, 4) if left else vectors(2, 4, 3)
    target = aten.linalg_solve_triangular.default
    found = check(target, matrices(2).tril(), rhs, upper=False, left=left)
    assert str(found) == ("b _ _, b _ j -> b _ j" if left else "b _ _, b j _ -> b j _")


def test_a_vector_of_each_system_of_a_batch_is_no_matrix() -> None:
    assert check(aten.linalg_solve.default, matrices(6), vectors(6, 3)).factors == ("b",)
    assert check(aten.linalg_solve.default, matrices(6), vectors(3)).factors == ("b",)


@pytest.mark.parametrize("p", [0.5, 1.0, 2.0, float("inf")])
def test_both_sets_of_vectors_may_be_cut_and_features_of_a_norm(p: float) -> None:
    x = vectors(2, 4, 6)
    # Equal vectors have distance 0, whose gradient is 0.
    y = torch.cat([vectors(2, 2, 6), x[:, :2]], 1)
    factors = {"b", "i", "j", "k"} if 1 <= p < float("inf") else {"b", "i", "j"}
    assert set(check(aten.cdist.default, x, y, p).factors) == factors


@pytest.mark.parametrize("space", [(4,), (4, 2)])
def test_images_channels_and_places_of_samples_may_be_cut(space: tuple[int, ...]) -> None:
    image, grid = vectors(2, 4, 3, 3, *(3,) * (len(space) - 1)), vectors(2, 6, *space, 3)
    if len(space) == 1:
        grid = grid[..., :2]
    found = check(aten.grid_sampler.default, image, grid, 0, 0, False)
    assert set(found.factors) == {"b", "c", *"stu"[: 1 + len(space)]}


def test_affine_grids_of_a_batch_may_be_cut() -> None:
    check(aten.affine_grid_generator.default, vectors(4, 2, 3), [4, 3, 5, 6], False)
    check(aten.affine_grid_generator.default, vectors(4, 3, 4), [4, 3, 2, 5, 6], True)


def test_planes_are_unpooled_and_pooled_at_random_places_each_on_its_own() -> None:
    pooled, places = aten.max_pool2d_with_indices.default(vectors(2, 4, 4, 4), [2, 2])
    found = check(aten.max_unpool2d.default, nn.Buffer(pooled), places, [4, 4])
    assert found.factors == ("b", "s")
    samples = nn.Buffer(torch.rand(2, 4, 2, dtype=torch.float64))
    pool = aten.fractional_max_pool2d.default
    assert check(pool, vectors(2, 4, 6, 6), [2, 2], [3, 3], samples).factors == ("b", "s")


@pytest.mark.parametrize(
    ("name", "options", "factors"),
    [
        ("fft_rfft", {}, "bs"),
        ("fft_rfft", {"dim": 0, "n": 5}, "st"),
        ("fft_rfft2", {}, "b"),
        ("fft_rfftn", {"s": [3]}, "bs"),
        ("fft_rfftn", {}, ""),
        ("fft_ihfft", {"dim": 1}, "bt"),
    ],
)
def test_what_is_not_transformed_may_be_cut(name: str, options: Any, factors: str) -> None:
    found = check(getattr(aten, name).default, vectors(4, 6, 4), **options)
    assert "".join(found.factors) == factors


def test_signals_of_a_batch_may_be_cut() -> None:
    window = nn.Buffer(torch.ones(8, dtype=torch.float64))
    signals, options = vectors(4, 32), {"window": window, "return_complex": False}
    assert check(aten.stft.default, signals, 8, **options).factors == ("b",)


def test_distances_without_sharded_features_communicate_nothing() -> None:
    op = op_of(aten.cdist.default, randn(2, 4, 6), randn(2, 4, 6), 1.0)
    rule = rule_of(op)
    # Of a micro-batch, only the factors of samples are sharded.
    assert rule is not None and rule.reductions(op, {"i": 2}) == ()
    assert len(rule.reductions(op, {"k": 2, "i": 1, "j": 1})) == 1
