"""Models that are built on the meta device and initialized after `parallelize`."""

import pytest
import torch

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
        with pytest.raises(sw.PlanError, match=r"values in scale, table.*\n.*init_weights\(\)"):
            unset(*batch())
    unset.load_state_dict(wanted.state_dict())
    for block, source in zip(unset.blocks, wanted.blocks, strict=True):
        block.frequencies.copy_(source.frequencies)
    assert train(unset) == pytest.approx(train(wanted))
