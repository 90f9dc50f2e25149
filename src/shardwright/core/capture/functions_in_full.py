"""Capture of custom autograd functions as replicated operators, which every device computes in
full.

The function becomes one operator of the graph, a `LocalCall` without shardable dimensions: each
device runs `forward` and `backward` eagerly on replicated inputs. This is correct for every
`backward`, but devices do not share the work.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shardwright.core.capture.function_trials import CHANGES_INPUT
from shardwright.core.capture.local_dry_call import DryCall
from shardwright.core.capture.local_map import trained_reads
from shardwright.core.capture.local_trace import LocalPart, Options
from shardwright.core.capture.naming import current_line
from shardwright.core.graph.graph import Graph
from shardwright.core.graph.local_body import ForkGenerators
from shardwright.core.graph.local_declaration import Declaration
from shardwright.core.graph.local_map import LocalCall
from shardwright.core.torch_internals import pytree

log = logging.getLogger(__name__)

_CONSTANTS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, slice, range)
"""Argument types that contain no parameters and whose `repr` identifies the value."""


@dataclass(frozen=True, eq=False)
class AppliedFunction:
    """The code of a custom autograd function, which has no parameters or buffers of its own.

    Args:
        function: the function.
        fork: context that forks the random generators for `backward`; None to draw from the default
            generators, as on one device.
    """

    function: type[Function]
    fork: ForkGenerators | None = None

    def run(self, args: Any, kwargs: Any, state: Sequence[Tensor]) -> tuple[Any, dict[int, Tensor]]:
        function = self.function
        if self.fork is not None:
            # Drawn inside of the seeded operator, where all ranks draw the same.
            seed = int(torch.randint(2**62, ()))
            function = _seed_backward(function, seed, self.fork)
        return function.apply(*args, **kwargs), {}  # type: ignore[no-untyped-call]

    def with_seeded_backward(self, fork: ForkGenerators) -> AppliedFunction:
        return replace(self, fork=fork)

    @property
    def description(self) -> str:
        return f"{self.function.__module__}.{self.function.__qualname__}"


def _seed_backward(function: type[Function], seed: int, fork: ForkGenerators) -> type[Function]:
    """Derive an autograd function whose `backward` draws from generators seeded with `seed`.

    Autograd calls `backward` outside of the seeded operator, where generators may differ by rank.
    """

    def backward(ctx: Any, *gradients: Any) -> Any:
        with fork() as seed_generators:
            seed_generators(seed)
            return function.backward(ctx, *gradients)

    return type(function.__name__, (function,), {"backward": staticmethod(backward)})


def traced_in_full(
    function: type[Function], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, str]:
    """Insert a replicated operator that runs an autograd function in full on every device.

    Returns:
        (results, ""), or (None, reason why the function cannot be captured as a replicated
        operator).
    """
    # Parameters that are no inputs of the operator would get no gradient.
    if problem := _explain_parameters_without_gradient(function, args, kwargs):
        return None, problem
    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    constants = tuple((n, leaf) for n, leaf in enumerate(leaves) if not isinstance(leaf, Tensor))
    body = AppliedFunction(function)
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    # With the backward pass, since `backward` may draw random numbers too.
    dry = DryCall(body, structure, constants, autocast).run(tensors, with_backward=True)
    if dry is None:
        return None, "it does not run without values, so the sizes of its results are unknown"
    if dry.changes_arguments:
        return None, CHANGES_INPUT
    # `_` for every dimension: none may be sharded, so each device computes all.
    inputs = tuple(("_",) * tensor.ndim for tensor in tensors)
    outputs = tuple(("_",) * len(shape) for shape, _ in dry.results)
    notation = f"{_format_dimensions(inputs)} -> {_format_dimensions(outputs)}"
    declaration = Declaration(inputs, outputs, (None,) * len(outputs), notation)
    where = f"autograd function `{function.__qualname__}` at {current_line()}"
    options = Options(declaration, None, dry.random, None, None)
    local_part = LocalPart(where, options, body, body)
    return local_part.traced(tuple(args), dict(kwargs), []), ""


def warn_of_functions_in_full(graph: Graph) -> None:
    """Log a warning that names the custom autograd functions that run replicated."""
    bodies = (op.target.body for op in graph.ops if isinstance(op.target, LocalCall))
    names = {
        body.description: body.function for body in bodies if isinstance(body, AppliedFunction)
    }
    for function in names.values():
        log.warning(
            "every device computes the autograd function %s in full, as its gradients are not "
            "those of `forward` or of each element alone\n"
            "if parts of its inputs can be computed alone, call its `apply` through"
            ' `sw.local_map(F.apply, "b _ -> b _")`',
            function.__qualname__,
        )


def _explain_parameters_without_gradient(
    function: type[Function], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str:
    """Return an error message if the function reads trained parameters that are not arguments.

    Returns "" otherwise."""
    for leaf in pytree.tree_leaves((tuple(args), dict(kwargs))):
        if not isinstance(leaf, (Tensor, *_CONSTANTS)):
            return f"it takes a {type(leaf).__name__}, whose parameters would get no gradient"
    for code in _list_own_methods(function):
        for owner in trained_reads(code):
            return f"it reads a {type(owner).__name__} that is not among its arguments"
    return ""


def _list_own_methods(function: type[Function]) -> Iterator[Any]:
    for name in ("forward", "setup_context", "backward", "vjp"):
        method = getattr(function, name)
        # Inherited from `Function` itself, not code of the user.
        if method is not getattr(Function, name):
            yield method


def _format_dimensions(entries: Sequence[Sequence[str]]) -> str:
    return ", ".join(" ".join(entry) or "()" for entry in entries)
