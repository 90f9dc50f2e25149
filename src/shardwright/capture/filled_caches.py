"""Caches of the user's that a trace has filled, as `functools.lru_cache` of a table of positions.

What a trace puts there has no values. Where it depends on no input or parameter it gets them, so
that the model itself, and later captures, can go on with it.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from types import CellType
from typing import Any

from torch import Tensor


def fill(kept: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Puts tensors with values in the place of those without, wherever Python objects hold them.

    Args:
        kept: tensors that are alive though their trace is over, each with the one with its values.
    """
    if not kept:
        return
    values = {id(tensor): value for tensor, value in kept}
    own = {id(kept), *map(id, kept)}
    for holder in gc.get_referrers(*(tensor for tensor, _ in kept)):
        if id(holder) in own:
            continue
        if hasattr(holder, "cache_clear"):
            holder.cache_clear()
        elif isinstance(holder, dict):
            _fill_dict(holder, values)
        elif isinstance(holder, list):
            holder[:] = [values.get(id(x), x) for x in holder]
        elif isinstance(holder, CellType) and id(holder.cell_contents) in values:
            holder.cell_contents = values[id(holder.cell_contents)]


def _fill_dict(holder: dict[Any, Any], values: Mapping[int, Tensor]) -> None:
    found = {key: values[id(x)] for key, x in holder.items() if id(x) in values}
    kinds = (kind for kind in gc.get_referrers(holder) if found and isinstance(kind, type))
    of_class = [k for k in kinds if all(vars(k).get(name) is holder[name] for name in found)]
    for key, value in found.items():
        if of_class:
            # Attributes of a class are looked up in a cache of Python's own, too.
            setattr(of_class[0], key, value)
        else:
            holder[key] = value
