"""The calls that users make, on one device and on simulated ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from sample_models import bert, encoder, gpt2, llama, mlp, network, resnet

MODELS = {
    "mlp": mlp,
    "network": lambda: network(batch=8, hidden=64),
    "resnet": lambda: resnet(blocks=(1, 1)),
    "llama": llama,
    "gpt2": gpt2,
    "bert": bert,
    "encoder": encoder,
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mem_coeff", [0.01, 10.0])
def test_the_searched_plan_equals_one_device(name: str, mem_coeff: float) -> None:
    net, args, kwargs = MODELS[name]()
    plan = sw.plan(net, args, kwargs, devices=4, mem_coeff=mem_coeff)
    result = sw.check(net, args, kwargs, plan)
    assert result.passes(1e-9), result


@pytest.mark.parametrize("devices", [3, 6])
def test_a_number_of_devices_that_is_no_power_of_two_equals_one_device(devices: int) -> None:
    net, args, kwargs = mlp(batch=12, sizes=(12, 24, 36, 6))
    plan = sw.plan(net, args, kwargs, devices=devices)
    assert plan.cuts
    assert sw.check(net, args, kwargs, plan).passes(1e-9)


def test_data_parallel_and_stand_alone_equal_one_device() -> None:
    net, args, kwargs = resnet(batch=4, blocks=(1,))
    for mode in ("data_parallel", "stand_alone"):
        result = sw.check(net, args, kwargs, sw.plan(net, args, kwargs, devices=4, mode=mode))
        assert result.passes(1e-9), (mode, result)


def test_a_model_without_a_loss_returns_and_differentiates_its_whole_output() -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    args = (torch.randn(8, 8),)
    for mem_coeff in (0.01, 10.0):
        plan = sw.plan(net, args, devices=4, mem_coeff=mem_coeff)
        assert plan.cuts
        result = sw.check(net, args, {}, plan)
        assert result.loss is None
        assert result.passes(1e-9), result


def train(net: nn.Module, args: tuple[Tensor, ...], steps: int) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        loss = net(*args)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_on_one_device_a_parallel_module_trains_as_the_model_does() -> None:
    net, args, kwargs = resnet(batch=4, blocks=(1,))
    parallel = sw.parallelize(net, sw.plan(net, args, kwargs, devices=1), copy=True)
    assert parallel.state_dict().keys() == net.state_dict().keys()
    assert train(parallel, args, 4) == pytest.approx(train(net, args, 4), rel=1e-5)
    for name, value in net.state_dict().items():
        torch.testing.assert_close(parallel.state_dict()[name], value, msg=name)


def test_parallelize_leaves_the_given_model_alone() -> None:
    net, args, kwargs = mlp()
    before = [p.clone() for p in net.parameters()]
    train(sw.parallelize(net, sw.plan(net, args, kwargs, devices=1), copy=True), args, 2)
    for old, new in zip(before, net.parameters(), strict=True):
        assert torch.equal(old, new)


def test_a_loaded_plan_runs_like_the_one_that_was_saved() -> None:
    net, args, kwargs = mlp()
    plan = sw.plan(net, args, kwargs, devices=1)
    loaded = sw.Plan.from_json(plan.to_json())
    assert sw.parallelize(net, loaded, copy=True)(*args) == sw.parallelize(net, plan, copy=True)(
        *args
    )


def test_a_call_with_other_arguments_than_planned_is_refused() -> None:
    net, args, kwargs = mlp()
    parallel = sw.parallelize(net, sw.plan(net, args, kwargs, devices=1), copy=True)
    x, y = args
    with pytest.raises(sw.PlanError, match=r"torch\.float64, but the plan expects torch.float32"):
        parallel(x.double(), y)
    with pytest.raises(sw.PlanError, match="called with 1 positional argument: missing a required"):
        parallel(x)
    with pytest.raises(sw.PlanError, match=r"got an unexpected keyword argument 'z'"):
        parallel(x, y, z=1)
    with pytest.raises(sw.PlanError, match=r"has shape \(16,\), but the plan expects \(8, 16\)"):
        parallel(x[0], y)
    with pytest.raises(sw.PlanError, match="is None, but the plan expects a tensor"):
        parallel(x, None)


def test_another_batch_and_eval_mode_are_captured_once_more() -> None:
    net, (images, labels), _ = resnet(batch=4, blocks=(1,))
    parallel = sw.parallelize(net, sw.plan(net, (images, labels), devices=1), copy=True)
    for training in (True, False, True):
        for size in (4, 3):
            got = parallel.train(training)(images[:size], labels[:size])
            wanted = net.train(training)(images[:size], labels[:size])
            torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(parallel.state_dict(), net.state_dict())


def test_a_module_with_a_mode_of_its_own_keeps_it() -> None:
    """Frozen batch norm: one submodule in eval mode while the model trains."""
    net, args, _ = resnet(batch=4, blocks=(1,))
    parallel = sw.parallelize(net, sw.plan(net, args, devices=1), copy=True)
    before = parallel.bn1.running_mean.clone()
    parallel.bn1.eval()
    net.bn1.eval()
    torch.testing.assert_close(parallel(*args), net(*args))
    assert torch.equal(parallel.bn1.running_mean, before)


def test_a_model_parallelized_in_eval_mode_starts_there() -> None:
    net, args, _ = resnet(batch=4, blocks=(1,))
    plan = sw.plan(net, args, devices=1)
    parallel = sw.parallelize(net.eval(), plan, copy=True)
    assert not parallel.training
    assert not net.training
    torch.testing.assert_close(parallel(*args), net(*args))


def test_a_model_on_the_meta_device_can_be_planned_and_runs_once_it_has_values() -> None:
    with torch.device("meta"):
        net = nn.Linear(4, 4)
        x = torch.empty(4, 4)
    net = sw.parallelize(net, sw.plan(net, (x,), devices=1))
    with pytest.raises(
        sw.PlanError, match=r"the Linear was built .* are uninitialized: weight, bias"
    ):
        net(torch.ones(4, 4))
    eager = nn.Linear(4, 4)
    net.load_state_dict(eager.state_dict())
    assert torch.equal(net(torch.ones(4, 4)), eager(torch.ones(4, 4)))


def test_with_loss_joins_a_model_and_its_loss() -> None:
    net = sw.WithLoss(nn.Linear(8, 2), nn.CrossEntropyLoss())
    args = (torch.randn(4, 8), torch.tensor([0, 1, 1, 0]))
    assert sw.capture(net, args).loss is not None
    assert sw.check(net, args, {}, sw.plan(net, args, devices=2)).passes()


def test_examine_counts_operators_and_parameters() -> None:
    net, args, kwargs = network(batch=8)
    seen = sw.examine(net, args, kwargs)
    assert seen.main == ("layer1", "layer2", "layer3")
    assert seen.parameters == 784 * 512 + 512 * 512 + 512
    assert seen.without_rule == ()
    assert "every operator has a sharding rule" in str(seen)


def test_check_sees_a_wrong_plan() -> None:
    """A plan whose program is wrong does not pass: the comparison can fail."""
    net, args, kwargs = mlp()
    result = sw.check(net, args, kwargs, sw.plan(net, args, kwargs, devices=2))
    assert result.passes()
    assert not sw.Check(**{**vars(result), "loss_difference": 1e-3}).passes()
    assert not sw.Check(**{**vars(result), "counted_bytes": (1, 2)}).passes()


def test_a_model_with_a_cache_in_its_configuration_is_captured_without_it() -> None:
    net, args, kwargs = llama()
    assert net.config.use_cache and kwargs.pop("use_cache") is False
    plan = sw.plan(net, args, kwargs, devices=2)
    assert sw.check(net, args, kwargs, plan).passes()
    parallel = sw.parallelize(net, sw.plan(net, args, kwargs, devices=1), copy=True)
    assert parallel(**kwargs).past_key_values is None
    assert net.config.use_cache and net(**kwargs).past_key_values is not None
    wanted = {**kwargs, "use_cache": True}
    cached = sw.parallelize(net, sw.plan(net, args, wanted, devices=1))(**wanted)
    assert type(cached.past_key_values).__name__ == "DynamicCache"
    assert cached.past_key_values.get_seq_length() == kwargs["input_ids"].shape[1]


def test_that_no_cache_is_returned_is_said_once_for_a_model(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="shardwright")
    net, args, kwargs = llama()
    del kwargs["use_cache"]
    net = sw.parallelize(net, sw.plan(net, args, kwargs, devices=1))
    net.eval()
    shorter = {name: value[:, :-1] for name, value in kwargs.items()}
    assert net(**shorter).past_key_values is None
    assert caplog.text.count("captured the model for") == 1
    assert caplog.text.count("is captured with config.use_cache=False") == 1
