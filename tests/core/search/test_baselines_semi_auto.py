"""The semi-automatic mode: pinned operators as pinned, the others along the batch."""

from __future__ import annotations

from core.search.handmade import case_a
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.core.search.baselines import data_parallel, semi_auto


def test_without_pins_it_is_data_parallel() -> None:
    graph, mesh = case_a(batch=48), prime_mesh(8)
    assert semi_auto(graph, mesh, {}) == data_parallel(graph, mesh)


def test_neighbors_of_a_pinned_operator_stay_along_the_batch() -> None:
    graph, mesh = case_a(batch=48), prime_mesh(8)
    name = graph.ops[1].name
    pin = {"j": (2, 0)}
    expected = {op.name: {"b": (0, 1, 2)} for op in graph.ops}
    assert semi_auto(graph, mesh, {name: pin}) == expected | {name: pin}


def test_an_operator_pinned_whole_is_not_cut() -> None:
    graph, mesh = case_a(batch=48), prime_mesh(8)
    assert graph.ops[1].name not in semi_auto(graph, mesh, {graph.ops[1].name: {}})


def test_a_batch_that_the_devices_do_not_divide_is_divided_as_far_as_it_goes() -> None:
    graph, mesh = case_a(batch=4), prime_mesh(8)
    assert semi_auto(graph, mesh, {}) == {op.name: {"b": (0, 1)} for op in graph.ops}
