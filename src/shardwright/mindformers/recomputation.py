"""Read `recompute_config` of a MindFormers file: activation checkpointing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwright.errors import ConfigError
from shardwright.mindformers.keys import Keys
from shardwright.models.sizes import MAX_LAYERS

StageBlocks = bool | tuple[int, ...]
"""Transformer blocks to recompute: True for all, False for none, or the number of leading blocks of
each pipeline stage, or of each chunk in model order."""

_OP_TYPES: Mapping[str, str | None] = {
    "feed_forward.mul": "mul",
    "feed_forward.w1.activation.silu": "silu",
    "feed_forward.w1.matmul": "linear",
    "feed_forward.w2.matmul": "linear",
    "feed_forward.w3.matmul": "linear",
    "feed_forward.w1.reshape": None,
    "feed_forward.w2.reshape": None,
    "feed_forward.w3.reshape": None,
    "attention.softmax": "softmax",
    "attention.mul": "mul",
    "attention.flash_attention": "scaled_dot_product_attention",
    "attention.flash_attention.flash_attention": "scaled_dot_product_attention",
    "attention.reshape": None,
    "attention.transpose": None,
    "attention.merger_head_transpose": None,
    "attention_norm.norm": "rms_norm",
    "ffn_norm.norm": "rms_norm",
    "add": "add",
}
"""Operator type in Shardwright, by path of MindFormers' operator in a block; None for views, which
save no tensor."""


@dataclass(frozen=True)
class Recomputation:
    """Activation checkpointing options of a MindFormers file.

    Args:
        blocks: blocks that are recomputed fully.
        selective: blocks in which only activation functions and the softmax of attention are
            recomputed.
        operators: by operator type, the blocks in which operators of this type are recomputed;
            set instead of `selective` if the file has name patterns of operators.
        communication: whether communication inside blocks is recomputed too.
        gathers: whether sharded parameters are gathered again in the backward pass (ZeRO stage 3).
    """

    blocks: StageBlocks = False
    selective: StageBlocks = False
    operators: Mapping[str, StageBlocks] = field(default_factory=dict)
    communication: bool = True
    gathers: bool = False


def read_recomputation(section: Keys, stages: int, chunks: int, notes: list[str]) -> Recomputation:
    """Read the section `recompute_config`.

    Args:
        stages: number of pipeline stages.
        chunks: number of chunks of each stage.
        notes: receives a note for each key without effect.

    Raises:
        ConfigError: if a value is neither a flag, nor numbers of blocks, nor name patterns of
            operators.
    """
    name = "select_comm_recompute"
    patterns = _read_operator_patterns(section, name, stages, chunks)
    if patterns is None:
        # One entry without a pattern, for the check below.
        patterns = {"": _read_blocks(section, name, stages, chunks)}
    # Zeros for all stages ask for nothing.
    if any(blocks is True or (blocks and any(blocks)) for blocks in patterns.values()):
        notes.append(
            "recompute_config.select_comm_recompute has no effect: communication is recomputed in"
            " fully recomputed blocks"
        )
    name = "select_recompute"
    patterns = _read_operator_patterns(section, name, stages, chunks)
    return Recomputation(
        blocks=_read_blocks(section, "recompute", stages, chunks),
        selective=_read_blocks(section, name, stages, chunks) if patterns is None else False,
        operators=_match_op_types(section, patterns or {}, notes),
        communication=section.flag("mp_comm_recompute", True),
        gathers=section.flag("parallel_optimizer_comm_recompute", False),
    )


def leading_blocks(layers: Sequence[int], stages: int, blocks: StageBlocks) -> list[int]:
    """Return the indices, within the model, of the leading transformer blocks of each chunk.

    Args:
        layers: number of blocks of each chunk, in model order.
        stages: number of pipeline stages; chunk i belongs to stage i modulo `stages`.
        blocks: number of leading blocks of each chunk or of each stage; a stage's number is divided
            equally among its chunks, as in MindFormers.
    """
    starts = [sum(layers[:chunk]) for chunk in range(len(layers))]
    counts = _count_blocks_per_chunk(layers, stages, blocks)
    return [
        start + index
        for start, size, count in zip(starts, layers, counts, strict=True)
        # A chunk may have fewer blocks than are requested.
        for index in range(min(size, count))
    ]


def _count_blocks_per_chunk(
    layers: Sequence[int], stages: int, blocks: StageBlocks
) -> Sequence[int]:
    if isinstance(blocks, bool):
        return layers if blocks else [0] * len(layers)
    # One number for each chunk; otherwise one for each stage.
    if len(blocks) == len(layers):
        return blocks
    counts = [0] * len(layers)
    for stage, total in enumerate(blocks):
        of_stage = range(stage, len(layers), stages)
        remaining = min(total, sum(layers[chunk] for chunk in of_stage))
        # Ends, as no more than the blocks of the stage remain.
        while remaining:
            # In turn, so that numbers of recomputed blocks of the chunks differ by at most one.
            for chunk in of_stage:
                if remaining and counts[chunk] < layers[chunk]:
                    counts[chunk] += 1
                    remaining -= 1
    return counts


def _read_blocks(section: Keys, name: str, stages: int, chunks: int) -> StageBlocks:
    value = section.any(name)
    return _parse_blocks(section, name, value, stages, chunks)


def _parse_blocks(section: Keys, name: str, value: Any, stages: int, chunks: int) -> StageBlocks:
    """Parse the blocks to recompute.

    The value is a flag for all blocks, a list with the number of blocks of each pipeline stage, or
    a list of such lists, one for each chunk of a stage.

    Raises:
        ConfigError: if the value has another form.
    """
    if not isinstance(value, list):
        # As a section with this one key, so that an error names it.
        return Keys({name: value}, section.path, section.file).flag(name, False)
    rows = value if value and all(isinstance(row, list) for row in value) else [value]
    # A row has the numbers of all stages for one of their chunks, so the rows are in model order.
    numbers = [each for row in rows for each in row]
    has_integers = all(isinstance(each, int) and each >= 0 for each in numbers)
    fits = all(len(row) == stages for row in rows) and len(rows) in (1, chunks)
    if not has_integers or not fits:
        lists = f", or {chunks} such lists, one for each chunk" if chunks > 1 else ""
        raise section.error(
            name,
            f"{value} does not fit {stages} stages\n"
            f"set True, False or a list of {stages} numbers of blocks, one for each stage{lists}",
        )
    # True in the list means all blocks of that stage.
    return tuple(MAX_LAYERS if each is True else int(each) for each in numbers)


def _read_operator_patterns(
    section: Keys, name: str, stages: int, chunks: int
) -> Mapping[str, StageBlocks] | None:
    """Read the blocks in which operators are recomputed, by name pattern of the operators.

    Patterns in a list apply to all blocks. Returns None if the value is neither a mapping nor a
    list of patterns.
    """
    value = section.any(name)
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        value = dict.fromkeys(value, True)
    if not isinstance(value, Mapping):
        return None
    patterns = Keys(value, f"{section.path}.{name}", section.file)
    return {
        pattern: _parse_blocks(patterns, pattern, blocks, stages, chunks)
        for pattern, blocks in value.items()
    }


def _match_op_types(
    section: Keys, patterns: Mapping[str, StageBlocks], notes: list[str]
) -> dict[str, StageBlocks]:
    """Map operator types to the blocks that recompute them, according to name patterns.

    Raises:
        ConfigError: if two patterns with different blocks match the same operator type.
    """
    blocks_of_types: dict[str, StageBlocks] = {}
    for pattern, blocks in patterns.items():
        matches = [path for path in _OP_TYPES if _matches_operator_path(section, pattern, path)]
        if not matches:
            notes.append(
                f"recompute_config.select_recompute.{pattern} has no effect: it matches none of"
                f" {', '.join(_OP_TYPES)}"
            )
        # Once for each type, which several paths may have.
        for op_type in dict.fromkeys(_OP_TYPES[path] for path in matches):
            if op_type is None:
                continue
            if blocks_of_types.setdefault(op_type, blocks) != blocks:
                raise section.error(
                    "select_recompute",
                    f"{pattern} and another pattern of {op_type} have different blocks\n"
                    "set the same blocks for both",
                )
    return blocks_of_types


def _matches_operator_path(section: Keys, pattern: str, path: str) -> bool:
    """Whether a MindFormers pattern matches an operator's path, such as `feed_forward.mul`.

    Escaped dots split the pattern into one regular expression for each name in the path.
    """
    expressions, names = pattern.split(r"\."), path.split(".")
    try:
        return len(expressions) == len(names) and all(
            re.fullmatch(expression, name)
            for expression, name in zip(expressions, names, strict=True)
        )
    except re.error as error:
        raise ConfigError(
            f"{section.file}: {section.path}.select_recompute: {pattern!r} is not a regular"
            f" expression: {error}\nuse for example 'feed_forward\\.mul'"
        ) from None
