"""Extreme numbers in every place where a file or an option of the command line takes one.

`python -m features.number_cases KIND [EVERY]` prints how many end in which way, and the traceback
of each that ends in neither success nor an error of ours.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import os
import re
import resource
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints
from unittest.mock import patch

import typer
import yaml

from features.fuzzed_files import (
    CLUSTER,
    IMAGES,
    MEMORY,
    MODEL,
    NAMED,
    SIZES,
    TARGET,
    TRANSFORMERS,
    limited_time,
)
from mindformers.files import small
from mutations import yaml_text
from shardwright import cli
from shardwright.core.cost.cluster_file import cluster_file_text
from shardwright.core.cost.clusters import load_cluster
from shardwright.errors import ShardwrightError
from shardwright.mindformers import language_run
from shardwright.mindformers.keys import Keys
from shardwright.models import Dimensions
from shardwright.run.config.load import parse
from shardwright.run.config.schema import Config, Section
from shardwright.run.launch.rank_processes import RankProcess

NUMBERS: tuple[str, ...] = (
    *("0", "-1", "2147483648", "9007199254740992", "9223372036854775807"),
    *("18446744073709551616", "1e309", "true", ".nan", "-9223372036854775809", "1e300", "1e-320"),
)
"""As YAML writes them; `1e309` is beyond a float."""

Place = tuple[str | int, ...]


class Started(BaseException):
    """In place of a process that a command would start."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A command with one extreme number.

    Args:
        place: the key or option that has the number.
        arguments: of the command line.
        file, text: the file with the number; empty for an option.
    """

    place: str
    number: str
    arguments: tuple[str, ...]
    file: str = ""
    text: str = ""


def run(case: Case) -> str:
    """How the command ends, in the working folder: `success`, or the message of an error.

    Raises:
        AssertionError: if it ends otherwise.
    """
    if case.file:
        Path(case.file).write_text(case.text)
    out, err = io.StringIO(), io.StringIO()
    with (
        patch.object(sys, "argv", ["shardwright", *case.arguments]),
        patch.object(RankProcess, "start", _start),
        patch.object(cli.train, "launch_node", _start),
        patch.object(cli.machine, "calibrate", _start),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        limited_time(),
    ):
        try:
            cli.main()
        except SystemExit as done:
            status = done.code
        except Started:
            return "success"
    printed = out.getvalue() + err.getvalue()
    assert "Traceback" not in printed, printed
    if status == 2:
        assert "error: " in err.getvalue().lower(), printed
        return err.getvalue()
    assert status in (0, 1), (status, printed)
    return "success"


def _start(*_: object, **__: object) -> None:
    raise Started


def prepare(folder: Path) -> None:
    """Write the files that the cases name; `folder` is to be the working folder."""
    (folder / "fuzzed_model.py").write_text(MODEL)
    (folder / "cluster.yaml").write_text(CLUSTER)
    (folder / "script.py").write_text("")
    (folder / "run.yaml").write_text(_PERCEPTRON)
    (folder / "expert.yaml").write_text(yaml_text(small(parallel__parallel_mode=1)))


_PERCEPTRON = """
model: {target: "fuzzed_model:Perceptron"}
data: {target: "fuzzed_model:data", batch_size: 8}
train: {steps: 2}
"""

# Configurations


def configurations() -> Iterator[Case]:
    """Each numeric key of the schema, and each number of the examples."""
    examples = [yaml.safe_load(text) for text in (TARGET, NAMED, SIZES, TRANSFORMERS, IMAGES)]
    for example in examples:
        example.setdefault("train", {})["steps"] = 1
        example["train"].pop("checkpoint", None)
        example["train"].pop("load", None)
    places = dict.fromkeys(_keys_of(Config))
    owners = {place: _example_with(examples, place) for place in places}
    for example in examples:
        for place in _numbers_of(example):
            owners.setdefault(place, example)
    for place, example in owners.items():
        # What a model computes with its own numbers is its own affair; whether it can be planned
        # is not.
        command = "plan" if place[0] == "model" else "train"
        yield from _file_cases(example, place, (command, "numbers.yaml", "--devices", "1"))


def _keys_of(section: type, prefix: Place = ()) -> Iterator[Place]:
    hints = get_type_hints(section)
    for name, hint in hints.items():
        place = (*prefix, name)
        kinds = set(_parts(hint))
        for nested in kinds:
            if isinstance(nested, type) and issubclass(nested, Section):
                yield from _keys_of(nested, place)
        if kinds & {int, float}:
            yield (*place, 0) if list in kinds else place
    if section is Config:
        yield from (("model", "sizes", field.name) for field in dataclasses.fields(Dimensions))


def _parts(hint: Any) -> Iterator[Any]:
    yield get_origin(hint) or hint
    for each in get_args(hint):
        yield from _parts(each)


def _example_with(examples: Sequence[Any], place: Place) -> Any:
    """The first example in which a harmless number may stand at a place."""
    for example in examples:
        for number in (8, 1, 0, 0.5):
            with contextlib.suppress(ShardwrightError, TypeError):
                parse(yaml_text(_replaced(example, place, number)))
                return example
    return examples[0]


# Files of MindFormers


def mindformers_files() -> Iterator[Case]:
    """Each number that the reader of MindFormers' files asks for."""
    owners: dict[Place, Any] = {}
    for content in _mindformers_examples():
        for place in _numbers_read(content):
            owners.setdefault(place, content)
    for place, content in owners.items():
        yield from _file_cases(content, place, ("plan", "numbers.yaml", "--devices", "8"))


