"""Placements say to DTensor what the layout says."""

from collections.abc import Iterator
from itertools import permutations, product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwright.core.layout.layout import Layout, TensorLayout
from shardwright.core.runtime.devices import Devices
from shardwright.core.runtime.dtensor import (
    add_gradients,
    from_placements,
    local_shard,
    placements,
)
from shardwright.core.torch_internals.dtensor import local_chunks
from shardwright.errors import LayoutError

MATRICES = ((2, 3), (2, 2, 3), (2, 3, 5), (2, 2, 2, 2))


def all_layouts(matrix: tuple[int, ...]) -> Iterator[TensorLayout]:
    """Every way in which axes can cut two dimensions, in every order."""
    layout = Layout(matrix, tuple("abcd"[: len(matrix)]))
    for count in range(len(matrix) + 1):
        for order in permutations(range(len(matrix)), count):
            for cut in range(count + 1):
                yield TensorLayout(layout, (order[:cut], order[cut:]))


@pytest.mark.parametrize("matrix", MATRICES)
def test_every_order_of_axes_gives_each_rank_its_block(matrix):
    for laid in all_layouts(matrix):
        shape = (2 * laid.layout.num_devices, laid.layout.num_devices)
        given = placements(laid)
        for rank, place in enumerate(product(*map(range, matrix))):
            local, start = _compute_local_shape_and_global_offset(shape, matrix, place, given)
            wanted = laid.slices(rank, shape)
            assert start == tuple(part.start for part in wanted), (laid, given)
            assert local == laid.shard_shape(shape)


@pytest.mark.parametrize("matrix", MATRICES)
def test_placements_lead_back_to_the_layout(matrix):
    for laid in all_layouts(matrix):
        assert from_placements(placements(laid), laid.layout, 2) == laid


@pytest.fixture
def rank_of_eight(request):
    dist.init_process_group("fake", rank=request.param, world_size=8, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize("rank_of_eight", range(8), indirect=True)
def test_distributing_a_tensor_leaves_the_block_of_the_layout(rank_of_eight):
    full = torch.arange(16 * 8, dtype=torch.float64).reshape(16, 8)
    mesh = DeviceMesh("cpu", torch.arange(8).reshape(2, 2, 2))
    for laid in all_layouts((2, 2, 2)):
        made = distribute_tensor(full, mesh, placements(laid), src_data_rank=None)
        assert torch.equal(made.to_local(), full[laid.slices(rank_of_eight, full.shape)]), laid


@pytest.mark.parametrize("rank_of_eight", range(8), indirect=True)
def test_axes_that_are_not_neighbors_are_one_axis_of_the_mesh(rank_of_eight):
    layout = Layout((2, 2, 2), ("a", "b", "c"))
    devices = Devices.of_process(layout, torch.device("cpu"), mesh_axes=((0, 2), (1,)))
    assert devices.mesh is not None
    assert (devices.mesh.shape, devices.mesh.mesh_dim_names) == ((4, 2), ("a_c", "b"))
    full = torch.arange(16 * 8, dtype=torch.float64).reshape(16, 8)
    for dims in product(((), (0, 2), (1,), (0, 2, 1), (1, 0, 2)), repeat=2):
        if len({*dims[0], *dims[1]}) == len(dims[0]) + len(dims[1]):
            laid = TensorLayout(layout, dims)
            slices = laid.slices(rank_of_eight, full.shape)
            shard = local_shard(full, laid, devices)
            (held,) = local_chunks(shard)
            assert torch.equal(shard.to_local(), full[slices])
            assert tuple(held.offsets) == tuple(part.start for part in slices)
            for axis, joined in enumerate(devices.mesh_axes):
                ranks = dist.get_process_group_ranks(devices.mesh.get_group(axis))
                assert devices.group(joined).in_order
                assert ranks[devices.mesh.get_local_rank(axis)] == rank_of_eight


def test_sums_and_whole_axes_have_their_placements():
    layout = Layout((2, 2, 2), ("a", "b", "c"))
    laid = TensorLayout(layout, ((2,),), frozenset({0}), frozenset({1}))
    assert placements(laid) == (Partial("sum"), Replicate(), Shard(0))
    assert from_placements(placements(laid), layout, 1) == TensorLayout(
        layout, ((2,),), frozenset({0})
    )


def test_a_dimension_may_be_counted_from_the_end():
    layout = Layout((2,), ("a",))
    assert from_placements((Shard(-1),), layout, 2) == layout("None", "a")


def test_what_fsdp_and_tensor_parallelism_make_together_is_understood():
    layout = Layout((2, 4), ("dp", "tp"))
    given = (_StridedShard(0, split_factor=4), Shard(0))
    assert from_placements(given, layout, 2) == layout(("tp", "dp"), "None")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((Shard(0),), "1 placements .* with 2 axes"),
        ((Shard(2), Replicate()), "shards dimension 2 of a tensor with 2 dimensions"),
        ((Partial("max"), Replicate()), "is not supported by layouts\\n.*Shard"),
        ((_StridedShard(0, split_factor=3), Shard(0)), "has split factor 3"),
    ],
)
def test_placements_that_are_no_layout_say_why(given, text):
    with pytest.raises(LayoutError, match=text):
        from_placements(given, Layout((2, 4), ("dp", "tp")), 2)


@pytest.mark.parametrize("rank_of_eight", [0], indirect=True)
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_have_the_strides_of_their_parameter(rank_of_eight, transposed):
    data = torch.randn(4, 3).t() if transposed else torch.randn(3, 4)
    mesh = DeviceMesh("cpu", range(8))
    sharded = torch.nn.Parameter(distribute_tensor(torch.randn(24, 4), mesh, [Shard(0)]))
    alone = torch.nn.Parameter(data)
    for parameter, local in ((alone, data), (sharded, sharded.to_local())):
        for gradient in (torch.randn(4, 3).t(), torch.randn(1).expand(3, 4), torch.randn(3, 4)):
            expected = gradient.clone()
            add_gradients({"it": parameter}, {"it": gradient})
            grad = parameter.grad if parameter is alone else parameter.grad.to_local()
            assert torch.equal(grad, expected) and grad.stride() == local.stride()
            # Not of one element for all.
            assert torch.equal(grad.mul_(2), 2 * expected)
            parameter.grad = None
