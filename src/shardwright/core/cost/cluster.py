"""What devices a plan is priced for: their rates, their memory, and the links between them.

A cluster has *levels*: the devices of a node are joined by fast links, the nodes by slower ones.
Ranks fill a node before the next begins. So an axis of the device matrix lies on the slowest link
that any of its groups crosses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from shardwright.core.cost.units import BYTES, BYTES_PER_SECOND, FLOPS, SECONDS, SHARE, quantity
from shardwright.core.layout.layout import DeviceMatrix
from shardwright.errors import ConfigError
from shardwright.text_files import parse_yaml, short_repr

LOCAL = "local"
"""The name of the cluster that is this machine: processes on its CPU."""

Spans = tuple[tuple[int, int], ...]
"""Levels of links, each with the number that it joins."""

TREES, RINGS, GLOO = "trees", "rings", "gloo"
"""How collectives are made."""


@dataclass(frozen=True)
class LinkLevel:
    """Links of one kind.

    Args:
        name: what joins the devices: `node`, `network`.
        bandwidth: bytes per second that each device sends, all devices sending at once.
        latency: seconds from the start of a message to its arrival; of processes that share a
            processor, as if each had it for itself.
        call: likewise, that each collective takes beside its messages.
        devices: how many devices one group of this level joins; None: any number.
        efficiency: the share of the bandwidth that collectives of large tensors reach.
        collectives: `trees`: a group of p devices needs ⌈log₂ p⌉ messages one after the other;
            `rings`: so does an all-reduce, but an all-gather and a reduce-scatter go around one
            ring of all devices, as NCCL's do; `gloo`: p − 1 messages go from neighbor to neighbor,
            and a reduce-scatter is an all-reduce.
    """

    name: str
    bandwidth: float
    latency: float
    devices: int | None = None
    collectives: str = TREES
    efficiency: float = 1.0
    call: float = 0.0

    @property
    def rate(self) -> float:
        """Bytes per second that each device of a collective sends."""
        return self.bandwidth * self.efficiency


@dataclass(frozen=True)
class Device:
    """What one device computes and holds.

    Args:
        memory: bytes.
        rates: for each dtype (`bfloat16`) the peak of its matrix products, in FLOP per second.
        memory_bandwidth: bytes per second.
        matrix_efficiency, memory_efficiency: the share of the peaks that large operators reach.
        attention_efficiency: likewise, of attention in one operator; None: that of other products.
        matrix_half: a matrix product of d rows, columns or inner products reaches d / (d + this)
            of what it would reach with any number of them.
        overlap_slowdown: of communication beside computation the share by which both together take
            longer than the computation.
        overhead: seconds that each operator takes at least.
        pass_overhead: seconds that a pipeline stage takes for each pass of a chunk beside its
            operators.
        step_overhead: seconds that it takes for each step beside its passes.
        at_full_rate: how many devices can compute at the full rate at once (processes on the cores
            of one CPU); None: all of them.
    """

    memory: int
    rates: Mapping[str, float]
    memory_bandwidth: float
    matrix_efficiency: float = 1.0
    memory_efficiency: float = 1.0
    attention_efficiency: float | None = None
    matrix_half: float = 0.0
    overlap_slowdown: float = 0.0
    overhead: float = 0.0
    pass_overhead: float = 0.0
    step_overhead: float = 0.0
    at_full_rate: int | None = None

    def peak(self, dtype: torch.dtype) -> float:
        """FLOP per second of matrix products at most; of a dtype that is not listed, the lowest."""
        return self.rates.get(str(dtype).removeprefix("torch."), min(self.rates.values()))

    def rate(
        self, dtype: torch.dtype, sides: Iterable[float] = (), attention: bool = False
    ) -> float:
        """FLOP per second that matrix products reach.

        Args:
            sides: the numbers of their rows, columns and inner products; none if they are large.
            attention: whether they are those of attention in one operator.
        """
        peak = self.peak(dtype)
        if attention and self.attention_efficiency is not None:
            return peak * self.attention_efficiency
        return peak * self.matrix_efficiency * prod(d / (d + self.matrix_half) for d in sides)

    @property
    def stream(self) -> float:
        """Bytes per second that an operator reads and writes."""
        return self.memory_bandwidth * self.memory_efficiency

    def shared(self, devices: int) -> bool:
        """Whether `devices` of them share a processor, so that what one does slows the others."""
        return self.at_full_rate is not None and devices > self.at_full_rate

    def among(self, devices: int) -> Device:
        """The device as it is when `devices` of them compute at once, as `Cluster.among` has it."""
        if self.at_full_rate is None or not self.shared(devices):
            return self
        share = self.at_full_rate / devices
        return replace(
            self,
            rates={dtype: rate * share for dtype, rate in self.rates.items()},
            memory_bandwidth=self.memory_bandwidth * share,
            overhead=self.overhead / share,
            pass_overhead=self.pass_overhead / share,
            step_overhead=self.step_overhead / share,
        )


@dataclass(frozen=True)
class Cluster:
    """Devices of one kind and the links between them, the fastest (innermost) level first."""

    name: str
    device: Device
    levels: tuple[LinkLevel, ...]

    def among(self, devices: int) -> Cluster:
        """The cluster as it is when `devices` compute at once. If these are processes that share a
        processor, the others run while one waits for its turn: also to send."""
        if self.device.at_full_rate is None or not self.device.shared(devices):
            return self
        turns = devices / self.device.at_full_rate
        levels = tuple(
            replace(level, latency=turns * level.latency, call=turns * level.call)
            for level in self.levels
        )
        return replace(self, device=self.device.among(devices), levels=levels)

    def servers(self, devices: int) -> int:
        """How many nodes so many devices fill; a cluster of one level is one node."""
        of_node = self.levels[0].devices if len(self.levels) > 1 else None
        return 1 if of_node is None else -(-devices // of_node)

    def nodes(self, devices: int) -> tuple[int, ...]:
        """How many devices a group of each level joins, ascending, where so many need several."""
        sizes = (level.devices for level in self.levels)
        return tuple(size for size in sizes if size is not None and size < devices)

    def check_nodes(self, size: int) -> None:
        """
        Raises:
            ConfigError: if no level but the outermost joins `size` devices, so many as each of
                several nodes has.
        """
        sizes = [level.devices for level in self.levels[:-1]]
        if sizes and size not in sizes:
            raise ConfigError(
                f"a node of cluster {self.name!r} has {sizes[0]} devices, but this run has nodes of"
                f" {size}: start {sizes[0]} ranks on each, or name a cluster file with `devices:"
                f" {size}`"
            )

    def levels_of(
        self, mesh: DeviceMatrix, first_ranks: tuple[int, ...] = (0,)
    ) -> tuple[Spans, ...]:
        """For each axis of `mesh` the levels of links that its groups cross, the fastest first, and
        how many devices, or groups of the level before, each of them joins.

        Args:
            first_ranks: where the ranks of each pipeline stage begin; each has a matrix like this.

        Raises:
            ConfigError: if the cluster has not so many devices.
        """
        self._check_size(max(first_ranks) + mesh.num_devices)
        ranks = np.asarray(mesh.ranks).reshape(mesh.device_matrix)
        places = np.stack([ranks + first for first in first_ranks])
        axes = range(1, 1 + len(mesh.device_matrix))
        return tuple(self._spans(np.moveaxis(places, axis, -1)) for axis in axes)

    def _spans(self, places: np.ndarray[Any, Any]) -> Spans:
        """Of an axis, which comes last."""
        size, spans, joined = places.shape[-1], [], 1
        for number, level in enumerate(self.levels):
            together = size
            if number < len(self.levels) - 1:
                groups = places // (level.devices or 1)
                together = max(n for n in range(1, size + 1) if size % n == 0 and _equal(groups, n))
            if together > joined:
                spans.append((number, together // joined))
            joined = together
        return tuple(spans)

    def level_between(self, rank: int, other: int) -> LinkLevel:
        """The link from one rank to another.

        Raises:
            ConfigError: if the cluster has not so many devices.
        """
        self._check_size(max(rank, other) + 1)
        for level in self.levels[:-1]:
            if level.devices is not None and rank // level.devices == other // level.devices:
                return level
        return self.levels[-1]

    def _check_size(self, devices: int) -> None:
        most = self.levels[-1].devices
        if most is not None and devices > most:
            raise ConfigError(
                f"cluster {self.name!r} has {most} devices, but {devices} were requested; add a"
                " level that joins more of them, or drop `devices` from the last level"
            )


def _equal(groups: np.ndarray[Any, Any], length: int) -> bool:
    """Whether so many neighbors along the last axis are always in one group."""
    blocks = groups.reshape(*groups.shape[:-1], -1, length)
    return bool((blocks == blocks[..., :1]).all())


def read_cluster(text: str, where: str) -> Cluster:
    """The cluster that YAML `text` describes.

    Raises:
        ConfigError: names `where`, the key, what stands there and what should.
    """
    content = parse_yaml(text, where, ConfigError)
    entries = _Entries(content, where, "")
    entries.only("name", "device", "levels")
    name = str(content.get("name", Path(where).stem))
    device = _device(_Entries(entries.needed("device"), where, "device."))
    levels = entries.needed("levels")
    if not isinstance(levels, list) or not levels:
        raise ConfigError(f"{where}: levels must be a list, the fastest links first")
    parsed = tuple(
        _level(_Entries(level, where, f"levels[{i}].")) for i, level in enumerate(levels)
    )
    _check_levels(parsed, where)
    return Cluster(name, device, parsed)


def cluster_to_yaml(cluster: Cluster) -> str:
    """The cluster as YAML, as `read_cluster` reads it."""
    content = {
        "name": cluster.name,
        "device": _described(cluster.device),
        "levels": [_described(level) for level in cluster.levels],
    }
    return yaml.safe_dump(content, sort_keys=False)


def _described(part: Device | LinkLevel) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    entries = ((each, getattr(part, each.name)) for each in fields(part))
    return {
        each.name: dict(entry) if isinstance(entry, Mapping) else entry
        for each, entry in entries
        if entry != each.default
    }


MOST = 1e30
"""Of any unit; with it, and not more than its inverse, predictions are finite."""


class _Entries:
    """The entries of one mapping, read one by one with errors that name the key."""

    def __init__(self, mapping: Any, where: str, prefix: str) -> None:
        self.where, self.prefix = where, prefix
        if not isinstance(mapping, dict):
            name = prefix.rstrip(".") or "the file"
            raise ConfigError(f"{where}: {name} must be a mapping, not {short_repr(mapping)}")
        self.mapping: dict[Any, Any] = mapping

    def only(self, *known: str) -> None:
        for key in self.mapping:
            if key not in known:
                raise ConfigError(
                    f"{self.where}: unknown key {self.prefix}{key}; valid are {', '.join(known)}"
                )

    def needed(self, key: str) -> Any:
        if key not in self.mapping:
            raise ConfigError(f"{self.where}: {self.prefix}{key} is missing")
        return self.mapping[key]

    def number(
        self, key: str, units: dict[str, float], default: float | None = None, zero: bool = False
    ) -> float:
        if default is not None and key not in self.mapping:
            return default
        value = self.needed(key)
        number = quantity(value, units)
        possible = number is not None and 1 / MOST <= number <= MOST
        if number is None or not (possible or (zero and number == 0)):
            example = ", ".join(unit for unit in units if unit)
            raise ConfigError(
                f"{self.where}: {self.prefix}{key} must be a positive number (units: {example})"
                f" of at least {1 / MOST:g} and at most {MOST:g}, not {short_repr(value)}"
            )
        return number

    def share(self, key: str, default: float = 1.0) -> float:
        share = self.number(key, SHARE, default, zero=not default)
        if share > 1:
            raise ConfigError(
                f"{self.where}: {self.prefix}{key} must be at most 1 (100%), not {share:g}"
            )
        return share

    def one_of(self, key: str, valid: tuple[str, ...]) -> str:
        """One of `valid`, by default the first."""
        choice = self.mapping.get(key, valid[0])
        if choice not in valid:
            raise ConfigError(
                f"{self.where}: {self.prefix}{key} must be one of {', '.join(valid)},"
                f" not {short_repr(choice)}"
            )
        return str(choice)

    def count(self, key: str) -> int | None:
        count = self.mapping.get(key)
        if count is None:
            return None
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(
                f"{self.where}: {self.prefix}{key} must be a positive whole number,"
                f" not {short_repr(count)}"
            )
        return count


def _device(entries: _Entries) -> Device:
    entries.only(
        *("memory", "rates", "memory_bandwidth", "matrix_efficiency", "memory_efficiency"),
        *("attention_efficiency", "matrix_half", "overlap_slowdown", "overhead"),
        *("pass_overhead", "step_overhead", "at_full_rate"),
    )
    rates = _Entries(entries.needed("rates"), entries.where, f"{entries.prefix}rates.")
    for dtype in rates.mapping:
        if not isinstance(getattr(torch, str(dtype), None), torch.dtype):
            raise ConfigError(f"{entries.where}: {rates.prefix}{dtype} is not a torch dtype")
    if not rates.mapping:
        raise ConfigError(f"{entries.where}: {entries.prefix}rates lists no dtype")
    return Device(
        memory=int(entries.number("memory", BYTES)),
        rates={str(dtype): rates.number(dtype, FLOPS) for dtype in rates.mapping},
        memory_bandwidth=entries.number("memory_bandwidth", BYTES_PER_SECOND),
        matrix_efficiency=entries.share("matrix_efficiency"),
        memory_efficiency=entries.share("memory_efficiency"),
        attention_efficiency=(
            entries.share("attention_efficiency")
            if "attention_efficiency" in entries.mapping
            else None
        ),
        matrix_half=entries.number("matrix_half", {"": 1.0}, 0.0, zero=True),
        overlap_slowdown=entries.share("overlap_slowdown", 0.0),
        overhead=entries.number("overhead", SECONDS, 0.0, zero=True),
        pass_overhead=entries.number("pass_overhead", SECONDS, 0.0, zero=True),
        step_overhead=entries.number("step_overhead", SECONDS, 0.0, zero=True),
        at_full_rate=entries.count("at_full_rate"),
    )


def _level(entries: _Entries) -> LinkLevel:
    entries.only("name", "bandwidth", "latency", "devices", "efficiency", "call", "collectives")
    return LinkLevel(
        name=str(entries.needed("name")),
        bandwidth=entries.number("bandwidth", BYTES_PER_SECOND),
        latency=entries.number("latency", SECONDS, zero=True),
        call=entries.number("call", SECONDS, 0.0, zero=True),
        devices=entries.count("devices"),
        efficiency=entries.share("efficiency"),
        collectives=entries.one_of("collectives", (TREES, RINGS, GLOO)),
    )


def _check_levels(levels: tuple[LinkLevel, ...], where: str) -> None:
    for number, (inner, outer) in enumerate(pairwise(levels)):
        if inner.devices is None:
            raise ConfigError(
                f"{where}: levels[{number}].devices is missing; only the last level may leave it"
                " out"
            )
        if outer.devices is not None and outer.devices % inner.devices:
            raise ConfigError(
                f"{where}: levels[{number + 1}].devices is {outer.devices}, which is not a"
                f" multiple of the {inner.devices} devices of level {inner.name!r}"
            )
