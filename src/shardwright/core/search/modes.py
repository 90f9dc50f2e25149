"""Registry of the search modes, by value of the option `mode`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from shardwright.core.search.baselines import DataParallel, SemiAuto, StandAlone
from shardwright.core.search.by_time.exact import ExactSearch
from shardwright.core.search.propagation.propagation import ShardingPropagation
from shardwright.core.search.recursive_programming import RecursiveProgramming
from shardwright.core.search.request import SearchMode
from shardwright.errors import StrategyError

# The default first; errors list the names in this order.
_MODES: tuple[SearchMode, ...] = (
    RecursiveProgramming(),
    ExactSearch(),
    ShardingPropagation(),
    SemiAuto(),
    DataParallel(),
    StandAlone(),
)

MODES: Mapping[str, SearchMode] = MappingProxyType({mode.name: mode for mode in _MODES})


def check_takes_pins(mode: str, pinned: Mapping[str, object]) -> None:
    """Check that no operators are pinned in a mode that decides every operator itself.

    Args:
        pinned: the cuts of pinned operators, by name.

    Raises:
        StrategyError: if the mode does not support the pinned operators.
    """
    if pinned and not MODES[mode].takes_pins:
        names = ", ".join(list(pinned)[:5]) + (" …" if len(pinned) > 5 else "")
        valid = ", ".join(name for name, search_mode in MODES.items() if search_mode.takes_pins)
        raise StrategyError(
            f"mode={mode!r} decides every operator itself, but `shard` pins {names}\n"
            f"use one of the modes that support pinned operators: {valid}"
        )
