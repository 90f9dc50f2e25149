"""Description of a cluster: compute rates and memory of its devices, and the links between them.

Links have *levels*: fast links join the devices of a node, slower ones join nodes. Ranks fill one
node after another, so the slowest link that any group of a mesh axis crosses is the level of that
axis.
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
"""Name of the cluster of processes on this machine's CPU."""

Spans = tuple[tuple[int, int], ...]
"""(index of the link level, number of devices or inner groups that it joins), innermost first."""

TREES, RINGS, GLOO = "trees", "rings", "gloo"
"""Algorithms of collectives, by which latency scales with the group; see `LinkLevel`."""


@dataclass(frozen=True)
class LinkLevel:
    """Links of one kind.

    Args:
        name: what the links connect, such as `node` or `network`.
        bandwidth: bytes per second that each device sends while all devices send.
        latency: seconds from the start of a message to its arrival. For processes that share a
            processor, as if each had it to itself; `Cluster.among` scales it.
        devices: number of devices in one group of this level; None for any number.
        collectives: `trees`: a group of p devices needs ⌈log₂ p⌉ sequential messages; `rings`: as
            `trees` for all-reduce, but all-gather and reduce-scatter go around one ring of all
            devices, as in NCCL; `gloo`: p − 1 sequential messages between neighbors, and
            reduce-scatter costs an all-reduce.
        efficiency: fraction of the bandwidth that collectives of large tensors reach.
        call: seconds that each collective takes in addition to its messages, scaled as `latency`.
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
        """Bytes per second that each device sends in a collective of large tensors."""
        return self.bandwidth * self.efficiency


@dataclass(frozen=True)
class Device:
    """Compute rates and memory of one device.

    Args:
        memory: bytes.
        rates: peak rate of matrix products by dtype name (`bfloat16`), in FLOP per second.
        memory_bandwidth: bytes per second.
        matrix_efficiency, memory_efficiency: fraction of the peaks that large operators reach.
        attention_efficiency: fraction of the peak that fused attention reaches; by default
            `matrix_efficiency`.
        matrix_half: size of a matrix dimension (m, n or k) at which a product reaches half its
            rate; in general a dimension of size d multiplies the rate by d / (d + `matrix_half`).
        overlap_slowdown: fraction of overlapped communication time by which the computation beside
            it is slowed down; 0 for free overlap, 1 for no gain.
        overhead: minimum seconds of each operator, such as its kernel launch.
        pass_overhead: seconds per forward or backward pass of a chunk on a pipeline stage, in
            addition to its operators.
        step_overhead: seconds per step on a pipeline stage, in addition to its passes.
        at_full_rate: number of devices that can compute at the full rate at the same time, where
            devices are processes on the cores of one CPU; None for all.
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
        """Peak FLOP per second of matrix products; for an unlisted dtype, the lowest listed."""
        return self.rates.get(str(dtype).removeprefix("torch."), min(self.rates.values()))

    def rate(
        self, dtype: torch.dtype, sides: Iterable[float] = (), attention: bool = False
    ) -> float:
        """FLOP per second that a matrix product reaches.

        Args:
            sides: its dimensions m, n and k; none if they are large.
            attention: whether it belongs to fused attention.
        """
        peak = self.peak(dtype)
        if attention and self.attention_efficiency is not None:
            return peak * self.attention_efficiency
        return peak * self.matrix_efficiency * prod(d / (d + self.matrix_half) for d in sides)

    @property
    def stream(self) -> float:
        """Bytes per second that a memory-bound operator reads and writes."""
        return self.memory_bandwidth * self.memory_efficiency

    def shared(self, devices: int) -> bool:
        """Whether `devices` devices share a processor, so that each slows down the others."""
        return self.at_full_rate is not None and devices > self.at_full_rate

    def among(self, devices: int) -> Device:
        """Return the device with its rates when `devices` devices compute at the same time."""
        if self.at_full_rate is None or not self.shared(devices):
            return self
        processor_share = self.at_full_rate / devices
        return replace(
            self,
            rates={dtype: rate * processor_share for dtype, rate in self.rates.items()},
            memory_bandwidth=self.memory_bandwidth * processor_share,
            overhead=self.overhead / processor_share,
            pass_overhead=self.pass_overhead / processor_share,
            step_overhead=self.step_overhead / processor_share,
        )


