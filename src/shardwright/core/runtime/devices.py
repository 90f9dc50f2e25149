"""The devices of a program: this rank's position on the device matrix, and its process groups.

The module does not depend on the device type: process groups choose their backend (gloo, NCCL).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from itertools import product

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwright.core.agreement.collective import gathered, has_other_ranks, value_of_rank
from shardwright.core.agreement.content_hash import text_hash
from shardwright.core.layout.axes import Axes, shard_index
from shardwright.core.layout.joined_axes import joined_device_matrix
from shardwright.core.layout.layout import DeviceMatrix
from shardwright.core.runtime import worker_threads
from shardwright.core.runtime.exposed_communication import WaitTimer
from shardwright.core.torch_internals.distributed import (
    group_named,
    group_timeout,
    name_of_local_group,
    supports_split_group,
)
from shardwright.errors import PlanError

Subgroups = dict[tuple[tuple[int, ...], ...], dist.ProcessGroup | None]
"""Cache of process groups: a key has the ranks of each group created in one call, the value is the
group that contains this rank, or None."""

Index = int | torch.SymInt
"""A value that depends on the rank, such as the index of its shard; a `SymInt` if one process
simulates many ranks."""


@dataclass(frozen=True)
class Group:
    """The ranks whose coordinates differ from this rank's only along `axes`.

    Args:
        axes: the flattened mesh axes; the first is most significant in the index of a shard.
        name: name of the process group.
        size: number of ranks.
        order: for each shard along `axes`, the position in the process group of the rank that owns
            it; the ranks of the process group are in the order of the mesh.
        waits: adds up the time spent waiting for collectives.
    """

    axes: Axes
    name: str
    size: int
    order: tuple[int, ...]
    waits: WaitTimer = field(default_factory=WaitTimer, compare=False, repr=False)

    @property
    def in_order(self) -> bool:
        return self.order == tuple(range(self.size))


@dataclass
class Devices:
    """This rank's view of the devices: a device matrix bound to process groups.

    With pipeline stages, the matrix describes one stage; all stages have equal matrices.

    Args:
        matrix: the device matrix of one stage.
        device: the device of this rank.
        per_rank: evaluates a function of the coordinates on the device matrix for this rank.
        rank: index of this rank in its stage.
        stage, stages: index of this rank's stage, and number of stages.
        connected: whether process groups are created; otherwise groups only have names, for
            generated source that is not run.
        mesh: the `DeviceMesh` of DTensors; None without DTensors.
        mesh_axes: for each axis of `mesh`, the axes of `matrix` that are flattened into it.
        mesh_matrix: `mesh` as a device matrix.
        named_ranges: whether programs name their steps in traces of `torch.profiler`.
        model: index of the planned model among all models passed to `parallelize`, equal on all
            ranks.
        waits: adds up the time spent waiting for collectives.
    """

    matrix: DeviceMatrix
    device: torch.device
    per_rank: Callable[[Callable[[tuple[int, ...]], int]], Index]
    rank: int = 0
    stage: int = 0
    stages: int = 1
    connected: bool = False
    mesh: DeviceMesh | None = None
    mesh_axes: tuple[Axes, ...] = ()
    mesh_matrix: DeviceMatrix | None = None
    named_ranges: bool = False
    model: int = 1
    waits: WaitTimer = field(default_factory=WaitTimer)
    _subgroups: Subgroups = field(default_factory=dict)
    _group_names: dict[Axes, str] = field(default_factory=dict)
    _devices_by_matrix: dict[tuple[DeviceMatrix, tuple[Axes, ...]], Devices] = field(
        default_factory=dict
    )
    _groups_by_stages: dict[tuple[int, ...], dist.ProcessGroup | None] = field(default_factory=dict)

    @classmethod
    def of_process(
        cls,
        matrix: DeviceMatrix,
        device: torch.device,
        stages: int = 1,
        mesh_axes: tuple[Axes, ...] | None = None,
        subgroups: Subgroups | None = None,
        named_ranges: bool = False,
    ) -> Devices:
        """Bind a device matrix to the running process group.

        Args:
            matrix: the device matrix of one stage.
            device: the device of this rank.
            stages: number of pipeline stages.
            mesh_axes: for each axis of the `DeviceMesh`, the axes of `matrix` that are flattened
                into it; by default one axis each.
            subgroups: existing process groups, which are reused.
            named_ranges: whether programs name their steps in traces of `torch.profiler`.

        Raises:
            PlanError: if no process group is running, or its size is not the plan's number of
                devices.
        """
        total = matrix.num_devices * stages
        # A plan for one device needs no process group, also on one of several ranks.
        if total == 1:
            return cls(matrix, device, lambda function: function(()), named_ranges=named_ranges)
        if not dist.is_initialized():
            raise PlanError(
                f"the plan is for {total} devices, but no process group is running\nstart the "
                "script with `torchrun`, and call `torch.distributed.init_process_group()`"
            )
        if dist.get_world_size() != total:
            raise PlanError(
                f"the plan is for {total} devices, but {dist.get_world_size()} processes are "
                f"running\nplan for {dist.get_world_size()} devices, or start {total} processes"
            )
        # Before the first collective, which starts gloo's threads.
        worker_threads.apply_workarounds()
        # Stages are outermost: the ranks of a stage are consecutive, and near each other.
        stage, rank = divmod(dist.get_rank(), matrix.num_devices)
        coordinates = matrix.coordinates(rank)
        devices = cls(
            matrix, device, lambda function: function(coordinates), rank, stage, stages, True
        )
        # Groups of an earlier matrix are reused, because a communicator takes memory and seconds.
        groups = {} if subgroups is None else subgroups
        devices = replace(devices, _subgroups=groups, named_ranges=named_ranges)
        # Creating a group is collective; all ranks do so here in the same order.
        if stages > 1:
            devices.peers_of_stages(tuple(range(stages)))
        if mesh_axes is None:
            mesh_axes = tuple((axis,) for axis in range(len(matrix.device_matrix)))
        return devices._copy_with_mesh(mesh_axes)

    @classmethod
    def of_rank(cls, matrix: DeviceMatrix, rank: int) -> Devices:
        """Return the devices of `rank` without a process group, to print the program of that
        rank."""
        coordinates = matrix.coordinates(rank)
        return cls(matrix, torch.device("cpu"), lambda function: function(coordinates), rank)

    def with_matrix(self, matrix: DeviceMatrix, mesh_axes: tuple[Axes, ...]) -> Devices:
        """Return a copy with another device matrix or mesh.

        The first call with given arguments is collective, so every rank must make the same calls in
        the same order.

        Args:
            matrix: device matrix of one stage, with an equal number of devices.
            mesh_axes: for each axis of the `DeviceMesh`, the axes of `matrix` that are flattened
                into it.
        """
        key = matrix, mesh_axes
        # Without process groups there is nothing to create.
        if key == (self.matrix, self.mesh_axes) or not self.connected:
            return self
        if key not in self._devices_by_matrix:
            self._devices_by_matrix[key] = (
                self._copy_with_mesh(mesh_axes)
                if matrix == self.matrix
                else replace(
                    Devices.of_process(
                        matrix,
                        self.device,
                        self.stages,
                        mesh_axes,
                        self._subgroups,
                        self.named_ranges,
                    ),
                    model=self.model,
                    waits=self.waits,
                )
            )
        return self._devices_by_matrix[key]

    def _copy_with_mesh(self, mesh_axes: tuple[Axes, ...]) -> Devices:
        """Return a copy with a `DeviceMesh` of `mesh_axes`; both share their process groups."""
        if self.matrix.num_devices == 1:
            return self
        # `DeviceMesh` queries devices of its type, which the meta type does not support.
        device_type = "cpu" if self.device.type == "meta" else self.device.type
        joined = joined_device_matrix(self.matrix, mesh_axes)
        ranks = torch.tensor(joined.ranks).reshape(joined.device_matrix)
        # From the program's groups; `init_device_mesh` would create another communicator per axis.
        mesh = DeviceMesh.from_group(
            [group_named(self.group(axes).name) for axes in mesh_axes],
            device_type,
            # Ranks of the default process group: each stage has a mesh of its own.
            ranks + self.stage * self.matrix.num_devices,
            mesh_dim_names=joined.alias_names,
        )
        _get_num_stages_by_mesh_hash()[hash(mesh)] = self.stages
        return replace(self, mesh=mesh, mesh_axes=mesh_axes, mesh_matrix=joined)

    def group(self, axes: Axes) -> Group:
        """Return this rank's process group over the flattened mesh axes `axes`.

        The first call for a set of axes is collective, so every rank must make the same calls in
        the same order.
        """
        key = tuple(sorted(axes))
        if key not in self._group_names:
            self._group_names[key] = self._create_process_group_over_axes(key)
        # Groups over the same axes in any order share a process group; only block indices differ.
        order, sizes = [0] * self.matrix.size(axes), self.matrix.device_matrix
        for coordinates in all_coordinates(self.matrix):
            # Shard i along `axes` is owned by the rank at this position of the sorted group.
            order[shard_index(axes, sizes, coordinates)] = shard_index(key, sizes, coordinates)
        return Group(axes, self._group_names[key], len(order), tuple(order), self.waits)

    def index(self, axes: Axes) -> Index:
        """Return the index of this rank's shard along the flattened `axes`."""
        sizes = self.matrix.device_matrix
        return self.per_rank(lambda coordinates: shard_index(axes, sizes, coordinates))

    def common_seed(self) -> int:
        """Return the random seed of rank 0, on every rank. Collective.

        Ranks with equal shards must draw equal random numbers, even if processes were seeded
        differently.
        """
        # A seed may be any unsigned 64-bit number, which an int64 tensor cannot hold.
        seed = torch.initial_seed() % 2**31
        return value_of_rank(seed) if self.connected else seed

    @property
    def is_distributed(self) -> bool:
        """Whether there is more than one device, over all stages."""
        return self.matrix.num_devices * self.stages > 1

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The sets of axes of all groups requested so far, in the same order on all ranks."""
        return tuple(sorted(self._group_names, key=lambda axes: (len(axes), axes)))

    def peers_of_stages(self, stages: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Return the process group of this rank's peers in `stages`, the ranks with equal
        coordinates; None on ranks of other stages.

        The first call for given stages is collective, so every rank must make the same calls in the
        same order.
        """
        if stages not in self._groups_by_stages:
            size = self.matrix.num_devices
            # One list for each position in a stage: the ranks at that position, one per stage.
            peers = [[stage * size + rank for stage in stages] for rank in range(size)]
            self._groups_by_stages[stages] = self._find_or_create_subgroup(peers)
        return self._groups_by_stages[stages]

    @property
    def peers_of_all_stages(self) -> dist.ProcessGroup | None:
        """The process group of this rank's peers in all stages, the ranks with equal coordinates;
        None with one stage."""
        return self.peers_of_stages(tuple(range(self.stages))) if self.stages > 1 else None

    def _create_process_group_over_axes(self, axes: Axes) -> str:
        matrix = self.matrix
        if not self.connected:
            return f"over {matrix.named(axes)}"
        groups: dict[tuple[int, ...], list[int]] = {}
        # Groups of all stages, as every rank takes part in the creation of all groups.
        for stage in range(self.stages):
            for rank, coordinates in zip(matrix.ranks, all_coordinates(matrix), strict=True):
                fixed_coordinates = (
                    stage,
                    *(c for axis, c in enumerate(coordinates) if axis not in axes),
                )
                groups.setdefault(fixed_coordinates, []).append(stage * matrix.num_devices + rank)
        own_group = self._find_or_create_subgroup(list(groups.values()))
        assert own_group is not None
        return str(own_group.group_name)

    def _find_or_create_subgroup(self, ranks: list[list[int]]) -> dist.ProcessGroup | None:
        """Create or reuse a process group per list of ranks. Collective over all ranks.

        Returns:
            The group of this rank; None if no list contains this rank.
        """
        # By partition instead of axes, as two device matrices may divide the ranks in the same way.
        key = tuple(sorted(map(tuple, ranks)))
        if key not in self._subgroups:
            self._subgroups[key] = _create_subgroup(ranks, self.device)
        return self._subgroups[key]


