"""Training: data, the loop, processes and what is seen of them."""

from shardwright.train.data import Batches, digits, mnist, mnist_or_digits
from shardwright.train.loss import MeanAbsoluteError, MeanSquaredError
from shardwright.train.process_group import World, process_group
from shardwright.train.sampler import BatchSampler, local_part
from shardwright.train.steps import Step
from shardwright.train.text import packed_text
from shardwright.train.trainer import train

__all__ = [
    "BatchSampler",
    "Batches",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "Step",
    "World",
    "digits",
    "local_part",
    "mnist",
    "mnist_or_digits",
    "packed_text",
    "process_group",
    "train",
]
