"""The inputs of the model on which alone a traced tensor depends, such as the sizes of images.

A refusal of a branch on such a tensor names the inputs: in a buffer, their values are known.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor, fx, nn
from torch.utils.weak import WeakTensorKeyDictionary

from shardwright.core.capture.signature import is_floating_point
from shardwright.core.torch_internals import pytree


def remedy_of_node(node: fx.Node, inputs: Collection[str]) -> str:
    """Return the advice for a node whose value Python reads; empty if it depends on anything but
    integer inputs.

    Args:
        inputs: names of the placeholders of the model's inputs.
    """
    ancestors, pending = {node}, [node]
    while pending:
        new = set(pending.pop().all_input_nodes) - ancestors
        ancestors |= new
        pending += new
    sources = [each for each in ancestors if each.op == "placeholder"]
    if any(map(is_floating_point, sources)):
        return ""
    return _make_remedy(frozenset(each.name for each in sources if each.name in inputs))


def _make_remedy(names: frozenset[str]) -> str:
    if not names:
        return ""
    listed = " and ".join(map(repr, sorted(names)))
    return (
        f" If the values of the input {listed} are the same in each call, register them as a "
        "buffer of a module that calls this one, and pass the buffer."
    )


class InputsOfTensors:
    """Names of the integer and boolean inputs on which tensors of a trace depend.

    Args:
        twin: the copy of the model that is traced.
    """

    def __init__(self, twin: nn.Module) -> None:
        self._inputs_of: Any = WeakTensorKeyDictionary()
        self._read: frozenset[str] = frozenset()
        twin.register_forward_pre_hook(self._record_inputs, with_kwargs=True)

    @property
    def remedy(self) -> str:
        """Advice for the tensor whose values were read last; empty if it depends on anything but
        integer inputs."""
        return _make_remedy(self._read)

    def note_read(self, arguments: Any, is_known: Callable[[Tensor], bool]) -> None:
        """Record that Python reads unknown values of the tensors in `arguments`."""
        self._read = self._find_inputs(arguments, is_known)

    def note_result(self, result: Any, arguments: Any, is_known: Callable[[Tensor], bool]) -> None:
        """Record that `result` was computed from `arguments`.

        Args:
            is_known: whether capture can compute the values of a tensor.
        """
        names = self._find_inputs(arguments, is_known)
        for leaf in pytree.tree_leaves(result) if names else ():
            if isinstance(leaf, Tensor):
                self._inputs_of[leaf] = names

    def _record_inputs(
        self, twin: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        bound = inspect.signature(twin.forward).bind_partial(*args, **kwargs).arguments
        for name, value in {**bound, **kwargs}.items():
            if isinstance(value, Tensor) and not value.is_floating_point():
                self._inputs_of[value] = frozenset({name})

    def _find_inputs(self, arguments: Any, is_known: Callable[[Tensor], bool]) -> frozenset[str]:
        tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
        inputs = [self._inputs_of.get(tensor, frozenset()) for tensor in tensors]
        names = frozenset[str]().union(*inputs)
        others = (t for t, of in zip(tensors, inputs, strict=True) if not of)
        # Most tensors depend on no integer input, so that the others are seldom looked up.
        return names if names and all(map(is_known, others)) else frozenset()
