"""Replacement of symbolic counts of selected rows: by all rows in sizes, by mask sums in values."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from shardwright.core.capture.fx_nodes import insert, is_functional
from shardwright.core.capture.naming import line_of
from shardwright.core.torch_internals.operators import OpOverload, operator_name, schema_of
from shardwright.errors import CaptureError

aten = torch.ops.aten

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)

_SIZE_ARGUMENTS = ("size", "shape", "sizes", "self_size")


@dataclass(frozen=True)
class RowMask:
    """A mask that selects rows.

    Args:
        flat: copy of the mask as it was at the selection, `[rows]`.
        shape: shape of the mask in the user's code.
    """

    flat: fx.Node
    shape: tuple[int, ...]


class RowCounts:
    """Symbolic counts of selected rows, and the tensors whose shapes contain such a count.

    Attributes:
        masks: the mask of each symbolic count.
        traced: shape of each tensor of selected rows in the trace, with symbolic sizes.
    """

    def __init__(self) -> None:
        self.masks: dict[Any, RowMask] = {}
        self.traced: dict[fx.Node, tuple[Any, ...]] = {}

    def record(self, node: fx.Node, size: Any, mask: RowMask) -> None:
        """Record that the symbolic size `size` counts the rows that `mask` selects."""
        symbol = expression_of(size)
        # An operator, such as an addition of 24 rows to the selected ones, has fixed their number.
        if isinstance(symbol, int) or not symbol.is_Symbol:
            raise count_refusal(node, "this needs a fixed number of rows")
        # All index tensors of one mask have the same symbol.
        self.masks.setdefault(symbol, mask)

    def padded_size(self, size: Any) -> Any:
        """Return a symbolic size, computed for masks that select all rows."""
        if not isinstance(size, SYMBOLS):
            return size
        expression = expression_of(size)
        sizes = {s: prod(m.shape) for s, m in self.masks.items()}
        number = expression.subs(sizes)
        # Other symbols are values of tensors.
        return int(number) if number.is_Integer else None

    def check_sizes(self, node: fx.Node, value: Any) -> None:
        """Check that a rewritten node has the traced shape `value`, with all rows selected."""
        values = value if isinstance(value, (list, tuple)) else [value]
        news = node.meta["val"] if isinstance(value, (list, tuple)) else [node.meta["val"]]
        for old, new in zip(values, news, strict=True):
            if not isinstance(old, Tensor):
                continue
            sizes = tuple(self.padded_size(size) for size in old.shape)
            # A tensor in place of a Python number may promote the result to another dtype.
            if has_symbols(new) or sizes != tuple(new.shape) or old.dtype != new.dtype:
                raise count_refusal(node, "this needs the number of selected rows")

    def replace_symbols(self, node: fx.Node) -> None:
        """Replace symbolic row counts in the arguments of an operator.

        A size becomes the number of all rows; a divisor, factor or term becomes the sum of the
        mask.

        Raises:
            CaptureError: if another argument contains a row count.
        """
        target: Any = node.target
        arguments = schema_of(target).arguments
        names = {argument.name: str(argument.type) for argument in arguments}
        given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | node.kwargs
        for name, argument in given.items():
            leaves = argument if isinstance(argument, (list, tuple)) else [argument]
            if not any(is_symbolic(leaf) for leaf in leaves):
                continue
            if isinstance(argument, (list, tuple)) and name in _SIZE_ARGUMENTS:
                new: Any = [self._replace_by_static_size(node, leaf) for leaf in leaves]
            elif target is aten.slice.Tensor and name == "end" and self._is_full_slice(given):
                new = None
            # A value needs the number of selected rows, where a size needs that of all rows.
            elif name == "other":
                new = self._insert_row_count(node, argument)
                # The overload for a Python number takes no tensor.
                if names[name] != "Tensor":
                    packet = getattr(aten, operator_name(target), None)
                    target = getattr(packet, "Tensor", None)
                    if target is None:
                        raise count_refusal(node, "this needs the number of selected rows")
                    node.target = target
            else:
                raise count_refusal(node, "this needs the number of selected rows")
            position = list(names).index(name)
            if position < len(node.args):
                node.update_arg(position, new)
            else:
                node.update_kwarg(name, new)

    def _replace_by_static_size(self, node: fx.Node, leaf: Any) -> Any:
        if not is_symbolic(leaf):
            return leaf
        size = self.padded_size(leaf.meta["val"])
        if size is None:
            raise count_refusal(node, "this needs the number of selected rows")
        return size

    def _is_full_slice(self, arguments: dict[str, Any]) -> bool:
        """Whether the arguments of a slice select its full dimension, as `x[:len(x)]` does."""
        source, dim = arguments["self"], arguments.get("dim", 0)
        full = source in self.traced and self.traced[source][dim]
        end = expression_of(arguments["end"].meta["val"])
        return bool(full == end) and not arguments.get("start") and arguments.get("step", 1) == 1

    def _insert_row_count(self, node: fx.Node, size: fx.Node) -> fx.Node:
        """Insert a tensor with the value of `size`, a linear function of a row count."""
        expression = expression_of(size.meta["val"])
        symbols = [each for each in expression.free_symbols if each in self.masks]
        # Linear in one number of rows, such as `8 * rows` for `numel()`.
        if len(symbols) != 1 or not expression.is_polynomial(symbols[0]):
            raise count_refusal(node, "this computes with the number of selected rows")
        (symbol,) = symbols
        factor, constant_term = expression.coeff(symbol, 1), expression.coeff(symbol, 0)
        if expression.expand() != (factor * symbol + constant_term).expand() or not (
            factor.is_Integer and constant_term.is_Integer
        ):
            raise count_refusal(node, "this computes with the number of selected rows")
        count = insert(node, aten.sum.default, (self.masks[symbol].flat,))
        if factor != 1:
            count = insert(node, aten.mul.Scalar, (count, int(factor)))
        if constant_term != 0:
            count = insert(node, aten.add.Scalar, (count, int(constant_term)))
        return count


def erase_unread_sizes(graph: fx.Graph) -> None:
    """Erase unused operators with results of symbolic size, and checks of symbolic sizes."""
    # In reverse, so that what reads a result is erased before the result.
    for node in reversed(list(graph.nodes)):
        value = node.meta.get("val")
        if node.op != "call_function" or node.users:
            continue
        is_part = node.target is operator.getitem or isinstance(value, SYMBOLS)
        is_operator = isinstance(node.target, OpOverload) and is_functional(node.target)
        if is_part or checks_size(node) or (is_operator and has_symbols(value)):
            graph.erase_node(node)


def checks_size(node: fx.Node) -> bool:
    """Whether an operator, such as `sym_constrain_range`, only checks symbolic sizes."""
    return node.meta.get("val") is None and any(
        isinstance(each.meta.get("val"), SYMBOLS) for each in node.all_input_nodes
    )


def has_symbols(value: Any) -> bool:
    """Whether a number, or a size of a tensor, in `value` is symbolic."""
    if isinstance(value, (list, tuple)):
        return any(has_symbols(each) for each in value)
    sizes = value.shape if isinstance(value, Tensor) else (value,)
    return any(isinstance(size, SYMBOLS) for size in sizes)


def expression_of(size: Any) -> Any:
    """Return the SymPy expression of a symbolic size; other sizes are returned unchanged."""
    return size.node.expr if isinstance(size, SYMBOLS) else size


def is_symbolic(leaf: Any) -> bool:
    """Whether an argument of a node is a symbolic number that another node computes."""
    return isinstance(leaf, fx.Node) and isinstance(leaf.meta.get("val"), SYMBOLS)


def count_refusal(node: fx.Node, what: str) -> CaptureError:
    """Return the error for an operator that needs the number of selected rows.

    Args:
        what: what the operator does, such as "this broadcasts selected rows".
    """
    return CaptureError(
        f"{line_of(node)}: {what}, but the number of rows that a mask selects is unknown during "
        "capture\nkeep all rows, and use `torch.where`, or multiply by the mask"
    )
