"""Baichuan 2."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from shardwright.models import MODELS, build, example_batch


def test_with_rotary_positions_the_hidden_states_are_those_of_llama() -> None:
    net = build("baichuan2_7b_tiny")
    llama = build(replace(MODELS["llama2_7b_tiny"], norm_eps=MODELS["baichuan2_7b"].norm_eps))
    llama.load_state_dict(net.state_dict())
    ids, _ = example_batch(MODELS["baichuan2_7b_tiny"], 2, 16)
    wanted = llama.model(input_ids=ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(net.model(ids), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["baichuan2_7b_tiny", "baichuan2_13b_tiny"])
def test_the_length_of_a_row_of_the_head_has_no_effect(name: str) -> None:
    net = build(name)
    batch = example_batch(MODELS[name], 2, 16)
    before = net(*batch).item()
    with torch.no_grad():
        net.lm_head.weight.mul_(torch.rand(320, 1) + 0.5)
    assert net(*batch).item() == pytest.approx(before, rel=1e-5)
    rows = F.normalize(net.lm_head.weight, dim=-1).norm(dim=-1)
    torch.testing.assert_close(rows, torch.ones(320))


def test_with_alibi_no_angles_enter_and_order_still_counts() -> None:
    net = build("baichuan2_13b_tiny")
    for parameter in net.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3
    ids, _ = example_batch(MODELS["baichuan2_13b_tiny"], 1, 16)
    swapped = ids.clone()
    swapped[0, [2, 3]] = ids[0, [3, 2]]
    last = [net.model(given)[0, -1] for given in (ids, swapped)]
    assert (last[0] - last[1]).abs().max() > 1e-4
