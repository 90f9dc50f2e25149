"""The joint optimum: against trying everything, and against the recursion."""

from __future__ import annotations

from itertools import product

import pytest

from core.search.toy import TOY, searcher
from sample_models import captured, llama, mlp
from shardwright.core.cost.time_model import TimeModel
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.core.search.by_time.exact import _JointTables, search_exactly
from shardwright.core.search.by_time.objective import Objective
from shardwright.core.search.request import SearchRequest, TimedStep


def test_no_combination_of_cuts_is_below_the_bound_and_the_plan_is_the_best() -> None:
    graph, mesh = captured(mlp, sizes=(16, 32)), prime_mesh(4)
    search = searcher(graph, mesh, TOY)
    objective = Objective(search.problem, search.model)
    states = _JointTables(search.problem, TimeModel(TOY, mesh), objective).all_cuts
    least = min(search.total(objective.cost(list(cuts))) for cuts in product(*states))
    shares: list[float] = []
    request = SearchRequest(graph, mesh, timed_step=TimedStep(TOY), on_share=shares.append)
    found = search_exactly(request)
    assert found.cost == pytest.approx(least)
    assert found.bound <= least * (1 + 1e-9)
    assert found.gap < 0.02
    assert shares == sorted(shares) and shares[0] == 0.0 and 2 / 3 < shares[-1] <= 1.0


@pytest.mark.slow
def test_the_recursion_comes_near_the_bound_for_a_language_model() -> None:
    graph, mesh = captured(llama, width=64, vocabulary=256, sequence=32), prime_mesh(4)
    found = search_exactly(SearchRequest(graph, mesh, timed_step=TimedStep(TOY)))
    search = searcher(graph, mesh, TOY)
    recursive = search.total(search.objective.cost(search.best()))
    assert found.bound <= found.cost <= recursive
    assert recursive < 1.05 * found.bound


def test_where_there_are_too_many_combinations_it_stops_with_a_plan_and_its_bound() -> None:
    graph, mesh = captured(mlp, sizes=(512, 512, 512), batch=64), prime_mesh(64)
    search = searcher(graph, mesh, TOY)
    found = search_exactly(SearchRequest(graph, mesh, timed_step=TimedStep(TOY)))
    assert 0 < found.bound <= found.cost
    assert found.cost <= search.total(search.objective.cost(search.best()))
