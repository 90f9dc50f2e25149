"""The benchmarks count and compare rightly, and every number finds its way into the page."""

import os
import sys
import threading
from dataclasses import replace
from functools import partial
from itertools import count
from math import prod
from pathlib import Path

import benchmarks.__main__ as benchmarks
import pytest
import torch
from benchmarks import (
    bench_bytes,
    bench_faults,
    bench_nodes,
    bench_one_device,
    bench_pins,
    bench_scale,
    bench_scale_start,
    bench_search,
    bench_structure,
)
from benchmarks.__main__ import main
from benchmarks.collect import measure, names
from benchmarks.models import LLAMA_2, example, examples, llama_2, small
from benchmarks.page import facts, page, with_section
from benchmarks.size import Size
from benchmarks.table import Table
from benchmarks.timing import Sample, cpu_seconds, in_fork, in_fresh_process, paired
from torch import nn

from features.fuzzed_files import KINDS
from shardwright import Check, capture, plan


def test_every_benchmark_is_found_by_its_file_name():
    assert {"bytes", "one_device", "pins", "search"} <= set(names())


def test_an_unknown_benchmark_is_refused_with_the_valid_names(capsys):
    with pytest.raises(SystemExit):
        main(["--only", "speed"])
    message = capsys.readouterr().err
    assert "speed" in message
    assert all(name in message for name in names())


def test_only_full_sizes_are_written_into_the_page_and_seconds_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = []

    def found(name: str, size: Size) -> tuple[str, list[Table]]:
        sizes.append(size)
        return f"The {name}\n\nHow.", [Table(name, ("n",), rows=[("12",)])]

    page_file = tmp_path / "benchmarks.md"
    monkeypatch.setattr(benchmarks, "measure", found)
    monkeypatch.setattr(benchmarks, "names", lambda: ["bytes", "search"])
    monkeypatch.setattr(benchmarks, "PAGE", page_file)
    monkeypatch.setattr(benchmarks, "ROOT", tmp_path)
    assert main([]) == 0
    assert sizes == [Size.DEFAULT] * 2 and not page_file.exists()
    assert "Wall time" in capsys.readouterr().out
    assert main(["--full"]) == 0
    assert sizes[2:] == [Size.FULL] * 2
    assert "## The search" in page_file.read_text()
    page_file.write_text("# Benchmarks\n\n## The bytes\n\nold\n\n## Others\n\n3\n")
    main(["--only", "bytes"])
    assert "old" in page_file.read_text()
    main(["--only", "bytes", "--full"])
    assert "old" not in page_file.read_text() and "## Others" in page_file.read_text()


def test_without_network_namespaces_one_line_says_why_nodes_are_skipped(monkeypatch):
    monkeypatch.setattr(bench_nodes, "can_be_made", lambda: False)
    (table,) = bench_nodes.run()
    assert table.rows == [("network namespaces need Linux, root and `ip`",)]


def test_the_start_of_a_rank_is_a_row_and_a_goal_that_is_missed_is_named():
    start = bench_scale_start.measured("searched", 8)
    assert start is not None
    phases = {"plan", "process groups", "start", "step 1", "step 2", "checkpoint"}
    assert phases <= set(start.seconds)
    slow = {**start.seconds, "step 1": 11.0, "step 2": 2 * start.seconds["step 2"]}
    first, second, groups = bench_scale_start.missed(
        replace(start, devices=4096, seconds=slow, groups=5000), start
    )
    assert first == "4,096 devices: the first step takes 11.0 s"
    assert second == "4,096 devices: the second step takes 2.0 times as long"
    assert groups == "4,096 devices: 5,000 process groups are made"


def test_a_row_must_have_a_cell_for_every_column():
    table = Table("t", ("a", "b"))
    table.add(1, 2)
    with pytest.raises(ValueError, match="3 cells for the 2 columns"):
        table.add(1, 2, 3)


def test_a_page_holds_every_row_every_missed_goal_and_how_it_was_made():
    table = Table("Sizes", ("name", "size"), missed=["x is too big"])
    table.add("x", 12)
    text = page({"Title\n\nHow it\nis measured.\n": [table]}, facts())
    for line in (
        "## Title",
        "How it is measured.",
        "| name | size |",
        "| :-- | --: |",
        "| x | 12 |",
    ):
        assert f"\n{line}\n" in text
    assert "**Missed:** x is too big" in text
    assert f"| torch | {torch.__version__.split('+')[0]}" in text


