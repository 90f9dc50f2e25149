"""What is measured of Shardwright: `python -m benchmarks` prints it and writes docs/benchmarks.md.

A benchmark is a module `bench_*.py` in this package with a function `run() -> list[Table]`. The
first line of its docstring is the title of its section, the rest says how it is measured. It runs
in a process of its own, on one thread.
"""
