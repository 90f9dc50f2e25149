"""Read the training options of a MindFormers file: `optimizer`, `lr_schedule`, and others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.mindformers.keys import Keys
from shardwright.mindformers.parallelism import WITHOUT_OPERATOR_PARALLEL, Parallelism
from shardwright.mindformers.recomputation import Recomputation, read_recomputation

_OPTIMIZERS = (
    *("FP32StateAdamWeightDecay", "FusedAdamWeightDecay", "AdamWeightDecayX"),
    *("AdamWeightDecay", "AdamW"),
    # Other names of these in MindFormers.
    *("adamw", "fused_adamw", "fp32_adamw"),
)
_SCHEDULES = {
    "CosineWithWarmUpLR": "cosine",
    "LinearWithWarmUpLR": "linear",
    "PolynomialWithWarmUpLR": "polynomial",
    "ConstantWarmUpLR": "constant",
    "cosine": "cosine",
    "linear": "linear",
    "polynomial": "polynomial",
    "constant_with_warmup": "constant",
}
_CHECKPOINT_CALLBACKS = ("CheckpointMonitor", "CheckpointMointor")
"""Names of MindFormers' callback that saves checkpoints; the misspelled one is of old versions."""
_ONLY_SCHEDULE_VALUES = {"warmup_epochs": 0.0, "num_cycles": 0.5}
"""The only supported value of some keys of MindFormers' `lr_schedule`, by key."""

_DEFAULT_CLIP_NORM = 1.0
"""MindFormers' default of `max_grad_norm`."""


@dataclass(frozen=True)
class Training:
    """Training options of a MindFormers file.

    Args:
        seed: seed of initial weights and sample order.
        resume: whether to resume from a checkpoint.
        optimizer, train: the sections `optimizer` and `train` of a Shardwright configuration.
    """

    seed: int
    resume: bool
    recompute: Recomputation
    optimizer: Mapping[str, Any]
    train: Mapping[str, Any]


def read_training(keys: Keys, stages: int, chunks: int, notes: list[str]) -> Training:
    """Read the training options of a MindFormers file.

    Args:
        keys: all keys of the file.
        stages: number of pipeline stages.
        chunks: number of chunks of each stage.
        notes: receives a note for each key without effect.

    Raises:
        ConfigError: if an optimizer or schedule is not supported, or a number is invalid or
            contradicts another.
    """
    # Only checked: both modes train.
    keys.string("run_mode", "train", valid=("train", "finetune"))
    seed, epochs = (
        keys.integer("seed", 0, minimum=0),
        keys.section("runner_config").integer("epochs", 1),
    )
    optimizer = _read_optimizer(keys, notes)
    recompute = read_recomputation(keys.section("recompute_config"), stages, chunks, notes)
    load, resume = keys.string("load_checkpoint"), keys.flag("resume_training", False)
    if resume and not load:
        raise keys.error(
            "resume_training",
            "True needs a checkpoint to resume from\nset `load_checkpoint` to its folder",
        )
    checkpoint = _read_checkpoint_callback(keys)
    # A resumed run saves to the folder of its checkpoints.
    if resume:
        checkpoint["folder"] = load
    train: dict[str, Any] = {"epochs": epochs, "seed": seed, "resume": resume}
    if checkpoint:
        train["checkpoint"] = checkpoint
    # Resuming reads the checkpoint by itself.
    if load and not resume:
        train["load"] = load
    return Training(seed, resume, recompute, optimizer, train)


def _read_checkpoint_callback(keys: Keys) -> dict[str, Any]:
    """Convert the callback `CheckpointMonitor` to keys of `train.checkpoint`; {} without it."""
    callbacks, folder = keys.any("callbacks") or [], keys.string("output_dir", "output")
    if not isinstance(callbacks, list):
        raise keys.error(
            "callbacks",
            f"{callbacks!r} is not a list\nset for example [{{type: CheckpointMonitor}}]",
        )
    for index, content in enumerate(callbacks):
        if isinstance(content, Mapping) and content.get("type") in _CHECKPOINT_CALLBACKS:
            monitor = Keys(content, f"callbacks[{index}]", keys.file)
            # MindFormers' defaults, here and below.
            steps = monitor.integer("save_checkpoint_steps", 1, minimum=0)
            if not steps and monitor.number("save_checkpoint_seconds", 0, minimum=0):
                raise monitor.error(
                    "save_checkpoint_seconds",
                    "checkpoints by time are not supported\nset `save_checkpoint_steps` instead",
                )
            # MindSpore saves nothing then, not even at the end.
            if not steps:
                return {}
            return {
                "folder": folder,
                "every": steps,
                "keep": monitor.integer("keep_checkpoint_max", 5),
                "async": monitor.flag("async_save", False),
            }
    return {}


