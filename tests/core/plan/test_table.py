"""The first lines of a plan: the batch, the time of a step, and memory against what there is."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.core.plan.summary import plan_head


class Words(nn.Module):
    """A language model of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.embed(ids))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def plan_of_words(**options: object) -> sw.Plan:
    ids = torch.zeros(16, 8, dtype=torch.long)
    return sw.plan(Words(), (ids, ids), devices=2, **options)  # type: ignore[arg-type]


def plan_of_layer(**options: object) -> sw.Plan:
    x = torch.randn(16, 32)
    return sw.plan(nn.Linear(32, 32), (x,), devices=2, **options)  # type: ignore[arg-type]


def line(plan: sw.Plan, label: str) -> str:
    """The one line that begins with `label`, which the full table has too."""
    (found,) = [line for line in plan_head(plan, 160) if line.startswith(label)]
    return found.removeprefix(label).strip()


def test_the_global_batch_is_that_of_all_micro_batches() -> None:
    assert line(plan_of_layer(), "batch") == "16 samples"
    text = line(plan_of_words(micro_batches=4), "batch")
    assert text == "16 sequences of 8 tokens, in 4 micro-batches"


def test_on_a_cluster_a_step_has_a_speed_in_tokens_where_samples_are_sequences() -> None:
    plan = plan_of_words(micro_batches=4, cluster="h100")
    assert plan.step_time is not None
    assert f" on h100, {16 * 8 / plan.step_time:,.0f} tokens/s, " in line(plan, "step")
    plan = plan_of_layer(cluster="h100")
    assert plan.step_time is not None
    assert f" on h100, {16 / plan.step_time:,.0f} samples/s, " in line(plan, "step")


def test_without_a_cluster_nothing_is_said_of_time() -> None:
    assert not any(line.startswith("step") for line in plan_head(plan_of_words(), 160))


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"memory_limit": "1MiB"}, " of 1.0 MiB per device"),
        ({"cluster": "h100"}, " of 74.5 GiB per device"),
    ],
)
def test_memory_stands_against_what_a_device_has(options: dict[str, object], limit: str) -> None:
    assert limit in line(plan_of_words(**options), "memory")


def test_without_a_limit_or_a_cluster_memory_stands_alone() -> None:
    assert " of " not in line(plan_of_words(), "memory")


def test_memory_is_that_of_the_optimizer_that_was_planned_for() -> None:
    plan = plan_of_words(optimizer="sgd")
    assert ", with sgd" in line(plan, "memory")
    assert plan.memory == plan.memory_with("sgd")


def test_a_saved_plan_knows_its_batch_and_its_limit() -> None:
    plan = plan_of_words(memory_limit="1MiB")
    loaded = sw.Plan.from_json(plan.to_json())
    assert (loaded.global_batch, loaded.sequence, loaded.memory_limit) == (16, 8, 2**20)


def test_a_plan_that_was_saved_says_what_memory_it_needs(tmp_path: Path) -> None:
    plan = plan_of_words(memory_limit="1MiB")
    plan.save(tmp_path / "plan.json")
    loaded = sw.Plan.load(tmp_path / "plan.json")
    assert line(loaded, "memory") == line(plan, "memory")
    loaded.save(tmp_path / "again.json")
    assert sw.Plan.load(tmp_path / "again.json").saved_memory == plan.memory
