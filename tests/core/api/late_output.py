"""A class of results that `shared_plan_ranks.py` imports in `forward` only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


class LateOutput:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


def unflatten(children: Iterable[Any], _: object) -> LateOutput:
    return LateOutput(*children)


pytree.register_pytree_node(
    *(LateOutput, lambda output: ([output.hidden], None), unflatten),
    serialized_type_name="late output",
)
