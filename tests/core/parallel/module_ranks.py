"""What `test_module.py` runs on every rank: real processes, gloo, real optimizers."""

from __future__ import annotations

import copy
import io
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[2]))

import shardwright as sw
from features.graph_models import graph_model, plan_of_edges
from random_plans import random_plan
from sample_models import Model, gpt2, llama, mlp, resnet
from shardwright.core.misuse import batch_guard
from shardwright.run import local_batch
from torchrun import run_checks

Optimizer = Callable[[Any], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-2)


def loss_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.loss


def train(net: nn.Module, model: Model, make: Optimizer, clip: float) -> list[list[float]]:
    """Loss and gradient norm of three steps."""
    _, args, kwargs = model
    optimizer = make(net.parameters())
    history = []
    for _ in range(3):
        loss = loss_of(net(*args, **kwargs))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), clip)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        optimizer.step()
        optimizer.zero_grad()
        history.append([loss.item(), norm.item()])
    return history


def check_training(model: Model, plan: sw.Plan, make: Optimizer) -> None:
    net, _args, _kwargs = model
    parallel = sw.parallelize(net, plan, copy=True)
    wanted = train(net, model, make, clip=0.5)
    got = train(parallel, model, make, clip=0.5)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted), rtol=1e-4, atol=1e-5)
    whole = get_model_state_dict(parallel, options=StateDictOptions(full_state_dict=True))
    for name, value in net.state_dict().items():
        torch.testing.assert_close(whole[name], value, rtol=1e-3, atol=1e-4, msg=name)


def check_searched_plans() -> None:
    for build in (mlp, lambda: resnet(blocks=(1,)), llama):
        for mem_coeff, make in ((0.01, sgd), (10.0, adamw)):
            net, args, kwargs = build()
            plan = sw.plan(net, args, kwargs, devices=4, mem_coeff=mem_coeff)
            assert plan.cuts
            check_training((net, args, kwargs), plan, make)


def check_sharded_edges() -> None:
    for name in ("GAT", "SchNet"):
        net, args = graph_model(name)
        plan = plan_of_edges(net, args, dist.get_world_size())
        check_training((net, args, {}), plan, sgd)


def check_random_plans() -> None:
    """Random plans with random storage: shards of replicated parameters, axes in any order."""
    for seed in range(3):
        net, args, kwargs = gpt2(layers=1)
        plan = random_plan(sw.capture(net, args, kwargs), 4, seed)
        check_training((net, args, kwargs), plan, sgd)


def check_parameters_are_shards() -> None:
    net, args, kwargs = llama()
    plan = sw.plan(net, args, kwargs, devices=4, mem_coeff=10.0)
    parallel = sw.parallelize(net, plan, copy=True)
    assert parallel.state_dict().keys() == net.state_dict().keys()
    kept = 0
    for name, parameter in parallel.named_parameters():
        assert isinstance(parameter, DTensor), name
        kept += parameter.to_local().numel() * parameter.element_size()
        assert torch.equal(parameter.full_tensor(), net.get_parameter(name)), name
    assert kept == plan.parameter_bytes
    logits = parallel(*args, **kwargs).logits
    wanted = net(*args, **kwargs).logits
    assert isinstance(logits, DTensor)
    torch.testing.assert_close(logits.full_tensor(), wanted, rtol=1e-4, atol=1e-5)


def check_deferred_parameters() -> None:
    """Deferred parameters with an optimizer made before, and tied weights."""
    net, args, kwargs = gpt2(layers=1)
    with sw.no_init_parameters():
        deferred, _, _ = gpt2(layers=1)
        optimizer = sgd(deferred.parameters())
    parallel = sw.parallelize(
        deferred, random_plan(sw.capture(net, args, kwargs), 4, seed=3), copy=True
    )
    sw.adopt(optimizer, parallel)
    wanted = train(net, (net, args, kwargs), sgd, clip=0.5)
    got = train(parallel, (net, args, kwargs), lambda parameters: optimizer, clip=0.5)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted), rtol=1e-4, atol=1e-5)


