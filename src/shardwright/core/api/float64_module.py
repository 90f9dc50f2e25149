"""A copy of a module in float64, with which `check` compares a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from shardwright.core.capture.naming import line_of_error
from shardwright.core.capture.outer_references import OuterReferences
from shardwright.core.capture.reachable_state import ReachableState
from shardwright.core.graph.float64 import (
    module_in_float64,
)
from shardwright.core.runtime.micro_batches import (
    SPLIT_NOTE,
)
from shardwright.errors import CaptureError, PlanError


@contextmanager
def with_float64_copy(net: nn.Module, values: Mapping[str, Tensor]) -> Iterator[nn.Module]:
    """Context manager that yields a float64 copy of the model.

    Inside the context, objects that refer to the model, such as closures, refer to the copy.
    """
    module = module_in_float64(net, values)
    state = ReachableState(module)
    with OuterReferences(net, module, state, follow_ids=True).leading_to_copy():
        yield module


@contextmanager
def convert_float64_errors(micro_batches: int) -> Iterator[None]:
    """Context manager that converts errors of the user's module in float64 to `PlanError`.

    Args:
        micro_batches: number of micro-batches; the module is called with one micro-batch.
    """
    try:
        yield
    except PlanError:
        raise
    except Exception as error:
        where = "" if isinstance(error, CaptureError) else f"{line_of_error(error)}: "
        call_note = ""
        if micro_batches > 1:
            call_note = f", called with one of {micro_batches} micro-batches ({SPLIT_NOTE})"
        raise PlanError(
            f"`sw.check` compares in float64, in which this module does not run{call_note}:"
            f" {where}{error}\n"
            "this says nothing about the plan: compare the losses of some steps on ranks with those"
            " of one device instead. For `sw.check`, use operators with a float64 kernel, and"
            " neither cache tensors of other dtypes nor require one"
        ) from error
