"""YAML configurations and what they describe."""

from shardwright.config.build import Run
from shardwright.config.load import load, parse
from shardwright.config.schema import Config

__all__ = ["Config", "Run", "load", "parse"]