def check_gradients_accumulate() -> None:
    net, args, kwargs = mlp()
    parallel = sw.parallelize(net, sw.plan(net, args, kwargs, devices=4), copy=True)
    for _ in range(2):
        parallel(*args).backward()
        net(*args).backward()
    for name, parameter in parallel.named_parameters():
        got = parameter.grad.full_tensor()
        torch.testing.assert_close(got, net.get_parameter(name).grad, rtol=1e-5, atol=1e-6)


def check_compiled() -> None:
    """Forward and backward, collectives included, in one graph without breaks."""
    for build in (mlp, llama):
        net, args, kwargs = build()
        parallel = sw.parallelize(
            net, sw.plan(net, args, kwargs, devices=4, mem_coeff=10.0), copy=True
        )
        wanted = loss_of(parallel(*args, **kwargs))
        parallel.compile(fullgraph=True, backend="aot_eager")
        loss = loss_of(parallel(*args, **kwargs))
        loss.backward()
        torch.testing.assert_close(loss, wanted)
        loss_of(net(*args, **kwargs)).backward()
        for name, parameter in parallel.named_parameters():
            gradient = net.get_parameter(name).grad
            torch.testing.assert_close(parameter.grad.full_tensor(), gradient, rtol=1e-4, atol=1e-5)


def check_torch_compile_leaves_a_planned_model_as_it_is() -> None:
    net, args, kwargs = mlp()
    parallel = sw.parallelize(net, sw.plan(net, args, kwargs, devices=4), copy=True)
    compiled: Any = torch.compile(parallel, backend="eager")
    for rows in (None, 4, 2):
        piece = [arg[:rows] for arg in args]
        torch.testing.assert_close(compiled(*piece, **kwargs), net(*piece, **kwargs))
    assert not counters["stats"], "nothing was captured"


def check_optimizer_states_of_one_device_are_taken() -> None:
    net, args, kwargs = mlp()
    for make in (sgd, adamw):
        one_device = make(net.parameters())
        parallel = sw.parallelize(
            net, sw.plan(net, args, kwargs, devices=4, mem_coeff=10.0), copy=True
        )
        optimizer = make(parallel.parameters())
        train_on(parallel, optimizer, args)  # A state of its own that is replaced.
        for _ in range(2):
            train_on(net, one_device, args)
        parallel.load_state_dict(net.state_dict())
        optimizer.load_state_dict(copy.deepcopy(one_device.state_dict()))
        for _ in range(2):
            got, wanted = (
                train_on(*pair, args) for pair in ((parallel, optimizer), (net, one_device))
            )
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
        for name, parameter in parallel.named_parameters():
            for key, value in optimizer.state[parameter].items():
                mine = value.full_tensor() if isinstance(value, DTensor) else value
                wanted = one_device.state[net.get_parameter(name)][key]
                torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)


class ShardPickler(pickle.Pickler):
    """Writes shards, which a planned model refuses: files of earlier versions have them."""

    def reducer_override(self, value: Any) -> Any:
        return Tensor.__reduce_ex__(value, 4) if type(value) is DTensor else NotImplemented


def check_a_state_that_rank_0_saved_is_refused_by_others() -> None:
    net, args, kwargs = mlp()
    parallel = sw.parallelize(net, sw.plan(net, args, kwargs, devices=4, mem_coeff=10.0), copy=True)
    optimizer = adamw(parallel.parameters())
    train_on(parallel, optimizer, args)
    file = io.BytesIO()
    ShardPickler(file).dump([parallel.state_dict(), optimizer.state_dict()])
    box = [file.getvalue()]
    dist.broadcast_object_list(box)
    of_rank_0 = pickle.loads(box[0])
    for loads, state in zip((parallel, optimizer), of_rank_0, strict=True):
        try:
            loads.load_state_dict(state)
        except sw.PlanError as error:
            assert dist.get_rank()
            assert "is the shard of another rank" in str(error)
        else:
            assert not dist.get_rank(), "the part of another rank was loaded"


