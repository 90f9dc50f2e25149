"""Control characters in all that commands print: names in files, keys, files, errors, warnings."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import shardwright as sw
from shardwright.__main__ import run_command

HOSTILE = "\x1b[2J\x1b]0;owned\x07\x9b31m\x08\r\x7f\u202eevil\u2066\u2028\u2029\u200b\U000e0041"
"""Clears a screen, sets its title, goes back, and turns the order of what follows."""

FORMAT = "\u202eevil\u2066\u200b\U000e0041"
"""Characters that plan files may have in names, and that turn the order of what follows."""

MODEL = """
import logging, warnings
import torch
from torch import nn

HOSTILE = {hostile!r}

def data():
    return torch.randn(16, 8), torch.randint(4, (16,))

def named():
    net = nn.Sequential()
    net.add_module(HOSTILE.replace(".", ""), nn.Linear(8, 8))
    net.add_module("last", nn.Linear(8, 4))
    return net

def warns():
    warnings.warn(HOSTILE)
    logging.getLogger("model").warning(HOSTILE)
    return nn.Sequential(nn.Linear(8, 4))

def fails():
    raise ValueError(HOSTILE)
"""
CONFIG = """
model: {{target: "hostile_model:{model}"}}
data: {{target: "hostile_model:data", batch_size: 8}}
"""
CLUSTER = """
name: {name}
device: {{memory: 24 GB, rates: {{float32: 82 TFLOP/s}}, memory_bandwidth: 1008 GB/s}}
levels: [{{name: {name}, bandwidth: 3 GB/s, latency: 20 us{more}}}]
"""


def cases(folder: Path) -> Mapping[str, Sequence[str]]:
    """Write files with hostile names into `folder`; the arguments of the command line, by what is
    hostile."""
    text = json.dumps(HOSTILE)
    (folder / "hostile_model.py").write_text(MODEL.format(hostile=HOSTILE))
    for model in ("named", "warns", "fails"):
        (folder / f"{model}.yaml").write_text(CONFIG.format(model=model))
    good = CONFIG.format(model="warns")
    (folder / f"{HOSTILE[:40]}.yaml").write_text(f"{good}{text}: 1\n")
    (folder / f"{HOSTILE[:9]}.yaml").write_text(f"{good}unknown: 1\n")
    (folder / "key.yaml").write_text(f"{good}{text}: 1\n")
    (folder / "value.yaml").write_text(f"model: {{name: {text}}}\n")
    (folder / "broken.yaml").write_text(f"model: *{HOSTILE[:1]}\n{text}: [")
    (folder / "strategies.yaml").write_text(f"{good}parallel: {{strategies: pins.json}}\n")
    pins = {"version": 1, "strategies": {HOSTILE: {"in_strategy": [[1, 2]]}}}
    (folder / "pins.json").write_text(json.dumps(pins))
    (folder / "cluster.yaml").write_text(CLUSTER.format(name=text, more=""))
    (folder / "small.yaml").write_text(CLUSTER.format(name=text, more=", devices: 1"))
    _write_plans(folder)
    plan = ("plan", "warns.yaml", "--devices", "2")
    return {
        "operator of a plan, diff": ("diff", "hostile.json", "other.json"),
        "operator of a plan, diff --every": ("diff", "hostile.json", "other.json", "--every"),
        "operator of a plan, explain": ("explain", "hostile.json", "net.0" + HOSTILE),
        "direction of a plan's names, diff": ("diff", "turned.json", "other.json", "--every"),
        "direction of a plan's names, explain": ("explain", "turned.json", "net.0" + FORMAT),
        "operator that a plan has not": ("explain", "other.json", HOSTILE),
        "key of a plan": ("diff", "key.json", "other.json"),
        "number of a plan": ("diff", "number.json", "other.json"),
        "cluster": (*plan, "--cluster", "cluster.yaml"),
        "cluster that is too small": (*plan, "--cluster", "small.yaml"),
        "cluster that does not exist": (*plan, "--cluster", HOSTILE),
        "option": ("plan", "warns.yaml", "--" + HOSTILE),
        "command": (HOSTILE,),
        "progress": (*plan, "--progress"),
        "module, plan": ("plan", "named.yaml", "--devices", "2", "--full", "--progress"),
        "module, check": ("check", "named.yaml", "--devices", "2"),
        "error of a model": ("plan", "fails.yaml", "--devices", "2"),
        "file": ("plan", f"{HOSTILE[:40]}.yaml", "--devices", "2"),
        **{
            f"{name} of a configuration": ("plan", f"{file}.yaml", "--devices", "2")
            for name, file in (("key", "key"), ("value", "value"), ("syntax", "broken"))
        },
        "file, which has an unknown key": ("plan", f"{HOSTILE[:9]}.yaml", "--devices", "2"),
        "strategy": ("plan", "strategies.yaml", "--devices", "2"),
    }


def _write_plans(folder: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    batch = (torch.randn(8, 8), torch.randint(4, (8,)))
    plan = sw.plan(sw.WithLoss(net, torch.nn.CrossEntropyLoss()), batch, devices=2)
    text = plan.to_json()
    (folder / "other.json").write_text(text)
    data = json.loads(text)
    (folder / "hostile.json").write_text(json.dumps(_renamed(data, "net.0", HOSTILE)))
    (folder / "turned.json").write_text(json.dumps(_renamed(data, "net.0", FORMAT)))
    (folder / "key.json").write_text(json.dumps({**data, HOSTILE: 1}))
    (folder / "number.json").write_text(json.dumps({**data, "devices": HOSTILE}))


def _renamed(data: Any, name: str, suffix: str) -> Any:
    """Plain data in which every string that starts with a name has a suffix."""
    if isinstance(data, dict):
        pairs = data.items()
        return {_renamed(k, name, suffix): _renamed(v, name, suffix) for k, v in pairs}
    if isinstance(data, list):
        return [_renamed(each, name, suffix) for each in data]
    return data + suffix if isinstance(data, str) and data.startswith(name) else data


def control_characters(folder: Path, arguments: Sequence[str]) -> set[str]:
    """Control characters that a command prints, run in `folder` in this process."""
    out, err = io.StringIO(), io.StringIO()
    with _at(folder, arguments), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run_command()
        except SystemExit:
            pass
        except Exception:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    printed = out.getvalue() + err.getvalue()
    assert printed, arguments
    return {
        character
        for character in printed
        if character not in "\n\t" and unicodedata.category(character) in _CONTROL
    }


_CONTROL = ("Cc", "Cf", "Cs", "Zl", "Zp")


@contextlib.contextmanager
def _at(folder: Path, arguments: Sequence[str]) -> Iterator[None]:
    before, path, argv, hook = Path.cwd(), list(sys.path), sys.argv, sys.excepthook
    os.chdir(folder)
    sys.argv = ["shardwright", *arguments]
    try:
        yield
    finally:
        os.chdir(before)
        sys.path[:], sys.argv, sys.excepthook = path, argv, hook
