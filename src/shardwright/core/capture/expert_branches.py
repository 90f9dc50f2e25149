"""Python branches on the tokens of an expert, such as `if len(rows) == 0: continue`.

A branch may skip operators on selected rows if their mask selects none: a program without the
branch computes the same result. Capture traces the call with four draws of experts:

1. one token for each expert of the first half, all others for the second half;
2. equal numbers of tokens for all experts;
3. all tokens for the first experts, and none for the others;
4. all tokens for the last experts, and none for the others.

The first trace is the captured program if the second is equal, and the third and fourth lack only
writes of rows whose masks are empty in their draws. A program that depends on the number of tokens
in another way, such as a capacity or a mean, differs in one of these traces.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Set
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
from shardwright.core.capture.signature import Signature, results
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
    # The rows of a skipped expert are found before the branch, and are not read.
    remove_dead(first.graph)
    for preference in (balance_experts, prefer_first_experts, prefer_last_experts):
        other = canonical_trace(trace(preference), call)
        remove_dead(other.graph)
        numbers: dict[str, int] = {}
        values = _ValueNumbering(other, numbers)
        expected = values.list_results()
        masks = {values.numbers[region.mask] for region in _list_expert_regions(other.graph)}
        skips = _SkippedWrites(first.graph, masks, preference)
        is_equal = _ValueNumbering(first, numbers, skips.find_base).list_results() == expected
        if not is_equal or (first.trace.filled, first.trace.signature.out_spec) != (
            other.trace.filled,
            other.trace.signature.out_spec,
        ):
            line = next(map(line_of, skips.regions_of_ends), NO_LINE)
            raise CaptureError(
                f"{line}: a branch on the tokens of an expert changes more than the rows of these "
                "tokens\nskip only what writes these rows, or adds them to the result"
            )
    return first


class _SkippedWrites:
    """Writes of expert rows that a trace with another draw of experts skips.

    Args:
        graph: graph of a trace in which all experts have tokens.
        masks: value numbers (`_ValueNumbering`) of the masks of the other trace.
        preference: the draw of experts of the other trace.
    """

    def __init__(self, graph: fx.Graph, masks: Set[int], preference: Preference) -> None:
        self._masks, self._preference = masks, preference
        regions = _list_expert_regions(graph)
        self.regions_of_ends = {end: region for region in regions for end in region.ends}

    def find_base(self, node: fx.Node, numbers: Mapping[fx.Node, int]) -> fx.Node | None:
        """Return the tensor that a skipped write would change; None for other nodes.

        Raises:
            CaptureError: if the write was skipped although its mask selects rows.
        """
        region = self.regions_of_ends.get(node)
        if region is None or numbers[region.mask] in self._masks:
            return None
        if not _selects_no_rows(region.mask, self._preference):
            raise CaptureError(
                f"{line_of(region.nodes[0])}: a branch skips these rows of an expert that may have "
                "tokens\nskip only experts without tokens"
            )
        return get_base(node)


def _list_expert_regions(graph: fx.Graph) -> list[ExpertRegion]:
    return [region for loop in find_loops(graph, EqualNodes(graph)) for region in loop]


def _selects_no_rows(mask: fx.Node, preference: Preference) -> bool:
    """Whether a mask is False everywhere for a draw of experts."""
    value = compute_for_preference(mask, preference)
    return value is not None and not bool(value.any())


class _ValueNumbering:
    """Value numbers of the nodes of a graph: equal operators on equal values have equal numbers.

    Args:
        trace: the graph and its placeholders.
        numbers_of_formulas: value number by formula, which is an operator with the value numbers of
            its arguments; shared by the graphs to compare.
        find_equal: returns an earlier node with the value of a given node, or None.

    Attributes:
        numbers: value number of each node.
    """

    def __init__(
        self,
        trace: CanonicalTrace,
        numbers_of_formulas: dict[str, int],
        find_equal: Callable[[fx.Node, Mapping[fx.Node, int]], fx.Node | None] = lambda *_: None,
    ) -> None:
        self._graph, self._inputs = trace.graph, _describe_inputs(trace.trace.signature)
        self.numbers: dict[fx.Node, int] = {}
        draws: dict[str, int] = {}
        for node in self._graph.nodes:
            equal = find_equal(node, self.numbers)
            if equal is not None:
                self.numbers[node] = self.numbers[equal]
            elif node.op != "output":
                formula = self._format_formula(node)
                if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                    # Each draw gives other numbers.
                    draws[formula] = draws.get(formula, 0) + 1
                    formula += f" draw {draws[formula]}"
                self.numbers[node] = numbers_of_formulas.setdefault(
                    formula, len(numbers_of_formulas)
                )

    def list_results(self) -> tuple[str, str]:
        """Return the value numbers of the graph's results and of its buffer updates."""
        returned, updates = results(self._graph)
        updated = {self._inputs[name]: self.numbers[node] for name, node in updates.items()}
        return self._format_arguments(returned), str(sorted(updated.items()))

    def _format_formula(self, node: fx.Node) -> str:
        if node.op == "placeholder":
            return self._inputs[node.name]
        is_detached = bool(node.meta.get("no_grad"))
        return f"{node.target} {self._format_arguments((node.args, node.kwargs))} {is_detached}"

    def _format_arguments(self, arguments: Any) -> str:
        return str(fx.map_arg(arguments, lambda node: f"%{self.numbers[node]}"))


def _describe_inputs(signature: Signature) -> dict[str, str]:
    """Return a description of each placeholder, by name, that is equal in all traces of a call."""
    inputs: dict[str, str] = {}
    for named in (signature.parameters, signature.buffers):
        for name, placeholder in named.items():
            inputs.setdefault(placeholder, f"state {name}")
    for index, placeholder in enumerate(signature.inputs):
        inputs[placeholder] = f"input {index}"
    for placeholder, constant in signature.constants.items():
        inputs[placeholder] = f"constant {_hash_constant(constant)}"
    return inputs


def _hash_constant(constant: Tensor) -> str:
    data = constant.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{constant.dtype} {tuple(constant.shape)} {hashlib.sha256(data).hexdigest()}"
