"""Strategies from a file, pinned to the modules of a model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path

import torch
from torch import nn

from shardwright.capture.annotations import attach, attached
from shardwright.capture.naming import local_operator_name
from shardwright.constraints.shard import Pin, checked_parameter_plan
from shardwright.constraints.strategy_file import FileEntry, parse_strategies
from shardwright.errors import StrategyError
from shardwright.rules.rule import registry

_CALL = re.compile(r"@\d+")
"""What marks a further call of a module."""


def load_strategies(net: nn.Module, path: str | Path) -> None:
    """Pins operators of `net` as a file says that `Plan.save_strategies` or a person wrote.

    A module's path stands for its main operator, in every call; other operators are called as in
    plans, `path.add_1`. What the file names replaces what `shard` has said of it before, and a
    later `shard` of a module replaces what the file says of it.

    Raises:
        StrategyError: if the file is missing, is no such file, an entry is none, or `net` has no
            such module or parameter. What needs shapes and devices is checked by `plan`.
        LayoutError: if a layout cannot be.
    """
    text = _text(Path(path))
    modules = dict(net.named_modules(remove_duplicate=False))
    found: dict[str, dict[str, FileEntry]] = {}
    for name, said in parse_strategies(text, str(path)).items():
        owner = _owner(name, modules)
        rest = name.removeprefix(owner)
        if _operators(rest) is None:
            raise StrategyError(f"{path}: {_unknown(name, modules)}")
        if rest and said.parameters:
            raise StrategyError(
                f"{path}: {name}: parameter_plan is for modules, and this is an operator"
            )
        found.setdefault(owner, {})[rest] = said
    pins = {owner: _pin(f"{path}: {owner}", modules[owner], said) for owner, said in found.items()}
    before = attached(net)
    for owner, pin in pins.items():
        earlier = next((tag for tag in before.get(owner, ()) if isinstance(tag, Pin)), None)
        attach(modules[owner], _joined(earlier, pin))


def _text(path: Path) -> str:
    if not path.is_file():
        raise StrategyError(f"{path}: there is no such file")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise StrategyError(
            f"{path}: not text; strategies are JSON, as Plan.save_strategies writes them"
        ) from None


def _owner(name: str, modules: Mapping[str, nn.Module]) -> str:
    """The path of the innermost module that `name` is in."""
    owner = _CALL.sub("", name)
    while owner and not (owner in modules and name.startswith(owner)):
        owner = owner.rpartition(".")[0]
    return owner


def _operators(rest: str) -> tuple[str, ...] | None:
    """The operators in what follows a module's path, `.add_1` or `@2`; None if one is unknown."""
    parts = [part for part in _CALL.sub("", rest).split(".") if part]
    names = tuple(re.sub(r"_\d+$", "", part) for part in parts)
    return names if all(name == "bias" or _is_operator(name) for name in names) else None


def _is_operator(name: str) -> bool:
    return hasattr(torch.ops.aten, name) or any(
        name
        == (
            target.split("::")[-1].split(".")[0]
            if isinstance(target, str)
            else local_operator_name(target)
        )
        for target in registry()
    )


def _unknown(name: str, modules: Mapping[str, nn.Module]) -> str:
    near = get_close_matches(name, [path for path in modules if path], n=3, cutoff=0.0)
    return (
        f"the model has no module {name!r}, nor an operator of this name in a module; nearest"
        f" modules: {', '.join(near) or 'it has none'}"
    )


def _pin(where: str, module: nn.Module, said: Mapping[str, FileEntry]) -> Pin:
    try:
        parameters = checked_parameter_plan(module, said[""].parameters if "" in said else {})
    except StrategyError as error:
        raise StrategyError(f"{where}: {error}") from None
    operators = {rest: s.strategy for rest, s in said.items() if s.strategy is not None}
    return Pin(None, parameters, operators)


def _joined(before: Pin | None, pin: Pin) -> Pin:
    """What was pinned before, but for what `pin` says."""
    if before is None:
        return pin
    strategy = None if "" in pin.operators else before.strategy
    return Pin(
        strategy,
        {**before.parameters, **pin.parameters},
        {**before.operators, **pin.operators},
    )