def train_on(net: nn.Module, optimizer: torch.optim.Optimizer, args: Any) -> Tensor:
    loss = loss_of(net(*args))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def check_calls_of_many_shapes_are_compared_in_bounded_memory() -> None:
    net, args, _ = mlp()
    parallel = sw.parallelize(net, sw.plan(net, args, devices=4), copy=True)
    batch_guard.MAX_CACHED_SIGNATURES, most = 2, batch_guard.MAX_CACHED_SIGNATURES
    for rows in (1, 2, 3, 1, 3):
        piece = [arg[:rows] for arg in args]
        torch.testing.assert_close(parallel(*piece), net(*piece))
        assert len(parallel.execution._guard._signature_tables) <= 2
    batch_guard.MAX_CACHED_SIGNATURES = most


def check_recomputed() -> None:
    """Recomputed layers with their redistributions and gathers, eager and compiled."""
    net, args, kwargs = llama()
    sw.recompute(net.model.layers)
    plan = sw.plan(net, args, kwargs, devices=4, mem_coeff=10.0, hsdp={"level": "level3"})
    assert plan.recompute
    check_training((net, args, kwargs), plan, adamw)
    net, args, _ = mlp()
    sw.recompute(net, communication=False)
    parallel = sw.parallelize(net, sw.plan(net, args, devices=4, mem_coeff=10.0), copy=True)
    parallel.compile(fullgraph=True, backend="aot_eager")
    for module in (parallel, net):
        module(*args).backward()
    for name, parameter in parallel.named_parameters():
        got = parameter.grad.full_tensor()
        torch.testing.assert_close(got, net.get_parameter(name).grad, rtol=1e-4, atol=1e-5)


def check_other_modes_and_batches() -> None:
    """After a training step: `eval()`, and a last batch that no axis divides."""
    net, (images, labels), _ = resnet(batch=8, blocks=(1,))
    for mem_coeff in (0.01, 10.0):
        plan = sw.plan(net, (images, labels), devices=4, mem_coeff=mem_coeff)
        parallel = sw.parallelize(net, plan, copy=True)
        for training in (True, False):
            for size in (8, 3):
                got = parallel.train(training)(images[:size], labels[:size])
                wanted = net.train(training)(images[:size], labels[:size])
                torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
        parallel.train()(images[:3], labels[:3]).backward()
        net.train()(images[:3], labels[:3]).backward()
        for name, parameter in parallel.named_parameters():
            gradient = net.get_parameter(name).grad
            torch.testing.assert_close(parameter.grad.full_tensor(), gradient, rtol=1e-3, atol=1e-4)
        net.zero_grad()


