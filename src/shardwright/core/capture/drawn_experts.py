"""Traces with random experts, in which Python code can branch on the tokens of each expert.

    for i, expert in enumerate(experts):
        if not (ids == i).any():
            continue

The expert indices `ids` are unknown during capture. `DrawnExperts` draws them for a trace by a
`Preference` and computes from them only what Python reads, such as `any()`, `len(rows)` and
`counts.tolist()`. `expert_branches.py` compares traces with different draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.core.capture.expert_conditions import (
    Condition,
    DrawnNumber,
    Preference,
    draw_scores,
    find_other_condition,
)
from shardwright.core.capture.known_values import KnownValues, RecordedCall, UnknownValueError
from shardwright.core.capture.naming import LocatedError, current_line, find_user_frame
from shardwright.core.capture.value_guards import tests_length_for_zero
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.shape_guards import (
    depends_on_positive_sizes,
    suppose_size,
    supposed_size,
)
from shardwright.core.torch_internals.tensors import version
from shardwright.errors import CaptureError

_TOPK = (torch.topk, Tensor.topk)
_SORTS = (torch.sort, Tensor.sort, torch.argsort, Tensor.argsort)
_LARGEST = (torch.argmax, Tensor.argmax, torch.max, Tensor.max)
_SMALLEST = (torch.argmin, Tensor.argmin, torch.min, Tensor.min)
_CONDITIONS = {Tensor.__bool__, Tensor.equal, Tensor.allclose, torch.equal, torch.allclose}
_NUMBERS = {Tensor.item, Tensor.tolist}
_CONVERSIONS = {Tensor.__int__, Tensor.__float__, Tensor.__index__}
_UNBIND = (torch.unbind, Tensor.unbind)


def _parse_expert_choice(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Parse a call that chooses experts by scores, such as `topk`; None for other calls.

    Returns (dimension of the experts, experts per token, whether the smallest scores are chosen).
    """

    def argument(name: str, position: int, default: Any = None) -> Any:
        return kwargs.get(name, args[position] if len(args) > position else default)

    if func in _TOPK:
        ascending = not argument("largest", 3, True)
        return argument("dim", 2, -1), argument("k", 1), ascending
    if func in _SORTS:
        return argument("dim", 1, -1), 1, not argument("descending", 2, False)
    if func in _LARGEST or func in _SMALLEST:
        dim = argument("dim", 1)
        return (dim, 1, func in _SMALLEST) if isinstance(dim, int) else None
    return None


