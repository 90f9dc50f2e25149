"""Pipeline stages that store each parameter and buffer of a model.

A stage stores what its chunks read. A tensor that the planned call does not read may be read by
another call, as in a branch that alternates between two submodules. It is stored beside the tensors
of the nearest submodule that the planned call reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain

from torch import nn

from shardwright.core.partition.partitioned import Partitioned

Stages = tuple[int, ...]


def stages_of_tensors(module: nn.Module, partitioned: Partitioned) -> dict[str, Stages]:
    """Return the indices of the stages that store each parameter and buffer, by name.

    Args:
        module: the model with the tensors of all stages.
        partitioned: the planned graph, in chunks.
    """
    stages_of_read: dict[str, Stages] = {}
    for stage in range(partitioned.pipeline.stages):
        for value in chain(*partitioned.tensors_of(stage)):
            stages_of_read[value.name] = (*stages_of_read.get(value.name, ()), stage)
    names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    stages_of_path: dict[str, Stages] = {}
    for name in names:
        if name in stages_of_read:
            stages_of_path.setdefault(_path_of(name), stages_of_read[name][:1])
    order = {path: index for index, (path, _) in enumerate(module.named_modules())}
    nearest = {
        path: _stages_of_nearest_module(path, stages_of_path, order)
        for path in dict.fromkeys(_path_of(name) for name in names if name not in stages_of_read)
    }
    return {
        name: stages_of_read[name] if name in stages_of_read else nearest[_path_of(name)]
        for name in names
    }


def _path_of(name: str) -> str:
    return name.rpartition(".")[0]


def _stages_of_nearest_module(
    path: str, stages_of_path: Mapping[str, Stages], order: Mapping[str, int]
) -> Stages:
    """Return the stage of the submodule that shares the longest prefix of `path`.

    Of several, returns that of the nearest one in the order of registration.
    """

    def nearness(other: str) -> tuple[int, int, bool]:
        distance = order[other] - order[path]
        return _count_common_names(path.split("."), other.split(".")), -abs(distance), distance < 0

    return stages_of_path[max(stages_of_path, key=nearness)] if stages_of_path else (0,)


def _count_common_names(first: Iterable[str], second: Iterable[str]) -> int:
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count
