"""Finds the benchmarks and runs each in a process of its own."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pkgutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import benchmarks
from benchmarks.size import Size
from benchmarks.table import Table

PREFIX = "bench_"


def names() -> list[str]:
    """Of all benchmarks: `search` is the module `bench_search`."""
    found = (module.name for module in pkgutil.iter_modules(benchmarks.__path__))
    return sorted(name.removeprefix(PREFIX) for name in found if name.startswith(PREFIX))


def measure(name: str, size: Size = Size.DEFAULT, *arguments: Path) -> tuple[str, list[Table]]:
    """The docstring of a benchmark and its tables, measured in a fresh process on one thread, so
    that no benchmark finds caches, modules or threads that another one left.

    Args:
        arguments: of the benchmark, in place of its defaults.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(_run, name, size, *arguments).result()


def _run(name: str, size: Size, *arguments: Path) -> tuple[str, list[Table]]:
    module = importlib.import_module(f"benchmarks.{PREFIX}{name}")
    return module.__doc__ or "", module.run(size, *arguments)
