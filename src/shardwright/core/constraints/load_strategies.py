"""Pin the modules of a model to the strategies in a file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path

import torch
from torch import nn

from shardwright.core.capture.annotations import attach, module_tags
from shardwright.core.capture.naming import local_operator_name
from shardwright.core.constraints.pin import Pin
from shardwright.core.constraints.shard import validate_parameter_plan
from shardwright.core.constraints.strategy_file import FileEntry, parse_strategies
from shardwright.core.rules.rule import registered_rules
from shardwright.errors import StrategyError
from shardwright.text_files import read_text

_CALL_SUFFIX = re.compile(r"@\d+")
"""Pattern of the suffix, such as `@2`, in names of operators of the second and later calls of a
module."""


def load_strategies(net: nn.Module, path: str | Path) -> None:
    """Pin the operators of `net` that a strategy file lists.

    The file is written by `Plan.save_strategies`, or by hand. The path of a module names its
    main operator in every call; other operators have the names that plans show, `path.add_1`. An
    entry overrides an earlier `shard` of the same module; a later `shard` overrides the entry.

    Args:
        net: the model; its modules are pinned in place.
        path: the strategy file (JSON).

    Raises:
        StrategyError: if the file is missing or malformed, or names a module or parameter that
            `net` does not have. `plan` checks the strategies against shapes and devices.
        LayoutError: if a layout is invalid.
    """
    content = read_text(path, StrategyError)
    # With all names of a module that is registered several times.
    modules = dict(net.named_modules(remove_duplicate=False))
    entries: dict[str, dict[str, FileEntry]] = {}
    for name, entry in parse_strategies(content, str(path)).items():
        owner = _find_owner_path(name, modules)
        suffix = name.removeprefix(owner)
        if _parse_aten_names(suffix) is None:
            raise StrategyError(f"{path}: {_format_unknown_name(name, modules)}")
        if suffix and entry.parameters:
            raise StrategyError(
                f"{path}: {name}: only modules take a `parameter_plan`, but this is an operator\n"
                f"move the `parameter_plan` to the entry of the module {owner!r}"
            )
        # A module may have several entries, for itself, its operators and its calls, but has one
        # pin.
        entries.setdefault(owner, {})[suffix] = entry
    # All pins are made before the first is attached, so that an error leaves the model unchanged.
    pins = {
        owner: _make_pin(f"{path}: {owner}", modules[owner], entry)
        for owner, entry in entries.items()
    }
    tags = module_tags(net)
    for owner, pin in pins.items():
        earlier = next((tag for tag in tags.get(owner, ()) if isinstance(tag, Pin)), None)
        attach(modules[owner], _merge_pins(earlier, pin))


def _find_owner_path(name: str, modules: Mapping[str, nn.Module]) -> str:
    """Return the path of the innermost module that contains the operator or module `name`; empty
    for the model itself."""
    owner = _CALL_SUFFIX.sub("", name)
    # From the inside out, so that `a.b.add_1` belongs to `a.b` and not to `a`.
    while owner and not (owner in modules and name.startswith(owner)):
        owner = owner.rpartition(".")[0]
    return owner


def _parse_aten_names(suffix: str) -> tuple[str, ...] | None:
    """Return the ATen names in `suffix`, the part of an operator's name after its module path, such
    as `.add_1` or `@2`; None if an operator name is unknown."""
    pieces = [piece for piece in _CALL_SUFFIX.sub("", suffix).split(".") if piece]
    # `add_1` is the second `add` of its module.
    names = tuple(re.sub(r"_\d+$", "", piece) for piece in pieces)
    # The operator that adds the bias of a layer is called `bias`.
    return names if all(name == "bias" or _is_operator_name(name) for name in names) else None


def _is_operator_name(name: str) -> bool:
    # Operators that are not ATen's can be sharded, and so pinned, only with a registered rule.
    return hasattr(torch.ops.aten, name) or any(
        name
        == (
            target.split("::")[-1].split(".")[0]
            if isinstance(target, str)
            else local_operator_name(target)
        )
        for target in registered_rules()
    )


def _format_unknown_name(name: str, modules: Mapping[str, nn.Module]) -> str:
    # Cutoff 0: the closest names, however different.
    closest = get_close_matches(name, [path for path in modules if path], n=3, cutoff=0.0)
    return (
        f"the model has no module or operator named {name!r}\n"
        f"closest modules: {', '.join(closest) or 'none, the model has no modules'}"
    )


def _make_pin(where: str, module: nn.Module, entries: Mapping[str, FileEntry]) -> Pin:
    """Return the pin of a module for its entries in a strategy file.

    Args:
        where: path of the file and of the module, for errors.
        entries: entries of the module and its operators, by the part of their name after the module
            path; `""` for the module itself.
    """
    try:
        parameters = validate_parameter_plan(
            module, entries[""].parameters if "" in entries else {}
        )
    except StrategyError as error:
        raise StrategyError(f"{where}: {error}") from None
    operators = {
        suffix: entry.strategy for suffix, entry in entries.items() if entry.strategy is not None
    }
    return Pin(None, parameters, operators)


def _merge_pins(earlier: Pin | None, pin: Pin) -> Pin:
    """Return a pin with the settings of both pins; settings of `pin` take precedence."""
    if earlier is None:
        return pin
    # The entry "" is the strategy of the module itself, like the `in_strategy` of `shard`.
    strategy = None if "" in pin.operators else earlier.strategy
    return Pin(
        strategy,
        {**earlier.parameters, **pin.parameters},
        {**earlier.operators, **pin.operators},
    )
