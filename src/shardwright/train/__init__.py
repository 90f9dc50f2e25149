"""Training: data, the loop, launching and following processes, checkpoints."""

from shardwright.train.data import Batches, digits, mnist, mnist_or_digits, packed_text
from shardwright.train.loop import MeanAbsoluteError, MeanSquaredError, train
from shardwright.train.padding import PadToMultiple
from shardwright.train.process_group import World, process_group
from shardwright.train.sampler import BatchSampler, local_batch
from shardwright.train.step_log import StepRecord

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
