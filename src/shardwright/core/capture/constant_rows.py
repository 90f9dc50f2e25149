"""Evaluate the indices and row counts of experts in a traced graph.

Models count the rows of each expert in many ways: `bincount`, `histc`, a sum of one-hot vectors or
of comparisons. To detect a tensor with the end positions of the experts' rows, capture therefore
runs the operators that compute the tensor on random expert indices.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from shardwright.core.capture.expert_conditions import Preference, draw_scores
from shardwright.core.capture.fx_nodes import is_tensor, node_arguments, node_shape, tensor
from shardwright.core.torch_internals import pytree

aten = torch.ops.aten

MOST_ELEMENTS = 1 << 28
"""Maximum number of elements of a tensor that is computed from random expert indices; the largest
is usually a one-hot vector for each row."""

_CREATIONS = (
    *(aten.zeros.default, aten.ones.default, aten.full.default, aten.arange.default),
    *(aten.arange.start, aten.arange.start_step),
)
_LIKE = (
    *(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default),
    *(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default),
)
"""Operators that read only the shape and dtype of their input."""

_CHOICES = (
    *(aten.topk.default, aten.max.dim, aten.min.dim, aten.sort.default),
    *(aten.argmax.default, aten.argmin.default, aten.argsort.default),
)
"""Operators that choose experts by the largest or smallest scores, and return expert indices."""

_ASCENDING = (aten.min.dim, aten.argmin.default)
"""Operators of `_CHOICES` that always choose the smallest score."""

_CHOICE_VIEWS = (
    *(aten.reshape.default, aten.select.int, aten.slice.Tensor, aten.permute.default),
    *(aten.to.dtype, aten.unsqueeze.default, aten.squeeze.dim, aten.flatten.using_ints),
    *(aten.view.default, aten.clone.default, aten.detach.default, aten.transpose.int),
)
"""Operators that reshape, select or cast expert indices without changing them."""


def row_numbers(node: fx.Node) -> Tensor | None:
    """Return the value of a vector that the graph computes from constants alone; None for other
    tensors."""
    return compute_constant(node) if len(node_shape(node)) == 1 else None


def compute_constant(node: fx.Node) -> Tensor | None:
    """Return the value of a tensor that the graph computes from constants alone; None for other
    tensors."""
    try:
        value: Tensor = _Subgraph([node], set()).run({}, _raise_unknown_value)[0]
    except _UnknownNumbersError:
        return None
    return value


def repeats_of_rows(numbers: Tensor | None, count: int) -> int | None:
    """Return r if the row numbers are r times 0, r times 1, …, r times `count - 1`, else None."""
    if numbers is None or not count or len(numbers) % count:
        return None
    repeats = len(numbers) // count
    expected = torch.arange(count).repeat_interleave(repeats)
    return repeats if torch.equal(numbers.to(torch.int64), expected) else None


class MaskTrials:
    """Values of expert masks, computed from random expert indices.

    Args:
        root: node of the expert indices, `[tokens, top_k]` or `[tokens]`.
        masks: masks that are computed from `root`.
    """

    def __init__(self, root: fx.Node, masks: Sequence[fx.Node]) -> None:
        self.draws: list[tuple[Tensor, list[Tensor]]] = []
        """Expert indices and values of the masks for each draw; empty if a mask cannot be
        computed."""
        generator = torch.Generator().manual_seed(0)
        formula = _Subgraph(masks, {root})
        num_choices = find_num_choices(root)
        num_experts = num_choices or len(masks)
        for drawn in _draw_expert_ids(root, num_experts, generator):
            try:
                values = formula.run({root: drawn}, _raise_unknown_value)
            except (_UnknownNumbersError, RuntimeError, IndexError):
                self.draws.clear()
                return
            self.draws.append((drawn, values))
        if num_choices is None:
            self._draw_arbitrary_integers(root, formula, num_experts, generator)

    def _draw_arbitrary_integers(
        self, root: fx.Node, formula: _Subgraph, experts: int, generator: torch.Generator
    ) -> None:
        """Add draws of arbitrary integers, since `root` may contain other numbers than expert
        indices."""
        for low in (0, -2 * experts):
            drawn = torch.randint(low, 3 * experts, node_shape(root), generator=generator)
            drawn = drawn.to(tensor(root).dtype)
            # An operator such as `one_hot` fails for values that the model then never has.
            with suppress(RuntimeError, IndexError):
                self.draws.append((drawn, formula.run({root: drawn}, _raise_unknown_value)))


def find_num_choices(root: fx.Node) -> int | None:
    """Return the number of experts if `root` has expert indices chosen by scores, else None."""
    choice = find_choice(root)
    if choice is None:
        return None
    arguments = node_arguments(choice)
    sizes, dim = node_shape(arguments["self"]), arguments.get("dim")
    return sizes[dim] if isinstance(dim, int) and sizes else None


def find_choice(root: fx.Node) -> fx.Node | None:
    """Return the operator, such as `topk`, that chose the expert indices `root` by scores; None for
    other integers."""
    while root.target in _CHOICE_VIEWS:
        root = root.args[0]  # type: ignore[assignment]
    source = root
    if root.target is operator.getitem:
        source = root.args[0]  # type: ignore[assignment]
        if root.args[1] != 1:
            return None
    return source if source.target in _CHOICES else None


def compute_for_preference(node: fx.Node, preference: Preference) -> Tensor | None:
    """Compute the value of a node for tokens routed by a given preference.

    Args:
        node: node that is computed from expert indices and constants.
        preference: the order in which each token prefers experts.

    Returns:
        The value; None if it cannot be computed.
    """
    root = find_first_integers(node)
    choice = find_choice(root)
    if choice is None or find_num_choices(root) is None:
        return None
    arguments = node_arguments(choice)
    scores = arguments["self"]
    ascending = choice.target in _ASCENDING or not arguments.get("largest", True)
    ascending = not arguments.get("descending", not ascending)
    drawn = draw_scores(
        preference, node_shape(scores), arguments["dim"], arguments.get("k", 1), ascending
    )
    try:
        value: Tensor = _Subgraph([node], {scores}).run({scores: drawn}, _raise_unknown_value)[0]
    except (_UnknownNumbersError, RuntimeError, IndexError):
        return None
    return value


def _raise_unknown_value(_: fx.Node) -> Tensor:
    raise _UnknownNumbersError


class ExpertEnds:
    """Detector of tensors with the end position of each expert's rows after a sort by expert.

    Equal operators, such as those of the layers of a model, are tried once.
    """

    def __init__(self) -> None:
        self._matches: dict[str, bool] = {}

    def match(self, ends: fx.Node, positions: fx.Node, keys: fx.Node, experts: int) -> bool:
        """Whether a sort arranges rows by expert and `ends` are the end positions of each expert.

        Args:
            ends: presumed end positions, `[experts]`.
            positions: position before the sort of each sorted row, `[rows]`.
            keys: expert index of each row before the sort, `[rows]`.
            experts: number of experts.
        """
        if node_shape(ends) != (experts,):
            return False
        root = find_first_integers(keys)
        formula = _Subgraph((ends, positions, keys), {root})
        description = f"{formula.describe()}, {experts} of {is_topk(root)}"
        if description not in self._matches:
            self._matches[description] = _are_expert_ends_in_trials(formula, root, experts)
        return self._matches[description]


def find_first_integers(keys: fx.Node) -> fx.Node:
    """Return the first integer tensor from which a chain of operators computes `keys`.

    A model may count the rows of an expert from another view of this tensor.
    """
    return list_integers(keys)[0]


def list_integers(keys: fx.Node) -> list[fx.Node]:
    """Return the chain of integer and boolean tensors that computes `keys`, with `keys` last."""
    chain = [keys]
    while True:
        # The number of an expert may be a constant tensor: `ids == torch.full((), 3)`.
        inputs = [each for each in chain[-1].all_input_nodes if each.target not in _CREATIONS]
        if len(inputs) != 1 or not is_tensor(inputs[0]) or tensor(inputs[0]).is_floating_point():
            return chain[::-1]
        chain += inputs


def _are_expert_ends_in_trials(formula: _Subgraph, root: fx.Node, experts: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    for drawn in _draw_expert_ids(root, experts, generator):
        try:
            row_ends, order, expert_ids = formula.run(
                {root: drawn}, lambda node: _draw_random_values(node, generator)
            )
        except (_UnknownNumbersError, RuntimeError, IndexError):
            # An operator that fails for values that the model never has.
            return False
        counts = expert_ids.to(torch.int64).bincount(minlength=experts)
        is_sorted = bool((expert_ids[order].diff() >= 0).all())
        if not is_sorted or not torch.equal(row_ends.to(torch.int64), counts.cumsum(0)):
            return False
    return True


class _UnknownNumbersError(Exception):
    """Raised for a node that is computed from tensors of unknown value."""


class _Subgraph:
    """Operators that compute nodes of a graph from constants and from the nodes `roots`.

    Args:
        nodes: nodes of one graph.
        roots: nodes whose values are given.
    """

    def __init__(self, nodes: Sequence[fx.Node], roots: Set[fx.Node]) -> None:
        self.nodes, self.roots = nodes, roots
        ancestors = _sorted_ancestors(nodes, roots)
        self.computable = set(roots)
        for node in ancestors:
            computable = not self.computable.isdisjoint(node.all_input_nodes)
            if node.op == "call_function" and (computable or node.target in (*_CREATIONS, *_LIKE)):
                self.computable.add(node)
        read = set(nodes)
        for node in reversed(ancestors):
            if node in read and self._is_computed(node):
                read.update(_list_read_nodes(node))
        self.steps = [node for node in ancestors if node in read]

    def _is_computed(self, node: fx.Node) -> bool:
        return node in self.computable and node not in self.roots

    def describe(self) -> str:
        """Return a key that is equal for equal operators on tensors of equal shapes."""
        numbers = {node: index for index, node in enumerate(self.steps)}
        lines = []
        for node in self.steps:
            target, arguments = "", ""
            if self._is_computed(node):
                numbered = fx.map_arg((node.args, node.kwargs), lambda n: f"%{numbers.get(n)}")
                target, arguments = str(node.target), str(numbered)
            results = [(x.shape, x.dtype) for x in pytree.tree_leaves(node.meta["val"])]
            lines.append(f"{target}{arguments}{results}")
        return f"{lines} {[numbers[node] for node in self.nodes]}"

    def run(
        self, values: dict[fx.Node, Any], draw_unknown: Callable[[fx.Node], Tensor]
    ) -> list[Any]:
        """Run the operators, and return the values of `nodes`.

        Args:
            values: values of the roots.
            draw_unknown: returns a value for a node that depends on neither roots nor constants, or
                raises an error.
        """
        for node in self.steps:
            if self._is_computed(node):
                values[node] = _run_operator(node, values)
            elif node not in values:
                values[node] = draw_unknown(node)
        return [values[node] for node in self.nodes]


def _list_read_nodes(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose values an operator reads."""
    return [] if node.target in _LIKE else node.all_input_nodes


