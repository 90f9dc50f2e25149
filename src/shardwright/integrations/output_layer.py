"""The output layer of a planned model, for losses that call it themselves.

Losses in chunks of tokens never materialize the logits of a full batch: for each chunk they call
the output layer, the loss, and its backward pass. The layer runs on the samples of this rank with
full parameters, which are gathered once per forward pass; their gradients are reduced once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.core.torch_internals.dtensor import local_part_of, spec_of, with_spec
from shardwright.integrations.plan_on_call import set_class
from shardwright.integrations.rank_data import DataShards


class OutputLayer:
    """A copy of a planned model's output layer with full parameters.

    Args:
        layer: the submodule of the planned model, whose parameters are sharded.
        shards: division of the batch into shards over the ranks.
    """

    def __init__(self, layer: nn.Module, shards: DataShards) -> None:
        self._planned_layer = layer
        # Ranks with equal samples have equal gradients of this layer.
        self._ranks_per_shard = len(shards.owners[0])
        self._full_parameters: dict[str, Tensor] = {}
        # Without `__init__`, which would allocate and initialize parameters.
        self._layer_copy: Any = object.__new__(type(layer))
        # The planned model sets a `forward` on its submodules that explains errors.
        state = {name: value for name, value in vars(layer).items() if name != "forward"}
        without_values = dict.fromkeys(vars(layer)["_parameters"])
        vars(self._layer_copy).update(state | {"_parameters": without_values})

    @staticmethod
    def of(layer: nn.Module | None, shards: DataShards) -> OutputLayer | None:
        """Replace direct calls of `layer` by calls with full parameters, in the input's dtype.

        Returns:
            The copy with full parameters; None if `layer` is None or has submodules.
        """
        if layer is None or any(True for _ in layer.children()):
            return None
        full = OutputLayer(layer, shards)
        user_class: Any = type(layer)

        def call(self: nn.Module, inputs: Tensor) -> Any:
            return full(inputs)

        names = {"__module__": user_class.__module__, "__qualname__": user_class.__qualname__}
        set_class(layer, type(user_class.__name__, (user_class,), {**names, "__call__": call}))
        return full

    def __call__(self, inputs: Tensor) -> Any:
        if not self._full_parameters:
            for name, parameter in self._planned_layer.named_parameters():
                full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                # A leaf, in whose `grad` autograd adds up the gradients of all chunks.
                self._full_parameters[name] = full.detach().requires_grad_(parameter.requires_grad)
        for name, full in self._full_parameters.items():
            # Cast in each call, so that these gradients are of the full parameter's dtype.
            self._layer_copy._parameters[name] = full.to(inputs.dtype)
        outputs = self._layer_copy(inputs)
        # The copy must not keep the result of the cast alive.
        self._layer_copy._parameters.update(dict.fromkeys(self._full_parameters))
        return outputs

    def add_gradients(self) -> None:
        """All-reduce the gradients, add each rank's shard to its parameter, and free the full
        parameters.

        Collective.
        """
        for name, full in self._full_parameters.items():
            parameter = self._planned_layer.get_parameter(name)
            if not parameter.requires_grad:
                continue
            # A rank without a gradient must still take part in the all-reduce.
            total = torch.zeros_like(full) if full.grad is None else full.grad
            # Divided before the sum, in which ranks with equal samples would count several times.
            dist.all_reduce(total.div_(self._ranks_per_shard))
            gradient: Tensor = local_part_of(total, parameter)
            if isinstance(parameter, DTensor):
                gradient = with_spec(gradient.contiguous(), spec_of(parameter))
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self.free()

    def free(self) -> None:
        """Free the full parameters that a forward pass has gathered."""
        self._full_parameters.clear()
