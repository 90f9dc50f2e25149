"""How a tensor lies on a matrix of devices, and the cheapest way from one layout to another."""

from shardwright.core.layout.layout import Layout, TensorLayout

__all__ = ["Layout", "TensorLayout"]
