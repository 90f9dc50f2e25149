"""Summarize a plan in at most 25 lines: metrics, and one row per repeated block."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from shardwright.core.cost.memory import bytes_text
from shardwright.core.plan.data import PlanData
from shardwright.core.plan.parallelism import parallelism_phrases, parallelism_sentence
from shardwright.core.plan.repeated_rows import Fold, fold_names, fold_rows, split_module_path
from shardwright.core.plan.rows import devices_text, seconds_text
from shardwright.core.plan.text_columns import format_columns, wrap_sentence

MAX_LINES = 25
"""Maximum number of lines of the summary."""

MAX_LISTED_NAMES = 4
"""Maximum number of operator names in one row of the summary."""

HINT = "every operator: --full, plan.text(full=True); why: shardwright explain, plan.explain(name)"


def plan_summary(plan: PlanData, width: int) -> str:
    """Return the summary of a plan, with the most detailed table that fits into `MAX_LINES` lines.

    Args:
        plan: the plan.
        width: maximum length of a line in characters.
    """
    head = plan_head(plan, width)
    # The table gets the lines that head and tail leave.
    tail = [
        line
        for note in (*plan_notes(plan, max_operators=1), HINT)
        for line in wrap_sentence(note, width)
    ]
    remaining_lines = MAX_LINES - len(head) - len(tail)
    table: list[str] = []
    # From the most detailed to the coarsest table.
    for detail in (2, 1, 0):
        table = _format_summary_table(
            _group_operators_into_rows(plan, detail), plan.step is not None, width
        )
        if len(table) <= remaining_lines:
            break
    else:
        # Not even the coarsest table fits.
        table[remaining_lines - 1 :] = ["…"]
    return "\n".join([*head, *table, *tail])


def plan_head(plan: PlanData, width: int) -> list[str]:
    """Return the first lines of the summary: devices, parallelism and the main metrics.

    Args:
        plan: the plan.
        width: maximum length of a line in characters.
    """
    lines = wrap_sentence(f"Plan for {devices_text(plan.mesh, plan.pipeline.stages)}", width)
    lines += wrap_sentence(parallelism_sentence(plan), width)
    for label, figures in _format_main_metrics(plan):
        lines += wrap_sentence(figures, width, f"{label:8}")
    return lines


def _format_main_metrics(plan: PlanData) -> Iterator[tuple[str, str]]:
    """Yield (label, text) of each known metric: step time, optimality gap, memory, communication
    volume, batch size."""
    step, memory, limit = plan.step, plan.known_memory, plan.memory_limit
    if step is not None:
        words = [
            f"{seconds_text(step.seconds)} on {step.cluster}",
            throughput_text(plan, step.seconds),
        ]
        if step.utilization is not None:
            words.append(f"utilization {step.utilization:.1%}")
        words.append(f"exposed communication {seconds_text(step.communication)}")
        # A list times False is empty.
        words += [f"bubbles {step.bubble:.1%}"] * bool(step.bubble)
        yield "step", ", ".join(filter(None, words))
    if plan.gap is not None:
        yield "gap", f"within {plan.gap:.1%} of the best on this mesh" + stages_suffix(plan)
    if memory is not None:
        stage = f" of stage {memory.largest_stage.stage}" if len(memory.stages) > 1 else ""
        of_limit = "" if limit is None else f" of {bytes_text(limit)}"
        of_limit += ": over the limit" * plan.over_limit
        need = f"{bytes_text(memory.peak)}{of_limit} per device{stage}"
        yield "memory", f"{need}, with {memory.optimizer}"
    sent = f"{bytes_text(plan.forward_bytes)} forward, {bytes_text(plan.backward_bytes)} backward"
    yield (
        "sends",
        f"{sent} per device and step; stores {bytes_text(plan.parameter_bytes)} of parameters",
    )
    samples, micro_batches = plan.global_batch, plan.pipeline.micro_batches
    if samples is not None:
        unit = "samples" if plan.sequence is None else f"sequences of {plan.sequence:,} tokens"
        in_micro_batches = f", in {micro_batches:,} micro-batches" if micro_batches > 1 else ""
        yield "batch", f"{samples:,} {unit}{in_micro_batches}"


def stages_suffix(plan: PlanData) -> str:
    """Format the number of stages as a suffix, `, with 4 stages`; empty for one stage."""
    stages = plan.pipeline.stages
    return f", with {stages} stages" if stages > 1 else ""


def throughput_text(plan: PlanData, seconds: float) -> str:
    """Format the throughput of a plan: `8,192 tokens/s`, or samples/s without a sequence length.

    Args:
        plan: the plan.
        seconds: time of a step.

    Returns:
        An empty string if `seconds` is 0 or the batch size is unknown.
    """
    if plan.global_batch is None or not seconds:
        return ""
    if plan.sequence is None:
        return f"{plan.global_batch / seconds:,.0f} samples/s"
    return f"{plan.global_batch * plan.sequence / seconds:,.0f} tokens/s"


def plan_notes(plan: PlanData, max_operators: int | None = None) -> Iterator[str]:
    """Yield warnings about unused mesh axes and operators without a sharding rule.

    Args:
        plan: the plan.
        max_operators: maximum number of operators to list; None for all.
    """
    yield from unused_axes_warning(plan)
    names = fold_names(plan.without_rule)
    if names:
        listed = names[:max_operators]
        more = f" and {len(names) - len(listed)} more" if len(listed) < len(names) else ""
        named = ", ".join(listed) + more
        yield f"no sharding rule, so they are replicated: {named}"


def unused_axes_warning(plan: PlanData) -> Iterable[str]:
    """Yield a warning that lists unused mesh axes, over which all operators are replicated."""
    unused = plan.unused_axes
    if unused:
        names = plan.mesh.named(unused)
        axes = f"axes {names} are" if len(unused) > 1 else f"axis {names} is"
        size, devices = plan.mesh.size(unused), plan.mesh.num_devices
        # Unused axes of all devices leave a single group.
        copies = f"{size} devices" if size == devices else f"groups of {size} devices"
        yield f"{axes} unused: {copies} compute the same result"


@dataclass
class _SummaryRow:
    """A row of the summary: operators of equal parallelism in one block and its repetitions.

    Args:
        path: module path of the block, with the numbers of all repetitions: `layers.{0..3}`; empty
            for operators outside repeated blocks.
        phrases: the parallelism of the operators, such as `row-parallel over tp`.
        names: names of the operators, relative to `path`.
        sent: communication volume of one device in one micro-batch, by stage.
        seconds: computation time of one device in one micro-batch, by stage.
    """

    path: str
    phrases: tuple[str, ...]
    names: list[str] = field(default_factory=list)
    sent: Counter[int] = field(default_factory=Counter)
    seconds: dict[int, float] = field(default_factory=dict)

    def add(self, name: str, fold: Fold, sent: Counter[str]) -> None:
        if name not in self.names:
            self.names.append(name)
        for row in fold.members:
            self.sent[row.stage] += sent[row.name]
            self.seconds[row.stage] = self.seconds.get(row.stage, 0.0) + row.seconds


def _make_summary_row_key(block_path: str, name: str, detail: int) -> tuple[str, str]:
    """Return the (block, module in the block) by which rows are grouped; parts are "" if `detail`
    is lower.

    `detail` 2 groups by both, 1 by block, 0 puts all rows into one group.
    """
    return block_path if detail else "", name.rpartition(".")[0] if detail > 1 else ""


def _group_operators_into_rows(plan: PlanData, detail: int) -> list[_SummaryRow]:
    """Group operators into rows of the summary.

    Operators that the search decided by cost or the user pinned come first, in model order, grouped
    by block and parallelism. All other operators are grouped by parallelism only, and listed by
    ATen operator.

    Args:
        plan: the plan.
        detail: grouping of main and pinned operators: 2 by module, 1 by repeated block, 0 into one
            group.
    """
    sent = _count_bytes_by_operator(plan)
    blocks: dict[object, _SummaryRow] = {}
    others: dict[tuple[str, ...], _SummaryRow] = {}
    # By parallelism, not by shapes: a row may stand for operators of different sizes.
    for fold in fold_rows(plan.operators, partial(parallelism_phrases, plan)):
        row, phrases = fold.row, parallelism_phrases(plan, fold.row)
        if row.main or row.pinned:
            # Only main and pinned operators are listed by block: all others follow them.
            block_path, name = _split_name_at_block(row.name)
            key = _make_summary_row_key(block_path, name, detail)
            block = blocks.setdefault((key, phrases), _SummaryRow(key[0], phrases))
            # In the coarsest table rows have no block, so names keep their paths.
            block.add(name if key[0] else row.name, fold, sent)
        else:
            words = row.operator.split(".")
            # `aten.add.Tensor` is shown as `add`; a Python function has no namespace.
            aten_name = words[min(1, len(words) - 1)]
            others.setdefault(phrases, _SummaryRow("", phrases)).add(aten_name, fold, sent)
    for block in others.values():
        block.names = [f"others: {', '.join(_shorten_names(block.names))}"]
    return [*blocks.values(), *others.values()]


def _count_bytes_by_operator(plan: PlanData) -> Counter[str]:
    """Return the bytes that redistributions send on one device, by the name of the operator that
    causes them.

    The producer causes reductions of its partial sums, such as a row-parallel linear layer,
    although the plan lists them at the consumer. The consumer causes all other redistributions.
    """
    names = {row.name for row in plan.operators}
    sent: Counter[str] = Counter()
    for row in plan.operators:
        for each in row.redistributions:
            reduces = any(s.startswith(("all_reduce", "reduce_scatter")) for s in each.steps[:1])
            # An input of the model has no producer to which its redistribution could be attributed.
            cause = each.value if reduces and each.value in names else row.name
            sent[cause] += each.forward_bytes + each.backward_bytes
    return sent


def _split_name_at_block(name: str) -> tuple[str, str]:
    """Split an operator's name after its last number into block and operator: `layers.{0..3}` and
    `attn.q`."""
    words = split_module_path(name)
    # Not the last word, so that something is left to name the operator in its block.
    numbers = [i for i, word in enumerate(words[:-1]) if re.fullmatch(r"\d+|\{.*\}", word)]
    # Without a number nothing repeats: there is no block, and the name stays whole.
    block_length = numbers[-1] + 1 if numbers else 0
    return ".".join(words[:block_length]), ".".join(words[block_length:])


def _format_summary_table(blocks: list[_SummaryRow], timed: bool, width: int) -> list[str]:
    """Return the lines of the summary's table.

    If a block has several rows, its path is on a line of its own above them.
    """
    first = blocks[0].phrases if blocks else ()
    # Phrases that apply to all rows, usually data parallelism, are written once, in the header.
    common = [phrase for phrase in first if all(phrase in block.phrases for block in blocks)]
    differs = any(len(block.phrases) > len(common) for block in blocks)
    ending, nothing = (", and", "nothing else") if differs else ("", "")
    common_header = f"all {', '.join(common)}{ending}" if common and len(blocks) > 1 else ""
    header = ("", common_header, "sends", *(["computes"] if timed else []))
    rows_of_path = Counter(block.path for block in blocks)
    rows: list[tuple[str, ...]] = []
    previous_path = ""
    for block in blocks:
        shared = rows_of_path[block.path] > 1 and bool(block.path)
        # Rows of one block stand below one line with its path.
        if shared and block.path != previous_path:
            rows.append((block.path, *[""] * (len(header) - 1)))
        previous_path = block.path
        prefix = "  " if shared else f"{block.path}." if block.path else ""
        # Of one stage, as stages run at the same time.
        sent, seconds = max(block.sent.values()), max(block.seconds.values())
        numbers = [bytes_text(sent) if sent else "-"]
        numbers += [seconds_text(seconds) if seconds else "-"] * timed
        # A single row has no phrases in the header, which all rows would share.
        phrases = [phrase for phrase in block.phrases if not common_header or phrase not in common]
        names = prefix + ", ".join(_shorten_names(_join_names_by_module(block.names)))
        rows.append((names, ", ".join(phrases) or nothing, *numbers))
    return format_columns(header, rows, width)


def _shorten_names(names: list[str]) -> list[str]:
    """Shorten a list of names to the first `MAX_LISTED_NAMES`, followed by `N more`."""
    remaining = len(names) - MAX_LISTED_NAMES
    # "1 more" would be hardly shorter than the last name.
    return [*names[:MAX_LISTED_NAMES], f"{remaining} more"] if remaining > 1 else names


def _join_names_by_module(names: Iterable[str]) -> list[str]:
    """Join the names of operators in the same module by braces.

    >>> _join_names_by_module(["attn.q", "attn.k", "mlp.up", "head"])
    ['attn.{q,k}', 'mlp.up', 'head']
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        *modules, last_word = split_module_path(name)
        groups.setdefault(".".join(modules), []).append(last_word)
    joined = list[str]()
    for module, last_words in groups.items():
        if module:
            inner = last_words[0] if len(last_words) == 1 else f"{{{','.join(last_words)}}}"
            joined.append(f"{module}.{inner}")
        else:
            joined += last_words
    return joined
