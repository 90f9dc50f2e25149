"""Reject saving only one rank's shards or pipeline stage of a model or optimizer.

Sharded parameters are DTensors, which reject pickling. A stage on one device has ordinary tensors:
the state dict of an incomplete model returns `StageTensor`s, that of its optimizer a `StageState`.
`torch.distributed.checkpoint` saves from all ranks, so it may pickle any of them.
"""

from __future__ import annotations

from collections.abc import Collection
from copy import deepcopy
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwright.core.misuse.caller import is_called_by, user_line
from shardwright.core.runtime.devices import stages_of_plan
from shardwright.core.torch_internals.dtensor import refuse_pickling
from shardwright.core.torch_internals.modules import state_names
from shardwright.errors import PlanError

SAVES_FROM_ALL_RANKS = "torch.distributed.checkpoint"
SENDS_TO_RANKS = "torch.distributed.distributed_c10d"
"""Module of the collectives of objects, such as `gather_object`, which pickle the objects that they
send. A rank can collect all stages with them."""

SHARD, STAGE = "shard of each tensor", "pipeline stage"


def refuse_to_save_shards() -> None:
    """Make DTensors of planned models reject pickling unless every rank has all values."""
    refuse_pickling(_check_complete)


def _check_complete(tensor: DTensor) -> None:
    """Raise PlanError for a tensor of a planned model if other ranks have parts of the state."""
    stages = stages_of_plan(tensor.device_mesh)
    if stages is None:
        return
    if not all(placement.is_replicate() for placement in tensor.placements):
        _refuse_saving(SHARD)
    elif stages > 1:
        _refuse_saving(STAGE)


def _refuse_saving(part: str) -> None:
    """Raise PlanError unless the caller combines the parts of all ranks."""
    if is_called_by(SAVES_FROM_ALL_RANKS) or (part == STAGE and is_called_by(SENDS_TO_RANKS)):
        return
    raise PlanError(
        f"`torch.save`, pickle or safetensors{user_line()} of a planned model's state: this rank"
        f" has only its {part}, so the state would be incomplete\ncall `sw.save_state_dict(net,"
        " path)` on every rank, which writes the complete model to one file, or"
        " `sw.save_checkpoint` for model and optimizer; for a single sharded tensor save"
        " `tensor.full_tensor()`"
    )


def refuse_to_save_stage(module: nn.Module, names: Collection[str]) -> None:
    """Make the incomplete state dicts of a pipeline stage and its submodules reject pickling.

    Args:
        module: this rank's stage of the model.
        names: names of the parameters and persistent buffers of all stages.
    """
    for path, child in module.named_modules():
        prefix = f"{path}." if path else ""
        own = state_names(child)
        of_child = (n.removeprefix(prefix) for n in names if n.startswith(prefix))
        missing = next((name for name in of_child if name not in own), None)
        if missing is not None:
            child.register_state_dict_post_hook(partial(_mark_stage, missing))


def _mark_stage(
    missing: str, module: nn.Module, state: dict[str, Any], prefix: str, metadata: object
) -> None:
    """Convert the tensors of a state dict to `StageTensor`, unless it has the entry `missing`."""
    if prefix + missing in state:  # complete: inside of `whole`
        return
    for name, value in state.items():
        if name.startswith(prefix) and type(value) is Tensor:
            state[name] = value.as_subclass(StageTensor)


class StageTensor(Tensor):
    """A tensor from the state dict of one pipeline stage, or computed from such a tensor.

    It rejects pickling, as a checkpoint of one stage would be incomplete.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        _refuse_saving(STAGE)
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __copy__(self) -> Tensor:
        return self.as_subclass(Tensor).as_subclass(StageTensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = deepcopy(self.as_subclass(Tensor), memo).as_subclass(StageTensor)
        memo[id(self)] = copied
        return copied

    def untyped_storage(self) -> Any:
        self._check_safetensors()
        return super().untyped_storage()

    def storage(self) -> Any:
        self._check_safetensors()
        return super().storage()  # type: ignore[no-untyped-call]

    def _check_safetensors(self) -> None:
        """Reject safetensors, which reads the memory instead of pickling.

        It falls back to `storage` if `untyped_storage` raises, so both methods call this.
        """
        if is_called_by("safetensors"):
            _refuse_saving(STAGE)


class StageState(dict[str, Any]):
    """The state dict of an optimizer of one pipeline stage; rejects pickling."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        _refuse_saving(STAGE)
        return dict, (dict(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> StageState:
        return StageState(deepcopy(dict(self), memo))


def mark_stage_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Convert the state dict of an optimizer of one stage to one that rejects pickling."""
    return StageState(state) if state["state"] else state
