"""The oracle finds wrong rules: of each kind one that must fail."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, randn

from core.rules.oracle import Case, check, cuts_of, op_of
from shardwright.core.rules.notation import from_notation
from shardwright.core.rules.rule import LocalSharding, Reduction

aten = torch.ops.aten
F64 = torch.float64


def case(notation: str, target: object, *args: object, **options: object) -> Case:
    op = op_of(target, *args)
    tensors = [argument for argument in args if isinstance(argument, Tensor)]
    return Case(op, tensors, from_notation(notation, op, **options))


def run(made: Case) -> None:
    for mesh, cuts in cuts_of(made.rule):
        made.compare(mesh, cuts)


def test_a_softmax_cut_where_it_normalizes_is_found() -> None:
    with pytest.raises(AssertionError):
        run(case("b s -> b s", aten.softmax.int, randn(4, 6, dtype=F64), -1))


def test_a_mean_without_its_kernel_is_found() -> None:
    with pytest.raises(AssertionError):
        run(case("b -> ()", aten.mean.default, randn(4, dtype=F64), reduced="b"))


def test_a_declared_reduction_is_carried_out_with_its_gradient() -> None:
    def reductions(op, parts):
        return (Reduction(("b",), "sum", (), F64),) if parts["b"] > 1 else ()

    def kernel(op, local: LocalSharding):
        def total(x: Tensor) -> Tensor:
            return local.reduce[0](x.sum()) if local.reduce else x.sum()

        return total

    made = case("b -> ()", aten.sum.default, randn(12, dtype=F64), reduced="b")
    made.rule = replace(
        made.rule,
        kernel=kernel,
        reductions=reductions,
        reduced=frozenset(),
        complete=frozenset({"b"}),
    )
    run(made)
    made.rule = replace(made.rule, complete=frozenset(), reduced=frozenset({"b"}))
    with pytest.raises(AssertionError):
        run(made)


def test_kernels_learn_their_place_among_many_simulated_ranks() -> None:
    def kernel(op, local: LocalSharding):
        return lambda x: x + local.index("b")

    made = case("b -> b", aten.clone.default, torch.zeros(4, dtype=F64))
    made.rule = replace(made.rule, kernel=kernel)
    with pytest.raises(AssertionError):
        run(made)
    made.outputs = [torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=F64)]
    mesh, cuts = next(cuts_of(made.rule))
    made.compare(mesh, cuts)


def test_all_factors_and_pairs_are_cut() -> None:
    found = check(aten.add.Tensor, randn(12, 4, dtype=F64), randn(4, dtype=F64))
    cuts = [(mesh.device_matrix, cut) for mesh, cut in cuts_of(found)]
    assert ((3,), {"b": (0,)}) in cuts
    assert ((2, 2), {"s": (1, 0)}) in cuts
    assert ((2, 2), {"b": (0,), "s": (1,)}) in cuts
    assert ((3,), {"s": (0,)}) not in cuts
