"""Randomly drawn experts of a trace, and the conditions of Python branches that depend on them.

    if not (ids == i).any():
        continue

Capture recomputes the condition for other draws. Its value may change only if one particular expert
has no tokens. A branch that skips an expert without tokens is accepted; a branch on the tokens of
several experts, or on their order, is not.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import compress
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwright.core.capture.known_values import RecordedCall, UnknownValueError
from shardwright.core.capture.naming import current_line
from shardwright.core.torch_internals import pytree

Preference = Callable[[int, int, int], Tensor]
"""Function of (tokens, experts, experts per token) that returns expert indices in the order in
which each token prefers them, `[tokens, experts]`."""

MOST_SCORES = 1 << 24
"""Maximum number of drawn scores; `topk` over a vocabulary has more, and is not drawn."""


def balance_experts(tokens: int, experts: int, top_k: int) -> Tensor:
    """Prefer consecutive experts, so that all experts have equal numbers of tokens.

    Raises:
        ValueError: if there are fewer choices than experts.
    """
    if tokens * top_k < experts:
        raise ValueError(f"too few tokens ({tokens}) for {experts} experts")
    first = torch.arange(tokens).unsqueeze(1) * top_k
    return (first + torch.arange(experts)) % experts


def skew_experts(tokens: int, experts: int, top_k: int) -> Tensor:
    """Give one token to each expert of the first half, and all other tokens to the second half.

    Raises:
        ValueError: if there are too few tokens for all experts.
    """
    if tokens * top_k < experts:
        raise ValueError(f"too few tokens ({tokens}) for {experts} experts")
    second = max(top_k, experts - experts // 2)
    first = experts - second
    order = torch.cat(
        [balance_experts(tokens, second, top_k) + first, torch.arange(first).expand(tokens, first)],
        1,
    )
    # The first tokens choose as many experts of the first half as they can, so that the others
    # are enough for the second half.
    for token, start in zip(range(tokens), range(0, first, top_k), strict=False):
        chosen = torch.arange(start, min(start + top_k, first))
        row = order[token]
        order[token] = torch.cat([chosen, row[~torch.isin(row, chosen)]])
    if len(set(order[:, :top_k].flatten().tolist())) < experts:
        raise ValueError(f"too few tokens ({tokens}) for {experts} experts")
    return order


def prefer_first_experts(tokens: int, experts: int, top_k: int) -> Tensor:
    """Give all tokens to the first experts."""
    return torch.arange(experts).expand(tokens, experts)


def prefer_last_experts(tokens: int, experts: int, top_k: int) -> Tensor:
    """Give all tokens to the last experts."""
    return prefer_first_experts(tokens, experts, top_k).flip(1)


def draw_scores(
    preference: Preference, sizes: Sequence[int], dim: int, top_k: int, ascending: bool
) -> Tensor:
    """Return scores by which tokens choose the experts that they prefer.

    Args:
        preference: the order of experts of each token.
        sizes: shape of the scores.
        dim: dimension of the experts.
        top_k: number of experts that each token chooses.
        ascending: whether the smallest scores are chosen.

    Raises:
        ValueError: if the scores have more than `MOST_SCORES` elements.
    """
    if not 0 < prod(sizes) <= MOST_SCORES:
        raise ValueError(f"cannot draw scores of shape {tuple(sizes)}")
    leading = [size for index, size in enumerate(sizes) if index != dim % len(sizes)]
    order = preference(prod(leading), sizes[dim], top_k)
    ranks = order.argsort(1).view(*leading, sizes[dim]).movedim(-1, dim).double()
    return ranks if ascending else -ranks


def prefer_expert(expert: int, tokens: int, experts: int, top_k: int) -> Tensor:
    """Prefer `expert`, then the experts that follow it, for all tokens."""
    return ((torch.arange(experts) + expert) % experts).expand(tokens, experts)


def shuffle_experts(seed: int, tokens: int, experts: int, top_k: int) -> Tensor:
    """Prefer experts in random order; for odd seeds, experts of the second half first."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=generator)
    if seed % 2:
        scores[:, experts // 2 :] += 1
    return scores.argsort(1)


def count_tokens(count: int, tokens: int, experts: int, top_k: int) -> Tensor:
    """Give `count` tokens to the first expert."""
    order = torch.arange(experts).repeat(tokens, 1)
    order[count:] = order[count:].roll(-1, 1)
    return order


@dataclass(frozen=True)
class Condition:
    """A condition of a Python branch that depends on the experts of tokens.

    Args:
        call: computes the condition; None for arithmetic on drawn numbers, whose later comparisons
            are not recorded.
        line: the user's line that reads the condition.
    """

    call: RecordedCall | None
    line: str


class DrawnNumber(int):
    """A Python integer computed from drawn experts, which records its comparisons.

    Args:
        value: the number for the drawn experts.
        call: computes the number.
        conditions: list to which each comparison is added.
    """

    def __new__(cls, value: int, call: RecordedCall, conditions: list[Condition]) -> DrawnNumber:
        return super().__new__(cls, value)

    def __init__(self, value: int, call: RecordedCall, conditions: list[Condition]) -> None:
        self._call, self._conditions = call, conditions

    def _record_comparison(self, compare: Callable[..., Any], *others: Any) -> Any:
        if not all(isinstance(other, (int, float)) for other in others):
            return NotImplemented
        calls = [each._call if isinstance(each, DrawnNumber) else each for each in others]
        call = RecordedCall(compare, ((self._call, *calls), {}))
        self._conditions.append(Condition(call, current_line()))
        plain = (int.__int__(o) if isinstance(o, DrawnNumber) else o for o in others)
        return compare(int.__int__(self), *plain)

    def __bool__(self) -> bool:
        return bool(self._record_comparison(bool))

    def __eq__(self, other: object) -> Any:
        return self._record_comparison(operator.eq, other)

    def __ne__(self, other: object) -> Any:
        return self._record_comparison(operator.ne, other)

    def __lt__(self, other: Any) -> Any:
        return self._record_comparison(operator.lt, other)

    def __le__(self, other: Any) -> Any:
        return self._record_comparison(operator.le, other)

    def __gt__(self, other: Any) -> Any:
        return self._record_comparison(operator.gt, other)

    def __ge__(self, other: Any) -> Any:
        return self._record_comparison(operator.ge, other)

    __hash__ = int.__hash__


_ARITHMETIC = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv"),
    *("mod", "rmod", "divmod", "rdivmod", "pow", "rpow", "and", "rand", "or", "ror", "xor", "rxor"),
    *("lshift", "rlshift", "rshift", "rrshift", "neg", "pos", "abs", "invert", "int", "float"),
)


