"""The command `shardwright`: each of its commands reads its arguments and calls the library."""

from shardwright.cli import calibrate, check, launch, plan, train
from shardwright.cli.app import app, main

__all__ = ["app", "calibrate", "check", "launch", "main", "plan", "train"]