class Autoencoder(nn.Module):
    """Has a second method, which `forward` calls for an argument of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(16, 8)
        self.decoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))

    def decode(self, z: Tensor) -> Tensor:
        return self.decoder(z)

    def forward(self, x: Tensor | None = None, *, z: Tensor | None = None) -> Tensor:
        if x is None:
            return self.decode(z)
        return (self.decode(self.encoder(x)) - x).square().mean()


def check_a_second_method_runs_as_planned() -> None:
    torch.manual_seed(0)
    net = Autoencoder()
    x, z = torch.randn(8, 16), torch.randn(6, 8)
    plan = sw.plan(net, (x,), devices=4, mem_coeff=64.0)
    assert plan.strategies["decoder.2"] == ((1, 4), (1, 4))
    parallel = sw.parallelize(net, plan, copy=True)
    torch.testing.assert_close(parallel(x), net(x))
    decoded, wanted = parallel(z=z), net.decode(z)
    torch.testing.assert_close(decoded, wanted)
    decoded.square().mean().backward()
    wanted.square().mean().backward()
    for name, parameter in parallel.decoder.named_parameters():
        gradient = net.decoder.get_parameter(name).grad
        assert gradient is not None
        torch.testing.assert_close(parameter.grad.full_tensor(), gradient, rtol=1e-4, atol=1e-5)
    with pytest.raises(sw.PlanError, match=r"with sw.whole\(net\):`, or in `forward` of the model"):
        parallel.decode(z)
    with sw.whole(parallel):
        torch.testing.assert_close(parallel.decode(z), wanted)


def check_dropout_on_ranks_seeded_apart() -> None:
    """Replicated activations, for which all ranks must draw one mask."""
    net, x = nn.Sequential(nn.Dropout(0.5)), torch.ones(64)
    plan = sw.plan(net, (x,), devices=4, mode="stand_alone")
    torch.manual_seed(dist.get_rank())
    mine = sw.parallelize(net, plan, copy=True)(x)
    every = [torch.empty_like(mine) for _ in range(4)]
    dist.all_gather(every, mine)
    assert all(torch.equal(mine, other) for other in every)
    assert 0 < int((mine == 0).sum()) < 64


def check_inputs_that_arrive_cut() -> None:
    """Each rank passes a local batch: in one program, with micro-batches, with pipeline stages."""
    torch.manual_seed(0)
    net = sw.WithLoss(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)), nn.MSELoss())
    batch, other = ((torch.randn(rows, 6), torch.randn(rows, 4)) for rows in (16, 8))
    wanted = net(*batch)
    gradients = torch.autograd.grad(wanted, list(net.parameters()))
    for stages, pieces in ((1, 1), (1, 2), (2, 2)):
        plan = sw.plan(
            net,
            batch,
            devices=4,
            stages=stages,
            micro_batches=pieces,
            dataset_strategy="data_parallel",
        )
        parallel = sw.parallelize(net, plan, copy=True)
        loss = parallel.train_step(*local_batch(plan, dist.get_rank(), batch))
        torch.testing.assert_close(loss, wanted.detach())
        # Those of this rank's stage.
        of_rank = dict(parallel.named_parameters(remove_duplicate=False))
        for name, gradient in zip(dict(net.named_parameters()), gradients, strict=True):
            mine = of_rank.get(name)
            if mine is not None:
                assert mine.grad is not None
                torch.testing.assert_close(mine.grad.full_tensor(), gradient, msg=name)
        with torch.no_grad():
            smaller = parallel(*local_batch(plan, dist.get_rank(), other))
        torch.testing.assert_close(smaller, net(*other).detach())


class Optional(nn.Module):
    """Returns a prediction, or the loss if there is a target."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, target: Tensor | None = None
    ) -> Tensor:
        y = self.down(torch.relu(self.up(x if mask is None else x * mask)))
        return y if target is None else nn.functional.mse_loss(y, target)


def check_calls_with_other_arguments() -> None:
    """Each rank passes the global or a local batch, with and without a target."""
    net, (x, target) = Optional(), batch_of(8)
    for strategy in ("full_batch", "data_parallel"):
        plan = sw.plan(net, (x,), {"target": target}, devices=4, dataset_strategy=strategy)
        parallel, (mine, my_target) = sw.parallelize(net, plan, copy=True), (x, target)
        if strategy == "data_parallel":
            mine, my_target = local_batch(plan, dist.get_rank(), (x, target))
        loss = parallel(target=my_target, x=mine)
        torch.testing.assert_close(loss, net(x, target=target))
        # Each rank gets the outputs of its own samples.
        wanted = net(x) if strategy == "full_batch" else net(x).chunk(4)[dist.get_rank()]
        torch.testing.assert_close(parallel(mine), wanted)
        with torch.no_grad():
            torch.testing.assert_close(parallel.eval()(x=mine), wanted)
        mask = torch.ones_like(mine)
        if strategy == "full_batch":
            torch.testing.assert_close(parallel(mine, mask), net(x, mask))
            continue
        try:
            parallel(mine, mask)
        except sw.PlanError as error:
            assert "that the planned call did not pass" in str(error)
        else:
            raise AssertionError("a tensor that may be a part or the whole was taken")


