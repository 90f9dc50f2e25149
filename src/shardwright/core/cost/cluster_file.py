"""Read and write the YAML files of clusters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml

from shardwright.core.cost.cluster import GLOO, RINGS, TREES, Cluster, Device, LinkLevel
from shardwright.core.cost.units import (
    BYTES,
    BYTES_PER_SECOND,
    FLOPS,
    SECONDS,
    SHARE,
    parse_quantity,
)
from shardwright.errors import ConfigError, printable
from shardwright.plain_data import DIGEST, content_digest, parse_yaml, short_repr, warn_if_edited


def read_cluster(text: str, where: str) -> Cluster:
    """Return the cluster that a YAML text describes.

    Args:
        text: contents of a cluster file.
        where: name of the file, for errors.

    Raises:
        ConfigError: if an entry is invalid; the message contains the file, the key, its value and
            the valid values.
    """
    return cluster_from_content(parse_yaml(text, where, ConfigError), where)


def cluster_from_content(content: Any, where: str) -> Cluster:
    """Return the cluster that the parsed contents of a cluster file describe.

    Args:
        content: contents of the file as Python objects.
        where: name of the file, for errors.

    Raises:
        ConfigError: if an entry is invalid.
    """
    reader = _ClusterMappingReader(content, where, "")
    reader.check_keys("name", "software", "device", "levels", DIGEST)
    name = reader.name(Path(where).stem)
    device = _read_device(_ClusterMappingReader(reader.required("device"), where, "device."))
    levels = reader.required("levels")
    if not isinstance(levels, list) or not levels:
        raise ConfigError(
            f"{where}: levels must be a list, the fastest links first\n"
            "for example `levels: [{name: NVLink, bandwidth: 450 GB/s, latency: 1 us}]`"
        )
    link_levels = tuple(
        _read_link_level(_ClusterMappingReader(level, where, f"levels[{i}]."))
        for i, level in enumerate(levels)
    )
    _check_link_levels(link_levels, where)
    warn_if_edited(content, where)
    return Cluster(name, device, link_levels, str(content.get("software", "")))


def cluster_to_yaml(cluster: Cluster) -> str:
    """Return YAML text from which `read_cluster` returns an equal cluster."""
    # Numbers in base units are read back exactly, unlike rounded numbers with prefixes.
    content = {
        "name": cluster.name,
        **({"software": cluster.software} if cluster.software else {}),
        "device": _non_default_fields(cluster.device),
        "levels": [_non_default_fields(level) for level in cluster.levels],
    }
    return yaml.safe_dump(content, sort_keys=False)


def cluster_file_text(cluster: Cluster) -> str:
    """Return the YAML text of a measured cluster, with a digest that detects later edits."""
    content = cluster_to_yaml(cluster)
    return (
        # The digest is of the parsed text, as the reader digests what it has parsed.
        f"{content}{DIGEST}: {content_digest(parse_yaml(content, cluster.name, ConfigError))!r}\n"
    )


def _non_default_fields(config: Device | LinkLevel) -> dict[str, Any]:
    """Return the values of the fields of a device or link level that differ from their defaults,
    by name."""
    values = ((each, getattr(config, each.name)) for each in fields(config))
    return {
        each.name: dict(value) if isinstance(value, Mapping) else value
        for each, value in values
        # Fields without a default have `dataclasses.MISSING`, which differs from every value.
        if value != each.default
    }


LARGEST_VALUE = 1e30
"""Largest valid number in a cluster file, in base units; the smallest is 1 / `LARGEST_VALUE`.

