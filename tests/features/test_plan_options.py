"""One frozen value has the options of a plan: the public calls write them out, configurations and
commands take them from it. Whatever lags behind it fails here.

Nothing here names what options there are, but where a value that is not valid is shown."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from inspect import Parameter, signature
from pathlib import Path
from types import FunctionType
from typing import Any, get_type_hints

import pytest
import torch
import yaml
from torch import nn

import shardwright as sw
from shardwright.cli.options import load_run
from shardwright.cli.plan import explain_command, plan_command
from shardwright.cli.train import train_command
from shardwright.core.planner.options import FileOptions, KeywordOptions, PlanOptions
from shardwright.core.planner.requirement import requirements
from shardwright.errors import ConfigError, StrategyError
from shardwright.run.config import parse
from shardwright.run.config.schema import ParallelSection

KEYWORD = Parameter.KEYWORD_ONLY
MODEL = "model: {name: llama2_7b_tiny}\n"


def defaults(options: type[FileOptions]) -> dict[str, Any]:
    """Of each option; MISSING for one that is required."""
    return {each.name: each.default for each in fields(options)}


CALLS_WITH_OPTIONS: dict[str, tuple[Callable[..., Any], type[FileOptions]]] = {
    "plan": (sw.plan, PlanOptions),
    "best_plans": (sw.best_plans, PlanOptions),
    "AutoParallel": (sw.AutoParallel.__init__, KeywordOptions),
}


@pytest.mark.parametrize("name", CALLS_WITH_OPTIONS)
def test_the_parameters_of_a_call_are_the_options_with_their_defaults_and_types(name: str) -> None:
    call, options = CALLS_WITH_OPTIONS[name]
    parameters = [each for each in signature(call).parameters.values() if each.kind == KEYWORD]
    given = {
        each.name: MISSING if each.default is each.empty else each.default for each in parameters
    }
    assert given == defaults(options)
    of_call, of_value = get_type_hints(call), get_type_hints(options)
    assert {each: of_call[each] for each in given} == {each: of_value[each] for each in given}


@pytest.mark.parametrize("name", CALLS_WITH_OPTIONS)
def test_the_parameters_of_a_call_stand_in_its_def(name: str) -> None:
    call, _ = CALLS_WITH_OPTIONS[name]
    assert isinstance(call, FunctionType)
    kinds = {each.kind for each in signature(call).parameters.values()}
    assert kinds == {Parameter.POSITIONAL_OR_KEYWORD, KEYWORD}


@pytest.mark.parametrize("name", sw.__all__)
def test_no_public_call_leaves_its_parameters_to_another_one(name: str) -> None:
    """Only options of other libraries' calls are handed on as they are."""
    value = getattr(sw, name)
    if not callable(value) or (isinstance(value, type) and issubclass(value, Exception | str)):
        return
    passed_on = [
        each.name
        for each in signature(value).parameters.values()
        if each.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    ]
    foreign = name in ("dataloader", "from_pretrained", "save_pretrained")
    assert passed_on == (["options"] if foreign else [])


def test_all_options_but_devices_and_mode_are_those_of_the_one_object_form() -> None:
    assert set(defaults(PlanOptions)) - set(defaults(KeywordOptions)) == {"devices", "mode"}


class OptionsReachedError(Exception):
    """Carries what a call made its options of."""


