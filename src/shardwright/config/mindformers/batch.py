"""How many samples a step has, by the rule of four rows."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.config.mindformers.keys import Keys
from shardwright.config.mindformers.parallelism import WHOLE_OPERATORS, Parallelism


@dataclass(frozen=True)
class Batch:
    """What makes the global batch.

        pipeline   full_batch   global batch = batch_size · interleave ·
        no         False        devices · gradient_accumulation_steps
        no         True         data_parallel · gradient_accumulation_steps
        yes        False        devices · micro_batch_num
        yes        True         data_parallel · micro_batch_num

    A mode that decides no operator (`data_parallel`, `stand_alone`) is the first row, without
    interleaving. Where `auto_pipeline` may choose several stages there is a pipeline.

    Args:
        size: `runner_config.batch_size`.
        gradient_accumulation_steps: without meaning where there are stages.
        interleave: `micro_batch_interleave_num`.
    """

    size: int
    gradient_accumulation_steps: int
    interleave: int
    parallelism: Parallelism

    def micro_batches(self) -> int:
        """Pieces in which the global batch is computed one after the other."""
        return self.interleave * self._steps()[1]

    def global_batch(self, devices: int) -> int:
        """Samples of one step on so many devices."""
        parallelism = self.parallelism
        replicas = parallelism.data_parallel if parallelism.full_batch else devices
        return self.size * replicas * self.micro_batches()

    def formula(self, devices: int) -> str:
        """The row of the rule that holds, with its numbers."""
        full = self.parallelism.full_batch
        name, steps = self._steps()
        replicas = "data_parallel" if full else "devices"
        number = self.parallelism.data_parallel if full else devices
        return (
            f"global batch {self.global_batch(devices)} = batch_size {self.size} · {replicas}"
            f" {number} · micro_batch_interleave_num {self.interleave} · {name} {steps}"
        )

    def _steps(self) -> tuple[str, int]:
        if self.parallelism.pipelined:
            return "micro_batch_num", self.parallelism.micro_batch_num
        return "gradient_accumulation_steps", self.gradient_accumulation_steps


def batch(keys: Keys, parallelism: Parallelism, notes: list[str]) -> Batch:
    """Reads the batch; `notes` takes what has no effect.

    Raises:
        ConfigError: a number is missing or not positive.
    """
    runner, dataset = keys.section("runner_config"), keys.section("train_dataset")
    if runner.has("batch_size"):
        size = runner.whole("batch_size")
        if dataset.has("batch_size") and dataset.whole("batch_size") != size:
            notes.append(
                f"runner_config.batch_size {size} overrides train_dataset.batch_size"
                f" {dataset.whole('batch_size')}"
            )
    else:
        size = dataset.whole("batch_size", 1)
    steps = runner.whole("gradient_accumulation_steps", 1)
    if steps > 1 and parallelism.pipelined:
        notes.append(
            "runner_config.gradient_accumulation_steps has no effect with pipeline_stage"
            f" {parallelism.stages}: parallel_config.micro_batch_num counts the micro-batches"
        )
    interleave = keys.whole("micro_batch_interleave_num", 1)
    if interleave > 1 and parallelism.mode in WHOLE_OPERATORS:
        notes.append(f"micro_batch_interleave_num is 1: the mode is {parallelism.mode}")
        interleave = 1
    return Batch(size, steps, interleave, parallelism)
