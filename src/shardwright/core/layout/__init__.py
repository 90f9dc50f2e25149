"""Layouts of tensors on a device matrix, and the cheapest redistribution between two of them."""

from shardwright.core.layout.layout import Layout, TensorLayout

__all__ = ["Layout", "TensorLayout"]
