"""The tiny variant of a language model, divided as its expert divides the large one."""

from __future__ import annotations

from dataclasses import replace

from shardwright.config.build import Run
from shardwright.errors import ConfigError
from shardwright.models.dimensions import Dimensions

BATCH, MICRO_BATCHES = 16, 2
"""Samples of a step, and into how many pieces they are cut, so that there can be two stages."""


def tiny_run(run: Run, devices: int) -> Run:
    """An expert's run of the tiny variant on so many devices, in single precision on texts that are
    built in: as many stages as there are blocks at most, model parallel as in the file where it
    divides the devices that are left, and data parallel over the others. All parameters are stored
    sharded where the file shards any.

    Args:
        run: an expert's.

    Raises:
        ConfigError: so many devices do not divide it.
    """
    parallel, sizes = run.config.parallel, run.config.model.sizes
    assert parallel.expert is not None and sizes is not None
    tiny = Dimensions(**sizes).tiny()
    stages = _shared(int(parallel.stages), tiny.num_layers, devices)
    model = _shared(parallel.expert.model_parallel, tiny.num_kv_heads, devices // stages)
    data, rows = devices // stages // model, BATCH // MICRO_BATCHES
    if rows % data:
        raise ConfigError(
            f"devices={devices}: the tiny variant has {rows} samples in a micro-batch, which {data}"
            " data parallel parts do not divide; valid are 2, 4, 8"
        )
    expert = parallel.expert.model_copy(update={"data_parallel": data, "model_parallel": model})
    whole = {"threshold": 0}
    config = run.config.model_copy(
        update={
            "model": run.config.model.model_copy(update={"sizes": vars(tiny)}),
            "data": run.config.data.model_copy(
                update={"seq_length": tiny.seq_length, "batch_size": BATCH, "path": None}
            ),
            "parallel": parallel.model_copy(
                update={
                    "expert": expert,
                    "stages": stages,
                    "micro_batches": MICRO_BATCHES,
                    "hsdp": parallel.hsdp and parallel.hsdp.model_copy(update=whole),
                    "compute_dtype": None,
                    "memory_limit": None,
                }
            ),
            "train": run.config.train.model_copy(update={"dtype": "float32", "load": None}),
        }
    )
    return replace(run, config=config)


def _shared(said: int, most: int, devices: int) -> int:
    """The largest number up to `said` and `most` that divides `devices`."""
    return max(n for n in range(1, min(said, most, devices) + 1) if devices % n == 0)
