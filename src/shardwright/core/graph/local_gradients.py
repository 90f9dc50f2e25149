"""Autograd functions around the user's function in a `local_map`.

They replace functions that cannot run on meta or fake tensors, run a function once per simulated
rank, and return zero gradients for inputs that the function did not read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from shardwright.core.torch_internals.local_tensors import (
    on_simulated_rank,
    tensor_of_ranks,
    tensors_by_rank,
)
from shardwright.core.torch_internals.tensors import (
    prioritize_gradient,
    requires_grad,
    runs_in_backward_pass,
    storage_id,
)

ShapesAndDtypes = Sequence[tuple[tuple[int, ...], torch.dtype]]
"""(Shape, dtype) of each tensor of a sequence."""


def empty_results(
    results: ShapesAndDtypes, tensors: Sequence[Tensor], saved_bytes: int | None
) -> tuple[Tensor, ...]:
    """Return uninitialized results, for a function that cannot run on meta or fake tensors.

    Args:
        results: shape and dtype of each result.
        tensors: the inputs; autograd connects the results to them.
        saved_bytes: bytes that the function saves for the backward pass; None to save the inputs
            and results.
    """
    placeholders: tuple[Tensor, ...] = _EmptyResultsFunction.apply(results, saved_bytes, *tensors)  # type: ignore[no-untyped-call]
    return placeholders


class _EmptyResultsFunction(torch.autograd.Function):
    """Autograd function of `empty_results`: its results and gradients are uninitialized."""

    @staticmethod
    def forward(
        ctx: Any, results: ShapesAndDtypes, saved_bytes: int | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.input_types = [(t.shape, t.dtype, t.device) for t in tensors]
        device = tensors[0].device if tensors else torch.device("meta")
        empty = tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in results)
        # Autograd raises if an integer tensor requires a gradient.
        ctx.mark_non_differentiable(*(tensor for tensor in empty if not is_floating(tensor)))
        if saved_bytes is None:
            ctx.save_for_backward(*tensors, *empty)
        else:
            # Memory in place of the tensors that the code would save, as long as the graph lives.
            ctx.saved = torch.empty(saved_bytes, dtype=torch.uint8, device=device)
        return empty

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        # The first two arguments of `forward` are no tensors.
        inputs = zip(ctx.input_types, ctx.needs_input_grad[2:], strict=True)
        return (
            None,
            None,
            *(
                torch.empty(shape, dtype=dtype, device=device) if needs_grad else None
                for (shape, dtype, device), needs_grad in inputs
            ),
        )


def is_floating(tensor: Tensor) -> bool:
    """Whether a tensor has a real or complex floating-point dtype, and so may have a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


RunLocally = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""The user's function of a `local_map`, from local input tensors to local results."""