def test_a_sample_shows_its_median_and_its_spread():
    sample = Sample((0.4, 0.1, 0.2))
    assert sample.milliseconds() == "200 (100–400)"
    assert Sample((1.0, 2.0, 3.0)).ratio() == "2.000 (1.000–3.000)"


def test_steps_are_compared_within_a_round_and_each_begins_a_round_in_turn():
    calls = []

    def step(name, factor):
        def seconds():
            calls.append(name)
            return factor * (1 + len(calls) // 3)

        return seconds

    seconds, ratios = paired({"a": step("a", 1.0), "b": step("b", 2.0)}, "a", rounds=3)
    assert "".join(calls) == "abbaab"
    assert seconds["a"].values == (1.0, 2.0, 2.0)
    assert list(ratios) == ["b"]
    assert ratios["b"].values == (2.0, 2.0, 3.0)


def test_cpu_time_does_not_count_waiting():
    assert cpu_seconds(lambda: torch.randn(300, 300) @ torch.randn(300, 300)) > 0
    event = threading.Event()
    assert cpu_seconds(lambda: event.wait(0.3)) < 0.2


def test_a_fork_is_another_process_and_leaves_this_one_as_it_is():
    numbers = count()
    assert in_fork(lambda: (os.getpid(), next(numbers)))[0] != os.getpid()
    assert next(numbers) == 0


def test_what_fails_in_a_fork_is_an_error_here(capfd):
    with pytest.raises(RuntimeError, match="a measurement failed"):
        in_fork(lambda: 1 / 0)
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_llama_2_has_its_published_number_of_parameters():
    for name, billions in (("7B", 6.738), ("70B", 68.977)):
        net, _, _ = llama_2(name, batch=8, sequence=16)
        assert round(sum(p.numel() for p in net.parameters()) / 1e9, 3) == billions
        assert len(net.model.layers) == LLAMA_2[name]["num_hidden_layers"]


def test_a_search_is_timed_in_every_state_of_its_caches():
    graph = capture(*llama_2("7B", batch=8, sequence=16, layers=1))
    found = bench_search.searched(graph, 8)
    assert len(found.first.values) == len(found.whole_plan.values) == bench_search.PROCESSES
    # A plan contains a first search; both take a few milliseconds here, so with a wide margin.
    assert 0 < found.again.median < 3 * found.first.median < 9 * found.whole_plan.median


def test_a_program_that_computes_twice_is_seen(monkeypatch):
    class Twice(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, *args):
            return self.net(*args) + self.net(*args)

    monkeypatch.setattr(
        bench_one_device.sw, "parallelize", lambda net, plan, device, copy: Twice(net)
    )
    model = small("mlp", batch=64, sizes=(64, 256, 8))
    _, ratio, noise = bench_one_device.compared(model, rounds=40)
    assert noise.median < 1.3 < ratio.median


def test_bytes_that_differ_miss_the_goal():
    table = Table("t", ("model", "plan", "planned", "counted", "equal"))
    check = dict.fromkeys(
        ("loss", "loss_difference", "gradient_difference", "replica_difference"), 0.0
    )
    check["worst_parameter"] = ""
    bench_bytes.add(table, "m", "p", Check(**check, planned_bytes=(7, 9), counted_bytes=(7, 9)))
    assert table.missed == []
    bench_bytes.add(table, "m", "p", Check(**check, planned_bytes=(7, 9), counted_bytes=(7, 8)))
    assert table.missed == ["m, p: planned 7 + 9 bytes, counted 7 + 8"]
    assert [row[-1] for row in table.rows] == ["yes", "NO"]


def test_pins_are_spread_evenly_over_the_layers_and_cut_as_an_expert_would():
    case = bench_pins.CASES["FFN"]
    net, _, _ = case.build()
    assert bench_pins.pins(case, net, 2) == {
        "net.dense2": ((2, 4), (1, 4)),
        "net.dense4": ((2, 4), (1, 4)),
    }
    assert list(bench_pins.pins(case, net, 4)) == [f"net.dense{i}" for i in (1, 2, 4, 5)]
    every = bench_pins.pins(case, net, 8)
    assert every["net.dense1"] == ((2, 1), (4, 1))
    assert every["net.dense5"] == ((8, 1), (1, 1))
    assert every["loss_fn"] == ((2, 1), (2,))
    with pytest.raises(ValueError, match="9 pins for 5 layers and 3 others"):
        bench_pins.pins(case, net, 9)


def test_the_half_of_a_resnet_that_is_model_parallel_is_the_second():
    case = bench_pins.CASES["ResNet-18"]
    net, _, _ = case.build()
    whole, cut = bench_pins.pins(case, net, 2).items()
    assert whole == ("stages.1.0.conv1", ((8, 1, 1, 1), (1, 1, 1, 1)))
    assert cut == ("stages.3.0.conv1", ((2, 1, 1, 1), (4, 1, 1, 1)))


@pytest.mark.parametrize("mode", bench_pins.MODES)
def test_what_is_counted_of_a_pinned_plan_is_what_it_sends(mode):
    graph = bench_pins.pinned_graph(bench_pins.CASES["FFN"], 2)
    wanted = plan(graph, devices=bench_pins.DEVICES, mode=mode)
    assert sum(row.pinned for row in wanted.operators) == 2
    found = bench_pins.planned(graph, mode)
    assert found.bytes == wanted.bytes
    assert found.redistributions > found.of_parameters == len(wanted.parameters)
    assert 0 < found.bytes_of_parameters < found.bytes
    assert found.seconds > 0


def test_every_example_can_be_built():
    assert {"digits.yaml", "network.yaml"} <= set(examples())
    for name in examples():
        net, args, kwargs = example(name)
        assert torch.isfinite(net(*args, **kwargs))


@pytest.mark.slow
def test_bytes_are_measured_and_equal():
    _, tables = measure("bytes")
    assert tables[0].rows
    assert tables[0].missed == []


def test_one_section_is_replaced_and_a_new_one_added_with_a_date_of_its_own():
    def measured(number: int) -> Table:
        table = Table("Numbers", ("n",))
        table.add(number)
        return table

    whole = page({"First\n\nHow.": [measured(1)], "Second\n\nHow.": [measured(2)]}, facts())
    changed = with_section(whole, "First\n\nHow.", [measured(3)], {**facts(), "commit": "abc"})
    assert "| 1 |" not in changed and changed.index("| 3 |") < changed.index("## Second")
    assert changed.index("commit abc") < changed.index("## Second")
    longer = with_section(changed, "Third\n\nHow.", [measured(4)], facts())
    assert longer.startswith(changed.rstrip("\n"))
    assert longer.index("## Third") < longer.index("| 4 |")


def test_planning_at_scale_says_which_goal_it_misses():
    found = bench_scale.Scale(7, 3, 20.0, (0.5, 0.6, 1.2), (5.0, 6.0, 41.0), 4.5)
    assert bench_scale.missed(found) == [
        "the search on 1024 devices takes 1.20 s",
        "capture and plan on 1024 take 61 s",
        "4.50 GiB are needed",
    ]
    assert not bench_scale.missed(replace(found, searches=(0.5,) * 3, plans=(1.0,) * 3, memory=1.0))


def test_a_fresh_process_has_imported_nothing_of_this_one():
    sys.modules["marked"] = sys
    try:
        assert in_fork(partial(is_imported, "marked"))
        assert not in_fresh_process(partial(is_imported, "marked"))
    finally:
        del sys.modules["marked"]


def is_imported(name):
    return name in sys.modules


def test_the_structure_of_a_package_with_a_circle_and_a_name_twice_is_told(tmp_path: Path) -> None:
    room = tmp_path / "pack" / "room"
    room.mkdir(parents=True)
    (room / "one.py").write_text("from pack.room.two import Two\n\n\nclass One:\n    pass\n")
    (room / "two.py").write_text('"""A."""\nfrom pack.room.one import One\n# B\nTwo = One\n')
    (tmp_path / "pack" / "loose.py").write_text(
        "class Two:\n    def f(self):\n        pass\n\n\ndef g():\n    pass\n"
    )
    table, rooms = bench_structure.run(package=tmp_path / "pack")
    figures = dict(table.rows)
    assert (figures["rooms"], figures["files"], figures["lines of code"]) == ("2", "3", "10")
    assert figures["a circle of files"] == "yes"
    assert table.missed == ["files import each other in a circle", "names that stand twice: Two"]
    assert rooms.rows == [
        ("loose", "1", "5", "0", "0.0", "2"),
        ("room", "2", "5", "0", "20.0", "1"),
        ("all", "3", "10", "0", "10.0", "3"),
    ]


def test_mutated_files_are_counted_by_kind_and_raw_errors_miss_the_goal(monkeypatch):
    assert list(bench_faults.FILE_KINDS) == list(KINDS)
    monkeypatch.setattr(bench_faults, "FILE_KINDS", ("plan",))
    monkeypatch.setattr(bench_faults, "DATA_KINDS", ())
    table = bench_faults.mutated_files(9)
    ((kind, read, refused, raw),) = table.rows
    assert (kind, int(read) + int(refused), raw) == ("plan", 9, "0")
    assert not table.missed
    ends = '{"success": 1, "refused": 1, "raw": {"7": "Traceback"}}'
    monkeypatch.setattr(bench_faults, "python", lambda *_, folder: ends)
    assert "plan, seed 7: a raw error" in bench_faults.mutated_files(3).missed


def test_operator_samples_are_counted_by_end_and_wrong_ones_miss_the_goal(monkeypatch):
    pytest.importorskip("expecttest", reason="PyTorch's operator samples need expecttest")
    table = bench_faults.operator_samples(250)
    counts = {end: int(count) for end, count in table.rows}
    assert list(counts) == ["equal", "random", "refused", "wrong", "raw error"]
    assert counts["equal"] > 3 and not table.missed
    ends = 'a | 1 | wrong | why\nb | 2 | refused | why\n{"equal": 1, "wrong": 1, "raw error": 0}'
    monkeypatch.setattr(bench_faults, "python", lambda *_, folder: ends)
    assert bench_faults.operator_samples(1).missed == ["a | 1 | wrong | why"]


@pytest.mark.slow
def test_a_model_is_as_fast_as_the_best_of_its_grid() -> None:
    transformers = pytest.importorskip("transformers", "5.0")
    pytest.importorskip("diffusers")
    from benchmarks import bench_full_size
    from benchmarks.full_size import language
    from benchmarks.zoo.tiny import shrunk

    def tiny() -> nn.Module:
        config = shrunk(transformers.MixtralConfig())
        config.hidden_size, config.intermediate_size = 256, 512
        return transformers.MixtralForCausalLM(config)

    make = partial(language, tiny, length=64)
    case = bench_full_size.Case("tiny", make, devices=4, batch=8, length=64)
    found = bench_full_size.measured(case)
    assert 0 < found.step <= (1 + bench_full_size.TOLERANCE) * found.grid_seconds
    assert found.parts is not None
    assert prod(found.parts[:3]) * found.parts[4] == case.devices


def test_full_size_plans_that_are_beaten_or_do_not_fit_miss_the_goal() -> None:
    pytest.importorskip("transformers", "5.0")
    pytest.importorskip("diffusers")
    from benchmarks.bench_full_size import CASES, Found

    table = Table("t", tuple("abcdefghi"))
    found = Found(8, 1.0, 2.0, step=2.0, memory=1, grid_seconds=2.0, parts=(64, 1, 1, 1, 1))
    found.add_to(table, CASES[0])
    assert not table.missed
    replace(found, grid_seconds=1.0).add_to(table, CASES[0])
    replace(found, step=float("inf"), parts=None).add_to(table, CASES[0])
    assert table.missed == [
        "Llama-3 8B, 64 × 8192: 2.00 of its grid",
        "Llama-3 8B, 64 × 8192: no plan fits",
    ]


@pytest.mark.slow
@pytest.mark.distributed
def test_experts_on_processes_send_what_is_planned_and_slow_plans_miss_the_goal() -> None:
    pytest.importorskip("transformers", "5.0")
    from benchmarks import bench_structures

    found = bench_structures.measured("experts", rounds=2, ranks=2)
    assert set(found) == {"one device", "data parallel", "automatic"}
    assert all(f["counted"] == f["planned"] > 0 for way, f in found.items() if "mesh" in f)
    slow = {**found["automatic"], "seconds": [9.0, 9.0], "counted": 1}
    found["data parallel"]["seconds"] = [3.0, 3.0]
    table = Table("t", ("a",))
    bench_structures.add_misses(table, "experts", {**found, "automatic": slow})
    assert table.missed == [
        "experts: 3.00 of the time of data parallel",
        "experts, automatic: other bytes than planned",
    ]
