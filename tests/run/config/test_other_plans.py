"""Plans of other settings beside that of a configuration."""

from pathlib import Path

from shardwright.run.config.other_plans import AlternativePlanner
from shardwright.run.config.run import Run

TEXT = """
model: {name: llama2_7b_tiny, arguments: {num_layers: 1}}
data: {name: text, seq_length: 32, batch_size: 1}
parallel: {mode: data_parallel, save_graphs: graphs}
"""


def test_other_plans_save_no_graphs_and_no_batch_is_halved_to_none(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(TEXT)
    planner = AlternativePlanner.of(Run.from_file(tmp_path / "run.yaml"), 1)
    names = [name for name, _ in planner.what_if_plans()]
    assert "twice the batch" in names and "half the batch" not in names
    assert [file.name for file in tmp_path.iterdir()] == ["run.yaml"]