def _record_arithmetic(name: str) -> Callable[..., Any]:
    method = getattr(int, name)

    def compute(self: DrawnNumber, *others: Any) -> Any:
        self._conditions.append(Condition(None, current_line()))
        return method(self, *others)

    return compute


for _name in _ARITHMETIC:
    setattr(DrawnNumber, f"__{_name}__", _record_arithmetic(f"__{_name}__"))


MOST_EXPERTS = 512
"""Maximum number of experts of a supported branch: each expert needs a draw of its own."""


def find_other_condition(conditions: Sequence[Condition]) -> Condition | None:
    """Return the first condition on more than whether one expert has tokens, or None."""
    by_choice: dict[int, tuple[RecordedCall, list[Condition]]] = {}
    for condition in conditions:
        calls = [] if condition.call is None else _list_expert_choices(condition.call)
        choices = {id(choice): choice for choice in calls}
        if len(choices) != 1:
            return condition
        ((key, choice),) = choices.items()
        by_choice.setdefault(key, (choice, []))[1].append(condition)
    draws: dict[Any, Tensor] = {}
    others = (_find_unsupported_condition(*group, draws) for group in by_choice.values())
    return next((condition for condition in others if condition is not None), None)


def _find_unsupported_condition(
    choice: RecordedCall, conditions: Sequence[Condition], draws: dict[Any, Tensor]
) -> Condition | None:
    """Return the first condition that depends on more than whether one expert has tokens, or None.

    Args:
        choice: call, such as `topk`, that chooses experts by drawn scores.
        conditions: conditions that depend on `choice`.
        draws: cache of drawn scores, by the arguments of `draw_scores`.
    """
    _, sizes, dim, *_ = _get_drawn_scores(choice).arguments[0]
    experts = sizes[dim]
    if experts > MOST_EXPERTS:
        return conditions[0]
    values, missing = [], []
    for preference in _list_preferences(prod(sizes) // experts, experts):
        trial = _RoutingTrial(preference, draws)
        try:
            values.append([bool(trial.compute(each.call)) for each in conditions if each.call])
            ids = trial.compute(choice).flatten()
        except UnknownValueError:
            return conditions[0]
        missing.append(torch.bincount(ids, minlength=experts) == 0)
    # `[draws, conditions]`; the first draw gives tokens to all experts.
    differs = torch.tensor(values) != torch.tensor(values[0])
    skips = (torch.stack(missing)[:, None] == differs[:, :, None]).all(0).any(1)
    is_other = ~skips & differs.any(0)
    return next(compress(conditions, is_other.tolist()), None)


@cache
def _list_preferences(tokens: int, experts: int) -> Sequence[Preference]:
    counts = {
        *range(min(tokens, 32)),
        *(1 << power for power in range(tokens.bit_length())),
        tokens,
    }
    return (
        *(skew_experts, balance_experts),
        *(partial(prefer_expert, expert) for expert in range(experts)),
        *(partial(shuffle_experts, seed) for seed in range(8)),
        # A branch may compare the number of an expert's tokens with any number.
        *(partial(count_tokens, count) for count in sorted(counts)),
    )


def _list_expert_choices(call: RecordedCall) -> Iterator[RecordedCall]:
    """Yield the calls, such as `topk`, that choose experts by drawn scores and on which `call`
    depends."""
    pending, seen = [call], {id(call)}
    while pending:
        each = pending.pop()
        inputs = [x for x in pytree.tree_leaves(each.arguments) if isinstance(x, RecordedCall)]
        if any(x.function is draw_scores for x in inputs):
            yield each
            continue
        pending += [x for x in inputs if x.is_drawn and id(x) not in seen]
        seen.update(map(id, inputs))


def _get_drawn_scores(choice: RecordedCall) -> RecordedCall:
    leaves = pytree.tree_leaves(choice.arguments)
    calls = (leaf for leaf in leaves if isinstance(leaf, RecordedCall))
    return next(call for call in calls if call.function is draw_scores)


class _RoutingTrial:
    """Values of recorded calls for another routing of tokens than that of the trace.

    Args:
        preference: the order in which each token prefers experts.
        draws: cache of drawn scores, by the arguments of `draw_scores`.
    """

    def __init__(self, preference: Preference, draws: dict[Any, Tensor]) -> None:
        self._preference, self._draws = preference, draws
        self._values: dict[int, Any] = {}

    def compute(self, call: RecordedCall) -> Any:
        """Return the value of a call.

        Raises:
            UnknownValueError: if it cannot be computed.
        """
        if not call.is_drawn:
            return call.value
        if id(call) not in self._values:
            self._values[id(call)] = self._compute_call(call)
        return self._values[id(call)]

    def _compute_call(self, call: RecordedCall) -> Any:
        if call.function is draw_scores:
            arguments = (self._preference, *call.arguments[0][1:])
            if arguments not in self._draws:
                self._draws[arguments] = call.run(arguments, {})
            return self._draws[arguments]
        args, kwargs = pytree.tree_map_only(RecordedCall, self.compute, call.arguments)
        return call.select(call.run(args, kwargs))