Predictions from numbers in this range do not overflow."""


class _ClusterMappingReader:
    """Reader of one mapping of a cluster file; its errors contain the file and the key.

    Args:
        where: name of the file.
        prefix: path of the mapping in the file, such as `device.`; empty for the top level.
    """

    def __init__(self, mapping: Any, where: str, prefix: str) -> None:
        self.where, self.prefix = where, prefix
        if not isinstance(mapping, dict):
            name = prefix.rstrip(".") or "the file"
            raise ConfigError(
                f"{where}: {name} must be a mapping, not {short_repr(mapping)}\n"
                "write one `key: value` per line"
            )
        self.mapping: dict[Any, Any] = mapping

    def check_keys(self, *valid: str) -> None:
        """Raise `ConfigError` if the mapping has a key that is not in `valid`."""
        for key in self.mapping:
            if key not in valid:
                raise ConfigError(
                    f"{self.where}: unknown key {self.prefix}{key}\n"
                    f"valid keys are {', '.join(valid)}"
                )

    def required(self, key: str) -> Any:
        """Return the value of `key`, which must be present."""
        if key not in self.mapping:
            raise ConfigError(
                f"{self.where}: {self.prefix}{key} is missing\n"
                "add the key, as in the built-in cluster files in shardwright/core/cost/clusters"
            )
        return self.mapping[key]

    def name(self, default: str | None = None) -> str:
        """Return the value of `name` as printable text; required without a default."""
        name = self.required("name") if default is None else self.mapping.get("name", default)
        return printable(str(name), lines=False)

    def number(
        self,
        key: str,
        units: dict[str, float],
        default: float | None = None,
        allows_zero: bool = False,
    ) -> float:
        if default is not None and key not in self.mapping:
            return default
        value = self.required(key)
        number = parse_quantity(value, units)
        in_range = number is not None and 1 / LARGEST_VALUE <= number <= LARGEST_VALUE
        if number is None or not (in_range or (allows_zero and number == 0)):
            example = ", ".join(unit for unit in units if unit)
            raise ConfigError(
                f"{self.where}: {self.prefix}{key} must be a positive number, not"
                f" {short_repr(value)}\nuse a number from {1 / LARGEST_VALUE:g} to"
                f" {LARGEST_VALUE:g} with one of these units: {example}"
            )
        return number

    def share(self, key: str, default: float = 1.0) -> float:
        """Return the value of `key` in the file, a fraction from 0 to 1."""
        # Times are divided by efficiencies, so only a share with default 0 may be 0.
        share = self.number(key, SHARE, default, allows_zero=not default)
        if share > 1:
            raise ConfigError(
                f"{self.where}: {self.prefix}{key} must be at most 1 (100%), not {share:g}\n"
                "use a fraction such as 0.8, or 80%"
            )
        return share

    def optional_share(self, key: str) -> float | None:
        """Return the value of `key` in the file, a fraction up to 1; None if it is missing."""
        return self.share(key) if key in self.mapping else None

    def boolean(self, key: str, default: bool) -> bool:
        """Return the value of `key` in the file, true or false."""
        value = self.mapping.get(key, default)
        if not isinstance(value, bool):
            raise ConfigError(
                f"{self.where}: {self.prefix}{key} must be true or false, not {short_repr(value)}\n"
                "write `true` or `false`"
            )
        return value

    def one_of(self, key: str, valid: tuple[str, ...]) -> str:
        """Return the value of a key that must be one of `valid`; `valid[0]` if the key is
        missing."""
        choice = self.mapping.get(key, valid[0])
        if choice not in valid:
            raise ConfigError(
                f"{self.where}: {self.prefix}{key} {short_repr(choice)} is unknown\n"
                f"use one of {', '.join(valid)}"
            )
        return str(choice)

    def count(self, key: str) -> int | None:
        """Return the value of `key`, a positive integer; None if the key is missing."""
        count = self.mapping.get(key)
        if count is None:
            return None
        # YAML reads `yes` as a boolean, which is an integer in Python.
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(
                f"{self.where}: {self.prefix}{key} must be a positive whole number,"
                f" not {short_repr(count)}\nuse for example 8, or omit the key for no limit"
            )
        return count


def _read_device(reader: _ClusterMappingReader) -> Device:
    reader.check_keys(
        *("memory", "rates", "memory_bandwidth", "matrix_efficiency", "memory_efficiency"),
        *("attention_efficiency", "attention_half", "attention_head_half"),
        *("matrix_half", "overlap_slowdown", "overhead"),
        *("norm_traffic", "pointwise_traffic", "overlaps_parameters", "overlaps_products"),
        *("sends_routed_tokens", "sends_tokens_once", "dispatch_efficiency", "routing_traffic"),
        *("reduction_traffic", "divides_sends", "exchanges_in_turn", "part_overhead"),
        *("gathers_to_recompute", "accumulation_traffic"),
        *("pass_overhead", "step_overhead", "at_full_rate"),
    )
    rates = _ClusterMappingReader(reader.required("rates"), reader.where, f"{reader.prefix}rates.")
    for dtype in rates.mapping:
        if not isinstance(getattr(torch, str(dtype), None), torch.dtype):
            raise ConfigError(
                f"{reader.where}: {rates.prefix}{dtype} is not a torch dtype\n"
                "use names such as bfloat16 or float32"
            )
    if not rates.mapping:
        raise ConfigError(
            f"{reader.where}: {reader.prefix}rates is empty\n"
            "add the peak rate of a dtype, for example `bfloat16: 989 TFLOP/s`"
        )
    return Device(
        memory=int(reader.number("memory", BYTES)),
        rates={str(dtype): rates.number(dtype, FLOPS) for dtype in rates.mapping},
        memory_bandwidth=reader.number("memory_bandwidth", BYTES_PER_SECOND),
        matrix_efficiency=reader.share("matrix_efficiency"),
        memory_efficiency=reader.share("memory_efficiency"),
        # None, not 1.0: `Device` then takes the efficiency of matrix products.
        attention_efficiency=reader.optional_share("attention_efficiency"),
        # Numbers of keys and sizes of dimensions have no unit.
        attention_half=reader.number("attention_half", {"": 1.0}, 0.0, allows_zero=True),
        attention_head_half=reader.number("attention_head_half", {"": 1.0}, 0.0, allows_zero=True),
        matrix_half=reader.number("matrix_half", {"": 1.0}, 0.0, allows_zero=True),
        # Not a share: norms that are composed of several operators move more than a fused kernel.
        norm_traffic=reader.number("norm_traffic", SHARE, 1.0),
        pointwise_traffic=reader.share("pointwise_traffic"),
        overlaps_parameters=reader.boolean("overlaps_parameters", True),
        overlaps_products=reader.boolean("overlaps_products", False),
        sends_routed_tokens=reader.boolean("sends_routed_tokens", False),
        sends_tokens_once=reader.boolean("sends_tokens_once", False),
        # None, not 1.0: tokens are then sent as fast as other tensors.
        dispatch_efficiency=reader.optional_share("dispatch_efficiency"),
        routing_traffic=reader.share("routing_traffic"),
        # Not a share: reductions in float32 send twice the bytes of bfloat16 gradients.
        reduction_traffic=reader.number("reduction_traffic", SHARE, 1.0),
        divides_sends=reader.boolean("divides_sends", False),
        exchanges_in_turn=reader.boolean("exchanges_in_turn", False),
        part_overhead=reader.number("part_overhead", SECONDS, 0.0, allows_zero=True),
        gathers_to_recompute=reader.boolean("gathers_to_recompute", False),
        # Not a share: gradients that are cast before they are added take more passes.
        accumulation_traffic=reader.number("accumulation_traffic", SHARE, 1.0, allows_zero=True),
        overlap_slowdown=reader.share("overlap_slowdown", 0.0),
        overhead=reader.number("overhead", SECONDS, 0.0, allows_zero=True),
        pass_overhead=reader.number("pass_overhead", SECONDS, 0.0, allows_zero=True),
        step_overhead=reader.number("step_overhead", SECONDS, 0.0, allows_zero=True),
        at_full_rate=reader.count("at_full_rate"),
    )


def _read_link_level(reader: _ClusterMappingReader) -> LinkLevel:
    reader.check_keys(
        "name", "bandwidth", "latency", "devices", "efficiency", "call", "collectives"
    )
    return LinkLevel(
        name=reader.name(),
        bandwidth=reader.number("bandwidth", BYTES_PER_SECOND),
        latency=reader.number("latency", SECONDS, allows_zero=True),
        call=reader.number("call", SECONDS, 0.0, allows_zero=True),
        devices=reader.count("devices"),
        efficiency=reader.share("efficiency"),
        collectives=reader.one_of("collectives", (TREES, RINGS, GLOO)),
    )


def _check_link_levels(levels: tuple[LinkLevel, ...], where: str) -> None:
    # `Links` divides the group sizes of consecutive levels, so an outer size must be a multiple of
    # the inner size.
    for number, (inner, outer) in enumerate(pairwise(levels)):
        if inner.devices is None:
            raise ConfigError(
                f"{where}: levels[{number}].devices is missing\n"
                "only the last level may omit `devices`; for an inner level set, for example,"
                " `devices: 8`"
            )
        if outer.devices is not None and outer.devices % inner.devices:
            raise ConfigError(
                f"{where}: levels[{number + 1}].devices is {outer.devices}, which is not a"
                f" multiple of the {inner.devices} devices of level {inner.name!r}\n"
                # At least one group of the inner level, also if the outer level has fewer devices.
                f"use for example {max(1, outer.devices // inner.devices) * inner.devices}"
            )
