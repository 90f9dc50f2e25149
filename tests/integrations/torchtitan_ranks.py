"""Trainings of torchtitan's `Trainer` with planned models on several ranks, compared with one
process.

python torchtitan_ranks.py FOLDER
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardwright as sw

sys.path.insert(0, str(Path(__file__).parents[1]))

# Before all that imports torchtitan.
from integrations.torchtitan_cases import LOCAL_BATCH, Seen, configuration, one_process, trained
from shardwright.integrations.torchtitan import parallelize_fn
from torchrun import run_checks

BATCH = 2 * LOCAL_BATCH
TENSOR_PARALLEL = {"mode": "recursive_programming", "mem_coeff": 64.0}


def folder() -> Path:
    return Path(sys.argv[1])


def own(name: str, **config: Any) -> Any:
    """Return a configuration with torchtitan's own parallelization, and a folder of its own."""
    return configuration(folder() / name, **config)


def planned(name: str, options: Mapping[str, Any] | None = None, **config: Any) -> Any:
    made = own(name, **config)
    made.model_spec.parallelize_fn = parallelize_fn(**(options or {}))
    return made


def reference(accumulated: int = 1, **options: Any) -> tuple[Seen, nn.Module]:
    return one_process(configuration(folder(), **options), BATCH, accumulated)


def local_batch(tensor_parallel: int = 1) -> int:
    """Number of samples that a rank reads, if groups of `tensor_parallel` ranks read the same."""
    return BATCH * tensor_parallel // dist.get_world_size()


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_equal(found: Seen, wanted: Seen) -> None:
    assert [entry[0] for entry in found] == [entry[0] for entry in wanted]
    for (_, loss, *norm), (_, wanted_loss, *wanted_norm) in zip(found, wanted, strict=True):
        assert loss == pytest.approx(wanted_loss, rel=2e-5), (found, wanted)
        # PyTorch's norm of half a million float32 numbers on a CPU is off by some 6e-5.
        assert norm == pytest.approx(wanted_norm, rel=2e-4), (found, wanted)


def assert_equal_models(found: nn.Module, wanted: nn.Module) -> None:
    state = {name: full(value) for name, value in found.state_dict().items()}
    torch.testing.assert_close(state, dict(wanted.state_dict()), rtol=1e-3, atol=1e-5)


def trains_as_one_process() -> None:
    wanted, net = reference()
    seen, parallel = trained(planned("data", local_batch=local_batch()))
    assert_equal(seen, wanted)
    assert_equal_models(parallel, net)
    # Ranks of one `tensor_parallel_degree` read the same samples.
    config = planned("tensor", TENSOR_PARALLEL, local_batch=local_batch(2))
    config.parallelism.tensor_parallel_degree = 2
    seen, parallel = trained(config)
    assert any(placement.is_shard() for p in parallel.parameters() for placement in p.placements)
    assert_equal(seen, wanted)
    assert_equal_models(parallel, net)


def accumulates_and_divides_the_loss_into_chunks() -> None:
    wanted, net = reference(2)
    for options, tensor_parallel in (({}, 1), (TENSOR_PARALLEL, 2)):
        size = local_batch(tensor_parallel)
        config = planned(f"chunks{tensor_parallel}", options, local_batch=size, chunked=True)
        config.parallelism.tensor_parallel_degree = tensor_parallel
        config.training.global_batch_size = 2 * BATCH
        seen, parallel = trained(config)
        assert_equal(seen, wanted)
        assert_equal_models(parallel, net)


def computes_in_bfloat16_and_recomputes_layers() -> None:
    from torchtitan.distributed.activation_checkpoint import FullAC

    wanted, _ = reference()
    config = planned("bfloat16", local_batch=local_batch(), chunked=True)
    config.training.mixed_precision_param = "bfloat16"
    config.activation_checkpoint = FullAC.Config()
    seen, parallel = trained(config)
    for (_, loss, *_), (_, wanted_loss, *_) in zip(seen, wanted, strict=True):
        assert loss == pytest.approx(wanted_loss, rel=5e-3)
    program = str(parallel.program)
    assert "torch.bfloat16" in program
    assert "recompute" in program


def balances_experts() -> None:
    wanted, net = reference(model="deepseek_v3")
    config = planned("experts", model="deepseek_v3", local_batch=local_batch())
    seen, parallel = trained(config)
    assert_equal(seen, wanted)
    bias = net.layers["1"].moe.expert_bias_E
    assert bias.count_nonzero()
    torch.testing.assert_close(full(parallel.layers["1"].moe.expert_bias_E), bias)


def exchanges_checkpoints_with_torchtitan() -> None:
    wanted, net = reference()
    after_2_steps = [entry for entry in wanted if entry[0] > 2]
    assert_equal(trained(own("own", local_batch=local_batch()))[0], wanted)
    # "data" and "tensor" were trained with plans, in `trains_as_one_process`.
    for config in (
        own("data", local_batch=local_batch()),
        planned("tensor", local_batch=local_batch()),
        planned("own", TENSOR_PARALLEL, local_batch=local_batch()),
    ):
        config.checkpoint.load_step = 2
        seen, trained_model = trained(config)
        assert_equal(seen, after_2_steps)
        assert_equal_models(trained_model, net)


def refuses_what_a_plan_does_not_follow() -> None:
    for change, match in (
        ({"pipeline_parallel_degree": 2}, "torchtitan runs the stages itself\nset it to 1"),
        ({"context_parallel_degree": 2}, "a plan shards the sequence of whole samples"),
    ):
        config = planned("refused")
        for name, value in change.items():
            setattr(config.parallelism, name, value)
        with pytest.raises(sw.PlanError, match=match):
            trained(config)
    config = planned("refused")
    config.training.enable_cpu_offload = True
    with pytest.raises(sw.PlanError, match="keep their parameters on the device"):
        trained(config)


CHECKS = (
    trains_as_one_process,
    accumulates_and_divides_the_loss_into_chunks,
    computes_in_bfloat16_and_recomputes_layers,
    balances_experts,
    exchanges_checkpoints_with_torchtitan,
    refuses_what_a_plan_does_not_follow,
)

if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    run_checks(CHECKS)
