"""Autograd around a `local_map`: without values, on simulated ranks, and of what it skips."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from shardwright.core.torch_internals.distributed import by_rank, of_ranks, on_simulated_rank
from shardwright.core.torch_internals.tensors import requires_grad, storage_id

ShapesAndDtypes = Sequence[tuple[tuple[int, ...], torch.dtype]]
"""Those of several tensors."""


def empty_results(
    results: ShapesAndDtypes, tensors: Sequence[Tensor], saved_bytes: int | None
) -> tuple[Tensor, ...]:
    """Results without values, whose gradients flow to `tensors`, of code that cannot run without.

    Args:
        saved_bytes: how much is kept for the backward pass; None for the inputs and results.
    """
    made: tuple[Tensor, ...] = _Placeholders.apply(results, saved_bytes, *tensors)  # type: ignore[no-untyped-call]
    return made


class _Placeholders(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, results: ShapesAndDtypes, saved_bytes: int | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.like = [(t.shape, t.dtype, t.device) for t in tensors]
        device = tensors[0].device if tensors else torch.device("meta")
        made = tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in results)
        ctx.mark_non_differentiable(*(tensor for tensor in made if not is_floating(tensor)))
        if saved_bytes is None:
            ctx.save_for_backward(*tensors, *made)
        else:
            ctx.saved = torch.empty(saved_bytes, dtype=torch.uint8, device=device)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        wanted = zip(ctx.like, ctx.needs_input_grad[2:], strict=True)
        return (
            None,
            None,
            *(
                torch.empty(shape, dtype=dtype, device=device) if need else None
                for (shape, dtype, device), need in wanted
            ),
        )


def is_floating(tensor: Tensor) -> bool:
    """Whether a tensor may have a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


def linked(results: Sequence[Tensor], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The results, through which every input gets a gradient: zeros where no path leads to it.

    Ranks reduce gradients together, and data-dependent code may read a parameter on some only.
    """
    trained = [tensor for tensor in tensors if tensor.requires_grad]
    if not trained or not any(result.requires_grad for result in results):
        return tuple(results)
    reached = reached_by_gradients(results, trained)
    missed = [tensor for tensor, is_reached in zip(trained, reached, strict=True) if not is_reached]
    if not missed:
        return tuple(results)
    joined: tuple[Tensor, ...] = _Linked.apply(len(results), *results, *missed)  # type: ignore[no-untyped-call]
    return joined


def reached_by_gradients(results: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[bool]:
    """For each of `tensors`, which require gradients, whether one of `results` depends on it."""
    edges = [get_gradient_edge(tensor) for tensor in tensors]
    reached = _reached(results, {edge.node for edge in edges})
    return [(edge.node, edge.output_nr) in reached for edge in edges]


def _reached(results: Sequence[Tensor], ends: set[Any]) -> set[tuple[Any, int]]:
    """The edges of the autograd graph that lead to the nodes `ends`."""
    edges = map(get_gradient_edge, filter(requires_grad, results))
    waiting: list[tuple[Any, int]] = [(edge.node, edge.output_nr) for edge in edges]
    reached = set(waiting)
    seen: set[Any] = set()
    while waiting:
        node, _ = waiting.pop()
        # What lies behind an input is of another part of the model.
        if node in seen or node in ends:
            continue
        seen.add(node)
        further = [(n, number) for n, number in node.next_functions if n is not None]
        reached.update(further)
        waiting.extend(further)
    return reached


class _Linked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        results, missed = tensors[:count], tensors[count:]
        ctx.missed = [(t.shape, t.dtype, t.device) for t in missed]
        ctx.set_materialize_grads(False)
        # Views, since autograd treats inputs that are returned as they are specially.
        views = tuple(result.view_as(result) for result in results)
        ctx.mark_non_differentiable(
            *(v for v, r in zip(views, results, strict=True) if not r.requires_grad)
        )
        return views

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        zeros = (torch.zeros(s, dtype=dtype, device=device) for s, dtype, device in ctx.missed)
        return None, *gradients, *zeros


RunLocally = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def on_each_rank(run: RunLocally, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The results of simulated ranks, each of which runs by itself: the code may depend on values,
    which differ between ranks."""
    results: tuple[Tensor, ...] = _OnEachRank.apply(run, *tensors)  # type: ignore[no-untyped-call]
    return results


class _OnEachRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: RunLocally, *tensors: Tensor) -> tuple[Tensor, ...]:
        local = [by_rank(tensor) for tensor in tensors]
        ranks = sorted(next(shards for shards in local if shards is not None))
        ctx.runs = {}
        saved: set[int] = set()
        for rank in ranks:
            with on_simulated_rank(rank), torch.enable_grad():
                inputs = [
                    (whole if shards is None else shards[rank]).detach()
                    for whole, shards in zip(tensors, local, strict=True)
                ]
                for tensor, need in zip(inputs, ctx.needs_input_grad[1:], strict=True):
                    tensor.requires_grad_(need)
                with noting_saved(inputs, saved):
                    ctx.runs[rank] = inputs, linked(run(inputs), inputs)
        # So that parameters which the backward pass needs are gathered again, as on real ranks.
        ctx.save_for_backward(*(t if n in saved else None for n, t in enumerate(tensors)))
        first = ctx.runs[ranks[0]][1]
        results = tuple(
            of_ranks({rank: ctx.runs[rank][1][number].detach() for rank in ranks})
            for number in range(len(first))
        )
        ctx.mark_non_differentiable(
            *(r for r, one in zip(results, first, strict=True) if not one.requires_grad)
        )
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        local, _ = [by_rank(gradient) for gradient in gradients], ctx.saved_tensors
        found: dict[int, list[Tensor | None]] = {}
        for rank, (inputs, results) in ctx.runs.items():
            with on_simulated_rank(rank):
                pairs = [
                    (result, gradient if shards is None else shards[rank])
                    for result, gradient, shards in zip(results, gradients, local, strict=True)
                    if result.requires_grad
                ]
                trained = [tensor for tensor in inputs if tensor.requires_grad]
                ends, starts = [r for r, _ in pairs], [g for _, g in pairs]
                some = torch.autograd.grad(ends, trained, starts, retain_graph=True)
                left = iter(some)
                found[rank] = [next(left) if t.requires_grad else None for t in inputs]
        count = len(ctx.needs_input_grad) - 1
        return None, *(_joined(found, number) for number in range(count))


def noting_saved(inputs: Sequence[Tensor], saved: set[int]) -> AbstractContextManager[object]:
    """A context in which the numbers of those inputs go into `saved` that autograd saves."""
    numbers = {storage_id(tensor): number for number, tensor in enumerate(inputs)}

    def pack(tensor: Tensor) -> Tensor:
        if (number := numbers.get(storage_id(tensor))) is not None:
            saved.add(number)
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


def _joined(found: dict[int, list[Tensor | None]], number: int) -> Tensor | None:
    of_rank = {rank: tensor for rank, g in found.items() if (tensor := g[number]) is not None}
    return of_ranks(of_rank) if of_rank else None
