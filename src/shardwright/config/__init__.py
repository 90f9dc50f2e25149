"""YAML configurations and what they describe."""

from shardwright.config.load import load, parse
from shardwright.config.run import Run
from shardwright.config.schema import Config

__all__ = ["Config", "Run", "load", "parse"]
