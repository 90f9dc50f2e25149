"""Guards on symbolic sizes, under which a trace is valid for other shapes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

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
