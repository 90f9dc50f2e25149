"""What is said of a failure of `torch.export`."""

from __future__ import annotations

from collections.abc import Callable

from shardwright.core.capture.naming import NO_LINE, line_of_error

NESTED = (
    "nested tensors cannot be sharded. Pad to the longest row, with a mask, or keep the rows one"
    " after the other with the number of the sample that each belongs to"
)

OWN_ERROR = "the model itself raises an error for these arguments"
ACCEPTED = ". Pass arguments whose shapes and dtypes it accepts"


def error_of_model(message: str) -> str:
    """Return a message of `explain_export` without blaming the arguments, where the model itself
    raises the error."""
    return message.replace(f"{OWN_ERROR}: ", "").replace(ACCEPTED, "")


def explain_export(error: Exception, hint: str, raises_alone: Callable[[], bool]) -> str:
    """A one-line message for a failure of `torch.export`.

    Args:
        hint: what to do instead if it depends on values.
        raises_alone: whether the model raises the error on these arguments outside of it, too.
    """
    line = line_of_error(error)
    text = str(error).strip()
    if "data-dependent" in text or "DataDependent" in type(error).__name__:
        return (
            f"{line}: this depends on the value of a tensor, which is unknown during capture. Use "
            f"`torch.where` on tensors instead, or make it a Python constant.{hint}"
        )
    if "numpy() is not supported" in text:
        return (
            f"{line}: this gives the values of a tensor to numpy, and they are unknown during "
            "capture. Compute it with operators of torch, outside of the model, or make a "
            "`torch.library.custom_op` of it."
        )
    if "in output, which is not a known type" in text:
        return (
            f"{line}: `forward` returns an object that may hold tensors: "
            f"{text.split(' in out')[0]}; return tensors, numbers, tuples, lists, dicts or "
            "dataclasses that are made of their fields alone; call a model of `transformers` "
            "without `use_cache=True`"
        )
    if "Creating a new Tensor subclass" in text:
        return (
            f"{line}: this makes a tensor of a class of its own, {text.split()[5]}, which cannot be"
            " captured. Use an ordinary one: instead of a `CausalBias`, as of `causal_lower_right`,"
            " the mask `torch.ones(n, m, dtype=torch.bool).tril(m - n)`"
        )
    if "FlexAttention" in text:
        return (
            f"{line}: `flex_attention` cannot be captured. Use `scaled_dot_product_attention` with "
            "`is_causal=True` or a mask: that of a window is not held"
        )
    if "HigherOrderOp" in type(error).__name__:
        return (
            f"{line}: an operator that calls functions, such as `torch.cond`, `while_loop`, `scan` "
            "or `map`, cannot be split. Compute both branches and choose by `torch.where`, loop in "
            "Python as often as is known, and call `torch.vmap` in place of `map`"
        )
    if "Unsupported input type" in text:
        kind = text.partition("input type ")[2].partition(">. ")[0]
        return (
            f"an argument is an object ({kind}>): pass its fields, or tensors, numbers, tuples, "
            "lists and dicts"
        )
    if "nested_tensor" in text or "nested_tensor" in line:
        return f"{line}: {NESTED}"
    if "UnsupportedOperator" in type(error).__name__ or "no fake impl" in text:
        return (
            f"{line}: capture needs a fake implementation of this operator ({text.splitlines()[0]})"
            ": register one by `torch.library.register_fake`"
        )
    first = (text.splitlines()[0] if text else "").removesuffix(".")
    of_arguments = isinstance(error, RuntimeError | ValueError | TypeError | IndexError)
    if of_arguments and "data pointer" not in text and raises_alone():
        # Of an operator that a module of torch calls there may be no line of the user's.
        where = "" if line == NO_LINE else f"{line}: "
        return f"{where}{OWN_ERROR}: {type(error).__name__}: {first}{ACCEPTED}"
    return (
        f"{line}: torch.export cannot capture this: {type(error).__name__}: {first}. If the line is"
        " right where the model runs, write it with operators whose shapes and branches do not"
        " depend on values, or make a `torch.library.custom_op` of it."
    )
