"""The files in `configs/tiny/`: each trains alike on one device and on eight."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from features.tiny_ranks import NAMES, TINY, history, run_of
from shardwright.models import MODELS
from torchrun import torchrun


def test_every_published_model_has_a_tiny_file() -> None:
    published = {name for name in MODELS if not name.endswith("_tiny")}
    assert {path.stem for path in TINY.glob("*.yaml")} == published
    assert all(run_of(name, lora=False).config.model.name == f"{name}_tiny" for name in published)


def test_those_that_are_trained_are_all_that_differ() -> None:
    """But for the name of the model, files of equal tiny models are equal."""

    def said(name: str) -> tuple[object, ...]:
        config = run_of(name, lora=False).config
        model = config.model.model_copy(update={"name": None})
        return MODELS[f"{name}_tiny"], config.model_copy(update={"model": model})

    trained = [said(name) for name in NAMES]
    assert all(said(path.stem) in trained for path in TINY.glob("*.yaml"))


def test_a_tiny_model_learns() -> None:
    losses = history("llama2_7b", lora=False, world=1)
    assert losses[-1] < losses[0] - 0.2


@pytest.mark.slow
@pytest.mark.distributed
def test_ten_steps_on_eight_processes_have_the_losses_of_one_device(tmp_path: Path) -> None:
    out = tmp_path / "losses.json"
    output = torchrun(Path(__file__).with_name("tiny_ranks.py"), 8, str(out), timeout=1500)
    assert out.exists(), output
    found = json.loads(out.read_text())
    for name in NAMES:
        for lora in (False, True):
            wanted = history(name, lora, world=1)
            assert found[f"{name} {lora}"] == pytest.approx(wanted, rel=1e-9), (name, lora)
