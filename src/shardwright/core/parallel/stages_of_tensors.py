"""Pipeline stages that store each parameter and buffer of a model, and uses of those that this
rank's stage does not store.

A stage stores what its chunks read. A tensor that the planned call does not read may be read by
another call, as in a branch that alternates between two submodules. It is stored beside the tensors
of the nearest submodule that the planned call reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain

from torch import nn

from shardwright.core.parallel.unavailable import Unavailable
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.torch_internals.modules import own_buffers, own_parameters
from shardwright.errors import PlanError

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


def explain_tensors_of_other_stages(net: nn.Module, template: nn.Module) -> None:
    """Make uses of tensors that this rank's stage does not store raise an error.

    Args:
        net: the planned model, whose registries have None in place of these tensors.
        template: the model with the tensors of all stages.
    """
    of_template = (template.named_parameters, template.named_buffers)
    for name, _ in chain.from_iterable(each(remove_duplicate=False) for each in of_template):
        path, _, leaf = name.rpartition(".")
        owner = net.get_submodule(path)
        if {**own_parameters(owner), **own_buffers(owner)}.get(leaf) is None:
            # Python finds attributes of the instance before it asks the module for its registries.
            vars(owner)[leaf] = Unavailable(_make_error_of_absent_tensor(net, name))


def leave_tensors_of_other_stages(net: nn.Module) -> bool:
    """Undo `explain_tensors_of_other_stages`; return whether there was anything to undo."""
    leaves = [
        (vars(owner), leaf)
        for owner in net.modules()
        for leaf in (*own_parameters(owner), *own_buffers(owner))
        if leaf in vars(owner)
    ]
    for attributes, leaf in leaves:
        del attributes[leaf]
    return bool(leaves)


def _make_error_of_absent_tensor(net: nn.Module, name: str) -> PlanError:
    return PlanError(
        f"{name!r} of the planned {type(net).__name__} is in another pipeline stage, so this rank"
        " does not have it\nread or write it on every rank inside `with sw.whole(net):`, initialize"
        " the model before `sw.plan`, or loop over `net.named_parameters()`, which yields what this"
        " rank has"
    )


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
