"""The command `shardwright`: each of its commands reads its arguments and calls the library."""

from shardwright.cli import calibrate, check, compare, diff, launch, models, plan, train, tune
from shardwright.cli.app import app, main

__all__ = [
    "app",
    "calibrate",
    "check",
    "compare",
    "diff",
    "launch",
    "main",
    "models",
    "plan",
    "train",
    "tune",
]
