"""Outputs of a step for the global batch, assembled from those of its micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.core.graph.graph import Value, WholeBatch
from shardwright.core.layout.layout import TensorLayout
from shardwright.core.micro_batches.buffer_updates import reduce_micro_batches
from shardwright.core.parallel.train_step import loss_weight
from shardwright.core.parallel.unavailable import Unavailable
from shardwright.core.parallel.whole_batch_values import batch_reduction
from shardwright.core.partition.chunk import Chunk
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.runtime.devices import Devices
from shardwright.core.runtime.dtensor import as_dtensor
from shardwright.core.runtime.sent_dtypes import broadcast
from shardwright.errors import PlanError


@dataclass(frozen=True)
class StepOutputs:
    """Assembles the outputs of a step from the local outputs of its micro-batches.

    Args:
        partitioned: the partitioned model, with the number of micro-batches of the step.
        devices: this rank's view of the devices of the plan.
        program_devices: this rank's view of the device matrix of the programs.
    """

    partitioned: Partitioned
    devices: Devices
    program_devices: Devices

    def assemble(self, value: Value, local_outputs: Mapping[str, list[Tensor]]) -> Any:
        """Return an output for the local batch of this rank or, if ranks pass the global batch, for
        the global batch. Collective.

        Args:
            value: an output of the model's graph.
            local_outputs: this rank's tensors of all micro-batches, by name of the output.

        Returns:
            A full tensor on every rank; `Unavailable` if the output mixes samples.
        """
        if value.name in batch_reduction(self.partitioned.graph).mixed:
            return Unavailable(self._make_error_of_mixed_output(value))
        output = self._assemble_global_output(value, local_outputs)
        axes = self.partitioned.local_outputs.get(value.name)
        if axes is None:
            return output
        # Every rank has the output for the global batch, so its slice needs no communication.
        layout = TensorLayout(self.devices.matrix, axes)
        return output[layout.slices(self.devices.rank, tuple(output.shape))]

    def _make_error_of_mixed_output(self, value: Value) -> PlanError:
        op = self.partitioned.graph.producer.get(value)
        where = f" ({op.source})" if op is not None and op.source else ""
        return PlanError(
            f"{value.name!r}{where} mixes samples, so that micro-batches do not determine it for"
            " the batch\nplan with micro_batches=1, or compute it from outputs of the model"
        )

    def _assemble_global_output(
        self, value: Value, local_outputs: Mapping[str, list[Tensor]]
    ) -> Tensor:
        """Return an output for the global batch, as a full tensor on every rank.

        Tensors with a batch dimension are concatenated over micro-batches; the loss and other means
        or sums over samples are reduced; other outputs are equal in all micro-batches.

        Args:
            value: an output of the model's graph.
            local_outputs: this rank's tensors of all micro-batches, by name of the output.
        """
        chunks, count = self.partitioned.chunks, self.partitioned.pipeline.micro_batches
        # By name, as a plan that was folded or split has other values.
        chunk, of_chunk = next((c, v) for c in chunks for v in c.returned if v.name == value.name)
        dim, shape = self._find_concatenation_dim(value), list(value.shape)
        if dim is not None:
            shape[dim] *= count
        # Gathered over the devices of the output's stage, then broadcast to peers in other stages.
        if chunk.stage == self.devices.stage:
            tensors = [
                self._gather_output(chunk, of_chunk, tensor) for tensor in local_outputs[value.name]
            ]
            if value is self.partitioned.graph.loss:
                output = torch.stack(tensors).sum(0) * loss_weight(self.partitioned)
            elif dim is not None:
                output = torch.cat(tensors, dim)
                if dim == 0:
                    output = self._restore_sample_order(output)
            else:
                reduction = dict(batch_reduction(self.partitioned.graph).outputs).get(value.name)
                assert not isinstance(reduction, int)
                output = reduce_micro_batches(tensors, reduction)
            # A broadcast reads contiguous memory.
            output = output.contiguous()
        else:
            output = torch.empty(shape, dtype=value.dtype, device=self.devices.device)
        # Ranks of other stages know the shape, so one broadcast suffices.
        if self.partitioned.pipeline.stages > 1:
            broadcast(output, self.devices.peers_of_all_stages, chunk.stage)
        return output

    def _find_concatenation_dim(self, value: Value) -> int | None:
        """Return the dimension in which micro-batches of output `value` are concatenated, or None.

        An output that was not analyzed is concatenated along dimension 0 if its dimension 0 has the
        size of dimension 0 of the first input.
        """
        graph, pipeline = self.partitioned.graph, self.partitioned.pipeline
        if isinstance(graph.whole_batch, WholeBatch):
            dim = dict(graph.whole_batch.outputs).get(value.name)
            return dim if isinstance(dim, int) else None
        sizes = [v.shape[0] for v in graph.input_values if v.shape]
        is_joined = value.shape and sizes and value.shape[0] == sizes[0]
        return 0 if is_joined and not pipeline.batch_dims else None

    def _restore_sample_order(self, samples: Tensor) -> Tensor:
        """Return the samples of concatenated micro-batches in the order of the global batch.

        If ranks pass local batches, each local batch is split into micro-batches: `samples` are
        ordered as [micro-batch, rank, sample], the global batch as [rank, micro-batch, sample].
        """
        micro_batches = self.partitioned.pipeline.micro_batches
        arrivals = self.partitioned.decisions.arrivals.values()
        layouts = (TensorLayout(self.devices.matrix, axes) for axes in arrivals if axes)
        num_shards = max((layout.shard_counts[0] for layout in layouts), default=1)
        # A dimension of another size is no batch dimension.
        if num_shards == 1 or samples.shape[0] % (micro_batches * num_shards):
            return samples
        blocks = samples.reshape(micro_batches, num_shards, -1, *samples.shape[1:])
        return blocks.transpose(0, 1).reshape(samples.shape)

    def _gather_output(self, chunk: Chunk, value: Value, tensor: Tensor) -> Tensor:
        layout = chunk.communication.returned_layout(value)
        if not layout.sharded and not layout.partial:
            return tensor
        like = torch.empty(value.shape, device="meta")
        return as_dtensor(tensor, like, layout, self.program_devices).full_tensor()