class Head(nn.Module):
    """Returns a loss and a sharded output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        y = self.down(torch.relu(self.up(x)))
        return nn.functional.mse_loss(y, target), y


class Attention(nn.Module):
    """Branches on the length of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.heads = nn.Embedding(16, 8), nn.Linear(8, 24)
        self.out = nn.Linear(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        batch, length = ids.shape
        heads = self.heads(self.table(ids)).view(batch, length, 3, 2, 4).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        y = y.transpose(1, 2).reshape(batch * length, 8)
        scores = self.out(y.tanh() if length > 12 else y) / length
        return nn.functional.cross_entropy(scores, ids.flatten())


def check_many_sizes() -> None:
    """Sizes that share a trace, and sizes that take other branches."""
    net = Attention()
    plan = sw.plan(net, (torch.zeros(8, 16, dtype=torch.int64),), devices=4)
    assert any(plan.cuts.values())
    parallel = sw.parallelize(net, plan, copy=True)
    for size in ((8, 8), (4, 20), (8, 24), (2, 40), (8, 10), (4, 12), (3, 13), (8, 1)):
        ids = torch.arange(size[0] * size[1]).view(size) % 16
        wanted = net(ids)
        gradients = torch.autograd.grad(wanted, list(net.parameters()))
        parallel.zero_grad()
        torch.testing.assert_close(parallel.train_step(ids), wanted.detach())
        for gradient, parameter in zip(gradients, parallel.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), gradient)
        torch.testing.assert_close(parallel(ids), wanted)


def check_a_batch_that_part_of_an_axis_divides() -> None:
    net = Head()
    plan = sw.plan(net, batch_of(8), devices=4, mode="data_parallel")
    assert plan.mesh.device_matrix == (4,)
    parallel = sw.parallelize(net, sw.Plan.from_json(plan.to_json()), copy=True)
    assert {p.device_mesh.shape for p in parallel.parameters()} == {(4,)}
    for rows, mesh in ((8, (4,)), (6, (2, 2)), (12, (4,)), (6, (2, 2))):
        batch = batch_of(rows)
        (loss, y), (wanted, y_wanted) = parallel(*batch), net(*batch)
        assert y.device_mesh.shape == mesh
        torch.testing.assert_close(y.full_tensor(), y_wanted)
        torch.testing.assert_close(loss, wanted)
        loss.backward()
        wanted.backward()
    for name, parameter in parallel.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), net.get_parameter(name).grad)


def batch_of(rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    return torch.randn(rows, 8), torch.randn(rows, 4)


def check_world_size() -> None:
    net, args, kwargs = mlp()
    try:
        sw.parallelize(net, sw.plan(net, args, kwargs, devices=8), copy=True)
    except sw.PlanError as error:
        assert "for 8 devices, but 4 processes are running" in str(error)
    else:
        raise AssertionError("a plan for 8 devices ran on 4")


CHECKS = (
    check_world_size,
    check_parameters_are_shards,
    check_deferred_parameters,
    check_gradients_accumulate,
    check_searched_plans,
    check_sharded_edges,
    check_other_modes_and_batches,
    check_a_second_method_runs_as_planned,
    check_dropout_on_ranks_seeded_apart,
    check_inputs_that_arrive_cut,
    check_calls_with_other_arguments,
    check_many_sizes,
    check_a_batch_that_part_of_an_axis_divides,
    check_torch_compile_leaves_a_planned_model_as_it_is,
    check_optimizer_states_of_one_device_are_taken,
    check_a_state_that_rank_0_saved_is_refused_by_others,
    check_calls_of_many_shapes_are_compared_in_bounded_memory,
)
SLOW_CHECKS = (check_random_plans, check_compiled, check_recomputed)
"""Checks that simulated ranks cover as well."""


if __name__ == "__main__":
    run_checks(SLOW_CHECKS if "slow" in sys.argv else CHECKS)
