"""Full state dicts keep which entries share memory, and their values."""

import torch
from torch import nn

from shardwright.integrations.full_state import full_model_state


def test_entries_of_one_memory_with_other_strides_are_not_one_tensor() -> None:
    net = nn.Linear(3, 3, bias=False)
    net.tied = net.weight
    net.register_buffer("transposed", net.weight.detach().t())
    state = full_model_state(net)
    assert state["tied"] is state["weight"]
    torch.testing.assert_close(state["weight"], net.weight.detach())
    torch.testing.assert_close(state["transposed"], net.weight.detach().t())