def _sorted_ancestors(nodes: Sequence[fx.Node], roots: Set[fx.Node]) -> list[fx.Node]:
    """Return `nodes` and their ancestors in topological order, up to and including `roots`."""
    ancestors: dict[fx.Node, None] = {}
    pending = list(nodes)
    while pending:
        node = pending[-1]
        missing = [] if node in roots else [n for n in _list_read_nodes(node) if n not in ancestors]
        if missing:
            pending += missing
        else:
            ancestors.setdefault(pending.pop())
    return list(ancestors)


def _run_operator(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    results = [x for x in pytree.tree_leaves(node.meta["val"]) if isinstance(x, Tensor)]
    is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    if is_random or any(prod(x.shape) > MOST_ELEMENTS for x in results):
        raise _UnknownNumbersError

    def value(each: fx.Node) -> Any:
        if node.target in _LIKE:
            return torch.empty(node_shape(each), dtype=tensor(each).dtype)
        return values[each]

    args, kwargs = fx.map_arg((node.args, node.kwargs), value)
    target: Any = node.target
    with torch.no_grad():
        return target(*args, **kwargs)


def is_topk(root: fx.Node) -> bool:
    """Whether `root` is the index output of `topk`, whose indices differ within a row."""
    source = root.args[0] if root.target is operator.getitem else None
    is_result = isinstance(source, fx.Node) and source.target is aten.topk.default
    return is_result and bool(root.args[1] == 1)


def _draw_expert_ids(root: fx.Node, experts: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield expert indices with the shape of `root`: random, all of the first, all of the last.

    The unbalanced draws reveal a capacity limit. The experts of a token differ if `root` is from
    `topk`.
    """
    sizes, dtype = node_shape(root), tensor(root).dtype
    if is_topk(root):
        scores = torch.rand(*sizes[:-1], experts, generator=generator)
        yield scores.topk(sizes[-1], dim=-1).indices.to(dtype)
        first = torch.arange(sizes[-1], dtype=dtype).expand(sizes)
        yield from (first, experts - 1 - first)
    else:
        yield torch.randint(experts, sizes, generator=generator).to(dtype)
        yield from (torch.full(sizes, expert, dtype=dtype) for expert in (0, experts - 1))


def _draw_random_values(node: fx.Node, generator: torch.Generator) -> Tensor:
    like = tensor(node)
    if like.dtype.is_floating_point:
        return torch.rand(like.shape, dtype=like.dtype, generator=generator)
    return torch.randint(2, like.shape, generator=generator).to(like.dtype)
