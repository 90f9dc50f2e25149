"""Recurrent layers: only the batch can be sharded, as a time step reads all previous features."""

from __future__ import annotations

import torch

from shardwright.core.graph.graph import Op
from shardwright.core.rules.notation import argument, sharding_rule
from shardwright.core.rules.rule import Dims, ShardingRule, rule_for

aten = torch.ops.aten


@rule_for(aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)
def recurrence(op: Op) -> ShardingRule:
    """Recurrent layer, `_ b _, _ b _, weights -> _ b _, _ b _`; with `batch_first` the sequences
    are `b _ _`.

    Without a batch dimension nothing can be sharded.
    """
    # An LSTM has a hidden and a cell state.
    states = 2 if op.target is aten.lstm.input else 1
    x = op.inputs[0].shape
    if len(x) == 2:
        sequence: Dims = (None, None)
        state: Dims = (None, None)
    else:
        sequence = ("b", None, None) if argument(op, "batch_first") else (None, "b", None)
        state = (None, "b", None)
    weights = [(None,) * len(value.shape) for value in op.inputs[1 + states :]]
    return sharding_rule(
        op,
        (sequence, *(state,) * states, *weights),
        (sequence, *(state,) * states),
        random=bool(argument(op, "train")) and argument(op, "dropout") > 0,
    )
