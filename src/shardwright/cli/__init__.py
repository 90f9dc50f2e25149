"""The command `shardwright`: each of its commands reads its arguments and calls the library."""

from shardwright.cli import compare, machine, plan, train, tune
from shardwright.cli.app import app, main

__all__ = [
    "app",
    "compare",
    "machine",
    "main",
    "plan",
    "train",
    "tune",
]
