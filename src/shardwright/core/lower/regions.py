"""Regional compilation: replaces repeated blocks of a program by calls of one function, which
`torch.compile` compiles once."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from shardwright.core.lower.emit import Line, Source, write_body

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]

REGION = "region"
"""Identifier, in generated source, of the function of a repeated block."""

# Identifiers that are not attributes, not quoted and not keywords of arguments; the last `\b`
# prevents a match of a part of one.
_VARIABLE = re.compile(r"(?<![\w.'])[A-Za-z_]\w*(?!=)\b")
_READS_PARAMETERS = re.compile(r"(parameters|buffers|inputs)\[|(enter|start|reuse|finish)_\d+\(")
"""Pattern of expressions that read or gather parameters, buffers or inputs."""


@dataclass(frozen=True)
class Regions:
    """A program whose repeated blocks are calls of one function, `REGION`.

    Args:
        lines: lines of the program, with a call of `REGION` for each block.
        body: lines of the function `REGION`.
        arguments, returns: parameters and returned variables of `REGION`.
    """

    lines: list[Line]
    body: list[Line]
    arguments: tuple[str, ...]
    returns: tuple[str, ...]


def find_regions(lines: Sequence[Line], outputs: Collection[str]) -> Regions | None:
    """Replace the longest run of repeated blocks by calls of one function; return None without one.

    Lines that read or gather parameters differ between blocks, and are moved before their block.

    Args:
        lines: lines of a program.
        outputs: variables that are read after the last line.
    """
    moved_before: dict[int, list[Line]] = {}
    remaining: list[Line] = []
    available: set[str] = set()
    for line in lines:
        # Names of parameters are literals in the source, so that blocks would differ; as arguments
        # of the function they are variables.
        if _READS_PARAMETERS.match(line.expression) and available.issuperset(line.reads):
            moved_before.setdefault(len(remaining), []).append(line)
            available.update(line.names)
        else:
            remaining.append(line)
    span = _find_longest_run(remaining)
    if span is None:
        return None
    candidates = [
        (_find_returned_variables(remaining, division, outputs), division)
        for division in _iterate_divisions_into_blocks(remaining, *span)
    ]
    if not candidates:
        return None
    # The division into blocks with the fewest returned variables begins where a layer begins.
    positions, (length, first, count) = min(candidates, key=lambda each: len(each[0]))
    blocks = [remaining[first + n * length :][:length] for n in range(count)]
    result: list[Line] = []
    for number in range(first):
        result += [*moved_before.get(number, ()), remaining[number]]
    for n, block in enumerate(blocks):
        # Before the call of the block, whose arguments they compute.
        for number in range(first + n * length, first + (n + 1) * length):
            result += moved_before.get(number, ())
        names = tuple(block[line].names[position] for line, position in positions)
        result.append(_make_region_call(block, names))
    for number in range(first + count * length, len(remaining)):
        result += [*moved_before.get(number, ()), remaining[number]]
    result += moved_before.get(len(remaining), ())
    returns = tuple(blocks[0][line].names[position] for line, position in positions)
    return Regions(result, blocks[0], _find_region_arguments(blocks[0]), returns)


def compile_regions(
    source: Source, lines: Sequence[Line], header_and_result: tuple[str, str], compiler: Compiler
) -> Callable[..., Any] | None:
    """Return a program as a function that calls one compiled function for all repeated blocks.

    Returns None if no blocks repeat.

    Args:
        source: source of the program, with the objects that its lines refer to.
        lines: lines of the program.
        header_and_result: first line of the program, and the expression that it returns.
        compiler: compiles the function of the repeated blocks.
    """
    header, returns = header_and_result
    regions = find_regions(lines, set(_VARIABLE.findall(returns)))
    if regions is None:
        return None
    head = f"def {REGION}({', '.join(regions.arguments)}):"
    # A tuple also of one variable, since the call unpacks it.
    end = f"    return ({', '.join(regions.returns)},)\n"
    # One function object for all blocks: Dynamo compiles it once, and guards on shapes and dtypes.
    body = "\n".join([head, *write_body(regions.body, regions.returns), end])
    region = compiler(source.compile(body, REGION))
    outputs = set(_VARIABLE.findall(returns))
    program = "\n".join([header, *write_body(regions.lines, outputs), f"    return {returns}\n"])
    return Source({**source.scope, REGION: region}).compile(program, "program")


def _make_region_call(block: Sequence[Line], names: tuple[str, ...]) -> Line:
    arguments = _find_region_arguments(block)
    return Line(names, f"{REGION}({', '.join(arguments)})", arguments, unpack=True)


def _find_region_arguments(block: Sequence[Line]) -> tuple[str, ...]:
    assigned = {name for line in block for name in line.names}
    return tuple(dict.fromkeys(n for line in block for n in line.reads if n not in assigned))


def _find_longest_run(lines: Sequence[Line]) -> tuple[int, int, int] | None:
    """Find the longest run of equal blocks, whatever the variable names.

    Of runs with equally many lines, the one with the shortest blocks wins.

    Returns:
        (lines per block, first line, number of lines of the run), or None if no blocks repeat.
    """
    numbers: dict[str, int] = {}
    # Equal lines have equal numbers, which the loops below compare very often.
    line_ids = [numbers.setdefault(_mask_variable_names(line), len(numbers)) for line in lines]
    best: tuple[int, int, int] | None = None
    for length in range(1, len(line_ids) // 2 + 1):
        start = 0
        # Blocks that cover more than half of the program are layers; longer blocks are multiples.
        if best is not None and best[2] > len(line_ids) / 2:
            break
        # A run of equal pairs (i, i + length) ends where a pair differs, or at the end of the
        # program.
        for index in range(len(line_ids) - length + 1):
            if index < len(line_ids) - length and line_ids[index] == line_ids[index + length]:
                continue
            covered = index - start + length
            # As many equal pairs as a block has lines are two whole blocks.
            if index - start >= length and (best is None or covered > best[2]):
                best = length, start, covered
            start = index + 1
    return best


def _iterate_divisions_into_blocks(
    lines: Sequence[Line], length: int, start: int, covered: int
) -> Iterator[tuple[int, int, int]]:
    """Yield (lines per block, first line, number of blocks) for each division into equal blocks.

    Args:
        lines: the lines of the program.
        length: number of lines per block.
        start, covered: first line and number of lines of the run to divide.
    """
    for first in range(start, start + length):
        count, first_block = 0, _number_variables(lines[first : first + length])
        while first + (count + 1) * length <= start + covered:
            block = lines[first + count * length :][:length]
            # Equal lines are not enough: their variables must be connected in the same way.
            if _number_variables(block) != first_block:
                break
            count += 1
        if count > 1:
            yield length, first, count


def _find_returned_variables(
    lines: Sequence[Line], blocks: tuple[int, int, int], outputs: Collection[str]
) -> list[tuple[int, int]]:
    """Return the variables of a block that are read after it, as (line in the block, index among
    the variables that the line assigns)."""
    length, first, count = blocks
    positions: dict[tuple[int, int], None] = {}
    read_by: dict[str, list[int]] = {}
    for number, line in enumerate(lines):
        for name in line.reads:
            read_by.setdefault(name, []).append(number)
    for number in range(first, first + count * length):
        end = first + ((number - first) // length + 1) * length
        for position, name in enumerate(lines[number].names):
            # The union over all blocks, since one function serves all of them.
            if name in outputs or any(n >= end for n in read_by.get(name, ())):
                positions[(number - first) % length, position] = None
    return sorted(positions)


def _find_variables(line: Line) -> Iterator[str]:
    yield from chain(line.reads, *map(_find_variables, line.body), line.names)


def _mask_variable_names(line: Line) -> str:
    """Return the source of a line with `_` for each variable, to compare lines."""
    return _rename_variables(line, dict.fromkeys(_find_variables(line), "_"))


def _number_variables(block: Sequence[Line]) -> list[str]:
    """Return the source of a block's lines, with variables numbered by first appearance."""
    names = dict.fromkeys(chain(*map(_find_variables, block)))
    numbered = {name: f"v{number}" for number, name in enumerate(names)}
    return [_rename_variables(line, numbered) for line in block]


def _rename_variables(line: Line, names: Mapping[str, str]) -> str:
    """Return the source of a line and of its inner function, with variables renamed."""
    # Each block has its own name for its inner functions, by which equal blocks would differ.
    statement = line.statement.replace(line.function, "inner") if line.function else line.statement
    line_text = _VARIABLE.sub(lambda name: names.get(name[0], name[0]), statement)
    return "\n".join((line_text, *(_rename_variables(inner, names) for inner in line.body)))
