"""Measures, prints, and writes the page and the cluster file."""

from __future__ import annotations

import argparse
import datetime
import platform
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.one_gpu.collectives import own_collectives
from benchmarks.one_gpu.memory import predicted_against_allocated
from benchmarks.one_gpu.programs import program_against_module
from benchmarks.one_gpu.rates import measured_cluster
from benchmarks.one_gpu.sizes import FULL, TINY, Sizes
from benchmarks.one_gpu.steps import predicted_against_measured
from benchmarks.page import commit
from benchmarks.table import Table
from shardwright.core.cost.cluster_file import cluster_to_yaml
from shardwright.core.cost.clusters import built_in_clusters
from shardwright.core.runtime.accelerator import CPU, device_of_group, use_device


def main(arguments: Sequence[str] | None = None) -> int:
    """Exits with 1 if a number misses its goal, with 2 if there is no accelerator."""
    options = _parser().parse_args(arguments)
    console = Console()
    device = CPU if options.device == "cpu" else device_of_group()
    if device == CPU and not options.tiny:
        console.print("error: no accelerator here; --tiny --device cpu tries all of it on the CPU")
        return 2
    use_device(device)
    about = {
        "device": _name(device),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "Python": platform.python_version(),
        "torch": torch.__version__,
    }
    parts = [f"# One device: {about['device']}", _facts(about).markdown()]
    missed: list[str] = []
    for section in options.only or SECTIONS:
        began = time.perf_counter()
        tables = SECTIONS[section](device, options, about)
        console.rule(f"[bold]{section}")
        console.print(*(table.rich() for table in tables), sep="\n", highlight=False)
        console.print(f"[dim]{time.perf_counter() - began:.0f} s", highlight=False)
        parts += [f"## {section.capitalize()}", *(table.markdown() for table in tables)]
        missed += [goal for table in tables for goal in table.missed]
        # What is measured stays if something later fails.
        _write(options.out, "gpu.md", "\n\n".join(parts) + "\n")
    for goal in missed:
        console.print(f"[bold red]missed:[/] {goal}", highlight=False)
    return 1 if missed else 0


def _rates(device: torch.device, options: Namespace, about: Mapping[str, str]) -> list[Table]:
    """Also writes the cluster file."""
    name = "-".join(about["device"].lower().replace(",", " ").split())
    cluster, tables = measured_cluster(device, _sizes(options), name, options.links)
    head = (
        f"# {about['device']}, measured {about['date']} by benchmarks/gpu.py with torch"
        f" {about['torch']}.\n# The links are those of {options.links}: one device has none.\n"
    )
    _write(options.out, f"{name}.yaml", head + cluster_to_yaml(cluster))
    return tables


def _collectives(device: torch.device, options: Namespace, about: Mapping[str, str]) -> list[Table]:
    return [own_collectives(device, _sizes(options))]


def _programs(device: torch.device, options: Namespace, about: Mapping[str, str]) -> list[Table]:
    return [program_against_module(device, _sizes(options))]


def _memory(device: torch.device, options: Namespace, about: Mapping[str, str]) -> list[Table]:
    return [predicted_against_allocated(device, _sizes(options))]


def _steps(device: torch.device, options: Namespace, about: Mapping[str, str]) -> list[Table]:
    return [predicted_against_measured(device, _sizes(options), options.links)]


SECTIONS = {
    "rates": _rates,
    "collectives": _collectives,
    "programs": _programs,
    "memory": _memory,
    "steps": _steps,
}


def _sizes(options: Namespace) -> Sizes:
    return TINY if options.tiny else FULL


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python benchmarks/gpu.py", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for gpu.md and the cluster's YAML file")
    parser.add_argument("--only", choices=SECTIONS, action="append", help="measure this section")
    parser.add_argument(
        "--links",
        choices=built_in_clusters(),
        default="h100",
        help="cluster to predict for",
    )
    parser.add_argument("--tiny", action="store_true", help="sizes with which nothing is measured")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    return parser


def _name(device: torch.device) -> str:
    if device == CPU:
        return f"CPU, {platform.machine()}"
    return str(torch.get_device_module(device).get_device_name(device))


def _facts(about: Mapping[str, str]) -> Table:
    table = Table("How this was measured", ("", ""))
    for item in about.items():
        table.add(*item)
    return table


def _write(folder: Path | None, name: str, text: str) -> None:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
