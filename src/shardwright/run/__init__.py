"""Train from a configuration file: data, training loop, process launching, checkpoints."""

from shardwright.core.checkpoint.sampler import BatchSampler, local_batch
from shardwright.run.data.data import Batches, digits, mnist, mnist_or_digits, packed_text
from shardwright.run.data.padding import PadToMultiple
from shardwright.run.launch.process_group import World, process_group
from shardwright.run.loop.loop import MeanAbsoluteError, MeanSquaredError, train
from shardwright.run.loop.step_log import StepRecord

__all__ = [
    "BatchSampler",
    "Batches",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "PadToMultiple",
    "StepRecord",
    "World",
    "digits",
    "local_batch",
    "mnist",
    "mnist_or_digits",
    "packed_text",
    "process_group",
    "train",
]
