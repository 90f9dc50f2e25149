"""The command `shardwright`: each of its commands reads its arguments and calls the library."""

from shardwright.cli import compare, machine, plan, rehearse, train, tune
from shardwright.cli.app import app, main

__all__ = [
    "app",
    "compare",
    "machine",
    "main",
    "plan",
    "rehearse",
    "train",
    "tune",
]
