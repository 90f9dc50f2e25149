"""The command line `shardwright`: a module for each group of commands."""

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
