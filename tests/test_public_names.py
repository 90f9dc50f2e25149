"""The public names are loaded when they are first used, and win over packages of the same name."""

import subprocess
import sys

import pytest

import shardwright as sw

FUNCTIONS = """
import inspect, sys
import shardwright as sw
from shardwright import capture, plan
assert inspect.isfunction(plan) and sw.plan is plan, sw.plan
assert inspect.isfunction(capture) and sw.capture is capture, sw.capture
import shardwright.plan.table, shardwright.capture.views, shardwright.plan, shardwright.capture
assert sw.plan is plan and sw.capture is capture
assert inspect.ismodule(sys.modules["shardwright.plan"])
import torch
print(len(sw.plan(torch.nn.Linear(4, 4), (torch.zeros(2, 4),), devices=2).operators))
"""

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


@pytest.mark.parametrize(
    "first",
    [
        "import shardwright.plan.plan",
        pytest.param("import shardwright.capture.capture", marks=pytest.mark.slow),
        pytest.param("import shardwright as sw; sw.plan; sw.capture", marks=pytest.mark.slow),
        pytest.param("from shardwright.plan import Plan", marks=pytest.mark.slow),
        pytest.param("from shardwright import cli, Layout", marks=pytest.mark.slow),
        pytest.param("import shardwright.rules", marks=pytest.mark.slow),
    ],
)
def test_plan_and_capture_are_functions_whatever_is_imported_first(first: str) -> None:
    assert int(run(first + FUNCTIONS)) > 0


def test_the_import_loads_no_torch_and_takes_less_than_a_tenth_of_a_second() -> None:
    seconds, loaded = run(CPU_TIME).split()
    assert float(seconds) < 0.1
    assert loaded == "False"


def test_every_public_name_is_listed_and_exists() -> None:
    assert {"plan", "Layout", "check"} <= set(sw.__all__) <= set(dir(sw))
    for name in sw.__all__:
        value = getattr(sw, name)
        assert value is getattr(sys.modules[value.__module__], value.__name__)


def test_a_room_is_an_attribute_and_another_name_is_an_error() -> None:
    assert sw.errors.PlanError is sw.PlanError
    with pytest.raises(AttributeError, match="has no attribute 'plans'"):
        _ = sw.plans