class DrawnExperts(KnownValues):
    """Context of a trace in which Python reads values that depend on randomly drawn experts.

    Args:
        module: the model, whose buffers have data.
        twin: the copy of `module` to trace.
        preference: the order in which each token prefers experts.
    """

    def __init__(self, module: nn.Module, twin: nn.Module, preference: Preference) -> None:
        super().__init__(module, twin)
        self._preference = preference
        self._conditions: list[Condition] = []
        """Conditions of Python branches that depend on the randomly drawn experts."""
        self._sizes: list[torch.SymInt] = []
        """Symbolic row counts, which branches of the trace see as the counts of the drawn experts.
        """
        self._unknown_reads: list[str] = []
        """User lines that convert drawn values to Python numbers whose uses are not recorded."""

    def check_conditions(self) -> None:
        """Check that each Python branch depends only on whether one expert has tokens.

        Raises:
            CaptureError: if a branch depends on more, such as the number of an expert's tokens.
        """
        if self._unknown_reads:
            raise LocatedError(
                f"{self._unknown_reads[0]}: this converts a tensor that depends on the routing of "
                "tokens to a Python number, whose uses capture cannot record\ncompare the number of"
                " tokens of one expert with 0: `mask.sum().item() > 0`"
            )
        other = find_other_condition(self._conditions)
        if other is not None:
            raise LocatedError(
                f"{other.line}: this branch depends on more than whether one expert has tokens\n"
                "skip only experts without tokens"
            )
        if any(map(depends_on_positive_sizes, self._sizes[-1:])):
            raise CaptureError(
                "a branch depends on the number of an expert's tokens, not only on whether the "
                "expert has tokens\nskip only experts without tokens"
            )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__len__ and args[0].ndim:
            return self._get_drawn_length(args[0].shape[0])
        if func in _UNBIND and (rows := self._unbind_expert_ids(*args, **kwargs)) is not None:
            return rows
        if func is Tensor.__getitem__:
            args = args[0], self._replace_constant_index(args[1])
        result = super().__torch_function__(func, types, args, kwargs)
        if func in _CONDITIONS or func in _NUMBERS or func in _CONVERSIONS:
            return self._record_python_reads(func, args, kwargs, result)
        return result

    def _get_drawn_length(self, size: int | torch.SymInt) -> int:
        """Return a tensor's length for the drawn experts; a plain number, as `len` requires."""
        if isinstance(size, torch.SymInt) and not tests_length_for_zero(find_user_frame()):
            self._unknown_reads.append(current_line())
        return supposed_size(size)

    def _record_python_reads(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Any:
        """Record a bool that Python reads, and replace integers by `DrawnNumber`s, which record
        their comparisons."""
        try:
            call = RecordedCall(func, self._replace_tensors_by_calls((args, kwargs)))
        except UnknownValueError:
            return result
        if not call.is_drawn:
            return result
        leaves, structure = pytree.tree_flatten(result)
        for position, leaf in enumerate(leaves):
            number = RecordedCall(func, call.arguments, position)
            if isinstance(leaf, bool):
                self._conditions.append(Condition(number, current_line()))
            # Python makes plain numbers of the results of conversions.
            elif func in _CONVERSIONS or isinstance(leaf, float):
                self._unknown_reads.append(current_line())
            elif isinstance(leaf, int):
                leaves[position] = DrawnNumber(leaf, number, self._conditions)
        return pytree.tree_unflatten(leaves, structure)

    def _call_and_record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = super()._call_and_record(func, args, kwargs)
        choice = _parse_expert_choice(func, args, kwargs)
        if choice is not None:
            self._record_drawn_choice(func, args, kwargs, choice, result)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._assume_drawn_sizes(leaf)
        return result

    def _record_drawn_choice(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], choice: Any, result: Any
    ) -> None:
        """Record the index results of a choice by unknown scores as computed from drawn scores."""
        scores = args[0] if args else kwargs.get("input")
        if not isinstance(scores, Tensor) or scores in self._recorded_calls:
            return
        if not scores.is_floating_point():
            return
        drawn = RecordedCall(draw_scores, ((self._preference, tuple(scores.shape), *choice), {}))
        drawn.is_drawn = True
        new_args = (drawn, *args[1:]) if args else ()
        new_kwargs = kwargs if args else {**kwargs, "input": drawn}
        for position, leaf in enumerate(pytree.tree_leaves(result)):
            if isinstance(leaf, Tensor) and not leaf.is_floating_point():
                call = RecordedCall(func, (new_args, new_kwargs), position)
                self._recorded_calls[leaf] = version(leaf), call

    def _find_drawn_call(self, tensor: Any) -> RecordedCall | None:
        """Return the call that computes a tensor from drawn experts; None for other tensors."""
        try:
            call = self._find_recorded_call(tensor)
        except UnknownValueError:
            return None
        return call if isinstance(call, RecordedCall) and call.is_drawn else None

    def _assume_drawn_sizes(self, tensor: Tensor) -> None:
        """Make Python branches see the symbolic sizes of a tensor as the drawn experts' sizes."""
        sizes = [size for size in tensor.shape if isinstance(size, torch.SymInt)]
        call = self._find_drawn_call(tensor) if sizes else None
        if call is None:
            return
        try:
            shape = call.value.shape
        except UnknownValueError:
            return
        for size, number in zip(tensor.shape, shape, strict=True):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                suppose_size(size, number)
                self._sizes.append(size)

    def _unbind_expert_ids(self, tensor: Any, dim: int = 0) -> tuple[Tensor, ...] | None:
        """Unbind a tensor of drawn experts with a symbolic length into constants; None for others.

        An example is a loop over `counts.nonzero()`, the experts that have tokens.
        """
        call = self._find_drawn_call(tensor) if isinstance(tensor, Tensor) else None
        if call is None or dim != 0 or not isinstance(tensor.shape[0], torch.SymInt):
            return None
        try:
            shape, numbers = call.value.shape[1:], _compute_numbers(call)
        except UnknownValueError:
            return None
        if prod(shape) != 1 or any(isinstance(number, float) for number in numbers):
            return None
        options = {"dtype": tensor.dtype}
        return tuple(
            self._call_and_record(torch.full, (tuple(shape), number), options) for number in numbers
        )

    def _replace_constant_index(self, index: Any) -> Any:
        """Replace a one-element integer index of known value by a number or a slice.

        The graph then shows which element, such as the weights of one expert, is selected.
        """
        if not isinstance(index, Tensor) or index.dtype is torch.bool or index.ndim > 1:
            return index
        # A comparison of a symbolic size would be a branch.
        if any(isinstance(size, torch.SymInt) or size != 1 for size in index.shape):
            return index
        try:
            call = self._find_recorded_call(index)
            if not isinstance(call, RecordedCall) or call.is_drawn:
                return index
            (number,) = _compute_numbers(call)
        except UnknownValueError:
            return index
        return number if index.ndim == 0 else slice(number, number + 1)


def _compute_numbers(call: RecordedCall) -> list[Any]:
    """Return the elements of a recorded tensor as Python numbers.

    Raises:
        UnknownValueError: if they cannot be computed.
    """
    flat = RecordedCall(torch.flatten, ((call,), {}))
    numbers: list[Any] = RecordedCall(Tensor.tolist, ((flat,), {})).result()
    return numbers