def run_with_connected_inputs(run: RunLocally, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run the user's function; return its results, connected in the autograd graph to every input
    that requires a gradient.

    An input that the user's function has not used gets a gradient of zeros instead of None. With
    data-dependent branches, a parameter may be used on some ranks only; without a gradient, the
    other ranks would not join the collective that reduces it, and the step would hang.

    Args:
        run: the user's function.
        tensors: its inputs.
    """
    if not torch.is_grad_enabled():
        return tuple(run(tensors))
    # The function gets views, whose autograd nodes tell in the backward pass whether it has used
    # them: the inputs themselves may share one node. To look for them in the autograd graph after
    # each call takes longer than a hundred views.
    # Prioritized, so that gradients are reduced as soon as they are complete.
    views = [
        prioritize_gradient(tensor.view_as(tensor)) if tensor.requires_grad else tensor
        for tensor in tensors
    ]
    results = tuple(run(views))
    pairs = [pair for pair in zip(tensors, views, strict=True) if pair[0].requires_grad]
    # Without results that require a gradient, no backward pass comes here.
    if not pairs or not any(map(requires_grad, results)):
        return results
    trained, used = zip(*pairs, strict=True)
    connected: tuple[Tensor, ...] = _ConnectInputsFunction.apply(  # type: ignore[no-untyped-call]
        [view.grad_fn for view in used], len(results), *results, *trained
    )
    return connected


def reached_by_gradients(results: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[bool]:
    """Return, for each input, whether a gradient of the results reaches it.

    Args:
        results: the results of the user's function.
        tensors: inputs of the user's function that require gradients.
    """
    # A leaf has an edge too: the node that accumulates its gradient.
    edges = [get_gradient_edge(tensor) for tensor in tensors]
    reached = _find_edges_to_inputs(results, {edge.node for edge in edges})
    # With the index: a node such as that of `split` may be reached through another of its outputs.
    return [(edge.node, edge.output_nr) in reached for edge in edges]


def _find_edges_to_inputs(results: Sequence[Tensor], input_nodes: set[Any]) -> set[tuple[Any, int]]:
    """Return the edges of the autograd graph, (node, output index), between results and inputs.

    Args:
        results: the results of the user's function.
        input_nodes: the autograd nodes of the inputs.
    """
    edges = map(get_gradient_edge, filter(requires_grad, results))
    pending: list[tuple[Any, int]] = [(edge.node, edge.output_nr) for edge in edges]
    reached = set(pending)
    visited: set[Any] = set()
    while pending:
        node, _ = pending.pop()
        # Nodes behind an input belong to other parts of the model.
        if node in visited or node in input_nodes:
            continue
        visited.add(node)
        following = [(n, output_index) for n, output_index in node.next_functions if n is not None]
        reached.update(following)
        pending.extend(following)
    return reached


class _ConnectInputsFunction(torch.autograd.Function):
    """Return results unchanged, with gradients of zeros for the inputs that they do not depend on.

    The arguments are the autograd nodes that the inputs are read through, the number of results,
    the results, and the inputs.
    """

    @staticmethod
    def forward(ctx: Any, nodes: Sequence[Any], count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        results, inputs = tensors[:count], tensors[count:]
        ctx.nodes = nodes
        ctx.input_types = [(t.shape, t.dtype, t.device) for t in inputs]
        # Results that no loss reads pass None on instead of zeros.
        ctx.set_materialize_grads(False)
        # Views, since autograd treats inputs that are returned unchanged specially.
        views = tuple(result.view_as(result) for result in results)
        ctx.mark_non_differentiable(
            *(v for v, r in zip(views, results, strict=True) if not r.requires_grad)
        )
        return views

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        inputs = zip(ctx.nodes, ctx.input_types, strict=True)
        zeros = (
            None if runs_in_backward_pass(node) else torch.zeros(s, dtype=dtype, device=device)
            for node, (s, dtype, device) in inputs
        )
        return None, None, *gradients, *zeros


def on_each_rank(run: RunLocally, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run a function once per simulated rank, because the values of its inputs differ between
    ranks.

    Args:
        run: the function.
        tensors: inputs of the function, with different values per simulated rank.

    Returns:
        The results, with different values per simulated rank.
    """
    results: tuple[Tensor, ...] = _OnEachRankFunction.apply(run, *tensors)  # type: ignore[no-untyped-call]
    return results


class _OnEachRankFunction(torch.autograd.Function):
    """Forward and backward pass of `on_each_rank`, with an autograd graph per rank."""

    @staticmethod
    def forward(ctx: Any, run: RunLocally, *tensors: Tensor) -> tuple[Tensor, ...]:
        local = [tensors_by_rank(tensor) for tensor in tensors]
        # At least one input differs between ranks, else the code is not run rank by rank.
        ranks = sorted(next(shards for shards in local if shards is not None))
        ctx.runs = {}
        saved: set[int] = set()
        for rank in ranks:
            # Autograd functions run `forward` without recording, but each rank needs its own graph.
            with on_simulated_rank(rank), torch.enable_grad():
                inputs = [
                    # Detached, so that the graph of a rank ends at its inputs.
                    (tensor if shards is None else shards[rank]).detach()
                    for tensor, shards in zip(tensors, local, strict=True)
                ]
                # Copied, as a function that changes its inputs in place must reach the error that
                # names them, and autograd has an error of its own for leaves.
                inputs = [
                    tensor.requires_grad_().clone() if needs_grad else tensor
                    for tensor, needs_grad in zip(inputs, ctx.needs_input_grad[1:], strict=True)
                ]
                with record_saved_inputs(inputs, saved):
                    ctx.runs[rank] = inputs, run_with_connected_inputs(run, inputs)
        # Saved through `ctx`, so that parameters are gathered again for the backward pass, as on
        # real ranks.
        ctx.save_for_backward(*(t if i in saved else None for i, t in enumerate(tensors)))
        # The number of results, and which require a gradient, are taken from the first rank.
        first = ctx.runs[ranks[0]][1]
        results = tuple(
            tensor_of_ranks({rank: ctx.runs[rank][1][index].detach() for rank in ranks})
            for index in range(len(first))
        )
        ctx.mark_non_differentiable(
            *(r for r, of_rank in zip(results, first, strict=True) if not of_rank.requires_grad)
        )
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        # Reading `saved_tensors` runs the hooks that gather parameters again.
        local, _ = [tensors_by_rank(gradient) for gradient in gradients], ctx.saved_tensors
        gradients_of_rank: dict[int, list[Tensor | None]] = {}
        for rank, (inputs, results) in ctx.runs.items():
            with on_simulated_rank(rank):
                pairs = [
                    (result, gradient if shards is None else shards[rank])
                    for result, gradient, shards in zip(results, gradients, local, strict=True)
                    if result.requires_grad
                ]
                trained = [tensor for tensor in inputs if tensor.requires_grad]
                outputs, output_gradients = [r for r, _ in pairs], [g for _, g in pairs]
                # Retained, because the caller may run its own backward pass twice. A custom
                # autograd function may return None for an input that it has used.
                computed = iter(
                    torch.autograd.grad(
                        outputs, trained, output_gradients, retain_graph=True, allow_unused=True
                    )
                )
                gradients_of_rank[rank] = [
                    next(computed) if t.requires_grad else None for t in inputs
                ]
        # All arguments of `forward` but `run`.
        count = len(ctx.needs_input_grad) - 1
        return None, *(_collect_input_gradient(gradients_of_rank, index) for index in range(count))


def record_saved_inputs(
    inputs: Sequence[Tensor], saved: set[int]
) -> AbstractContextManager[object]:
    """Within the context, record which of `inputs` autograd saves for the backward pass.

    Args:
        inputs: tensors, recognized by their storage.
        saved: the indices of saved inputs, updated in place.
    """
    # By storage, since autograd may save a view of an input.
    index_of_storage = {storage_id(tensor): index for index, tensor in enumerate(inputs)}

    def pack(tensor: Tensor) -> Tensor:
        if (index := index_of_storage.get(storage_id(tensor))) is not None:
            saved.add(index)
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


def _collect_input_gradient(
    gradients_of_rank: dict[int, list[Tensor | None]], index: int
) -> Tensor | None:
    """Return the gradient of input `index` on all simulated ranks, zeros for a rank without one;
    None if no rank has one."""
    by_rank = {rank: of_inputs[index] for rank, of_inputs in gradients_of_rank.items()}
    example = next((gradient for gradient in by_rank.values() if gradient is not None), None)
    if example is None:
        return None
    return tensor_of_ranks(
        {
            rank: torch.zeros_like(example) if gradient is None else gradient
            for rank, gradient in by_rank.items()
        }
    )
