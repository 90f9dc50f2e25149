"""Faults

What is broken on purpose, and how each case ends: refused by one error of Shardwright's, or wrong.
Bits are changed in all files of a checkpoint in turn, `.metadata` and `checkpoint.json` included.
Goal: nothing is loaded silently or ends in an error from inside PyTorch.

Programs are ones that users write, in `benchmarks/programs/`: several losses, hooks, parameters
and attributes that change, ranks with seeds or batches of their own. Each trains on one device and,
once data parallel and once model parallel, on 4 processes with gloo; losses and final parameters
are compared. Goal: exact, or refused by name.

Files that users write, data and records are mutated: values, lines, bytes and pieces of syntax are
changed, the same for each seed. Configurations go through the whole of `plan`. In place of each
number that files and options of the command line take stand 0, -1, powers of two up to 2^64, 1e309,
`true` and NaN. Goal: each ends in success or in one error of Shardwright's. Operators are those of
PyTorch's own tests, with up to three of its samples each, on 5 simulated devices under a random
plan; values and gradients are compared with the operator itself, random ones with their replicas
and a repetition. Goal: equal, or refused.

Kills are SIGKILLs of a rank, of two ranks at once or of the launcher of 4 processes, while they
start, while they train, and while files of a checkpoint are there in part. A launcher is started
again, ranks are restarted by it. Goal: the record has each step once, with the loss of a run that
nobody disturbed, and the final parameters are the same to the bit.

Before a step the module is looked at for what was changed on it, and ranks compare what they are
called with; the time is that of the calling thread, which does not wait for the answer. Goal: they
add less than 0.1 ms. The storage and a flag of each of 291 parameters are read, at 0.1 to 0.3 µs,
and as they are known then, the step need not read them from their modules; to start one collective
of gloo alone takes 0.05 ms and more.

Derived files (plans, calibrations, weights of `save_pretrained`, tokens) have a
bit changed too. Checkpoints from strangers have right checksums, and metadata that set attributes,
name files outside, or are links and pipes. Names with control characters are in every file that a
command reads, and its streams are closed, full or pipes. Another user of the machine writes to all
ports of a run. Goal: one error or warning, nothing raw on the terminal, and a run with the losses
of one that nobody disturbed.

Checksums are computed while a checkpoint is written, and verified when it is loaded, each file by
one rank.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import zlib
from pathlib import Path

import torch
from torch import nn

import shardwright as sw
from benchmarks.bit_flips import RAW, REFUSED, SILENT, flip_bits
from benchmarks.derived_files import SAME, WARNED, flip_derived_files
from benchmarks.kills import MOMENTS, VICTIMS, kill_at_random
from benchmarks.local_users import train
from benchmarks.page import ROOT
from benchmarks.program_ranks import ENDS, EXACT, WRONG
from benchmarks.programs import PROGRAMS
from benchmarks.programs.outcomes import outcomes
from benchmarks.size import Size
from benchmarks.strangers import ATTACKS, attack
from benchmarks.surroundings import SHELLS, ends_in, write_files
from benchmarks.table import Table
from benchmarks.terminals import cases, control_characters
from benchmarks.torchrun import python, torchrun
from shardwright.core.checkpoint.manifest import FileChecksum, find_damage

FILE_KINDS = ("config", "plan", "cluster", "strategies")
DATA_KINDS = ("images", "gzipped images", "profile", "step log", "runs", "tokens", "error")
NUMBER_KINDS = ("configurations", "mindformers", "clusters", "options")
MEGABYTES, FILES = 256, 4
GUARDED, GUARD_SECONDS = 2, 1e-4


def run(size: Size = Size.DEFAULT) -> list[Table]:
    inputs = [
        user_programs(size.of(8, full=1)),
        mutated_files(size.of(25, full=100)),
        extreme_numbers(size.of(40, full=1)),
        operator_samples(size.of(50, full=10)),
    ]
    breaks = [bit_flips(size.of(90, full=500)), kills(size.of(3, full=100))]
    hostile = [derived_files(size.of(25, full=200)), strangers(), terminals(), local_users()]
    hostile.append(surroundings())
    return [*inputs, *breaks, *hostile, guards(), checksum_speed()]


def user_programs(every: int) -> Table:
    """How one in `every` of the programs ends that users write; those that are refused by name."""
    ends = outcomes(list(PROGRAMS)[::every])
    whole = "Programs" if every == 1 else f"One in {every} programs"
    table = Table(f"{whole} under two plans each", ("ended", "programs × plans", "which"))
    for end in ENDS:
        ended = [one for one in ends if one.end == end]
        names = dict.fromkeys(one.program for one in ended) if end != EXACT else {}
        table.add(end, len(ended), "; ".join(names))
    table.missed += [
        f"{o.program}, {o.plan}: {o.end}: {o.why}" for o in ends if o.end in (WRONG, RAW)
    ]
    return table


def mutated_files(seeds: int) -> Table:
    """How reading ends of files that were changed at random."""
    table = Table(f"Mutated files, seeds 0 to {seeds - 1}", ("kind", "read", REFUSED, RAW))
    kinds = {
        **dict.fromkeys(FILE_KINDS, "features.fuzzed_files"),
        **dict.fromkeys(DATA_KINDS, "features.fuzzed_data"),
    }
    for kind, module in kinds.items():
        arguments = (module, kind, "0", str(seeds))
        ends = json.loads(python(*arguments, folder=ROOT / "tests"))
        table.add(kind, ends["success"], ends["refused"], len(ends["raw"]))
        table.missed += [f"{kind}, seed {seed}: a {RAW}" for seed in ends["raw"]]
    return table


def extreme_numbers(every: int) -> Table:
    """How commands end with extreme numbers in each place where files and options take one."""
    title = "Extreme numbers" if every == 1 else f"One in {every} extreme numbers"
    table = Table(title, ("in", "accepted", REFUSED, RAW))
    for kind in NUMBER_KINDS:
        arguments = ("features.number_cases", kind, str(every))
        ends = json.loads(python(*arguments, folder=ROOT / "tests"))
        table.add(kind, *(ends.get(end, 0) for end in ("success", "refused", "raw")))
        if ends.get("raw"):
            table.missed.append(f"{kind}: {ends['raw']} numbers end in a {RAW}")
    return table


def operator_samples(every: int) -> Table:
    """How PyTorch's samples of one in `every` of its operators end."""
    printed = python("operator_samples", "0", "1000", str(every), folder=ROOT / "tests")
    *bad, last = printed.splitlines()
    counts: dict[str, int] = json.loads(last)
    table = Table(f"Samples of one in {every} operators", ("ended", "samples"))
    for end, count in counts.items():
        table.add(end, count)
    if counts["wrong"] or counts[RAW]:
        table.missed += [line for line in bad if " | refused | " not in line]
    return table