def _read_optimizer(keys: Keys, notes: list[str]) -> dict[str, Any]:
    """Read the section `optimizer`; all types of MindFormers are variants of AdamW."""
    section, wrapper = keys.section("optimizer"), keys.section("runner_wrapper")
    section.string("type", "AdamW", valid=_OPTIMIZERS)
    clips = wrapper.flag("use_clip_grad", False)
    # Also without clipping, so that the key counts as read.
    norm = wrapper.number("max_grad_norm", _DEFAULT_CLIP_NORM, above=0)
    return {
        "name": "adamw",
        "learning_rate": _read_learning_rate(section, keys.section("lr_schedule"), notes),
        "schedule": _read_lr_schedule(keys),
        "betas": _read_adam_betas(section),
        "eps": section.number("eps", 1e-8, above=0),
        "weight_decay": section.number("weight_decay", 0.0, minimum=0),
        # MindFormers decays neither biases nor the weights of normalization layers.
        "decay_vectors": False,
        "clip_norm": norm if clips else None,
    }


def _read_adam_betas(section: Keys) -> list[float]:
    """Read the two betas of Adam: the keys `beta1` and `beta2`, or `betas`."""
    betas = section.any("betas")
    if betas is None:
        names = ("beta1", "beta2")
    elif not isinstance(betas, list | tuple) or len(betas) != 2:
        raise section.error("betas", f"{betas!r} are not two numbers\nset for example [0.9, 0.95]")
    elif section.has("beta1") or section.has("beta2"):
        raise section.error(
            "betas", "`betas` conflicts with `beta1` and `beta2`\nremove one of the two"
        )
    else:
        names = ("betas[0]", "betas[1]")
        # With an index in their names, for error messages.
        section = Keys(dict(zip(names, betas, strict=True)), section.path, section.file)
    # Defaults of Adam (Kingma and Ba, 2015).
    return [
        section.number(name, default, minimum=0, below=1)
        for name, default in zip(names, (0.9, 0.999), strict=True)
    ]


def _read_learning_rate(optimizer: Keys, schedule: Keys, notes: list[str]) -> float:
    """Read the peak learning rate from `lr_schedule`, or else from `optimizer`, as MindFormers."""
    section = schedule if schedule.has("learning_rate") else optimizer
    if not section.has("learning_rate"):
        raise section.error(
            "learning_rate", "the key is missing\nset it, or `lr_schedule.learning_rate`"
        )
    rate = section.number("learning_rate", above=0)
    if optimizer.has("learning_rate") and optimizer.number("learning_rate") != rate:
        notes.append(
            f"lr_schedule.learning_rate {rate:g} overrides optimizer.learning_rate"
            f" {optimizer.number('learning_rate'):g}"
        )
    return rate


def _read_lr_schedule(keys: Keys) -> dict[str, Any]:
    section = keys.section("lr_schedule")
    for name in ("lr_scale", "layer_scale"):
        if keys.flag(name, False):
            raise keys.error(name, "learning rates per layer are not supported\nset it to False")
    if not section.content:
        return {"kind": "constant"}
    for name, value in _ONLY_SCHEDULE_VALUES.items():
        if section.number(name, value) != value:
            raise section.error(name, f"{section.any(name)} is not supported\nset it to {value:g}")
    decay = _SCHEDULES[section.string("type", "ConstantWarmUpLR", valid=list(_SCHEDULES))]
    steps, ratio = section.integer("warmup_steps", 0, minimum=0), None
    if section.has("warmup_ratio"):
        ratio = section.number("warmup_ratio", minimum=0, below=1)
        if steps:
            raise section.error(
                "warmup_ratio", f"{ratio:g} conflicts with warmup_steps {steps}\nremove one key"
            )
    total = section.integer("total_steps", -1, minimum=-1)
    return {
        "kind": decay,
        "start": section.number("warmup_lr_init", 0.0, minimum=0),
        "end": section.number("lr_end", 0.0, minimum=0),
        "warmup_steps": steps,
        "warmup_ratio": ratio,
        # -1 stands for the steps of the run.
        "total_steps": None if total < 1 else total,
        "power": section.number("lr_power", 1.0, above=0),
    }


