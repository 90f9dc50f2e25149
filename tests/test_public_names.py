"""The public names are loaded when they are first used."""

import inspect
import subprocess
import sys

import pytest

import shardwright as sw

CPU_TIME = """
from time import process_time
start = process_time()
import shardwright
print(process_time() - start, "torch" in __import__("sys").modules)
"""


def run(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_import_loads_no_torch_and_takes_less_than_a_tenth_of_a_second() -> None:
    seconds, loaded = run(CPU_TIME).split()
    assert float(seconds) < 0.1
    assert loaded == "False"


def test_every_public_name_is_listed_and_exists() -> None:
    assert {"plan", "Layout", "check"} <= set(sw.__all__) <= set(dir(sw))
    for name in sw.__all__:
        value = getattr(sw, name)
        if inspect.ismodule(value):
            continue
        assert value is getattr(sys.modules[value.__module__], value.__name__)


def test_a_room_is_an_attribute_and_another_name_is_an_error() -> None:
    assert sw.errors.PlanError is sw.PlanError
    with pytest.raises(AttributeError, match="has no attribute 'plans'"):
        _ = sw.plans