def guards() -> Table:
    """What it costs to compare steps and parameters of several ranks."""
    costs = json.loads(torchrun("guard_ranks", GUARDED).splitlines()[-1])
    table = Table("Guards", ("what", "time"))
    table.add("a step of a LLaMA of 32 layers", f"{1e3 * costs['step']:.1f} ms")
    table.add("to see attributes, hooks and parameters change", f"{1e3 * costs['state']:.3f} ms")
    table.add("which saves reading them from their modules", f"-{1e3 * costs['read']:.3f} ms")
    shapes = "to start comparing its shapes, modes and a sample of its contents"
    table.add(shapes, f"{1e3 * costs['shapes']:.3f} ms")
    table.add("and its contents (10 first calls, 1 of 100)", f"{1e3 * costs['contents']:.3f} ms")
    table.add("to count it among the calls of its rank", f"{1e3 * costs['counted']:.3f} ms")
    ratio = costs["step"] / costs["bare"]
    table.add("a step with both, relative to one with neither", f"{ratio:.3f}")
    table.add("256 MiB of parameters that are equal", f"{costs['equal']:.2f} s")
    table.add("256 MiB of parameters that differ", f"{costs['sent']:.2f} s")
    guarded = costs["state"] + costs["shapes"] + costs["counted"] - costs["read"]
    if guarded > GUARD_SECONDS:
        table.missed.append(f"the guards of a step take {1e3 * guarded:.3f} ms")
    return table


def bit_flips(flips: int) -> Table:
    """One changed bit in a checkpoint, many times."""
    table = Table("Checkpoints with one changed bit", ("flips", REFUSED, SILENT, RAW))
    net = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(4, 16)).sum().backward()
    optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        sw.save_checkpoint(folder, net, optimizer, position=sw.Position(1))
        ends = flip_bits(
            Path(folder) / "step-1", lambda: sw.load_checkpoint(folder, net, optimizer), flips
        )
    table.add(flips, ends[REFUSED], ends[SILENT], ends[RAW])
    if ends[REFUSED] != flips:
        table.missed.append(f"of {flips} changed bits {flips - ends[REFUSED]} were not refused")
    return table


