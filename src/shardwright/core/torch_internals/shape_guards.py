"""Guards on input shapes, with which a call can reuse a trace, and assumed data-dependent sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import SymInt, Tensor

from shardwright.core.torch_internals.tensors import FakeTensor, FakeTensorMode


class ShapeGuards:
    """Guards on the shapes of inputs: a call that satisfies the guards has the same trace.

    Args:
        inputs: the fake inputs of the trace, whose sizes may be symbolic.
    """

    def __init__(self, inputs: Sequence[FakeTensor]) -> None:
        self.mode: FakeTensorMode = inputs[0].fake_mode
        assert self.mode.shape_env is not None
        self.symbols = self.mode.shape_env
        # Also sizes that are not symbolic, in which a call may differ.
        self.code = self.symbols.produce_guards_expression(inputs, ignore_static=False)

    def hold(self, inputs: Sequence[Tensor]) -> bool:
        """Whether the sizes and strides of a call's inputs satisfy the guards."""
        # Without guards there is no code, and the trace is valid for all sizes.
        return self.code is None or bool(self.symbols.evaluate_guards_expression(self.code, inputs))


def suppose_size(size: SymInt, number: int) -> None:
    """Make Python branches on a data-dependent size take the path for `number`.

    The size remains symbolic in the graph. Uses PyTorch's mechanism for tracing with real tensors
    beside fake tensors.
    """
    size.node.shape_env.set_real_tensor_prop_unbacked_vals(size.node.expr, number)


def supposed_size(size: int | SymInt) -> int:
    """Return a size as an int, with the value that `suppose_size` set for a symbolic size."""
    if isinstance(size, int):
        return size
    # Also in sizes that are computed from supposed ones.
    number = size.node.expr.xreplace(size.node.shape_env.real_tensor_prop_unbacked_vals)
    return int(number) if number.is_Integer else int(size)


def depends_on_positive_sizes(size: SymInt) -> bool:
    """Whether the trace of `size` may be invalid for other positive sizes, because a branch took
    the path for the number that `suppose_size` set."""
    environment = size.node.shape_env
    checks = (check for group in environment.deferred_runtime_asserts.values() for check in group)
    conditions = [check.expr for check in checks if check.msg.startswith(_SUPPOSED)]
    supposed = environment.real_tensor_prop_unbacked_vals
    return any(not _holds_for_positive_sizes(condition, supposed) for condition in conditions)


_SUPPOSED = "propagate_real_tensors"
"""Prefix of the messages of PyTorch's runtime checks for branches decided by `suppose_size`."""


def _holds_for_positive_sizes(condition: Any, supposed: Mapping[Any, Any]) -> bool:
    """Whether a condition on a symbolic size holds for sizes 1 to 64 and larger powers of two.

    True if `supposed` is 0 for the size.
    """
    if condition.is_Equality and all(side.is_Symbol for side in condition.args):
        # Rows that are selected twice by one mask have two symbols.
        return True
    symbols = tuple(condition.free_symbols)
    # Conditions on several sizes are not tried: the answer False is the safe one.
    if len(symbols) != 1:
        return False
    # Conditions on divisibility show at small numbers, those on thresholds at powers of two.
    numbers = (*range(1, 65), *(1 << power for power in range(7, 40)))
    is_empty = supposed.get(symbols[0]) == 0
    return is_empty or all(bool(condition.subs(symbols[0], number)) for number in numbers)
