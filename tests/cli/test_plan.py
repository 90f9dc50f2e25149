"""What `shardwright plan` prints beside the plan itself."""

import json
import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import shardwright as sw
from mindformers.files import small
from shardwright.cli import app
from shardwright.cli.plan import _color_axes


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of the MindFormers shape."""
    path = tmp_path_factory.mktemp("published") / "small.yaml"
    path.write_text(str(small(model__model_config__num_layers=1)))
    return path


def test_the_plan_of_a_published_file_says_how_its_batch_comes_about(published: Path) -> None:
    result = CliRunner().invoke(app, ["plan", str(published), "--devices", "8"])
    assert "global batch 8 = batch_size 2 · data_parallel 4 · " in result.stderr
    assert "batch   8 sequences of 32 tokens" in result.stdout


def printed(published: Path, *options: str) -> str:
    return CliRunner().invoke(app, ["plan", str(published), "--devices", "8", *options]).stdout


def test_every_shows_also_the_operators_that_only_follow(published: Path) -> None:
    full, every = printed(published, "--full"), printed(published, "--every")
    silent = re.search(r"(\d+) more\s+operators\s+follow", full)
    assert silent is not None
    assert not re.search(r"more\s+operators\s+follow", every)
    assert len(every.splitlines()) > len(full.splitlines()) + int(silent[1]) // 4


def test_axes_have_colors_on_a_terminal_alone(
    published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "\x1b" not in printed(published)
    text = _color_axes("k/tp over tp·dp, tp_proj/a", plan_of_two_axes())
    assert [str(text)[span.start : span.end] for span in text.spans] == ["dp", "tp", "tp"]


def plan_of_two_axes() -> sw.Plan:
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    return sw.plan(net, (torch.randn(8, 64),), devices=8, mem_coeff=1.0)


def test_the_json_of_a_plan_is_what_the_published_schema_describes(published: Path) -> None:
    schema = json.loads(
        (files("shardwright") / "core" / "plan" / "plan.schema.json").read_text(encoding="utf-8")
    )
    assert set(json.loads(printed(published, "--json"))) == set(schema["properties"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan in a file."""
    path = tmp_path_factory.mktemp("saved") / "plan.json"
    sw.plan(nn.Linear(8, 8), (torch.randn(8, 8),), devices=4).save(path)
    return path


def test_report_writes_a_page_beside_the_plan_or_where_it_is_told(saved: Path) -> None:
    other = saved.parent / "pages" / "other.html"
    for options, page in (([], saved.with_suffix(".html")), (["--out", str(other)], other)):
        result = CliRunner().invoke(app, ["report", str(saved), *options])
        assert result.stdout.split() == [str(page)]
        html = page.read_text(encoding="utf-8")
        assert html.startswith("<!doctype html>") and "Plan for 4 devices" in html


def test_report_plans_a_configuration_and_compares_it_with_others(
    published: Path, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--what-if", "--against", "presets", "--against", str(saved), "--cluster", "h100"]
    result = CliRunner().invoke(app, ["report", str(published), "--devices", "4", *options])
    assert result.stdout.split() == ["small.html"], result.exception
    html = (tmp_path / "small.html").read_text(encoding="utf-8").partition('id="others"')[2]
    html = html.partition("</section>")[0].rpartition("<table")[2]  # The last holds all plans.
    rows = dict(re.findall(r'<th scope="row">([\w ]+)[^<]*</th><td>([\d,]*)</td>', html))
    assert rows.pop("half the batch") in ("", "4")
    assert rows == {
        "this plan": "4",
        "half the memory": "4",
        "twice the devices": "8",
        "twice the batch": "4",
        "data parallel": "4",
        "fully sharded data parallel": "4",
        "plan": "4",
    }


def test_report_names_plans_of_equal_file_names_by_their_paths(saved: Path, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
        (folder / "plan.json").write_bytes(saved.read_bytes())
    options = [each for folder in folders for each in ("--against", str(folder / "plan.json"))]
    out = tmp_path / "page.html"
    CliRunner().invoke(app, ["report", str(saved), *options, "--out", str(out)])
    html = out.read_text(encoding="utf-8").partition('id="others"')[2]
    assert all(f'<th scope="row">{folder / "plan.json"}' in html for folder in folders)


def test_report_compares_a_plan_with_the_best_of_other_kinds(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--devices", "4", "--cluster", "h100", "--top", "3"]
    ranked = json.loads(
        CliRunner().invoke(app, ["plan", str(published), *options, "--json"]).stdout
    )
    result = CliRunner().invoke(app, ["report", str(published), *options])
    assert result.stdout.split() == ["small.html"], result.exception
    html = (tmp_path / "small.html").read_text(encoding="utf-8").partition('id="others"')[2]
    levels = {each["level"] for each in (*ranked["plans"][1:], *ranked["left_out"])}
    assert levels and all((level or "unsharded") in html for level in levels)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("plan", ["--devices", "4"], "is a saved plan"),
        ("plan", ["--what-if"], "is a saved plan"),
        ("plan", ["--top", "3"], "is a saved plan"),
        ("plan", ["--against", "presets"], "presets needs a configuration"),
        ("plan", ["--against", "missing.json"], "missing.json"),
        ("config", [], "a configuration needs --devices"),
    ],
)
def test_options_of_a_report_that_cannot_be_are_refused(
    published: Path, saved: Path, kind: str, options: list[str], message: str
) -> None:
    source = saved if kind == "plan" else published
    result = CliRunner().invoke(app, ["report", str(source), *options])
    assert result.exit_code
    assert message in " ".join(f"{result.output} {result.exception}".replace("│", " ").split())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], r"plan.json: not a plan: invalid JSON"),
        (lambda text: text.replace('"version": 3', '"version": 2'), "plan version 2 is not"),
        (lambda text: "model: {name: llama2_7b}", r"plan.json: not a plan: invalid JSON"),
        (lambda text: text.replace('"mesh"', '"meshes"'), r"invalid plan: `mesh`: Field required"),
    ],
    ids=["cut off", "another version", "a configuration", "a key missing"],
)
def test_a_report_of_what_is_no_plan_is_one_error_and_no_page(
    saved: Path, tmp_path: Path, change: Callable[[str], str], message: str
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(change(saved.read_text()))
    result = CliRunner().invoke(app, ["report", str(path)])
    assert isinstance(result.exception, sw.PlanError)
    assert re.search(message, str(result.exception))
    assert not path.with_suffix(".html").exists()


def test_explain_reads_a_saved_plan_whose_options_are_decided(saved: Path, published: Path) -> None:
    (name,) = [row.name for row in sw.Plan.load(saved).operators if row.main]
    result = CliRunner().invoke(app, ["explain", str(saved), name])
    assert result.stdout.rstrip() == sw.Plan.load(saved).explain(name)
    for arguments, message in (
        ([str(saved), name, "--devices", "4"], "is a saved plan"),
        ([str(published), name], "needs --devices"),
    ):
        failed = CliRunner().invoke(app, ["explain", *arguments])
        assert failed.exit_code == 2
        assert message in " ".join(failed.stderr.replace("│", "").split())
