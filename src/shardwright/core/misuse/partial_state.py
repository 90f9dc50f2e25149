"""Saving what one rank has of a model or an optimizer: refused, as the file would lack the rest.

Shards are DTensors, and refuse to be pickled. The tensors of a pipeline stage of one device are
ordinary: those of a state dict that lacks other stages are a `StageTensor`, the state of an
optimizer is a `StageState`. `torch.distributed.checkpoint` saves from all ranks, so it may pickle
any of them.
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
"""Collectives of objects: by them a rank can collect all stages."""

SHARD, STAGE = "shard of each tensor", "pipeline stage"


def refuse_to_save_shards() -> None:
    """Lets DTensors of planned models refuse to be pickled unless every rank has all values."""
    refuse_pickling(_check_complete)


def _check_complete(tensor: DTensor) -> None:
    """Raises:
    PlanError: for a tensor of a planned model of which other ranks have a part.
    """
    stages = stages_of_plan(tensor.device_mesh)
    if stages is None:
        return
    if not all(placement.is_replicate() for placement in tensor.placements):
        _refuse(SHARD)
    elif stages > 1:
        _refuse(STAGE)


def _refuse(part: str) -> None:
    """Raises:
    PlanError: unless the caller puts the parts of all ranks together.
    """
    if is_called_by(SAVES_FROM_ALL_RANKS) or (part == STAGE and is_called_by(SENDS_TO_RANKS)):
        return
    raise PlanError(
        f"`torch.save`, pickle or safetensors{user_line()} of a planned model's state: this rank"
        f" has only its {part}, and the rest would be missing; call on every rank"
        " `sw.save_state_dict(net, path)`, which writes the complete model to one file, or"
        " `sw.save_checkpoint` for model and optimizer; for a single sharded tensor save"
        " `tensor.full_tensor()`"
    )


def refuse_to_save_stage(module: nn.Module, names: Collection[str]) -> None:
    """Lets the state dicts of a model in pipeline stages, and of its submodules, refuse to be
    saved where they lack what other stages have.

    Args:
        names: of the parameters and persistent buffers of the whole model.
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
    if prefix + missing in state:  # Inside of `whole`.
        return
    for name, value in state.items():
        if name.startswith(prefix) and type(value) is Tensor:
            state[name] = value.as_subclass(StageTensor)


class StageTensor(Tensor):
    """A tensor from a state dict that lacks other pipeline stages; so is what is computed from
    it."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        _refuse(STAGE)
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
        """safetensors reads the memory; it asks for `storage` if `untyped_storage` raises."""
        if is_called_by("safetensors"):
            _refuse(STAGE)


class StageState(dict[str, Any]):
    """The state of an optimizer that has parameters of one pipeline stage."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        _refuse(STAGE)
        return dict, (dict(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> StageState:
        return StageState(deepcopy(dict(self), memo))


def mark_stage_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """The state dict of an optimizer of one stage, which refuses to be saved."""
    return StageState(state) if state["state"] else state