@dataclass(frozen=True)
class Batch:
    """Factors of the global batch size in a MindFormers file.

        pipeline   full_batch   global batch = batch_size · interleave ·
        no         False        devices · gradient_accumulation_steps
        no         True         data_parallel · gradient_accumulation_steps
        yes        False        devices · micro_batch_num
        yes        True         data_parallel · micro_batch_num

    The modes `data_parallel` and `stand_alone` follow the first row, with interleave 1. The rows
    with a pipeline also hold if `auto_pipeline` may choose several stages.

    Args:
        size: `runner_config.batch_size`.
        gradient_accumulation_steps: has no effect with pipeline stages.
        interleave: `micro_batch_interleave_num`.
    """

    size: int
    gradient_accumulation_steps: int
    interleave: int
    parallelism: Parallelism

    def micro_batches(self) -> int:
        """Return the number of micro-batches of a step."""
        # Interleaved parts of a batch are micro-batches as well.
        return self.interleave * self._get_num_steps_option()[1]

    def global_batch(self, devices: int) -> int:
        """Return the global batch size in samples."""
        parallelism = self.parallelism
        replicas = parallelism.data_parallel if parallelism.full_batch else devices
        return self.size * replicas * self.micro_batches()

    def formula(self, devices: int) -> str:
        """Return the formula of the global batch size as text, with the values of the file."""
        full_batch = self.parallelism.full_batch
        steps_name, steps = self._get_num_steps_option()
        replicas_name = "data_parallel" if full_batch else "devices"
        replicas = self.parallelism.data_parallel if full_batch else devices
        return (
            f"global batch {self.global_batch(devices)} = batch_size {self.size} · {replicas_name}"
            f" {replicas} · micro_batch_interleave_num {self.interleave} · {steps_name} {steps}"
        )

    def _get_num_steps_option(self) -> tuple[str, int]:
        """Return (configuration key, value) of the number of micro-batches with a pipeline,
        otherwise of the number of gradient accumulation steps."""
        if self.parallelism.pipelined:
            return "micro_batch_num", self.parallelism.micro_batch_num
        return "gradient_accumulation_steps", self.gradient_accumulation_steps


def read_batch(keys: Keys, parallelism: Parallelism, notes: list[str]) -> Batch:
    """Read the factors of the global batch size.

    Args:
        keys: all keys of the file.
        parallelism: parallel degrees, which are factors of the batch size.
        notes: receives a note for each key without effect.

    Raises:
        ConfigError: if a number is missing or not positive.
    """
    runner, dataset = keys.section("runner_config"), keys.section("train_dataset")
    if dataset.flag("eod_reset", False):
        raise dataset.error(
            "eod_reset",
            "Shardwright cannot reset positions and attention between documents\nset it to False",
        )
    if runner.has("batch_size"):
        size = runner.integer("batch_size")
        if dataset.has("batch_size") and dataset.integer("batch_size") != size:
            notes.append(
                f"runner_config.batch_size {size} overrides train_dataset.batch_size"
                f" {dataset.integer('batch_size')}"
            )
    else:
        size = dataset.integer("batch_size", 1)
    steps = runner.integer("gradient_accumulation_steps", 1)
    if steps > 1 and parallelism.pipelined:
        notes.append(
            "runner_config.gradient_accumulation_steps has no effect with pipeline_stage"
            f" {parallelism.stages}: parallel_config.micro_batch_num counts the micro-batches"
        )
    interleave = keys.integer("micro_batch_interleave_num", 1)
    if interleave > 1 and parallelism.mode in WITHOUT_OPERATOR_PARALLEL:
        notes.append(f"micro_batch_interleave_num is 1: the mode is {parallelism.mode}")
        interleave = 1
    return Batch(size, steps, interleave, parallelism)
