"""Searches: from a graph and a device matrix to what every operator cuts."""

from shardwright.search.presets import data_parallel, stand_alone
from shardwright.search.recursive import search

__all__ = ["data_parallel", "search", "stand_alone"]
