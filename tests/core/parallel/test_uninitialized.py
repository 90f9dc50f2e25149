"""Models that are built on the meta device and initialized after `parallelize`."""

import pytest
import torch
from torch import nn

import shardwright as sw
from core.parallel.uninitialized_ranks import CHECKS, Language, batch, check_equal, eager, train
from torchrun import checks_on_ranks

test_from_the_meta_device_on_two_ranks = checks_on_ranks(CHECKS, 2)
test_from_the_meta_device_on_four_ranks = checks_on_ranks(CHECKS, 4)


def test_from_the_meta_device_on_one_device() -> None:
    with torch.device("meta"):
        net, unset = Language(), Language()
    plan = sw.plan(net, batch(), devices=1)
    sw.parallelize(net, plan).to_empty(device="cpu")
    torch.manual_seed(0)
    net.init_weights()
    wanted = eager()
    check_equal(net, wanted)
    assert train(net) == pytest.approx(train(wanted))
    sw.parallelize(unset, plan)
    for prepare in (lambda: None, lambda: unset.to_empty(device="cpu")):
        prepare()
        with pytest.raises(
            sw.PlanError, match=r"are uninitialized: scale, table.*\n.*init_weights\(\)"
        ):
            unset(*batch())
    unset.load_state_dict(wanted.state_dict())
    for block, source in zip(unset.blocks, wanted.blocks, strict=True):
        block.frequencies.copy_(source.frequencies)
    assert train(unset) == pytest.approx(train(wanted))


def test_tied_parameters_stay_tied_on_one_device() -> None:
    """`nn.Module.to_empty` unties them, and the program would train only one of the two."""
    with torch.device("meta"):
        net = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
        net[1].weight = net[0].weight
    sw.parallelize(net, sw.plan(net, (torch.arange(4),), devices=1)).to_empty(device="cpu")
    assert net[1].weight is net[0].weight
    net[0].reset_parameters()
    net(torch.arange(4)).sum().backward()
