"""Keys that are read from the source of the schema are those of the imported schema."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from shardwright.run.config.known_keys import section_keys, unknown_keys
from shardwright.run.config.load import parse
from shardwright.run.config.schema import Config

WRONG = """
model: {name: llama2_7b, argumens: {}}
paralel: {stages: 2}
train: {checkpoint: {every: 2, asinc: true}}
"""


def check(section: type[BaseModel]) -> None:
    keys = section_keys()[section.__name__]
    fields = {field.alias or name: field for name, field in section.model_fields.items()}
    assert set(keys) == set(fields)
    for key, field in fields.items():
        members = get_args(field.annotation) or (field.annotation,)
        below = [m for m in members if isinstance(m, type) and issubclass(m, BaseModel)]
        assert keys[key] == (below[0].__name__ if below else None)
        for each in below:
            check(each)


def test_the_keys_are_those_of_the_schema() -> None:
    check(Config)


def test_unknown_keys_are_reported_as_by_the_schema() -> None:
    with pytest.raises(Exception, match="unknown key") as error:
        parse(WRONG, "my.yaml")
    import yaml

    found = unknown_keys(yaml.safe_load(WRONG), "my.yaml").splitlines()
    assert len(found) == 3 and set(found) <= set(str(error.value).splitlines())


def test_files_of_other_frameworks_are_left_to_their_readers() -> None:
    assert not unknown_keys({"runner_config": {}, "model": {"arch": {}}}, "a.yaml")
    assert not unknown_keys(["model"], "a.yaml")


def test_the_command_line_reports_an_unknown_key_without_torch(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(WRONG)
    script = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('torch' in sys.modules))\n"
        "from shardwright.__main__ import run_command\n"
        "sys.argv = ['shardwright', 'plan', 'my.yaml', '--devices', '8']\n"
        "run_command()"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True)
    assert done.returncode == 2 and done.stdout == b"False\n"
    assert b"error: my.yaml: model.argumens: unknown key; did you mean arguments?" in done.stderr