def _mindformers_examples() -> tuple[Any, ...]:
    model = "model__model_config__"
    semi = {"parallel__parallel_mode": 1}
    moe = {
        "moe_config__expert_num": 4,
        "moe_config__num_experts_chosen": 2,
        "trainer__model_name": "mixtral",
    }
    return (
        small(
            **semi,
            parallel__enable_parallel_optimizer=True,
            parallel__parallel_optimizer_config__parallel_optimizer_threshold=64,
            lr_schedule__type="CosineWithWarmUpLR",
            lr_schedule__learning_rate=1e-4,
            lr_schedule__warmup_steps=2,
            lr_schedule__total_steps=10,
            context__max_device_memory="24GB",
            callbacks=[{"type": "CheckpointMonitor", "save_checkpoint_steps": 2}],
        ),
        small(
            **semi, **{f"{model}pet_config__pet_type": "lora", f"{model}pet_config__lora_rank": 8}
        ),
        small(**semi, **moe),
        small(parallel_config__mem_coeff=0.2),
    )


def _numbers_read(content: Any) -> list[Place]:
    """Places of the numbers that reading asks for, whether or not the file has them."""
    places: dict[Place, None] = {}
    number, size = Keys.number, Keys.size

    def recorded(read: Callable[..., Any]) -> Callable[..., Any]:
        def record(keys: Keys, name: str, *arguments: Any, **options: Any) -> Any:
            parts = [*filter(None, re.split(r"[.\[\]]+", keys.path)), name]
            places[tuple(int(part) if part.isdecimal() else part for part in parts)] = None
            return read(keys, name, *arguments, **options)

        return record

    with (
        patch.object(Keys, "number", recorded(number)),
        patch.object(Keys, "size", recorded(size)),
        contextlib.suppress(ShardwrightError),
    ):
        language_run(deepcopy(content), "numbers.yaml")
    for place in _numbers_of(content):
        places[place] = None
    return list(places)


# Clusters


def clusters() -> Iterator[Case]:
    """Each value of a cluster's file and of a calibration, with its unit and without one."""
    command = ("plan", "run.yaml", "--devices", "4", "--cluster", "numbers.yaml")
    for text in (CLUSTER, cluster_file_text(load_cluster("h100"))):
        content = yaml.safe_load(text)
        for place in _leaves_of(content):
            yield from _file_cases(content, place, command)
            value = _value_at(content, place)
            unit = str(value).partition(" ")[2] if isinstance(value, str) else ""
            if unit:
                yield from _file_cases(content, place, command, f" {unit}")


# Options


def options() -> Iterator[Case]:
    """Each option that takes a number, of each command."""
    commands: Any = typer.main.get_command(cli.app)
    for name, command in commands.commands.items():
        for parameter in command.params:
            if parameter.name not in _numeric_options():
                continue
            option = parameter.opts[0]
            for number in NUMBERS:
                for value in _OPTION_VALUES.get(option, ("{}",)):
                    text = value.format(number.lstrip("."))
                    yield Case(f"{name} {option}", text, _arguments(name, option, text))


