"""The files in `configs/`: all nine models, searched and as an expert divides them."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.errors import ConfigError
from shardwright.mindformers import LanguageRun, language_run
from shardwright.models import MODELS
from shardwright.plain_data import parse_yaml
from shardwright.text_files import read_text

CONFIGS = Path(__file__).parents[2] / "configs"
BATCHES = {
    "llama2_7b": (8, 64),
    "llama2_13b": (8, 16),
    "llama2_70b": (64, 256),
    "qwen_7b": (8, 8),
    "qwen_14b": (8, 8),
    "baichuan2_7b": (8, 8),
    "baichuan2_13b": (8, 8),
    "pangualpha_2_6b": (8, 128),
    "pangualpha_13b": (16, 32),
}
"""Devices and global batch of the published files."""


def run_of(name: str) -> LanguageRun:
    file = CONFIGS / f"{name}.yaml"
    return language_run(parse_yaml(read_text(file, ConfigError), str(file), ConfigError), str(file))


def test_every_published_model_has_its_two_files() -> None:
    names = {f"{name}_{kind}" for name in BATCHES for kind in ("auto", "expert")}
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == names


@pytest.mark.parametrize("kind", ["auto", "expert"])
@pytest.mark.parametrize("name", BATCHES)
def test_a_file_describes_the_published_model_and_batch(name: str, kind: str) -> None:
    run = run_of(f"{name}_{kind}")
    devices, batch = BATCHES[name]
    assert run.model.sizes == MODELS[name]
    assert run.batch.global_batch(devices) == batch
    assert (run.notes, run.unused) == ((), ())
    assert run.parallelism.cluster == "ascend910b"
    run.check_devices(devices)


@pytest.mark.parametrize("name", BATCHES)
def test_the_two_files_differ_only_in_who_divides(name: str) -> None:
    auto, expert = run_of(f"{name}_auto"), run_of(f"{name}_expert")
    assert (auto.parallelism.mode, expert.parallelism.mode) == (
        "recursive_programming",
        "semi_auto",
    )
    assert expert.parallelism.devices == BATCHES[name][0]
    for part in ("model", "training", "memory_limit"):
        assert getattr(auto, part) == getattr(expert, part)
    assert auto.batch.global_batch(1) == expert.batch.global_batch(1)
