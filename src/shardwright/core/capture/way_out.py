"""Last line of each CaptureError: the `sw.local_map` call that avoids capture of a module."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx, nn

from shardwright.core.capture.explanation import OWN_ERROR, UpdatedBufferError
from shardwright.core.capture.fx_nodes import module_calls
from shardwright.core.capture.local_map import local_map
from shardwright.core.capture.local_trace import example_entries
from shardwright.core.capture.reachable_state import ReachableState
from shardwright.core.torch_internals import pytree
from shardwright.errors import CaptureError

log = logging.getLogger(__name__)

_NAMES = "hwdefgijklmnop"
"""Dimension names, after the first, in a suggested notation."""

REMEDY = "or leave it as it is, on shards of the batch, before `plan`"

AS_UNDER_DDP = "the loss is then the mean of the shards' losses, as under DDP"
"""Note for a suggested `sw.local_map` of a full model whose loss may select samples by value: the
divisor of its mean then differs between shards."""


UNKNOWN_RESULT = "write the dimensions of its result after `->`"
"""Note for a suggested `sw.local_map` of a module whose result is unknown."""

Retry = Callable[[tuple[Any, ...], dict[str, Any]], object]
"""Function that captures the model again, with the given arguments."""


class _Candidate(NamedTuple):
    """A possible `local_map`: path of the module, notation, `partial`, and a note."""

    path: str
    notation: str
    partial: Literal["mean"] | None = None
    note: str = ""

    def __str__(self) -> str:
        target = f"net.get_submodule({self.path!r})" if self.path else "net"
        partial = f', partial="{self.partial}"' if self.partial else ""
        note = f"; {self.note}" if self.note else ""
        return f'`sw.local_map({target}, "{self.notation}"{partial})`{note}'


@contextmanager
def naming_local_map(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    retry: Retry | None = None,
) -> Iterator[None]:
    """Return a context that appends a suggested call of `sw.local_map` to each CaptureError.

    The suggestion is for the innermost module whose `forward` raises the error, for a module that
    contains it, or for the model.

    Args:
        module, args, kwargs: the captured call.
        retry: captures the call again. Only a suggestion with which this succeeds is appended.
    """
    try:
        yield
    except CaptureError as error:
        # `local_map` would raise it too.
        if OWN_ERROR in str(error) or isinstance(error, UpdatedBufferError):
            raise
        call, is_changed = _replace_lists_of_samples((args, dict(kwargs)))
        for candidate in _list_candidates(error, module, call):
            if retry is None or _is_captured(module, candidate, partial(retry, *call)):
                break
        else:
            raise
        note = "; pass the numbers of the samples as a tensor, not as a list" if is_changed else ""
        raise type(error)(f"{error}\n{REMEDY}: {candidate}{note}") from error


def _is_captured(
    model: nn.Module, candidate: _Candidate, capture_again: Callable[[], object]
) -> bool:
    """Whether the model can be captured with a suggested `local_map`."""
    target = model.get_submodule(candidate.path)
    # With its attributes, the tag of the `local_map` goes too.
    with _unchanged_python_state(model):
        try:
            local_map(target, candidate.notation, partial=candidate.partial)
            capture_again()
        # Of the tracers, or of another line of the model.
        except Exception as error:
            log.debug("%s does not help: %s", candidate, error)
            return False
    return True


@contextmanager
def _unchanged_python_state(model: nn.Module) -> Iterator[None]:
    """Context that restores the Python state that `forward` can reach, on exit."""
    state = ReachableState(model)
    attributes = [(vars(child), dict(vars(child))) for child in model.modules()]
    try:
        yield
    finally:
        state.restore()
        for now, before in attributes:
            now.clear()
            now.update(before)


def _replace_lists_of_samples(call: Any) -> tuple[Any, bool]:
    """Replace lists of one number for each sample by tensors, as shards get the whole list.

    Returns:
        The arguments, and whether any was replaced.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, Tensor)]
    batch = {tensor.shape[0] for tensor in tensors[:1] if tensor.ndim}

    def is_of_samples(value: Any) -> bool:
        return (
            isinstance(value, (list, tuple))
            and len(value) in batch
            and all(type(item) in (int, float) for item in value)
        )

    leaves, spec = pytree.tree_flatten(call, is_leaf=is_of_samples)
    replaced = [torch.tensor(leaf) if is_of_samples(leaf) else leaf for leaf in leaves]
    return pytree.tree_unflatten(replaced, spec), any(map(is_of_samples, leaves))


def _list_candidates(error: BaseException, model: nn.Module, call: Any) -> Iterator[_Candidate]:
    """Yield possible calls of `local_map`, for the innermost module first."""
    for path, tensors, result in _find_failing_modules(error, model):
        note = "" if result is not None else UNKNOWN_RESULT
        yield _Candidate(path, _notation_for_module(tensors, result), note=note)
    entries = example_entries([x for x in pytree.tree_leaves(call) if isinstance(x, Tensor)])
    # On shards of the batch, other tensors would belong to other samples.
    if _have_samples(entries):
        yield _Candidate("", f"{entries} -> ()", "mean", AS_UNDER_DDP)