@pytest.mark.parametrize("name", CALLS_WITH_OPTIONS)
def test_every_argument_of_a_call_reaches_the_options(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(arguments: Mapping[str, Any]) -> None:
        raise OptionsReachedError(arguments)

    _, options = CALLS_WITH_OPTIONS[name]
    monkeypatch.setattr(options, "from_arguments", stop)
    given = {each: object() for each in defaults(options)}
    with pytest.raises(OptionsReachedError) as reached:
        getattr(sw, name)(nn.Linear(2, 2), **given)
    (arguments,) = reached.value.args
    assert {each: arguments[each] for each in given} == given


def test_options_are_made_of_all_arguments_that_are_options() -> None:
    arguments = {**defaults(KeywordOptions), "stages": 2, "network": nn.Linear(2, 2)}
    assert KeywordOptions.from_arguments(arguments) == KeywordOptions(stages=2)
    with pytest.raises(KeyError, match="devices"):
        PlanOptions.from_arguments(arguments)


def test_every_option_of_files_is_a_key_with_the_same_default() -> None:
    section = parse(MODEL).parallel
    keys = ParallelSection.model_fields
    assert {name: getattr(section, name) for name in defaults(FileOptions)} == defaults(FileOptions)
    same = set(keys) & set(defaults(PlanOptions))
    assert same > set(defaults(FileOptions))
    for name in same:
        assert keys[name].default == defaults(PlanOptions)[name], name


def test_what_a_command_changes_are_keys_of_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(MODEL)
    of_command = signature(load_run).parameters.keys() - {"config", "resume", "on_progress"}
    assert of_command <= set(defaults(FileOptions))
    given = {
        "mem_coeff": "4",
        "memory_limit": "1GiB",
        "cluster": "h100",
        "log_costs": True,
        "save_graphs": tmp_path,
    }
    assert given.keys() == of_command
    section = load_run(file, **given).config.parallel
    assert {name: str(getattr(section, name)) for name in given} == {
        **{name: str(value) for name, value in given.items()},
        "mem_coeff": "4.0",
    }


@pytest.mark.parametrize("option", [plan_command, explain_command, train_command])
def test_options_of_commands_with_the_name_of_an_option_are_left_open(
    option: Callable[..., Any],
) -> None:
    """What is left open is what the configuration says."""
    same = signature(option).parameters.keys() & set(defaults(FileOptions))
    assert same
    for name in same:
        assert not signature(option).parameters[name].default, name


def test_what_a_file_says_is_what_the_options_hold() -> None:
    values = {"log_costs": True, "stages": "auto", "micro_batches": 4, "memory_limit": "1GiB"}
    section = parse(MODEL + yaml.safe_dump({"parallel": values})).parallel
    assert section.keywords(FileOptions) == defaults(FileOptions) | values


@pytest.mark.parametrize("name", [each.name for each in fields(PlanOptions)])
def test_every_option_is_described_once_in_the_help_of_plan(name: str) -> None:
    assert (inspect.getdoc(sw.plan) or "").count(f"\n    {name}: ") == 1


@pytest.mark.parametrize("name", requirements(FileOptions))
def test_a_value_that_is_not_valid_is_refused_alike_as_keyword_and_as_key(name: str) -> None:
    requirement = requirements(FileOptions)[name]
    with pytest.raises(StrategyError) as keyword:
        KeywordOptions(**{name: []})
    assert str(keyword.value) == requirement.error(name, [])
    with pytest.raises(ConfigError) as key:
        parse(f"{MODEL}parallel: {{{name}: []}}")
    assert f"parallel.{name}: expected {requirement.valid_values}, got []" in str(key.value)


@pytest.mark.parametrize("name", requirements(FileOptions))
def test_only_an_option_that_may_be_left_open_takes_none(name: str) -> None:
    assert requirements(FileOptions)[name].accepts(None) == (defaults(FileOptions)[name] is None)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: sw.plan(nn.Linear(2, 2), devices=2, memory_limt=1), "plan().*mean 'memory_limit'"),
        (
            lambda: sw.plan(nn.Linear(2, 2), devices=2, xyz=1),
            "plan().*'xyz': use one of net, ",
        ),
        (lambda: sw.plan(nn.Linear(2, 2)), "plan().*missing .* argument: 'devices'"),
        (lambda: sw.best_plans(nn.Linear(2, 2), devices=2, tops=1), "best_plans().*mean 'top'"),
        (lambda: sw.AutoParallel(nn.Linear(2, 2), micro_batch=1), "mean 'micro_batches'"),
        (lambda: sw.AutoParallel(nn.Linear(2, 2), mode="exact"), "mean 'parallel_mode'"),
    ],
)
def test_an_argument_that_there_is_not_is_named_with_the_nearest(
    wrong: Callable[[], Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message.replace("()", r"\(\)")):
        wrong()


def test_a_number_of_plans_that_is_not_valid_is_refused() -> None:
    with pytest.raises(StrategyError, match="top=0: must be a whole number of at least 1"):
        sw.best_plans(nn.Linear(2, 2), devices=2, cluster="h100", top=0)


def test_an_option_that_is_not_valid_is_refused_before_the_model_is_called() -> None:
    with pytest.raises(StrategyError, match="must be one of 1f1b"):
        sw.AutoParallel(nn.Linear(2, 2), schedule="seqpipe")


def test_a_dtype_may_be_given_as_that_of_torch() -> None:
    assert PlanOptions(devices=2, compute_dtype=torch.bfloat16).compute_dtype == "bfloat16"
    with pytest.raises(
        StrategyError, match="compute_dtype='float16': must be one of float32, bfloat16"
    ):
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
