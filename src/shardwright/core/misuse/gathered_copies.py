"""Reject writes to views of DTensors that are gathered copies.

`p[0]` and `p.view(-1)` of an ordinary tensor share its memory. A view of a DTensor along a sharded
dimension gathers the DTensor first, so the result is a copy, and a write to it would be lost
silently.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.dispatch import plain_torch_function
from shardwright.core.torch_internals.dtensor import local_tensor, spec_of, with_spec
from shardwright.core.torch_internals.dtensor_dispatch import change_results
from shardwright.core.torch_internals.operators import schema_of
from shardwright.core.torch_internals.tensors import as_subclass, storage_id
from shardwright.errors import PlanError

aten = torch.ops.aten

VIEWS = (
    *(aten.select.int, aten.slice.Tensor, aten.diagonal.default, aten.unfold.default),
    *(aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int),
    *(aten.view.default, aten._unsafe_view.default),
)
"""View operators for which DTensor gathers sharded dimensions."""


def refuse_lost_writes() -> None:
    """Make view operators return read-only `GatheredCopy`s where they gather sharded DTensors.

    The change applies to all DTensors of this process.
    """
    for view in VIEWS:
        change_results(view, _make_gathered_views_read_only)


def _make_gathered_views_read_only(results: Any, args: Sequence[Any]) -> Any:
    # By storage, as most views of a DTensor are views of its local tensor.
    viewed_storage = storage_id(local_tensor(args[0]))

    def read_only_if_copied(result: DTensor) -> DTensor:
        local = local_tensor(result)
        # Equal storage: nothing was gathered. Simulated ranks have local tensors of another class.
        if type(local) is not Tensor or storage_id(local) == viewed_storage:
            return result
        return with_spec(GatheredCopy.of(local), spec_of(result))

    return pytree.tree_map_only(DTensor, read_only_if_copied, results)


class GatheredCopy(Tensor):
    """Read-only local tensor of a gathered view, which shares no memory with the DTensor."""

    tensor: Tensor
    __torch_function__ = plain_torch_function  # type: ignore[assignment]

    @classmethod
    def of(cls, tensor: Tensor) -> GatheredCopy:
        """Return a read-only `GatheredCopy` that shares the memory of `tensor`."""
        result = as_subclass(cls, tensor)
        result.tensor = tensor
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        schema, kwargs = schema_of(function), kwargs or {}
        for index, argument in enumerate(schema.arguments):
            # Before the call, so that nothing is written if one of several targets is a copy.
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write:
                _check_has_no_gathered_copy(function, value)
        unwrap = partial(pytree.tree_map_only, cls, lambda copy: copy.tensor)
        results = function(*unwrap(args), **unwrap(kwargs))
        is_view = any(result.alias_info is not None for result in schema.returns)
        # A view of a copy is a copy too. In-place operators also return aliases, but of other
        # tensors.
        if is_view and not schema.is_mutable:
            return pytree.tree_map_only(Tensor, cls.of, results)
        return results

    def numpy(self, *, force: bool = False) -> Any:
        # Reads need no check.
        return self.tensor.numpy(force=force)

    def tolist(self) -> Any:
        return self.tensor.tolist()

    # A copy that the user makes has memory of its own, which may be written.
    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return deepcopy(self.tensor, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.tensor.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _check_has_no_gathered_copy(function: Any, value: Any) -> None:
    """Reject a `GatheredCopy` in `value`, an argument that an operator writes to.

    Raises:
        PlanError: if `value` is a `GatheredCopy`, or a list with one.
    """
    if any(isinstance(leaf, GatheredCopy) for leaf in pytree.tree_leaves(value)):
        raise PlanError(
            f"`{function}` writes to a view of a DTensor along a sharded dimension, which is a "
            "gathered copy, so the DTensor would not change\nwrite to the DTensor itself (`mul_`, "
            "`masked_fill_`, `copy_`), or before `sw.plan`; to change only a copy, `clone` the "
            "view"
        )
