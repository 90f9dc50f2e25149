"""Reject saving one rank's shards, or one pipeline stage, as if they were a full model or
optimizer.

Sharded parameters are DTensors, and pickling DTensors is rejected. A stage on one device has
ordinary tensors: its state dict contains `StageTensor`s, and the state dict of its optimizer is a
`StageState`; both reject pickling. `torch.distributed.checkpoint` saves from all ranks, and may
therefore pickle these objects.
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
from shardwright.core.torch_internals.dtensor import check_before_pickling
from shardwright.core.torch_internals.modules import state_names
from shardwright.errors import PlanError

SAVES_FROM_ALL_RANKS = "torch.distributed.checkpoint"
SENDS_TO_RANKS = "torch.distributed.distributed_c10d"
"""Module of collectives that pickle objects, such as `gather_object`, by which a rank gathers all
stages."""

SHARD, STAGE = "shard of each tensor", "pipeline stage"


def refuse_to_save_shards() -> None:
    """Make DTensors of planned models reject pickling, unless every rank has the full model."""
    check_before_pickling(_check_rank_has_full_state)


def _check_rank_has_full_state(tensor: DTensor) -> None:
    """Check that this rank has the full state of the planned model that `tensor` belongs to.

    The check does not apply to tensors of other models.

    Raises:
        PlanError: if `tensor` is sharded, or the model has several pipeline stages.
    """
    stages = stages_of_plan(tensor.device_mesh)
    if stages is None:
        return
    if not all(placement.is_replicate() for placement in tensor.placements):
        _refuse_saving_partial_state(SHARD)
    elif stages > 1:
        _refuse_saving_partial_state(STAGE)
    # Each rank has the full values, but in DTensors, which `safetensors` cannot read.
    elif is_called_by("safetensors"):
        raise PlanError(
            f"`safetensors`{user_line()} cannot save the parameters of a planned model, which"
            " are DTensors\ncall `sw.save_pretrained(net, folder)` or"
            " `sw.save_state_dict(net, path)` on every rank, or save inside `with sw.whole(net):`"
        )


def _refuse_saving_partial_state(saved_part: str) -> None:
    """Reject saving, unless a caller combines the shards or stages of all ranks.

    Args:
        saved_part: which part of the state this rank has, `SHARD` or `STAGE`.

    Raises:
        PlanError: if no function that combines the state of all ranks is on the call stack.
    """
    # Stages that a rank has gathered make a full model; DTensors that it has gathered remain
    # shards.
    if is_called_by(SAVES_FROM_ALL_RANKS) or (saved_part == STAGE and is_called_by(SENDS_TO_RANKS)):
        return
    raise PlanError(
        f"`torch.save`, `pickle` or `safetensors`{user_line()} would save an incomplete state of a"
        f" planned model, as this rank has only its {saved_part}\n"
        "call `sw.save_state_dict(net, path)`"
        " on every rank, which writes the full model to one file, or `sw.save_checkpoint` for model"
        " and optimizer; for a single sharded tensor, save `tensor.full_tensor()`"
    )


def adapt_state_dicts_of_stage(module: nn.Module, names: Collection[str]) -> None:
    """Make state dicts of a stage and its submodules reject pickling if entries are missing.

    `load_state_dict` accepts a state of all stages, and loads the entries of this stage.

    Args:
        module: this rank's pipeline stage of the model.
        names: names of the parameters and persistent buffers of all stages.
    """
    for path, child in module.named_modules():
        prefix = f"{path}." if path else ""
        present = state_names(child)
        of_child = (n.removeprefix(prefix) for n in names if n.startswith(prefix))
        missing = [name for name in of_child if name not in present]
        if missing:
            # One missing entry suffices to recognize an incomplete state dict.
            child.register_state_dict_post_hook(partial(_convert_to_stage_tensors, missing[0]))
            drop = partial(_drop_entries_of_other_stages, missing)
            child.register_load_state_dict_pre_hook(drop)


def _drop_entries_of_other_stages(
    missing: list[str], module: nn.Module, state: dict[str, Any], prefix: str, *_: object
) -> None:
    """Drop from a state to load what only other stages have; a pre-hook of `load_state_dict`."""
    # Inside `whole` the module has the tensors of all stages.
    present = state_names(module)
    for name in missing:
        if name not in present:
            state.pop(prefix + name, None)


def _convert_to_stage_tensors(
    missing: str, module: nn.Module, state: dict[str, Any], prefix: str, metadata: object
) -> None:
    """Convert tensors of an incomplete state dict to `StageTensor`s.

    Args:
        missing: name, relative to `module`, of an entry that only other stages have; a state dict
            with this entry is complete.
        module, state, prefix, metadata: arguments of a state dict post-hook.
    """
    if prefix + missing in state:  # complete: inside of `whole`
        return
    for name, value in state.items():
        # DTensors reject pickling themselves.
        if name.startswith(prefix) and type(value) is Tensor:
            state[name] = value.as_subclass(StageTensor)


class StageTensor(Tensor):
    """A tensor from the state dict of one pipeline stage, or a tensor computed from one.

    Pickling raises an error, as a checkpoint of one stage would be incomplete.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        _refuse_saving_partial_state(STAGE)
        # As an ordinary tensor, which can be read without this library.
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __copy__(self) -> Tensor:
        # `copy.copy` would otherwise call `__reduce_ex__`.
        return self.as_subclass(Tensor).as_subclass(StageTensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = deepcopy(self.as_subclass(Tensor), memo).as_subclass(StageTensor)
        memo[id(self)] = copied
        return copied

    def untyped_storage(self) -> Any:
        self._refuse_safetensors()
        return super().untyped_storage()

    def storage(self) -> Any:
        self._refuse_safetensors()
        return super().storage()  # type: ignore[no-untyped-call]

    def _refuse_safetensors(self) -> None:
        """Reject `safetensors`, which reads the memory instead of pickling.

        `safetensors` falls back to `storage` if `untyped_storage` raises, so both methods check.
        """
        if is_called_by("safetensors"):
            _refuse_saving_partial_state(STAGE)


class StageState(dict[str, Any]):
    """The state dict of an optimizer of one pipeline stage; rejects pickling."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        _refuse_saving_partial_state(STAGE)
        # For callers that may pickle it; it is read back as an ordinary dict.
        return dict, (dict(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> StageState:
        return StageState(deepcopy(dict(self), memo))


def mark_stage_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return `state`, the state dict of an optimizer of one stage, as a dict that rejects pickling.

    A state dict without optimizer state is returned unchanged.
    """
    # Without state, as before the first step, nothing is lost: all ranks have the same settings.
    return StageState(state) if state["state"] else state
