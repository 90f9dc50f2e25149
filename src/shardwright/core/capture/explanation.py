"""Error messages for failures of `torch.export`."""

from __future__ import annotations

from collections.abc import Callable

from shardwright.core.capture.inline_regions import CONTROL_FLOW_REMEDY
from shardwright.core.capture.naming import NO_LINE, line_of_error
from shardwright.errors import CaptureError

NESTED = (
    "nested tensors cannot be sharded\npad samples to the longest one, with a mask, or pack them "
    "into one dimension, with the index of its sample for each element"
)

OWN_ERROR = "the model itself raises an error for these arguments"
ACCEPTED = "\npass a model and arguments with which `model(*args, **kwargs)` runs without a plan"


class UpdatedBufferError(CaptureError):
    """A shape or a branch depends on a buffer that `forward` updates.

    A `local_map` is no way out: it would update the buffer on each device by its own shard.
    """


class DataDependentError(CaptureError):
    """Python code of the model depends on the value of a tensor."""


def is_data_dependent(error: Exception) -> bool:
    """Whether `torch.export` failed because Python code depends on the value of a tensor."""
    return "data-dependent" in str(error) or "DataDependent" in type(error).__name__


def error_of_model(message: str) -> str:
    """Remove the remark about the arguments from a message of `explain_export`."""
    return message.replace(f"{OWN_ERROR}: ", "").replace(ACCEPTED, "")


def explain_export(error: Exception, hint: str, raises_alone: Callable[[], bool]) -> str:
    """Return the error message for a failure of `torch.export`.

    Args:
        error: the exception that `torch.export` raised.
        hint: further advice for code that depends on tensor values; starts with a space, or is
            empty.
        raises_alone: returns whether the model also raises the error without `torch.export`.
    """
    line = line_of_error(error)
    # Recognized by text: many are plain RuntimeErrors, other classes are private to PyTorch.
    message = str(error).strip()
    if is_data_dependent(error):
        return (
            f"{line}: this depends on the value of a tensor, which is unknown during capture\nuse "
            f"`torch.where` on tensors instead, or make the value a Python constant.{hint}"
        )
    if "numpy() is not supported" in message:
        return (
            f"{line}: this converts a tensor to numpy, but its values are unknown during capture\n"
            "compute with torch operators, or outside of the model, or write a "
            "`torch.library.custom_op`"
        )
    if "in output, which is not a known type" in message:
        return (
            f"{line}: `forward` returns an object that may contain tensors: "
            f"{message.split(' in out')[0]}\nreturn tensors, numbers, tuples, lists, dicts or "
            "dataclasses that are initialized by their fields alone; call a model of "
            "`transformers` without `use_cache=True`"
        )
    if "Creating a new Tensor subclass" in message:
        return (
            f"{line}: this creates a tensor subclass, {message.split()[5]}, which cannot be "
            "captured\nuse a plain tensor: in place of a `CausalBias` (`causal_lower_right`),"
            " the mask `torch.ones(n, m, dtype=torch.bool).tril(m - n)`"
        )
    if "HigherOrderOp" in type(error).__name__:
        return (
            f"{line}: an operator that calls functions, such as `torch.cond`, `while_loop`, `scan` "
            f"or `map`, cannot be sharded\n{CONTROL_FLOW_REMEDY}"
        )
    if "Unsupported input type" in message:
        object_type = message.partition("input type ")[2].partition(">. ")[0]
        return (
            f"an argument is an object ({object_type}>)\npass its fields, or tensors, numbers, "
            "tuples, lists and dicts"
        )
    if "nested_tensor" in message or "nested_tensor" in line:
        return f"{line}: {NESTED}"
    if "UnsupportedOperator" in type(error).__name__ or "no fake impl" in message:
        return (
            f"{line}: capture needs a fake implementation of this operator "
            f"({message.splitlines()[0]})\nregister one by `torch.library.register_fake`"
        )
    if "UnbackedSymbol" in type(error).__name__:
        return (
            f"{line}: this combines tensors whose sizes depend on values, such as rows of two"
            " masks, and capture does not know that the sizes are equal\nselect all rows by one"
            " mask, or compute all rows and select by `torch.where(mask, result, 0)`"
        )
    first = (message.splitlines()[0] if message else "").removesuffix(".")
    if "DynamicOutputShape" in type(error).__name__:
        return (
            f"{line}: a result of this operator has a shape that depends on values, which are"
            f" unknown during capture: {first}\nuse operators whose shapes do not depend on values,"
            " such as `torch.linalg.pinv(a) @ b` instead of `torch.linalg.lstsq(a, b)`"
        )
    # Fake tensors have no data pointer, and no implementation of some operators.
    of_trace = (
        type(error).__module__.startswith("torch.")
        or isinstance(error, NotImplementedError)
        or "data pointer" in message
    )
    # Asked last, because it runs the model once more.
    if not of_trace and raises_alone():
        # An operator called by a module of torch may have no line in the user's code.
        where = "" if line == NO_LINE else f"{line}: "
        return f"{where}{OWN_ERROR}: {type(error).__name__}: {first}{ACCEPTED}"
    return (
        f"{line}: torch.export cannot capture this: {type(error).__name__}: {first}\nif the"
        " model runs on its own, rewrite the line with operators whose shapes and branches do not"
        " depend on values, or wrap it in a `torch.library.custom_op`"
    )