def _find_failing_modules(
    error: BaseException, model: nn.Module
) -> list[tuple[str, list[Tensor], Tensor | None]]:
    """Find the submodules in whose `forward` an error was raised, innermost first.

    Returns:
        The path of each submodule, its tensor arguments, and its result if the trace has one.
    """
    paths: dict[str, str] = {}
    for path, module in model.named_modules():
        # By class, because the frames refer to modules of the traced copy.
        paths.setdefault(_get_class_name(module), path)
    calls_by_path: dict[str, tuple[list[Tensor], Tensor | None]] = {}
    cause: BaseException | None = error
    while cause is not None and not calls_by_path:
        trace = cause.__traceback__
        while trace is not None:
            local_variables, is_forward = (
                trace.tb_frame.f_locals,
                trace.tb_frame.f_code.co_name == "forward",
            )
            path = (
                paths.get(_get_class_name(local_variables["self"]))
                if is_forward and "self" in local_variables
                else None
            )
            if path:
                arguments = _find_tensor_arguments(local_variables["self"], local_variables)
                calls_by_path[path] = arguments, None
            elif isinstance(node := local_variables.get("node"), fx.Node):
                # An error after the trace, about this node.
                for depth, call in enumerate(module_calls(node)):
                    if call_path := call.partition("@")[0]:
                        calls_by_path[call_path] = _find_traced_tensors(node, depth)
            trace = trace.tb_next
        cause = cause.__cause__ or cause.__context__
    # A trace may call the model by another path.
    own_paths = dict(model.named_modules(remove_duplicate=False))
    return [(path, *calls_by_path[path]) for path in reversed(calls_by_path) if path in own_paths]


def _find_traced_tensors(node: fx.Node, depth: int) -> tuple[list[Tensor], Tensor | None]:
    """Return the tensor arguments of a module call that contains a traced operator, and its result;
    None for several results.

    Args:
        depth: index of the call in `module_calls(node)`.
    """
    calls = module_calls(node)[: depth + 1]
    nodes = node.graph.nodes
    # A dict, as a set has no order.
    inside = dict.fromkeys(n for n in nodes if module_calls(n)[depth : depth + 1] == calls[depth:])
    entering = dict.fromkeys(each for n in inside for each in n.all_input_nodes)
    arguments = [
        each.meta["val"]
        for each in entering
        if each not in inside
        and isinstance(each.meta.get("val"), Tensor)
        and not _is_parameter_or_buffer(each)
    ]
    leaving = [n.meta.get("val") for n in inside if n.users.keys() - inside.keys()]
    result = leaving[0] if len(leaving) == 1 else None
    return arguments, result if isinstance(result, Tensor) else None


def _is_parameter_or_buffer(node: fx.Node) -> bool:
    # `torch.export` names placeholders by what they are; arguments have the names of the user.
    return node.op == "placeholder" and node.name.startswith(("p_", "b_", "c_"))


def _get_class_name(module: object) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _find_tensor_arguments(module: object, local_variables: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensor arguments of `forward` that are still in its local variables.

    Args:
        local_variables: values of the local variables of `forward`, by name.
    """
    forward: Any = vars(type(module)).get("forward", nn.Module.forward)
    names = inspect.signature(forward).parameters
    call, _ = _replace_lists_of_samples([local_variables.get(n) for n in names if n != "self"])
    leaves = pytree.tree_leaves(call)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _notation_for_module(tensors: list[Tensor], result: Tensor | None) -> str:
    """Return a notation for a module with one result.

    Only if all arguments and the result have the samples of the batch, shards of the batch are
    computed; else all devices compute the module in full.
    """
    entries, batch = example_entries(tensors), "b"
    if not _have_samples(entries) or (
        result is not None and _get_first_size(result) != _get_first_size(tensors[0])
    ):
        entries, batch = entries.replace("b", "_"), "_"
    if tensors and result is not None:
        sizes = [str(size) if isinstance(size, int) else "_" for size in result.shape]
        shape = [batch, *sizes[1:]] if batch == "b" else sizes
        return f"{entries} -> {' '.join(shape) or '()'}"
    # Without known arguments: a batch of vectors.
    rank = tensors[0].ndim if tensors else 2
    # Assumes that the result has the shape of the first tensor.
    names = [f"_{name}" for name in _NAMES[: rank - 1]]
    first = " ".join(("b" if batch == "b" else "_b", *names)) if rank else "()"
    _, comma, others = entries.partition(",")
    return f"{first}{comma}{others} -> {first}"


def _get_first_size(tensor: Tensor) -> list[int | None]:
    """Return a list with the size of the first dimension, None if it depends on values; empty for a
    tensor without dimensions."""
    # A symbol for a size that depends on values cannot be compared.
    return [size if isinstance(size, int) else None for size in tensor.shape[:1]]


def _have_samples(entries: str) -> bool:
    """Whether each tensor of a notation is a scalar or has the dimension of samples."""
    return all(entry.strip().startswith(("b", "()")) for entry in entries.split(","))
