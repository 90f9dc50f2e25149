"""Searches: from a graph and a device matrix to what every operator cuts."""

from shardwright.search.baselines import data_parallel, stand_alone
from shardwright.search.recursive.search import search_recursively

__all__ = ["data_parallel", "search_recursively", "stand_alone"]