_OPTION_VALUES = {
    "--elastic": ("1:{}", "{}:2"),
    "--nnodes": ("{}", "1:{}"),
    "--rdzv": ("localhost:{}",),
    "--memory-limit": ("{}", "{} GiB"),
}


@cache
def _numeric_options() -> frozenset[str]:
    """Names of the parameters of commands that are numbers, or texts with a number."""
    names = {"mem_coeff", "memory_limit", "elastic", "nnodes", "rdzv"}
    commands: Any = typer.main.get_command(cli.app)
    for command in commands.commands.values():
        names |= {
            name
            for name, hint in get_type_hints(command.callback.__wrapped__).items()
            if {int, float} & set(_parts(hint))
        }
    return frozenset(names)


_COMMANDS: Mapping[str, tuple[str, ...]] = {
    "calibrate": ("calibrate", "--devices=2"),
    "check": ("check", "run.yaml", "--devices=2"),
    "compare": ("compare", "expert.yaml", "--devices=2", "--cluster=h100"),
    "explain": ("explain", "run.yaml", "first", "--devices=2"),
    "launch": ("launch", "--devices=2", "script.py"),
    "plan": ("plan", "run.yaml", "--devices=2"),
    "rehearse": ("rehearse", "run.yaml", "--devices=2"),
    "report": ("report", "run.yaml", "--devices=2"),
    "train": ("train", "run.yaml", "--devices=2"),
    "tune": ("tune", "run.yaml", "--devices=2", "--cluster=h100"),
}
_NODE = ("--nnodes=2", "--node-rank=0", "--rdzv=localhost:29400", "--nproc-per-node=1")


def _arguments(name: str, option: str, text: str) -> tuple[str, ...]:
    command = _COMMANDS[name]
    if any(each.startswith(f"{option}=") for each in _NODE):
        command = ("train", "run.yaml", *_NODE)
    if option == "--top":
        command = (*command, "--cluster=h100")
    if option == "--rounds":
        command = (*command, "--run=tiny")
    kept = [each for each in command[1:] if not each.startswith(f"{option}=")]
    return (command[0], f"{option}={text}", *kept)


# Places of plain data


def _file_cases(
    content: Any, place: Place, arguments: tuple[str, ...], unit: str = ""
) -> Iterator[Case]:
    # The marker is replaced in the text, as YAML would write another number.
    text = yaml_text(_replaced(content, place, "NUMBER"))
    name = ".".join(map(str, place))
    for number in NUMBERS:
        written = f"{number.lstrip('.')}{unit}" if unit else number
        yield Case(name, written, arguments, "numbers.yaml", text.replace("NUMBER", written))


def _replaced(content: Any, place: Place, value: object) -> Any:
    copy = deepcopy(content)
    owner: Any = copy
    for part, following in pairwise(place):
        if isinstance(owner, dict) and not isinstance(owner.get(part), dict | list):
            owner[part] = [0] if isinstance(following, int) else {}
        owner = owner[part]
    owner[place[-1]] = value
    return copy


def _value_at(content: Any, place: Place) -> Any:
    for part in place:
        content = content[part]
    return content


def _leaves_of(content: Any, prefix: Place = ()) -> Iterator[Place]:
    if isinstance(content, dict | list):
        parts = content if isinstance(content, dict) else range(len(content))
        for part in parts:
            yield from _leaves_of(content[part], (*prefix, part))
    else:
        yield prefix


def _numbers_of(content: Any) -> Iterator[Place]:
    for place in _leaves_of(content):
        value = _value_at(content, place)
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield place


CASES: Mapping[str, Callable[[], Iterator[Case]]] = {
    "configurations": configurations,
    "mindformers": mindformers_files,
    "clusters": clusters,
    "options": options,
}


def main(kind: str, every: str = "1") -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    logging.disable(logging.CRITICAL)
    ends = Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        prepare(Path(name))
        for case in list(CASES[kind]())[:: int(every)]:
            try:
                ends["success" if run(case) == "success" else "refused"] += 1
            except BaseException:
                ends["raw"] += 1
                print(case, traceback.format_exc(), file=sys.stderr, flush=True)
    print(json.dumps(ends))


if __name__ == "__main__":
    main(*sys.argv[1:])
