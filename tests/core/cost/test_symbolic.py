"""The symbolic cost against the figures of the published table and log."""

from __future__ import annotations

import pytest

from shardwright.core.cost.symbolic import break_even, cut_cost, no_cut_cost, redistribution_cost


def matmul_costs(i: int, j: int, k: int, mem_coeff: float) -> dict[str, float]:
    elements = (i * k, k * j, i * j)
    carries = {"I": (True, False, True), "J": (False, True, True), "K": (True, True, False)}
    return {letter: cut_cost(elements, row, 1, mem_coeff) for letter, row in carries.items()}


def test_cost_of_a_cut_is_half_of_what_it_leaves_whole() -> None:
    costs = matmul_costs(i=32, j=512, k=784, mem_coeff=0.1)
    assert costs == pytest.approx({"I": 0.1 * 784 * 512 / 2, "J": 32 * 784 / 2, "K": 32 * 512 / 2})


def test_mem_coeff_weighs_only_the_weight() -> None:
    low, high = matmul_costs(8, 16, 32, 0.5), matmul_costs(8, 16, 32, 2.0)
    assert high["I"] == 4 * low["I"]
    assert (high["J"], high["K"]) == (low["J"], low["K"])


def test_a_product_without_weight_has_nothing_weighed() -> None:
    assert cut_cost((6, 10, 15), (True, False, True), None, 0.1) == 5.0


def test_no_cut_costs_the_square_of_the_least_cut_over_25() -> None:
    assert no_cut_cost((20070.4, 12544, 8192)) == pytest.approx(2684354.56)


def test_cuts_that_cost_nothing_do_not_make_no_cut_free() -> None:
    assert no_cut_cost((0.0, 10.0)) == 4.0


def test_no_cut_is_free_where_nothing_can_be_cut() -> None:
    assert no_cut_cost(()) == 0.0


def test_redistribution_costs_16_an_element() -> None:
    assert redistribution_cost(32 * 512) == 262144


def test_break_even_is_the_coefficient_of_the_documents() -> None:
    coefficient = break_even(20.48, 0.01, 20.48**2 / 25)
    assert coefficient == pytest.approx(25 / 2048)
    assert coefficient == pytest.approx(0.012207, abs=5e-7)


@pytest.mark.parametrize("mem_coeff", [0.001, 0.01, 0.02])
def test_at_break_even_cutting_i_costs_as_much_as_not_cutting(mem_coeff: float) -> None:
    def both(m: float) -> tuple[float, float]:
        costs = matmul_costs(i=8192, j=1, k=4096, mem_coeff=m)
        return costs["I"], no_cut_cost(costs.values())

    cut, none = both(break_even(*_swap(both(mem_coeff), mem_coeff)))
    assert cut == pytest.approx(none)


def _swap(costs: tuple[float, float], mem_coeff: float) -> tuple[float, float, float]:
    return costs[0], mem_coeff, costs[1]