@dataclass(frozen=True)
class Cluster:
    """Identical devices and the levels of links between them, the fastest (innermost) first."""

    name: str
    device: Device
    levels: tuple[LinkLevel, ...]

    def among(self, devices: int) -> Cluster:
        """Return the cluster with its rates when `devices` devices compute at the same time."""
        if self.device.at_full_rate is None or not self.device.shared(devices):
            return self
        # A process has to wait for its turn on the processor to send a message, too.
        waiting_turns = devices / self.device.at_full_rate
        levels = tuple(
            replace(level, latency=waiting_turns * level.latency, call=waiting_turns * level.call)
            for level in self.levels
        )
        return replace(self, device=self.device.among(devices), levels=levels)

    def servers(self, devices: int) -> int:
        """Number of nodes that `devices` devices occupy; a cluster with one level is one node."""
        node_size = self.levels[0].devices if len(self.levels) > 1 else None
        return 1 if node_size is None else -(-devices // node_size)

    def nodes(self, devices: int) -> tuple[int, ...]:
        """Group sizes of the levels that need several groups for `devices` devices, ascending."""
        sizes = (level.devices for level in self.levels)
        return tuple(size for size in sizes if size is not None and size < devices)

    def check_nodes(self, size: int) -> None:
        """Check that the nodes of a run are nodes of the cluster.

        Args:
            size: devices per node of a run on several nodes.

        Raises:
            ConfigError: if no inner level has groups of `size` devices.
        """
        sizes = [level.devices for level in self.levels[:-1]]
        if sizes and size not in sizes:
            raise ConfigError(
                f"a node of cluster {self.name!r} has {sizes[0]} devices, but this run has nodes of"
                f" {size}\nstart {sizes[0]} ranks on each node, or name a cluster file with"
                f" `devices: {size}`"
            )

    def levels_of(
        self, mesh: DeviceMatrix, first_ranks: tuple[int, ...] = (0,)
    ) -> tuple[Spans, ...]:
        """Levels of links that each axis of `mesh` crosses, and the number of devices, or of groups
        of the level before, that each level joins.

        Args:
            first_ranks: first rank of each pipeline stage; every stage has a mesh of this shape.

        Raises:
            ConfigError: if the cluster has too few devices.
        """
        self._check_size(max(first_ranks) + mesh.num_devices)
        mesh_ranks = np.asarray(mesh.ranks).reshape(mesh.device_matrix)
        # All stages at once: a collective is as slow as in the stage whose ranks lie worst.
        ranks = np.stack([mesh_ranks + first for first in first_ranks])
        # Dimension 0 is that of the stages.
        axes = range(1, 1 + len(mesh.device_matrix))
        return tuple(self._spans(np.moveaxis(ranks, axis, -1)) for axis in axes)

    def _spans(self, ranks: np.ndarray[Any, Any]) -> Spans:
        """Levels that an axis crosses.

        Args:
            ranks: ranks of all stages; the axis is the last dimension.
        """
        size, spans, joined = ranks.shape[-1], [], 1
        for number, level in enumerate(self.levels):
            reach = size
            # A level joins as many neighbors along the axis as are in one of its groups in all
            # groups of the axis; the outermost level joins the rest.
            if number < len(self.levels) - 1:
                groups = ranks // (level.devices or 1)
                reach = max(n for n in range(1, size + 1) if size % n == 0 and _equal(groups, n))
            if reach > joined:
                spans.append((number, reach // joined))
            joined = reach
        return tuple(spans)

    def level_between(self, rank: int, other: int) -> LinkLevel:
        """The innermost level of links that joins two ranks.

        Raises:
            ConfigError: if the cluster has too few devices.
        """
        self._check_size(max(rank, other) + 1)
        # Levels are nested: the first one whose group has both ranks is the fastest link.
        for level in self.levels[:-1]:
            if level.devices is not None and rank // level.devices == other // level.devices:
                return level
        return self.levels[-1]

    def _check_size(self, devices: int) -> None:
        num_devices = self.levels[-1].devices
        if num_devices is not None and devices > num_devices:
            raise ConfigError(
                f"cluster {self.name!r} has {num_devices} devices, but {devices} were requested\n"
                "in its file, add a level that joins more devices, or remove `devices` from the"
                " last level"
            )


def _equal(groups: np.ndarray[Any, Any], length: int) -> bool:
    """Whether each aligned block of `length` entries along the last axis is in a single group."""
    blocks = groups.reshape(*groups.shape[:-1], -1, length)
    return bool((blocks == blocks[..., :1]).all())


def read_cluster(text: str, where: str) -> Cluster:
    """Parse a cluster from YAML.

    Args:
        where: name of the file for errors.

    Raises:
        ConfigError: names the file, the key, its value and the valid values.
    """
    content = parse_yaml(text, where, ConfigError)
    entries = _Entries(content, where, "")
    entries.check_keys("name", "device", "levels")
    name = str(content.get("name", Path(where).stem))
    device = _read_device(_Entries(entries.required("device"), where, "device."))
    levels = entries.required("levels")
    if not isinstance(levels, list) or not levels:
        raise ConfigError(
            f"{where}: levels must be a list, the fastest links first\n"
            "for example `levels: [{name: NVLink, bandwidth: 450 GB/s, latency: 1 us}]`"
        )
    parsed = tuple(
        _read_level(_Entries(level, where, f"levels[{i}].")) for i, level in enumerate(levels)
    )
    _check_levels(parsed, where)
    return Cluster(name, device, parsed)


def cluster_to_yaml(cluster: Cluster) -> str:
    """Write a cluster as YAML that `read_cluster` reads."""
    # Plain numbers in base units, which are read back exactly, unlike rounded numbers with units.
    content = {
        "name": cluster.name,
        "device": _changed_fields(cluster.device),
        "levels": [_changed_fields(level) for level in cluster.levels],
    }
    return yaml.safe_dump(content, sort_keys=False)


def _changed_fields(part: Device | LinkLevel) -> dict[str, Any]:
    """Fields that differ from their defaults."""
    values = ((each, getattr(part, each.name)) for each in fields(part))
    return {
        each.name: dict(value) if isinstance(value, Mapping) else value
        for each, value in values
        if value != each.default
    }


LARGEST_VALUE = 1e30
"""Largest number in a cluster file, in any unit, and inverse of the smallest: within this range no
prediction overflows."""


class _Entries:
    """Reads the entries of one mapping of a cluster file, with errors that name the key."""

    def __init__(self, mapping: Any, where: str, prefix: str) -> None:
        self.where, self.prefix = where, prefix
        if not isinstance(mapping, dict):
            name = prefix.rstrip(".") or "the file"
            raise ConfigError(f"{where}: {name} must be a mapping, not {short_repr(mapping)}")
        self.mapping: dict[Any, Any] = mapping

    def check_keys(self, *valid: str) -> None:
        for key in self.mapping:
            if key not in valid:
                raise ConfigError(
                    f"{self.where}: unknown key {self.prefix}{key}\nvalid are {', '.join(valid)}"
                )

    def required(self, key: str) -> Any:
        if key not in self.mapping:
            raise ConfigError(f"{self.where}: {self.prefix}{key} is missing")
        return self.mapping[key]

    def number(
        self, key: str, units: dict[str, float], default: float | None = None, zero: bool = False
    ) -> float:
        if default is not None and key not in self.mapping:
            return default
        value = self.required(key)
        number = quantity(value, units)
        in_range = number is not None and 1 / LARGEST_VALUE <= number <= LARGEST_VALUE
        if number is None or not (in_range or (zero and number == 0)):
            example = ", ".join(unit for unit in units if unit)
            raise ConfigError(
                f"{self.where}: {self.prefix}{key} must be a positive number, not"
                f" {short_repr(value)}\nvalid are numbers from {1 / LARGEST_VALUE:g} to"
                f" {LARGEST_VALUE:g} with a unit: {example}"
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
        """Return one of `valid`; the first one by default."""
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
        # YAML reads `yes` as a boolean, which is an integer in Python.
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(
                f"{self.where}: {self.prefix}{key} must be a positive whole number,"
                f" not {short_repr(count)}"
            )
        return count


def _read_device(entries: _Entries) -> Device:
    entries.check_keys(
        *("memory", "rates", "memory_bandwidth", "matrix_efficiency", "memory_efficiency"),
        *("attention_efficiency", "matrix_half", "overlap_slowdown", "overhead"),
        *("pass_overhead", "step_overhead", "at_full_rate"),
    )
    rates = _Entries(entries.required("rates"), entries.where, f"{entries.prefix}rates.")
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


def _read_level(entries: _Entries) -> LinkLevel:
    entries.check_keys(
        "name", "bandwidth", "latency", "devices", "efficiency", "call", "collectives"
    )
    return LinkLevel(
        name=str(entries.required("name")),
        bandwidth=entries.number("bandwidth", BYTES_PER_SECOND),
        latency=entries.number("latency", SECONDS, zero=True),
        call=entries.number("call", SECONDS, 0.0, zero=True),
        devices=entries.count("devices"),
        efficiency=entries.share("efficiency"),
        collectives=entries.one_of("collectives", (TREES, RINGS, GLOO)),
    )


def _check_levels(levels: tuple[LinkLevel, ...], where: str) -> None:
    # `Links` divides group sizes of neighboring levels, so outer ones must be whole multiples.
    for number, (inner, outer) in enumerate(pairwise(levels)):
        if inner.devices is None:
            raise ConfigError(
                f"{where}: levels[{number}].devices is missing\n"
                "only the last level may omit it; an example of an inner level is `devices: 8`"
            )
        if outer.devices is not None and outer.devices % inner.devices:
            raise ConfigError(
                f"{where}: levels[{number + 1}].devices is {outer.devices}, which is not a"
                f" multiple of the {inner.devices} devices of level {inner.name!r}"
            )
