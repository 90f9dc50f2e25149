"""Every redistribution step, run as the program runs it, on simulated ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwright.core.layout.collective_spec import COLLECTIVES, all_to_all_v_axes
from shardwright.core.layout.layout import Layout, TensorLayout
from shardwright.core.layout.redistribution import redistribution_steps
from shardwright.core.layout.redistribution_step import RedistributionStep
from shardwright.core.parallel.byte_counter import ByteCounter
from shardwright.core.parallel.simulate_ranks import assemble_shards, simulated_devices
from shardwright.core.runtime.collectives import BINDINGS, bind
from shardwright.core.runtime.overlap import FinishCollective, StartCollective
from shardwright.core.runtime.sent_dtypes import sendable
from torchrun import torchrun

MATRICES = ((2, 2), (2, 3), (2, 2, 2))
SHAPE = (24, 24)


@st.composite
def layouts(draw: st.DrawFn, mesh: Layout, partial: bool) -> TensorLayout:
    """Any layout of a matrix: each axis cuts a dimension, or none; in any order."""
    dims: list[list[int]] = [[], []]
    other: set[int] = set()
    for axis in draw(st.permutations(range(len(mesh.device_matrix)))):
        where = draw(st.sampled_from(["rows", "columns", "whole", "other"]))
        if where in ("rows", "columns"):
            dims[where == "columns"].append(axis)
        elif where == "other":
            other.add(axis)
    axes = tuple(tuple(d) for d in dims)
    if partial:
        return TensorLayout(mesh, axes, partial=frozenset(other))
    return TensorLayout(mesh, axes, varying=frozenset(other))


def ways(matrix: tuple[int, ...]) -> st.SearchStrategy[tuple[TensorLayout, TensorLayout]]:
    mesh = Layout(matrix, tuple("abc"[: len(matrix)]))
    return st.tuples(layouts(mesh, True), layouts(mesh, False))


def convert(
    source: TensorLayout, target: TensorLayout, halves: bool
) -> tuple[Tensor, float, Tensor, Tensor]:
    """A value in `source`, converted to `target`, and its gradient; in two halves if so said.

    Returns the value put together, the difference between its copies, the gradient put together,
    and the gradient that it should be.
    """
    mesh = source.layout
    full = torch.arange(24 * 24, dtype=torch.float64).reshape(SHAPE)
    terms = {rank: torch.rand(SHAPE, dtype=torch.float64) for rank in range(mesh.num_devices)}
    upstream = torch.cos(full)

    def term(rank: int) -> Tensor:
        """One term of the sum that makes up `full` over the partial axes."""
        place = mesh.coordinates(rank)
        if not source.partial:
            return full
        first = all(place[a] == 0 for a in source.partial)
        if not first:
            return terms[key(place)]
        others = [
            terms[key(p)]
            for p in places
            if all(p[a] == place[a] for a in kept) and any(p[a] for a in source.partial)
        ]
        return full - sum(others)

    kept = [a for a in range(len(mesh.device_matrix)) if a not in source.partial]
    places = [mesh.coordinates(rank) for rank in range(mesh.num_devices)]

    def key(place: tuple[int, ...]) -> int:
        """Ranks that hold the same block must hold the same term."""
        return places.index(
            tuple(
                c if a in source.partial or a in source.sharded else 0 for a, c in enumerate(place)
            )
        )

    with simulated_devices(mesh) as (devices, mode):
        assert mode is not None
        x = mode.rank_map(lambda r: term(r)[source.slices(r, SHAPE)].clone()).requires_grad_()
        y = x
        for step in redistribution_steps(source, target, SHAPE):
            bound = bind(step, devices)
            y = FinishCollective(bound)(StartCollective(bound)(y)) if halves else bound(y)
        # The gradient of a varying value is a sum: give each rank an equal part of it.
        parts = mesh.size(tuple(target.varying))
        g = mode.rank_map(lambda r: (upstream / parts)[target.slices(r, SHAPE)].clone())
        y.backward(g)
        values, gradients = dict(y._local_tensors), dict(x.grad._local_tensors)
    got, difference = assemble_shards(values, target, SHAPE)
    whole = TensorLayout(mesh, source.axes)
    gradient, spread = assemble_shards(gradients, whole, SHAPE)
    return got - full, max(difference, spread), gradient, upstream


@given(st.sampled_from(MATRICES).flatmap(ways), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_redistribution_keeps_the_value_and_its_gradient(
    way: tuple[TensorLayout, TensorLayout], halves: bool
) -> None:
    source, target = way
    error, spread, gradient, wanted = convert(source, target, halves)
    torch.testing.assert_close(error, torch.zeros_like(error), rtol=0, atol=1e-9)
    assert spread < 1e-9
    torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-9)


def test_what_is_sent_is_in_memory_as_it_is_read() -> None:
    numbers = torch.randn(4, dtype=torch.complex64)
    conjugated, negated = numbers.conj(), numbers[:1].conj().imag
    assert conjugated.is_conj() and negated.is_neg() and negated.is_contiguous()
    assert torch.equal(torch.view_as_complex(sendable(conjugated)), conjugated)
    assert torch.equal(sendable(negated), negated) and not sendable(negated).is_neg()


def test_every_kind_of_step_is_bound() -> None:
    assert set(BINDINGS) == set(COLLECTIVES)


EXCHANGES = (
    ((2, 4), ("a", "b"), ("b", "a")),
    ((2, 2), ("a", "b"), ("None", ("a", "b"))),
    ((2, 2, 2), (("a", "b"), "c"), ("c", ("a", "b"))),
    ((2, 2, 2), (("a", "b"), "c"), ("c", ("b", "a"))),
    ((2, 2, 2), (("a", "b"), "c"), (("a", "c"), "b")),
    ((2, 2, 3), (("a", "c"), "b"), ("b", ("a", "c"))),
)


@pytest.mark.parametrize(("matrix", "before", "after"), EXCHANGES)
def test_an_all_to_all_v_brings_every_block_and_every_gradient_to_its_place(
    matrix: tuple[int, ...], before: tuple[Any, ...], after: tuple[Any, ...]
) -> None:
    mesh = Layout(matrix, tuple("abc"[: len(matrix)]))
    source, target = mesh(*before), mesh(*after)
    axes = all_to_all_v_axes(source, target)
    assert axes is not None
    step = RedistributionStep("all_to_all_v", axes, None, None, source, target)
    shape = (72, 72)
    x = torch.arange(72 * 72, dtype=torch.float64).reshape(shape)
    upstream = torch.cos(x)
    with simulated_devices(mesh) as (devices, mode), ByteCounter() as counter:
        assert mode is not None
        local = mode.rank_map(lambda r: x[source.slices(r, shape)].clone()).requires_grad_()
        y = bind(step, devices)(local)
        forward = counter.sent
        y.backward(mode.rank_map(lambda r: upstream[target.slices(r, shape)].clone()))
        values, gradients = y._local_tensors, local.grad._local_tensors
    for rank in mesh.ranks:
        assert torch.equal(values[rank], x[target.slices(rank, shape)])
        assert torch.equal(gradients[rank], upstream[source.slices(rank, shape)])
    assert forward == step.forward_bytes(shape, 8)
    assert counter.sent - forward == step.backward_bytes(shape, 8)


def test_blocks_with_a_part_for_every_device_are_no_case_for_an_all_to_all_v() -> None:
    mesh = Layout((2, 2), ("a", "b"))
    assert all_to_all_v_axes(mesh("a", "b", "None"), mesh("None", "None", ("a", "b"))) is None


def test_an_all_to_all_v_moves_no_axis_that_cuts_only_one_of_the_layouts() -> None:
    mesh = Layout((2, 4, 2), ("a", "b", "c"))
    assert all_to_all_v_axes(mesh("a", "b"), mesh("b", "c")) is None


@pytest.mark.distributed
def test_an_all_to_all_v_runs_over_gloo() -> None:
    output = torchrun(Path(__file__).with_name("collective_ranks.py"), 8)
    assert all(f"rank {rank} has its block" in output for rank in range(8)), output
