"""A plan in at most 25 lines: the answer, and one row for each kind of block."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from shardwright.core.cost.memory import binary
from shardwright.core.plan.data import PlanData
from shardwright.core.plan.parallelism import parallelism, sentence
from shardwright.core.plan.repeated_rows import Fold, fold_names, fold_rows, module_words
from shardwright.core.plan.rows import devices_text, seconds_text
from shardwright.core.plan.text_columns import in_columns, wrapped

MOST_LINES = 25
MOST_NAMES = 4
"""Names of modules in one row."""

MORE = "every operator: --full, plan.text(full=True); why: shardwright explain, plan.explain(name)"


def plan_summary(plan: PlanData, width: int) -> str:
    """The text of the summary; its rows tell kinds of blocks apart as finely as the lines allow."""
    head = plan_head(plan, width)
    tail = [line for note in (*notes(plan, most=1), MORE) for line in wrapped(note, width)]
    room = MOST_LINES - len(head) - len(tail)
    table: list[str] = []
    for detail in (2, 1, 0):
        table = _table(_blocks(plan, detail), plan.step is not None, width)
        if len(table) <= room:
            break
    else:
        table[room - 1 :] = ["…"]
    return "\n".join([*head, *table, *tail])


def plan_head(plan: PlanData, width: int) -> list[str]:
    """What was chosen, and what everybody asks first."""
    lines = wrapped(f"Plan for {devices_text(plan.mesh, plan.pipeline.stages)}", width)
    lines += wrapped(sentence(plan), width)
    for label, text in _answer(plan):
        lines += wrapped(text, width, f"{label:8}")
    return lines


def _answer(plan: PlanData) -> Iterator[tuple[str, str]]:
    step, memory, limit = plan.step, plan.known_memory, plan.memory_limit
    if step is not None:
        words = [f"{seconds_text(step.seconds)} on {step.cluster}", speed(plan, step.seconds)]
        if step.utilization is not None:
            words.append(f"utilization {step.utilization:.1%}")
        words.append(f"exposed communication {seconds_text(step.communication)}")
        words += [f"bubbles {step.bubble:.1%}"] * bool(step.bubble)
        yield "step", ", ".join(filter(None, words))
    if plan.gap is not None:
        yield "gap", f"within {plan.gap:.1%} of the best on this mesh" + stages_text(plan)
    if memory is not None:
        place = f" of stage {memory.largest_stage.stage}" if len(memory.stages) > 1 else ""
        against = "" if limit is None else f" of {binary(limit)}"
        against += ": over the limit" * plan.over_limit
        yield "memory", f"{binary(memory.peak)}{against} per device{place}, with {memory.optimizer}"
    sent = f"{binary(plan.forward_bytes)} forward, {binary(plan.backward_bytes)} backward"
    yield (
        "sends",
        f"{sent} per device and step; stores {binary(plan.parameter_bytes)} of parameters",
    )
    samples, micro_batches = plan.global_batch, plan.pipeline.micro_batches
    if samples is not None:
        kind = "samples" if plan.sequence is None else f"sequences of {plan.sequence:,} tokens"
        parts = f", in {micro_batches:,} micro-batches" if micro_batches > 1 else ""
        yield "batch", f"{samples:,} {kind}{parts}"


def stages_text(plan: PlanData) -> str:
    """`, with 4 stages`; empty of one."""
    stages = plan.pipeline.stages
    return f", with {stages} stages" if stages > 1 else ""


def speed(plan: PlanData, seconds: float) -> str:
    """`8,192 tokens/s`, or samples where their tokens are not known; empty if no batch is."""
    if plan.global_batch is None or not seconds:
        return ""
    if plan.sequence is None:
        return f"{plan.global_batch / seconds:,.0f} samples/s"
    return f"{plan.global_batch * plan.sequence / seconds:,.0f} tokens/s"


def notes(plan: PlanData, most: int | None = None) -> Iterator[str]:
    """What an engineer should know before she runs it.

    Args:
        most: how many operators without a rule are named; all by default.
    """
    yield from unused_axes_text(plan)
    names = fold_names(plan.without_rule)
    if names:
        more = f" and {len(names) - most} more" if most is not None and len(names) > most else ""
        named = ", ".join(names[:most]) + more
        yield f"no sharding rule, so every device computes them in full: {named}"


def unused_axes_text(plan: PlanData) -> Iterable[str]:
    """The axes that shard no operator: devices along them compute the same result."""
    unused = plan.unused_axes
    if unused:
        names = plan.mesh.named(unused)
        axes = f"axes {names} are" if len(unused) > 1 else f"axis {names} is"
        size, devices = plan.mesh.size(unused), plan.mesh.num_devices
        copies = f"{size} devices" if size == devices else f"groups of {size} devices"
        yield f"{axes} unused: {copies} compute the same result"


@dataclass
class _Block:
    """Operators of one kind of block that are split alike, while they are collected.

    Args:
        place: the path of the block, with the numbers of all its repetitions; empty outside of any.
        sent, seconds: of a device of each stage, in one micro-batch.
    """

    place: str
    how: tuple[str, ...]
    names: list[str] = field(default_factory=list)
    sent: Counter[int] = field(default_factory=Counter)
    seconds: dict[int, float] = field(default_factory=dict)

    def add(self, name: str, fold: Fold, sent: Counter[str]) -> None:
        if name not in self.names:
            self.names.append(name)
        for row in fold.members:
            self.sent[row.stage] += sent[row.name]
            self.seconds[row.stage] = self.seconds.get(row.stage, 0.0) + row.seconds


def _shared(place: str, name: str, detail: int) -> tuple[str, str]:
    """What operators of one row have in common beside how they are split: with most detail their
    module in a block, then the block, then nothing."""
    return place if detail else "", name.rpartition(".")[0] if detail > 1 else ""


def _blocks(plan: PlanData, detail: int) -> list[_Block]:
    """Operators with a cost of their own by block and split, in the order of the model; then the
    others by split alone, under the names of their kinds."""
    sent = _sent(plan)
    blocks: dict[object, _Block] = {}
    others: dict[tuple[str, ...], _Block] = {}
    for fold in fold_rows(plan.operators, partial(parallelism, plan)):
        row, how = fold.row, parallelism(plan, fold.row)
        if row.main or row.pinned:
            place, name = _place(row.name)
            at = _shared(place, name, detail)
            block = blocks.setdefault((at, how), _Block(at[0], how))
            block.add(name if at[0] else row.name, fold, sent)
        else:
            words = row.operator.split(".")
            others.setdefault(how, _Block("", how)).add(words[min(1, len(words) - 1)], fold, sent)
    for block in others.values():
        block.names = [f"others: {', '.join(_shortened(block.names))}"]
    return [*blocks.values(), *others.values()]


def _sent(plan: PlanData) -> Counter[str]:
    """The bytes of redistributions by operator: of those that complete a sum the one that made its
    terms, else the one that reads the value."""
    names = {row.name for row in plan.operators}
    sent: Counter[str] = Counter()
    for row in plan.operators:
        for each in row.redistributions:
            completes = any(s.startswith(("all_reduce", "reduce_scatter")) for s in each.steps[:1])
            at = each.value if completes and each.value in names else row.name
            sent[at] += each.forward_bytes + each.backward_bytes
    return sent


def _place(name: str) -> tuple[str, str]:
    """The path up to the last number, and the rest."""
    words = module_words(name)
    numbers = [at for at, word in enumerate(words[:-1]) if re.fullmatch(r"\d+|\{.*\}", word)]
    cut = numbers[-1] + 1 if numbers else 0
    return ".".join(words[:cut]), ".".join(words[cut:])


def _table(blocks: list[_Block], timed: bool, width: int) -> list[str]:
    """The rows, with the place that several have in common above them."""
    first = blocks[0].how if blocks else ()
    common = [each for each in first if all(each in block.how for block in blocks)]
    split = f"all {', '.join(common)}, and" if common and len(blocks) > 1 else ""
    header = ("", split, "sends", *(["computes"] if timed else []))
    places = Counter(block.place for block in blocks)
    rows: list[tuple[str, ...]] = []
    before = ""
    for block in blocks:
        shared = places[block.place] > 1 and bool(block.place)
        if shared and block.place != before:
            rows.append((block.place, *[""] * (len(header) - 1)))
        before = block.place
        prefix = "  " if shared else f"{block.place}." if block.place else ""
        most, seconds = max(block.sent.values()), max(block.seconds.values())
        numbers = [binary(most) if most else "-"]
        numbers += [seconds_text(seconds) if seconds else "-"] * timed
        own = [each for each in block.how if not split or each not in common]
        names = prefix + ", ".join(_shortened(_joined(block.names)))
        rows.append((names, ", ".join(own) or "nothing else", *numbers))
    return in_columns(header, rows, width)


def _shortened(names: list[str]) -> list[str]:
    left = len(names) - MOST_NAMES
    return [*names[:MOST_NAMES], f"{left} more"] if left > 1 else names


def _joined(names: Iterable[str]) -> list[str]:
    """
    >>> _joined(["attn.q", "attn.k", "mlp.up", "head"])
    ['attn.{q,k}', 'mlp.up', 'head']
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        *modules, last = module_words(name)
        groups.setdefault(".".join(modules), []).append(last)
    joined = list[str]()
    for module, ends in groups.items():
        if module:
            inner = ends[0] if len(ends) == 1 else f"{{{','.join(ends)}}}"
            joined.append(f"{module}.{inner}")
        else:
            joined += ends
    return joined
