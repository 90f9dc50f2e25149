"""The public names are loaded when they are first used."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import shardwright as sw

CPU_TIME = """
from time import process_time
start = process_time()
import shardwright
print(process_time() - start, "torch" in __import__("sys").modules)
"""

WITHOUT_OTHERS = """
import sys
for name in ("run", "models", "mindformers", "integrations", "cli"):
    sys.modules[f"shardwright.{name}"] = None
for name in ("accelerate", "jinja2", "peft", "scipy", "sklearn", "transformers", "typer"):
    sys.modules[name] = None

import torch
import shardwright as sw
for name in sw.__all__:
    getattr(sw, name)

net = sw.WithLoss(torch.nn.Linear(4, 4), torch.nn.MSELoss())
batch = torch.randn(8, 4), torch.randn(8, 4)
plan = sw.plan(net, batch, devices=2)
assert sw.check(net, batch, None, plan).passes()
assert sw.rehearse(net, batch, None, plan).passes()
parallel = sw.parallelize(net, sw.plan(net, batch, devices=1))
optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
parallel.train_step(*batch)
optimizer.step()
sw.save_state_dict(parallel, sys.argv[1] + "/net.safetensors")
sw.save_checkpoint(sys.argv[1] + "/run", parallel, optimizer, position=sw.Position(1))
uses = (
    lambda: plan.report(sys.argv[1] + "/page.html"),
    lambda: sw.from_pretrained(None, sys.argv[1], plan),
)
for use in uses:
    try:
        use()
    except sw.ShardwrightError as error:
        print(error)
"""


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_import_loads_no_torch_and_takes_less_than_a_tenth_of_a_second() -> None:
    seconds, loaded = run(CPU_TIME).split()
    assert float(seconds) < 0.1
    assert loaded == "False"


def test_the_core_works_without_other_buildings_and_names_the_extra_of_each(tmp_path: Path) -> None:
    report, pretrained = run(WITHOUT_OTHERS, str(tmp_path)).splitlines()[1::2]
    assert report == "pip install 'shardwright[tools]'"
    assert pretrained == "pip install 'shardwright[transformers]'"


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
