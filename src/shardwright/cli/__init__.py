"""The command `shardwright`: each of its commands reads its arguments and calls the library."""

from shardwright.cli import compare, init, machine, plan, rehearse, train, tune
from shardwright.cli.app import app, main

__all__ = [
    "app",
    "compare",
    "init",
    "machine",
    "main",
    "plan",
    "rehearse",
    "train",
    "tune",
]
