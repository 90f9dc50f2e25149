"""Names of the outputs of a planned model, for errors."""

from __future__ import annotations

import torch

from shardwright.core.graph.graph import Graph
from shardwright.core.torch_internals import pytree


def output_names(graph: Graph) -> list[str]:
    """Return the name of each output of `graph`, such as `output['loss']`; equal on all ranks."""
    structure = graph.out_spec
    # Tensors, as objects of a class that this rank has not seen with tensors flatten to no leaves.
    leaves = [torch.empty(0, device="meta") for _ in range(structure.num_leaves)]
    try:
        paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(leaves, structure))
    except ValueError:  # a registered class without `flatten_with_keys_fn`
        names = [f"output {index}" for index in range(len(leaves))]
    else:
        names = [f"output{pytree.keystr(path)}" if path else "the output" for path, _ in paths]
    # Outputs beyond those of `forward` are stored in Python objects.
    return names + ["a tensor that the call stores"] * (len(graph.outputs) - len(names))