@cache
def _get_num_stages_by_mesh_hash() -> dict[int, int]:
    """Return a map from the hash of each planned `DeviceMesh` to the plan's number of stages."""
    return {}


def stages_of_plan(mesh: DeviceMesh) -> int | None:
    """Return the number of pipeline stages of the plan with `mesh`; None if no plan has this mesh.

    Meshes are compared by hash instead of identity, as DTensor's sharding cache may return an equal
    mesh of another DTensor.
    """
    return _get_num_stages_by_mesh_hash().get(hash(mesh))


def all_coordinates(matrix: DeviceMatrix) -> Iterator[tuple[int, ...]]:
    """Yield the coordinates of every device, in the order of `matrix.ranks`."""
    return product(*(range(size) for size in matrix.device_matrix))


def world_timeout() -> timedelta | None:
    """Return the timeout of the default process group, which new groups do not inherit."""
    world = dist.group.WORLD
    assert world is not None
    return group_timeout(world)


def _create_subgroup(ranks: list[list[int]], device: torch.device) -> dist.ProcessGroup | None:
    world = dist.group.WORLD
    assert world is not None
    # A communicator takes memory, and seconds to set up, so the default communicator is reused.
    if len(ranks[0]) == world.size():
        return world
    # NCCL splits a communicator at less cost than it creates one.
    if supports_split_group(world):
        return dist.split_group(world, ranks, timeout=world_timeout())
    if sum(map(len, ranks)) == world.size() and _can_create_groups_locally(device):
        # Each rank creates only its own group, instead of all groups one after another.
        own_ranks = next(each for each in ranks if world.rank() in each)
        return dist.new_group(own_ranks, timeout=world_timeout(), use_local_synchronization=True)  # type: ignore[no-any-return]
    member, _ = dist.new_subgroups_by_enumeration(ranks, timeout=world_timeout())  # type: ignore[no-untyped-call]
    return member  # type: ignore[no-any-return]


def _can_create_groups_locally(device: torch.device) -> bool:
    """Whether each rank can create only its own group, with local synchronization.

    With local synchronization, PyTorch derives the name of a group from the number of groups that
    the rank has created. If the user created groups on some ranks only, the ranks of a new group
    would wait for each other under different names.
    """
    if not has_other_ranks():
        return True
    # This name contains the number of groups that the rank has created so far.
    names = gathered(torch.tensor(text_hash(name_of_local_group([])), device=device))
    return bool((names == names[0]).all())
