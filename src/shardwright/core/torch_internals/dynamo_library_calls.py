"""Trace calls of NumPy, `print`, loggers and the detection of causal masks.

The functions replace methods of TorchDynamo during a trace, and take their arguments.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch._dynamo import config
from torch._dynamo.variables import ConstantVariable, TensorVariable
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.misc import NumpyVariable, get_np_to_tnp_map

from shardwright.core.torch_internals.modules import detects_causal_mask

_trace_numpy = NumpyVariable.call_function


def trace_numpy_call(function: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """Trace a NumPy call; compute the result during the trace if all arguments are constants.

    The trace fails at random draws, for which Dynamo would use the generator of torch.
    """
    is_random = getattr(get_np_to_tnp_map().get(function.value), "__module__", "").endswith(
        "random"
    )
    if not is_random and all(each.is_python_constant() for each in (*args, *kwargs.values())):
        constants = {name: each.as_python_constant() for name, each in kwargs.items()}
        result = function.value(*(each.as_python_constant() for each in args), **constants)
        if isinstance(result, np.number | np.bool_):
            # As a Python number, since Dynamo has no constants of numpy's types.
            return ConstantVariable.create(result.item())
    with config.patch(trace_numpy=not is_random):
        return _trace_numpy(function, tx, args, kwargs)


_convert_to_numpy = TensorVariable.method_numpy


def trace_conversion_to_numpy(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """Trace `tensor.numpy()`; the bytecode converts the outputs of the graph to arrays."""
    with config.patch(trace_numpy=True):
        return _convert_to_numpy(self, tx, *args, **kwargs)


_trace_function = UserFunctionVariable.call_function


def trace_function_call(function: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """Trace a call of a Python function; `nn.Transformer` modules detect no causal mask by its
    values, so that attention reads the mask."""
    if function.fn.__code__ is detects_causal_mask:
        # The second parameter: what the caller says takes precedence.
        hint = [*args[1:2], *(value for name, value in kwargs.items() if name == "is_causal")]
        if all(each.is_python_constant() and each.as_python_constant() is None for each in hint):
            return ConstantVariable.create(False)
    return _trace_function(function, tx, args, kwargs)


def print_after_graph(function: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """Record a call of `print`, which the bytecode makes after the graph has run.

    Dynamo's own method loses calls in nested functions, and accepts few types of arguments. Like
    Dynamo's method, this function ignores keyword arguments.
    """
    # Only the outermost frame writes bytecode.
    outermost = tx
    while getattr(outermost, "parent", None) is not None:
        outermost = outermost.parent
    outermost.debug_locals.append((function, list(args)))
    return ConstantVariable.create(None)


def iterate_logger_methods() -> Iterator[Callable[..., Any]]:
    """Yield the logging methods of `logging.Logger`, including methods added by libraries, such as
    `warning_once`."""
    for name in dir(logging.Logger):
        method = getattr(logging.Logger, name)
        if not name.startswith("_") and callable(method) and name != "getChild":
            yield method
