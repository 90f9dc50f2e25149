"""Extend the graph of a model with three equal blocks to more blocks.

Capturing dozens of equal blocks takes most of the time of planning a large model. The middle block
is copied instead, under the names of the omitted blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from shardwright.core.graph.graph import Graph, Op, Value

CAPTURED_BLOCKS = 3
"""Number of blocks of the captured model: first, middle and last; the middle block is copied."""


def with_more_blocks(graph: Graph, blocks: Sequence[str], num_blocks: int) -> Graph | None:
    """Return the graph of the same model with more blocks.

    Args:
        graph: graph of the model with `CAPTURED_BLOCKS` blocks, none of which updates a buffer.
        blocks: paths of the blocks, which end in their indices.
        num_blocks: number of blocks of the result, at least `CAPTURED_BLOCKS`.

    Returns:
        The graph, which shares all other values and operators with `graph`; None if the second and
        the third block differ, or do not run one after the other.
    """
    spans = [_list_ops_of_block(graph, block) for block in blocks]
    # A buffer that a block updates would have no update in copies of the block.
    if len(spans) != CAPTURED_BLOCKS or graph.updates or not _are_blocks_consecutive(graph, spans):
        return None
    first, middle, last = spans
    # Their outputs are paired one by one below.
    if len(first) != len(middle):
        return None
    # Each copy reads outputs of the previous block where the second block reads those of the first.
    previous = dict(zip(_iterate_op_outputs(first), _iterate_op_outputs(middle), strict=False))
    steps = _match_values_of_blocks(graph, middle, last, previous)
    if steps is None:
        return None
    parent = blocks[1].rpartition(".")[0]
    # Without the values that the middle block reads of the first one.
    middle_values = [value for value in steps if value not in previous]
    copies: list[Op] = []
    new_values: list[Mapping[Value, Value]] = []
    # From a value of the middle block to its counterpart in the latest block.
    latest: Mapping[Value, Value] = {value: value for value in middle_values}
    # Blocks 0 and 1 stay; block 2 becomes the last one.
    for index in range(2, num_blocks - 1):
        rename = _make_path_renamer(blocks[1], f"{parent}.{index}")
        copy = {value: replace(value, name=rename(value.name)) for value in middle_values}
        # Outputs of the first block stand for those of the latest one, which the copy reads.
        chained = {before: latest[after] for before, after in previous.items() if after in latest}
        copies += [_copy_op(op, {**copy, **chained}, rename) for op in middle]
        new_values.append(copy)
        latest = copy
    rename = _make_path_renamer(blocks[2], f"{parent}.{num_blocks - 1}")
    last_block_values = {
        steps[value]: replace(steps[value], name=rename(steps[value].name))
        for value in middle_values
    }
    # The last block reads the outputs of the last copy instead of those of the second block. The
    # tail also has the operators after it, such as the output layer.
    tail_values = {**latest, **last_block_values}
    tail = graph.ops[graph.ops.index(last[0]) :]
    head = graph.ops[: graph.ops.index(last[0])]

    def extend(values: tuple[Value, ...]) -> tuple[Value, ...]:
        added = [copy[value] for copy in new_values for value in values if value in copy]
        return (*(last_block_values.get(value, value) for value in values), *added)

    constants = {
        last_block_values.get(value, value): tensor for value, tensor in graph.constants.items()
    }
    for copied in new_values:
        constants |= {copied[v]: graph.constants[v] for v in copied if v in graph.constants}
    return replace(
        graph,
        ops=(*head, *copies, *(_copy_op(op, tail_values, rename) for op in tail)),
        parameters=extend(graph.parameters),
        buffers=extend(graph.buffers),
        constants=constants,
        module_tags=_extend_module_tags(graph, blocks, num_blocks),
    )


def _iterate_op_outputs(ops: Sequence[Op]) -> Iterator[Value]:
    return (value for op in ops for value in op.outputs)


def _list_ops_of_block(graph: Graph, block: str) -> list[Op]:
    return [op for op in graph.ops if _is_in_block(op.module, block)]


def _is_in_block(path: str, block: str) -> bool:
    return path == block or path.startswith(f"{block}.")


def _are_blocks_consecutive(graph: Graph, blocks: Sequence[Sequence[Op]]) -> bool:
    """Whether the blocks run in order, without operators of other modules between them."""
    block_of = {op: index for index, ops in enumerate(blocks) for op in ops}
    order = [index for index, _ in groupby(graph.ops, lambda op: block_of.get(op))]
    numbers = [*range(len(blocks))]
    # From the first block on, no other module may come between the blocks.
    return [each for each in order if each is not None] == numbers and (
        order[order.index(0) :][: len(blocks)] == numbers
    )


def _match_values_of_blocks(
    graph: Graph, middle: Sequence[Op], last: Sequence[Op], previous: Mapping[Value, Value]
) -> dict[Value, Value] | None:
    """Map each tensor that the middle block reads or computes to its counterpart in the last block.

    Returns None if the two blocks differ.

    Args:
        graph: the graph with both blocks.
        middle, last: operators of the blocks, in order.
        previous: counterparts in the middle block of the first block's outputs.
    """
    counterparts: dict[Value, Value] = {}
    if len(middle) != len(last):
        return None
    for op, other in zip(middle, last, strict=True):
        if op.target is not other.target or op.structure != other.structure:
            return None
        for value, counterpart in zip(op.inputs, other.inputs, strict=True):
            if value in previous:
                if previous[value] is not counterpart:
                    return None
            # A value that all blocks read, such as rotary angles.
            elif value is counterpart and value not in counterparts:
                continue
            # A value that a block computes must have been paired before it is read.
            elif value in graph.producer and counterparts.get(value) is not counterpart:
                return None
            counterparts[value] = counterpart
        counterparts |= dict(zip(op.outputs, other.outputs, strict=True))
    return counterparts


def _copy_op(op: Op, values: Mapping[Value, Value], rename: Callable[[str], str]) -> Op:
    args, kwargs = op.arguments(lambda value: values.get(value, value))
    return replace(
        op,
        name=rename(op.name),
        args=args,
        kwargs=kwargs,
        outputs=tuple(values.get(value, value) for value in op.outputs),
        module=rename(op.module),
        calls=tuple(map(rename, op.calls)),
    )


def _make_path_renamer(old_path: str, new_path: str) -> Callable[[str], str]:
    """Return a function that moves a module or operator path from block `old_path` to `new_path`.

    Paths outside the block stay as they are.
    """

    def rename(path: str) -> str:
        # Names of repeated calls end in `@2`, `@3`, ….
        is_in_block = _is_in_block(path.partition("@")[0], old_path)
        return new_path + path[len(old_path) :] if is_in_block else path

    return rename


def _extend_module_tags(
    graph: Graph, blocks: Sequence[str], num_blocks: int
) -> dict[str, tuple[object, ...]]:
    parent = blocks[1].rpartition(".")[0]
    result = {}
    # The last block takes its tags to its new index; copies have those of the middle block.
    for path, tags in graph.module_tags.items():
        if _is_in_block(path, blocks[2]):
            result[_make_path_renamer(blocks[2], f"{parent}.{num_blocks - 1}")(path)] = tags
            continue
        result[path] = tags
        if _is_in_block(path, blocks[1]):
            for index in range(2, num_blocks - 1):
                result[_make_path_renamer(blocks[1], f"{parent}.{index}")(path)] = tags
    return result
