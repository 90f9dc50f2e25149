"""YAML configuration files and the runs that they describe."""

from shardwright.run.config.load import load, parse
from shardwright.run.config.run import Run
from shardwright.run.config.schema import Config

__all__ = ["Config", "Run", "load", "parse"]
