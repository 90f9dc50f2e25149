"""Python branches on the tokens of an expert, such as `if len(rows) == 0: continue`.

A branch may skip operators on rows that a mask selects where the mask selects none: the program
without branches then computes the same. The call is traced with four draws of experts:

1. one token for each expert of the first half, all others for the second half;
2. equal numbers of tokens for all experts;
3. all tokens for the first experts, and none for the others;
4. all tokens for the last experts, and none for the others.

The first trace is the captured program if the second is equal, and if the third and the fourth lack
only writes of rows whose masks are empty in their draws. A program that depends on the number of
tokens in another way (a capacity, a mean) differs in one of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from shardwright.core.capture.build_graph import CapturedCall
from shardwright.core.capture.constant_rows import compute_for_preference
from shardwright.core.capture.equal_nodes import EqualNodes
from shardwright.core.capture.expert_conditions import (
    Preference,
    balance_experts,
    prefer_first_experts,
    prefer_last_experts,
    skew_experts,
)
from shardwright.core.capture.expert_loops import ExpertRegion, find_loops, get_base
from shardwright.core.capture.fx_nodes import remove_dead
from shardwright.core.capture.naming import NO_LINE, line_of
from shardwright.core.capture.signature import results
from shardwright.core.capture.trace import CanonicalTrace, Trace, canonical_trace
from shardwright.errors import CaptureError


def trace_branches(call: CapturedCall, trace: Callable[[Preference], Trace]) -> CanonicalTrace:
    """Return the trace of a call whose Python code branches on the tokens of experts.

    Args:
        call: the module and its arguments.
        trace: traces the call with drawn experts.

    Raises:
        CaptureError: if the program depends on the experts in another way, or cannot be traced.
    """
    first = canonical_trace(trace(skew_experts), call)
    remove_dead(first.graph)
    values = _Values(first)
    for preference in (balance_experts, prefer_first_experts, prefer_last_experts):
        other = canonical_trace(trace(preference), call)
        # The rows of a skipped expert are found before the branch.
        remove_dead(other.graph)
        other_values = values.of_other(other)
        skipped = _find_skipped(first, values, other, other_values, preference)
        if values.list_results(skipped) != other_values.list_results({}) or (
            (first.trace.filled, first.trace.signature.out_spec)
            != (other.trace.filled, other.trace.signature.out_spec)
        ):
            ends = (end for region in _list_regions(first.graph) for end in region.ends)
            line = next(map(line_of, ends), NO_LINE)
            raise CaptureError(
                f"{line}: a branch on the tokens of an expert changes more than the rows of these "
                "tokens\n"
                "skip only what writes these rows, or adds them to the result"
            )
    return first


def _find_skipped(
    first: CanonicalTrace,
    values: _Values,
    other: CanonicalTrace,
    other_values: _Values,
    preference: Preference,
) -> dict[fx.Node, fx.Node]:
    """Return the writes of rows that another trace skips, and the tensor to which each writes.

    Raises:
        CaptureError: if the mask of a skipped write selects rows in the other draw.
    """
    masks = {other_values.number(region.mask) for region in _list_regions(other.graph)}
    skipped: dict[fx.Node, fx.Node] = {}
    for region in _list_regions(first.graph):
        if values.number(region.mask) in masks:
            continue
        if not _is_empty(region.mask, preference):
            raise CaptureError(
                f"{line_of(region.nodes[0])}: a branch skips these rows though there may be some\n"
                "skip only experts without tokens"
            )
        skipped.update({end: get_base(end) for end in region.ends})
    return skipped


def _list_regions(graph: fx.Graph) -> list[ExpertRegion]:
    return [region for loop in find_loops(graph, EqualNodes(graph)) for region in loop]


def _is_empty(mask: fx.Node, preference: Preference) -> bool:
    """Whether a mask selects no row of the drawn experts."""
    value = compute_for_preference(mask, preference)
    return value is not None and not bool(value.any())


class _Values:
    """Numbers of the values of a graph, which are equal for equal operators on equal values.

    Args:
        trace: the graph and its placeholders.
        numbers: the number of each value, by its operator and the numbers of its arguments; shared
            by the graphs to compare.
    """

    def __init__(self, trace: CanonicalTrace, numbers: dict[str, int] | None = None) -> None:
        self._graph, self._numbers = trace.graph, {} if numbers is None else numbers
        signature = trace.trace.signature
        self._inputs: dict[str, str] = {}
        """Content of each placeholder, by its name."""
        for named in (signature.parameters, signature.buffers):
            for name, placeholder in named.items():
                self._inputs.setdefault(placeholder, f"state {name}")
        for index, placeholder in enumerate(signature.inputs):
            self._inputs[placeholder] = f"input {index}"
        for placeholder, constant in signature.constants.items():
            self._inputs[placeholder] = f"constant {_describe(constant)}"
        self._of_nodes = self._number_nodes({})

    def of_other(self, trace: CanonicalTrace) -> _Values:
        """Return the numbers of another graph."""
        return _Values(trace, self._numbers)

    def number(self, node: fx.Node) -> int:
        return self._of_nodes[node]

    def list_results(self, skipped: Mapping[fx.Node, fx.Node]) -> tuple[str, str]:
        """Return the numbers of the results and updates of a graph.

        Args:
            skipped: nodes that have the value of another node.
        """
        numbers = self._number_nodes(skipped) if skipped else self._of_nodes
        returned, updates = results(self._graph)
        updated = {self._inputs[name]: numbers[node] for name, node in updates.items()}
        return _format(returned, numbers), str(sorted(updated.items()))

    def _number_nodes(self, skipped: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, int]:
        numbers: dict[fx.Node, int] = {}
        draws: dict[str, int] = {}
        for node in self._graph.nodes:
            if node.op == "output":
                continue
            if node in skipped:
                numbers[node] = numbers[skipped[node]]
                continue
            formula = self._inputs.get(node.name, "") if node.op == "placeholder" else ""
            formula = formula or f"{node.target} {_format((node.args, node.kwargs), numbers)}"
            formula += f" {bool(node.meta.get('no_grad'))}"
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                draws[formula] = draws.get(formula, 0) + 1
                formula += f" draw {draws[formula]}"
            numbers[node] = self._numbers.setdefault(formula, len(self._numbers))
        return numbers


def _format(arguments: Any, numbers: Mapping[fx.Node, int]) -> str:
    return str(fx.map_arg(arguments, lambda node: f"%{numbers[node]}"))


def _describe(constant: Tensor) -> str:
    data = constant.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{constant.dtype} {tuple(constant.shape)} {hashlib.sha256(data).hexdigest()}"
