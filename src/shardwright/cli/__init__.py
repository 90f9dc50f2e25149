"""The command `shardwright`: each of its commands reads its arguments and calls the library."""

from shardwright.cli import check, launch, plan, train
from shardwright.cli.app import app, main

__all__ = ["app", "check", "launch", "main", "plan", "train"]
