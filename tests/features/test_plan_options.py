"""One set of options: keywords of `plan` and `AutoParallel`, and keys of configurations.

Nothing here names what options there are, but where a value that is not valid is shown."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
import yaml
from torch import nn

import shardwright as sw
from shardwright.core.planner.options import FileOptions, KeywordOptions, PlanOptions
from shardwright.core.planner.requirement import requirements
from shardwright.errors import ConfigError, StrategyError
from shardwright.run.config import parse
from shardwright.run.config.schema import ParallelSection

MODEL = "model: {name: llama2_7b_tiny}\n"


def defaults(options: type[FileOptions]) -> dict[str, Any]:
    """Of each option; MISSING for one that is required."""
    return {each.name: each.default for each in fields(options)}


def keyword_defaults(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {
        each.name: MISSING if each.default is each.empty else each.default
        for each in parameters
        if each.kind == each.KEYWORD_ONLY
    }


def test_every_option_is_a_keyword_of_plan_with_the_same_default_and_type() -> None:
    assert keyword_defaults(sw.plan) == defaults(PlanOptions)
    hints = get_type_hints(PlanOptions)
    for name, parameter in inspect.signature(sw.plan).parameters.items():
        assert parameter.annotation == hints.get(name, parameter.annotation), name


def test_every_option_but_devices_and_mode_is_a_keyword_of_the_one_object_form() -> None:
    assert keyword_defaults(sw.AutoParallel) == defaults(KeywordOptions)
    assert set(defaults(PlanOptions)) - set(defaults(KeywordOptions)) == {"devices", "mode"}


def test_every_option_of_files_is_a_key_with_the_same_default() -> None:
    section = parse(MODEL).parallel
    keys = ParallelSection.model_fields
    assert {name: getattr(section, name) for name in defaults(FileOptions)} == defaults(FileOptions)
    same = set(keys) & set(defaults(PlanOptions))
    assert same > set(defaults(FileOptions))
    for name in same:
        assert keys[name].default == defaults(PlanOptions)[name], name


def test_what_a_file_says_is_what_the_options_hold() -> None:
    values = {"log_costs": True, "stages": "auto", "micro_batches": 4, "memory_limit": "1GiB"}
    section = parse(MODEL + yaml.safe_dump({"parallel": values})).parallel
    assert section.keywords(FileOptions) == defaults(FileOptions) | values


@pytest.mark.parametrize("name", [each.name for each in fields(PlanOptions)])
def test_every_option_is_documented_once_by_its_class_and_shown_by_help(name: str) -> None:
    heading = f"\n    {name}: "
    classes = (FileOptions, KeywordOptions, PlanOptions)
    documented = [each for each in classes if heading in (inspect.getdoc(each) or "")]
    assert [name in inspect.get_annotations(each) for each in documented] == [True]
    assert (inspect.getdoc(sw.plan) or "").count(heading) == 1


@pytest.mark.parametrize("name", requirements(FileOptions))
def test_a_value_that_is_not_valid_is_refused_alike_as_keyword_and_as_key(name: str) -> None:
    requirement = requirements(FileOptions)[name]
    with pytest.raises(StrategyError) as keyword:
        KeywordOptions(**{name: []})
    assert str(keyword.value) == requirement.error(name, [])
    with pytest.raises(ConfigError) as key:
        parse(f"{MODEL}parallel: {{{name}: []}}")
    assert f"parallel.{name}: expected {requirement.words}, got []" in str(key.value)


@pytest.mark.parametrize("name", requirements(FileOptions))
def test_only_an_option_that_may_be_left_open_takes_none(name: str) -> None:
    assert requirements(FileOptions)[name].accepts(None) == (defaults(FileOptions)[name] is None)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: sw.plan(nn.Linear(2, 2), devices=2, memory_limt=1), "plan().*mean 'memory_limit'"),
        (lambda: sw.plan(nn.Linear(2, 2), devices=2, xyz=1), "plan().*'xyz': valid are net, args,"),
        (lambda: sw.plan(nn.Linear(2, 2)), "plan().*missing a required argument: 'devices'"),
        (lambda: sw.AutoParallel(nn.Linear(2, 2), micro_batch=1), "mean 'micro_batches'"),
        (lambda: sw.AutoParallel(nn.Linear(2, 2), mode="exact"), "mean 'parallel_mode'"),
    ],
)
def test_an_argument_that_there_is_not_is_named_with_the_nearest(
    wrong: Callable[[], Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message.replace("()", r"\(\)")):
        wrong()


def test_an_option_that_is_not_valid_is_refused_before_the_model_is_called() -> None:
    with pytest.raises(StrategyError, match="valid are 1f1b"):
        sw.AutoParallel(nn.Linear(2, 2), schedule="seqpipe")


def test_a_dtype_may_be_given_as_that_of_torch() -> None:
    assert PlanOptions(devices=2, compute_dtype=torch.bfloat16).compute_dtype == "bfloat16"
    with pytest.raises(StrategyError, match="compute_dtype='float16': valid are float32, bfloat16"):
        PlanOptions(devices=2, compute_dtype=torch.float16)


CALLS = """
import shardwright as sw
from torch import nn

net = nn.Linear(2, 2)
sw.plan(net, (), devices=2, memory_limit="1GiB", stages="auto")
sw.AutoParallel(net, "semi_auto", hsdp=True)
sw.plan(net, (), devices=2, memory_limt=1)
sw.plan(net, (), devices="2")
sw.plan(net, ())
sw.AutoParallel(net, micro_batch=1)
sw.AutoParallel(net, stages=1.5)
"""


@pytest.mark.slow
def test_mypy_refuses_unknown_keywords_and_wrong_types(tmp_path: Path) -> None:
    file = tmp_path / "calls.py"
    file.write_text(CALLS)
    command = [sys.executable, "-m", "mypy", "--strict", "--output=json", str(file)]
    printed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    problems = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    codes = {each["line"]: each["code"] for each in problems if each["file"] == str(file)}
    assert codes == {8: "call-arg", 9: "arg-type", 10: "call-arg", 11: "call-arg", 12: "arg-type"}
