"""Guards on symbolic sizes, under which a trace is valid for other shapes, and supposed sizes."""

from __future__ import annotations

from collections.abc import Sequence

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
        return self.code is None or bool(self.symbols.evaluate_guards_expression(self.code, inputs))


def suppose_size(size: SymInt, number: int) -> None:
    """Decide branches of Python on a size that depends on values by `number`; the size stays
    symbolic in the graph.

    PyTorch offers this for real tensors that are propagated beside fake tensors.
    """
    size.node.shape_env.set_real_tensor_prop_unbacked_vals(size.node.expr, number)


def supposed_size(size: int | SymInt) -> int:
    """Return the number of `suppose_size` for a size."""
    if isinstance(size, int):
        return size
    number = size.node.expr.xreplace(size.node.shape_env.real_tensor_prop_unbacked_vals)
    return int(number) if number.is_Integer else int(size)
