"""Replace instructions in a trace by TorchDynamo: branches on tensors, and `requires_grad`.

Dynamo knows no values of tensors, so it breaks the graph at a branch on one. It refuses
`tensor.requires_grad = True`, which AOTAutograd, behind `torch.compile`, would not trace.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.trace_rules import get_torch_obj_rule_map
from torch._dynamo.variables import (
    ConstantVariable,
    TensorVariable,
    TorchInGraphFunctionVariable,
)
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.tensor import SymNodeVariable
from torch.distributions.constraints import is_dependent

from shardwright.core.torch_internals.operators import assert_tensor

Decide = Callable[[str, dis.Positions], "bool | None"]
"""Function from the file and the position of a condition to its value; None if undecided."""

_JUMPS = [
    code
    for name, code in dis.opmap.items()
    if "JUMP" in name and ("IF_TRUE" in name or "IF_FALSE" in name)
]


_COMPARISONS = (torch.equal, torch.allclose)
"""Functions that return a Python bool, which Dynamo cannot compute; methods have the same names."""

_STORE_ATTRIBUTE = dis.opmap["STORE_ATTR"]

InstructionHandler = Callable[[Any, Any], None]
"""Method of Dynamo that traces one instruction; its arguments are the translator of the running
function and the instruction."""


@contextmanager
def deciding_branches(decide: Decide) -> Iterator[None]:
    """Context manager in which Dynamo takes the side of a branch that `decide` returns, if the
    condition is the value of a tensor or a number that is read from a tensor."""

    def deciding(jump: InstructionHandler) -> InstructionHandler:
        def decided(translator: Any, instruction: Any) -> None:
            condition = translator.stack[-1].realize()
            if isinstance(condition, TensorVariable | SymNodeVariable):
                # The condition is at the position of the instruction before the jump.
                value = _decide_at(translator, 1, decide)
                if value is not None:
                    translator.stack[-1] = value
            jump(translator, instruction)

        return decided

    call_function = TorchInGraphFunctionVariable.call_function
    call_method = TensorVariable.call_method

    def called_function(function: Any, tx: Any, *call: Any) -> Any:
        value = _decide_at(tx, 0, decide) if function.value in _COMPARISONS else None
        return call_function(function, tx, *call) if value is None else value

    def called_method(tensor: Any, tx: Any, name: str, *call: Any) -> Any:
        value = _decide_at(tx, 0, decide) if name in ("equal", "allclose") else None
        return call_method(tensor, tx, name, *call) if value is None else value

    # Traced like functions of the user, since they lead to conditions: `is_dependent` begins the
    # check of a distribution's parameters, and `torch._assert` contains an `assert`.
    rules: Any = dict.fromkeys((is_dependent, assert_tensor), UserFunctionVariable)
    with (
        _replaced_handlers(dict.fromkeys(_JUMPS, deciding)),
        patch.object(TorchInGraphFunctionVariable, "call_function", called_function),
        patch.object(TensorVariable, "call_method", called_method),
        patch.dict(get_torch_obj_rule_map(), rules),
    ):
        yield


def _decide_at(translator: Any, num_before: int, decide: Decide) -> ConstantVariable | None:
    """Return what `decide` says of an instruction; None if it says nothing.

    Args:
        translator: Dynamo's translator of the running function.
        num_before: distance of the instruction to the running one.
    """
    # The pointer is already behind the running instruction.
    index = translator.instruction_pointer - 1 - num_before
    position = translator.instructions[index].positions
    value = position and decide(translator.f_code.co_filename, position)
    return None if value is None else ConstantVariable.create(value)


@contextmanager
def tracing_leaves() -> Iterator[None]:
    """Context manager in which `tensor.requires_grad = True` is traced like `requires_grad_()`, for
    tensors that traced code creates; results may depend on them."""

    def storing(store: InstructionHandler) -> InstructionHandler:
        def stored(translator: Any, instruction: Any) -> None:
            tensor = translator.stack[-1].realize()
            if instruction.argval != "requires_grad" or not isinstance(tensor, TensorVariable):
                store(translator, instruction)
                return
            value, _ = translator.popn(2)
            tensor.call_method(translator, "requires_grad_", [value], {})

        return stored

    with (
        _replaced_handlers({_STORE_ATTRIBUTE: storing}),
        # It refuses results of such tensors; older versions of PyTorch lack it.
        patch.object(
            OutputGraph,
            "_check_requires_grad_intermediate_outputs",
            lambda *_: None,
            create=True,
        ),
    ):
        yield


@contextmanager
def _replaced_handlers(
    replacements: Mapping[int, Callable[[InstructionHandler], InstructionHandler]],
) -> Iterator[None]:
    """Context manager in which Dynamo traces instructions by other handlers.

    Args:
        replacements: functions from a handler to its replacement, by code of the instruction.
    """
    with ExitStack() as stack:
        for translator in _iterate_subclasses(InstructionTranslatorBase):
            table = list(translator.dispatch_table)
            for code, replace in replacements.items():
                if table[code] is not None:
                    table[code] = replace(table[code])
            stack.enter_context(patch.object(translator, "dispatch_table", table))
        yield


def _iterate_subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    yield cls
    for subclass in cls.__subclasses__():
        yield from _iterate_subclasses(subclass)
