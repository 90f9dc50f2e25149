"""The page of a plan: its figures are the plan's, its texts are texts, its file stands alone."""

import json
import re
import sys
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from sample_models import llama
from shardwright.core.cost.memory import bytes_text
from shardwright.core.plan.repeated_rows import fold_rows
from shardwright.core.plan.rows import seconds_text
from shardwright.models import build, dimensions, example_batch
from shardwright.tools.report import page_html
from shardwright.tools.report.plan_page import plan_page

VOID = {"meta", "br", "input", "link", "rect", "line", "use"}


class Reader(HTMLParser):
    """The elements of a page, each with its attributes and all text inside."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.opened: list[tuple[str, list[str]]] = []
        self.feed(html)
        self.close()
        assert self.opened == [], self.opened[-1]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        text: list[str] = []
        self.elements.append((tag, dict(attrs), text))
        if tag not in VOID:
            self.opened.append((tag, text))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), []))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            opened, text = self.opened.pop()
            assert opened == tag
            if self.opened:
                self.opened[-1][1].extend(text)

    def handle_data(self, data: str) -> None:
        if self.opened:
            self.opened[-1][1].append(data)

    def texts(self, tag: str, kind: str | None = None) -> list[str]:
        """Of all elements of this tag and class."""
        return [
            " ".join("".join(text).split())
            for name, attributes, text in self.elements
            if name == tag and (kind is None or kind in (attributes.get("class") or "").split())
        ]


def read(plan: sw.Plan) -> Reader:
    return Reader(page_html(plan_page(plan)))


def headlines(plan: sw.Plan) -> dict[str, tuple[str, str]]:
    return {each.label: (each.figure, each.note) for each in plan_page(plan).headlines}


@pytest.fixture(scope="module")
def staged() -> sw.Plan:
    """On a cluster, with two stages, sharded storage and recomputation, read from its file."""
    net, args, kwargs = llama(batch=16, layers=4)
    sw.recompute(net.model.layers[0])
    hsdp = {"threshold": 0}
    options: dict[str, Any] = {"stages": 2, "micro_batches": 4, "cluster": "h100", "hsdp": hsdp}
    plan = sw.plan(net, args, kwargs, devices=8, mode="data_parallel", **options)
    return sw.Plan.from_json(plan.to_json(memory=True))


@pytest.fixture(scope="module")
def plain() -> sw.Plan:
    """Without a cluster, read from its file."""
    net = sw.WithLoss(nn.Linear(64, 32), nn.MSELoss())
    plan = sw.plan(net, (torch.randn(16, 64), torch.randn(16, 32)), devices=2)
    return sw.Plan.from_json(plan.to_json(memory=True))


def test_the_answer_is_the_plans(staged: sw.Plan) -> None:
    shown, step, memory = headlines(staged), staged.step, staged.saved_memory
    assert step is not None and memory is not None and step.utilization is not None
    assert staged.global_batch is not None and staged.sequence is not None
    assert shown["Devices"] == ("8", f"pp 2 × {staged.mesh.sizes}")
    assert shown["Step"] == (seconds_text(step.seconds), "predicted on h100")
    tokens = staged.global_batch * staged.sequence / step.seconds
    assert shown["Speed"] == (
        f"{tokens:,.0f} tokens/s",
        f"{tokens / 8:,.0f} tokens/s of one device",
    )
    assert shown["Utilization"][0] == f"{step.utilization:.1%}"
    assert shown["Parameters"][0] == f"{sum(p.numel() for p in llama(layers=4)[0].parameters()):,}"
    assert shown["Memory per device"][0] == bytes_text(memory.peak)
    assert shown["Sent per device"][0] == bytes_text(staged.bytes)
    assert shown["Global batch"] == ("16 sequences", "of 8 tokens, 4 micro-batches of 4")


def test_the_sentence_names_what_was_chosen_in_words_of_the_field(staged: sw.Plan) -> None:
    sentence = plan_page(staged).sentence
    assert sentence.startswith("Pipeline parallel 2 (1f1b), fully sharded data parallel ")
    assert (
        "4 micro-batches; parameters and optimizer state are stored in shards, gathered" in sentence
    )
    assert re.search(r"; \d+ of \d+ operators are recomputed", sentence)


def test_axes_that_cut_nothing_are_called_copies_and_noted() -> None:
    plan = sw.plan(nn.Linear(4, 4), (torch.randn(4, 4),), devices=12)
    page = plan_page(plan)
    assert [axis.size for axis in page.axes if axis.meaning == "replicated"] == [3]
    assert any("groups of 3 devices compute the same result" in note for note in page.notes)


def test_what_the_page_holds_is_what_the_html_shows(staged: sw.Plan) -> None:
    page, html = plan_page(staged), read(staged)
    shown = html.texts("div", "headline")
    assert shown == [f"{each.label}{each.figure}{each.note}".strip() for each in page.headlines]
    assert html.texts("p", "sentence") == [page.sentence]
    assert html.texts("h1") == [page.title]


def test_bars_of_time_are_the_parts_of_the_step_one_after_the_other(staged: sw.Plan) -> None:
    step, bars = staged.step, plan_page(staged).time.rows
    assert step is not None and len(bars) == len(step.parts)
    end = 0.0
    for bar, part in zip(bars, step.parts, strict=True):
        assert bar.start == pytest.approx(end, abs=1e-9)
        assert bar.length == pytest.approx(part.seconds / step.seconds)
        end = bar.start + bar.length
    assert end == pytest.approx(1)


def test_memory_is_shown_by_kind_against_the_limit(staged: sw.Plan) -> None:
    memory, limit, chart = staged.saved_memory, staged.memory_limit, plan_page(staged).memory
    assert memory is not None and limit is not None
    for stage, stack in zip(memory.stages, chart.rows, strict=True):
        assert stack.size_text == bytes_text(stage.peak)
        assert sum(bar.length for bar in stack.bars) == pytest.approx(stage.peak / limit)
        assert stack.limit == 1
    assert [row[-2] for row in chart.table] == [bytes_text(stage.peak) for stage in memory.stages]


def test_memory_over_a_step_has_the_peak_of_every_action(staged: sw.Plan) -> None:
    memory = staged.saved_memory
    assert memory is not None
    data = {**json.loads(staged.to_json()), "memory_limit": memory.peak * 5 // 4}
    near = plan_page(sw.Plan.from_json(json.dumps(data))).curves
    for stage, curve, other in zip(memory.stages, plan_page(staged).curves, near, strict=True):
        heights = [height for *_, height in curve.columns]
        assert max(heights) == pytest.approx(stage.peak / memory.peak)
        # The limit is far above: only one nearby is in the picture.
        assert curve.limit is None and other.limit == 1
        assert max(height for *_, height in other.columns) == pytest.approx(
            stage.peak / data["memory_limit"]
        )
        kinds = [kind for kind, *_ in curve.columns]
        assert (kinds.count("F0"), kinds.count("B0")) == (4, 4)
        assert f"{stage.moment}: {bytes_text(stage.peak)}" in [text for _, text, _ in curve.columns]


def test_a_plan_that_does_not_fit_says_so(staged: sw.Plan) -> None:
    data = {**json.loads(staged.to_json()), "memory_limit": 1000}
    page = plan_page(sw.Plan.from_json(json.dumps(data)))
    (memory,) = [each for each in page.headlines if each.label == "Memory per device"]
    assert memory.state == "bad" and memory.note.endswith("does not fit")
    assert all(stack.state == "bad" for stack in page.memory.rows)


def test_the_timeline_has_every_action_of_every_stage(staged: sw.Plan) -> None:
    page = plan_page(staged)
    assert [len(lane.spans) for lane in page.lanes] == [8, 8]
    assert all(
        start >= 0 and start + length <= 1 + 1e-9 for *_, start, length in page.lanes[0].spans
    )
    assert staged.step is not None and f"{staged.step.bubble:.1%}" in page.pipeline_note


def test_each_stage_names_the_blocks_that_it_computes(staged: sw.Plan, plain: sw.Plan) -> None:
    first, last = plan_page(staged).stages.table
    assert first == ("stage 0", "model.embed_tokens, model.layers.{0..1}")
    assert last[1].startswith("model.layers.{2..3}, model.norm, lm_head")
    assert plan_page(plain).stages.table == ()


def test_without_a_cluster_there_are_bytes_and_memory_but_no_seconds(plain: sw.Plan) -> None:
    shown = headlines(plain)
    assert shown["Step"] == ("not predicted", "name a cluster to predict seconds")
    assert "Speed" not in shown and "Utilization" not in shown
    assert shown["Memory per device"][1] == "peak; no limit is known"
    assert plan_page(plain).time.rows == ()
    read(plain)


def test_a_model_that_takes_no_time_has_a_page_too() -> None:
    plan = sw.plan(nn.Flatten(), (torch.randn(4, 2, 2),), devices=2, cluster="h100")
    shown = headlines(plan)
    assert shown["Step"][0] == "0 μs" and shown["Utilization"][0] == "0.0%"
    assert plan_page(plan).time.rows == ()
    read(plan)


def test_bytes_of_all_kinds_of_redistributions_are_those_of_the_plan() -> None:
    net = nn.Linear(64, 32)
    plan = sw.plan(net, (torch.randn(16, 64),), devices=4, mode="data_parallel")
    table = plan_page(plan).traffic.table
    assert table == (
        ("vary over dp / all_reduce", "2", "0 B", bytes_text(plan.backward_bytes)),
        ("all_gather over dp", "1", bytes_text(plan.forward_bytes), "0 B"),
    )


def test_files_of_an_earlier_release_give_a_page_of_what_they_hold(staged: sw.Plan) -> None:
    data = json.loads(staged.to_json())
    for key in ("chunk_seconds", "saved_memory", "memory_limit"):
        del data[key]
    for key in ("parts", "utilization"):
        del data["step"][key]
    for row in data["operators"]:
        del row["seconds"]
    plan = sw.Plan.from_json(json.dumps(data))
    page, shown = plan_page(plan), headlines(plan)
    assert plan.step is not None and shown["Step"][0] == seconds_text(plan.step.seconds)
    assert shown["Parameters"][1] == f"{bytes_text(plan.parameter_bytes)} stored per device"
    assert shown["Memory per device"][0] == "not predicted"
    assert [bar.category for bar in page.time.rows][:2] == ["computation", "communication"]
    for note in (page.time.note, page.memory.note, page.pipeline_note):
        assert "plan again" in note
    read(plan)


class Odd(nn.Module):
    """Its submodules have names that would be markup."""

    NAMES = (
        "<script>alert(1)</script>",
        '" onmouseover="alert(1)',
        "{{ 7 * 7 }}",
        "{% raw %}",
        "]]>",
    )

    def __init__(self) -> None:
        super().__init__()
        for name in self.NAMES:
            self.add_module(name, nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        for name in self.NAMES:
            x = getattr(self, name)(x)
        return x.sum()


def test_names_that_would_be_markup_are_text(tmp_path: Path) -> None:
    plan = sw.plan(Odd(), (torch.randn(8, 8),), devices=2)
    plan.report(tmp_path / "odd.html")
    html = Reader((tmp_path / "odd.html").read_text(encoding="utf-8"))
    assert len(html.texts("script")) == 1
    assert not any("onmouseover" in attributes for _, attributes, _ in html.elements)
    shown = " ".join(html.texts("b"))
    assert all(name in shown for name in Odd.NAMES)


def test_the_page_loads_nothing(staged: sw.Plan) -> None:
    html = page_html(plan_page(staged))
    for _, attributes, _ in Reader(html).elements:
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    assert "default-src 'none'" in html
    assert not re.findall(r"https?://|@import|url\((?!#)", html)


def test_every_operator_is_found_by_its_path(staged: sw.Plan) -> None:
    names = [
        attributes["data-name"] or ""
        for tag, attributes, _ in read(staged).elements
        if tag == "li" and "data-name" in attributes
    ]
    assert len(names) == len(fold_rows(staged.operators))
    assert any(name.startswith("model.layers.{0..3}.mlp.") for name in names)


def test_without_jinja2_the_error_names_the_remedy(
    plain: sw.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(sw.PlanError, match=r"jinja2 .*\npip install 'shardwright\[tools\]'"):
        plain.report(tmp_path / "plan.html")
    assert not (tmp_path / "plan.html").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda data: data["chunk_seconds"].pop(),
            "`chunk_seconds` has 1 chunks, but the pipeline has 2",
        ),
        (
            lambda data: data["saved_memory"]["stages"].pop(),
            "`saved_memory` has 1 stages, but the pipeline has 2",
        ),
        (lambda data: data["step"]["parts"][0].update(kind="magic"), "`step.parts.0.kind`: "),
        (lambda data: data["step"]["parts"][0].update(seconds=-1.0), "`step.parts.0.seconds`: "),
        (lambda data: data["operators"][0].update(seconds="1"), "`operators.0.seconds`: "),
        (lambda data: data["chunk_seconds"][0].update(forward=None), "`chunk_seconds.0.forward`: "),
    ],
)
def test_what_a_file_says_of_time_and_memory_is_checked(
    staged: sw.Plan, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    data = json.loads(staged.to_json())
    change(data)
    with pytest.raises(sw.PlanError, match=re.escape(message)):
        sw.Plan.from_json(json.dumps(data))


def test_too_many_actions_are_not_drawn(staged: sw.Plan) -> None:
    data = json.loads(staged.to_json())
    data["pipeline"]["micro_batches"] = 10**9
    page = plan_page(sw.Plan.from_json(json.dumps(data)))
    assert page.lanes == () and "too many to draw" in page.pipeline_note


def test_other_plans_are_compared_row_by_row(staged: sw.Plan, plain: sw.Plan) -> None:
    page = plan_page(staged, {"small": plain, "half": "no plan fits <here>"})
    own, small, half = page.others.table
    assert staged.step is not None and staged.saved_memory is not None
    assert own[:4] == ("this plan", "8", seconds_text(staged.step.seconds), "1.00")
    assert own[5:7] == (bytes_text(staged.saved_memory.peak), bytes_text(staged.bytes))
    assert small[:5] == ("small", "2", "", "", "") and small[6] == bytes_text(plain.bytes)
    assert half == ("half", *[""] * 6, "no plan fits <here>")
    assert "no plan fits &lt;here&gt;" in page_html(page)
    assert plan_page(staged).others.table == ()


def test_a_slider_shows_other_plans_with_what_each_decides_otherwise(
    staged: sw.Plan, plain: sw.Plan
) -> None:
    page = plan_page(staged, {"small": plain, "half": "no plan fits <here>"})
    own, small, half = page.other_plans
    assert [each.name for each in page.other_plans] == ["this plan", "small", "half"]
    assert own.changes.table == () and half.rows == () and half.sentence == "no plan fits <here>"
    assert [row.label for row in own.rows] == ["step", "memory", "sent"]
    assert all(
        bar.length <= 1 for each in page.other_plans for row in each.rows for bar in row.bars
    )
    assert ("devices", "8", "2", "") in small.changes.table
    reader = Reader(page_html(page))
    (slider,) = (
        a for tag, a, _ in reader.elements if tag == "input" and a.get("id") == "other-plan"
    )
    assert (slider["type"], slider["min"], slider["max"]) == ("range", "0", "2")
    assert plan_page(staged).other_plans == ()


@pytest.mark.slow
def test_the_page_of_70b_on_64_devices_is_small_and_made_at_once(tmp_path: Path) -> None:
    with torch.device("meta"):
        net = build("llama2_70b")
        batch = example_batch(dimensions("llama2_70b"), 64, device="meta")
    plan = sw.plan(net, batch, devices=64, stages=8, micro_batches=64)
    plan = sw.Plan.from_json(plan.to_json())
    started = time.process_time()
    plan.report(tmp_path / "plan.html")
    assert time.process_time() - started < 5
    assert (tmp_path / "plan.html").stat().st_size < 5e6