def derived_files(flips: int) -> Table:
    """One changed bit in each kind of derived file, many times."""
    title = f"Derived files with one changed bit, {flips} of each kind"
    table = Table(title, ("file", REFUSED, WARNED, SAME, SILENT, RAW))
    with tempfile.TemporaryDirectory() as folder:
        for kind, ends in flip_derived_files(Path(folder), flips).items():
            table.add(kind, *(ends[end] for end in (REFUSED, WARNED, SAME, SILENT, RAW)))
            if ends[SILENT] or ends[RAW]:
                table.missed.append(f"changed bits in {kind}: {dict(ends)}")
    return table


def strangers() -> Table:
    """Checkpoints that a stranger has planted, with right checksums."""
    table = Table("Checkpoints from strangers", ("what", "ended"))
    with tempfile.TemporaryDirectory() as folder:
        for name in ATTACKS:
            end = attack(name, Path(folder) / "run")
            table.add(name, end)
            if end != REFUSED:
                table.missed.append(f"a checkpoint with {name}: {end}")
    return table


def terminals() -> Table:
    """Control characters that commands print."""
    table = Table("Control characters", ("in", "printed raw"))
    with tempfile.TemporaryDirectory() as folder:
        for name, arguments in cases(Path(folder)).items():
            printed = control_characters(Path(folder), arguments)
            table.add(name, len(printed))
            if printed:
                table.missed.append(f"{name}: {sorted(map(ascii, printed))}")
    return table


def surroundings() -> Table:
    """A command with streams, folders and limits that are not those of a usual shell."""
    table = Table("Streams, folders and limits of a command", ("with", "ended"))
    for name, (_, expected) in SHELLS.items():
        with tempfile.TemporaryDirectory() as folder:
            write_files(Path(folder))
            end = ends_in(Path(folder), name)
        table.add(name, end)
        if end != expected:
            table.missed.append(f"{name}: {end}, not {expected}")
    return table


def local_users() -> Table:
    """A run on 2 processes beside another user of the machine."""
    table = Table(
        "Another user of the machine", ("run", "exit status", "steps", "losses", "opened")
    )
    outcomes_of = {}
    for name in ("undisturbed", "attacked"):
        with tempfile.TemporaryDirectory() as folder:
            outcomes_of[name] = train(Path(folder), attacked=name == "attacked")
    calm = outcomes_of["undisturbed"]
    for name, outcome in outcomes_of.items():
        equal = "equal" if outcome.losses == calm.losses else "different"
        table.add(name, outcome.status, len(outcome.losses), equal, len(outcome.opened))
        if outcome.status or equal == "different" or outcome.opened:
            table.missed.append(f"the run that was {name}: {outcome.status}, {outcome.opened}")
    return table


def kills(number: int) -> Table:
    """Kills at random moments, beside a run without."""
    table = Table(
        "Kills of 4 processes", ("killed", *MOMENTS, "parameters", "steps lost", "repeated")
    )
    with tempfile.TemporaryDirectory() as folder:
        report = kill_at_random(Path(folder), number)
    for victim in VICTIMS:
        table.add(victim, *(report.kills[victim, moment] for moment in MOMENTS), "", "", "")
    outcome = "bit-equal" if report.equal else "different"
    table.add(f"{number} kills", "", "", "", outcome, report.lost, report.repeated)
    if not report.is_undisturbed:
        table.missed.append(f"{number} kills changed the run: {report}")
    return table


def checksum_speed() -> Table:
    """How fast files that were just written are verified by one process."""
    table = Table(
        "Verifying checksums, files in the page cache",
        ("files", "MB each", "MB/s", "MB per CPU second"),
    )
    content = os.urandom(1 << 20) * MEGABYTES
    checksum = FileChecksum(len(content), zlib.crc32(content))
    with tempfile.TemporaryDirectory() as name:
        folder, files = Path(name), [(f"{number}", checksum) for number in range(FILES)]
        for file, _ in files:
            (folder / file).write_bytes(content)
        for count in (1, FILES):
            started, busy = time.perf_counter(), time.process_time()
            assert find_damage(folder, files[:count]) is None
            seconds = time.perf_counter() - started, time.process_time() - busy
            speeds = (f"{count * len(content) / each / 1e6:,.0f}" for each in seconds)
            table.add(count, round(len(content) / 1e6), *speeds)
    return table
