"""Read and write strategies as a JSON file, which can be edited by hand.

    {
     "version": 1,
     "layouts": {
      "layout": {"device_matrix": [2, 2, 2], "alias_names": ["dp", "sp", "mp"]}
     },
     "strategies": {
      "layer1": {"in_strategy": [[2, 4], {"layout": ["None", ["sp", "mp"]]}]},
      "layer2": {"in_strategy": [[4, 1], null], "parameter_plan": {"weight": [8, 1]}}
     }
    }

The entry of a tensor is a list of shard counts, null, or a layout's name with the axes that shard
each dimension.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from shardwright.core.constraints.strategy import Entry, OperatorStrategy, check_entry
from shardwright.core.layout.layout import Layout, TensorLayout
from shardwright.errors import LayoutError, StrategyError
from shardwright.plain_data import parse_json, short_repr

VERSION = 1


@dataclass(frozen=True)
class FileEntry:
    """The settings of one operator or module in a strategy file.

    Args:
        strategy: sharding of the operator; None for an entry that only has a `parameter_plan`.
        parameters: storage sharding of each parameter of the module, by its name in the module.
    """

    strategy: OperatorStrategy | None
    parameters: Mapping[str, Entry] = field(default_factory=dict)


def strategies_to_text(strategies: Mapping[str, FileEntry]) -> str:
    """Return a strategy file (JSON) with the entries of operators and modules, one line per
    entry."""
    names: dict[Layout, str] = {}
    # Before the layouts, because encoding the strategies collects and names them.
    lines = [
        f"  {json.dumps(k)}: {json.dumps(_encode_file_entry(entry, names))}"
        for k, entry in strategies.items()
    ]
    # Lines by hand: `json.dumps` with an indent puts each number on a line of its own.
    layouts = [f"  {json.dumps(n)}: {json.dumps(x.to_dict())}" for x, n in names.items()]
    sections = [f' "version": {VERSION}', _format_json_section("layouts", layouts)]
    return "{\n" + ",\n".join([*sections, _format_json_section("strategies", lines)]) + "\n}\n"


def _format_json_section(name: str, lines: list[str]) -> str:
    inner = ",\n".join(lines)
    return f' "{name}": {{\n{inner}\n }}' if lines else f' "{name}": {{}}'


def _encode_file_entry(file_entry: FileEntry, names: dict[Layout, str]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    if file_entry.strategy is not None:
        data["in_strategy"] = [
            _encode_tensor_entry(entry, names) for entry in file_entry.strategy.inputs
        ]
        if file_entry.strategy.outputs is not None:
            data["out_strategy"] = [
                _encode_tensor_entry(entry, names) for entry in file_entry.strategy.outputs
            ]
    if file_entry.parameters:
        data["parameter_plan"] = {
            n: _encode_tensor_entry(e, names) for n, e in file_entry.parameters.items()
        }
    return data


def _encode_tensor_entry(entry: Entry, names: dict[Layout, str]) -> Any:
    if not isinstance(entry, TensorLayout):
        return None if entry is None else list(entry)
    # Layouts are named in the order of their first use, so that a saved file is stable.
    number = len(names) + 1
    name = names.setdefault(entry.layout, "layout" if number == 1 else f"layout{number}")
    dims = ([entry.alias_names[axis] for axis in axes] for axes in entry.axes)
    # As in a call of the layout: one axis by its name, several as a list.
    return {name: [d if len(d) > 1 else d[0] if d else "None" for d in dims]}


def parse_strategies(text: str, where: str) -> dict[str, FileEntry]:
    """Parse the text of a strategy file.

    Args:
        text: the JSON text.
        where: path of the file, for errors.

    Returns:
        The entries by name of the operator or module.

    Raises:
        StrategyError: if the file or an entry is malformed; the message has its position.
        LayoutError: if a layout is invalid.
    """
    data = parse_json(text, where, StrategyError)
    # First, because other versions may have other keys.
    version = data.get("version") if isinstance(data, dict) else None
    if version != VERSION:
        raise StrategyError(
            f"{where}: unsupported version {version!r}\n"
            f"use a strategy file of version {VERSION}, which `Plan.save_strategies` writes"
        )
    _check_valid_keys(where, data, ("version", "layouts", "strategies"))
    if "strategies" not in data:
        raise StrategyError(
            f"{where}: missing key 'strategies'\nadd the key, with the entries of operators and"
            " modules by name"
        )
    layout_data = _expect_json_object(f"{where}: layouts", data.get("layouts", {}))
    layouts = {
        name: _parse_layout(f"{where}: layouts: {name}", layout)
        for name, layout in layout_data.items()
    }
    return {
        name: _parse_file_entry(f"{where}: {name}", entry, layouts)
        for name, entry in _expect_json_object(f"{where}: strategies", data["strategies"]).items()
    }


def _expect_json_object(where: str, data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise StrategyError(
            f"{where}: must be a JSON object, not {short_repr(data)}\nuse {{name: value, …}}"
        )
    return data


def _check_valid_keys(where: str, data: Mapping[str, Any], valid: Iterable[str]) -> None:
    for key in data:
        if key not in valid:
            closest = get_close_matches(key, list(valid), n=1)
            hint = (
                f"did you mean {closest[0]!r}?" if closest else f"valid keys are {', '.join(valid)}"
            )
            raise StrategyError(f"{where}: unknown key {key!r}\n{hint}")


def _parse_layout(where: str, data: Any) -> Layout:
    _check_valid_keys(
        where, _expect_json_object(where, data), ("device_matrix", "alias_names", "rank_list")
    )
    for key in ("device_matrix", "alias_names", "rank_list"):
        # Only `rank_list` may be missing.
        if not isinstance(data.get(key, None if key != "rank_list" else []), list):
            raise StrategyError(
                f"{where}: {key!r} must be a list, not {short_repr(data.get(key))}\n"
                'use for example {"device_matrix": [2, 4], "alias_names": ["dp", "mp"]}'
            )
    try:
        return Layout.from_dict(data)
    except LayoutError as error:
        raise LayoutError(f"{where}: {error}") from None


def _parse_file_entry(where: str, data: Any, layouts: Mapping[str, Layout]) -> FileEntry:
    _check_valid_keys(
        where, _expect_json_object(where, data), ("in_strategy", "out_strategy", "parameter_plan")
    )
    inputs, outputs = (
        _parse_tensor_entries(f"{where}: {key}", data.get(key), layouts)
        for key in ("in_strategy", "out_strategy")
    )
    plan = _expect_json_object(f"{where}: parameter_plan", data.get("parameter_plan", {}))
    parameters = {
        name: _parse_tensor_entry(f"{where}: parameter_plan of {name}", entry, layouts)
        for name, entry in plan.items()
    }
    if inputs is None and outputs is not None:
        raise StrategyError(
            f"{where}: `out_strategy` requires `in_strategy`\nadd `in_strategy` to the entry"
        )
    if inputs is None and not parameters:
        raise StrategyError(
            f"{where}: the entry is empty\nadd `in_strategy` or `parameter_plan` to the entry, or"
            " remove it"
        )
    if inputs is None:
        return FileEntry(None, parameters)
    try:
        return FileEntry(OperatorStrategy(inputs, outputs), parameters)
    except StrategyError as error:
        raise StrategyError(f"{where}: {error}") from None


def _parse_tensor_entries(
    where: str, data: Any, layouts: Mapping[str, Layout]
) -> tuple[Entry, ...] | None:
    if data is None:
        return None
    if not isinstance(data, list):
        raise StrategyError(
            f"{where}: must be a list with one entry per tensor, not {short_repr(data)}\n"
            "use for example [[2, 4], [1, 4]]"
        )
    return tuple(_parse_tensor_entry(where, entry, layouts) for entry in data)


def _parse_tensor_entry(where: str, data: Any, layouts: Mapping[str, Layout]) -> Entry:
    if data is None:
        return None
    # Other objects, and axes that are no list, reach the error of an invalid entry below.
    if isinstance(data, dict) and len(data) == 1:
        ((name, dims),) = data.items()
        if name not in layouts:
            defined = ", ".join(map(repr, layouts)) or "none"
            raise StrategyError(
                f"{where}: unknown layout {name!r}\nuse one of the file's layouts: {defined}"
            )
        if isinstance(dims, list):
            # null means `None` here too.
            names = (tuple(d) if isinstance(d, list) else d or "None" for d in dims)
            try:
                return layouts[name](*names)
            except LayoutError as error:
                raise LayoutError(f"{where}: {error}") from None
    if not isinstance(data, list):
        raise StrategyError(
            f"{where}: {short_repr(data)} is not a valid entry\nuse a list of shard counts such as"
            ' [2, 4], a layout such as {"layout": ["dp", "None"]}, or null'
        )
    counts = tuple(data)
    try:
        check_entry("the entry", counts)
    except StrategyError as error:
        raise StrategyError(f"{where}: {error}") from None
    return counts
