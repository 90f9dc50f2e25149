"""The record of steps through restarts."""

from pathlib import Path

from shardwright.core.checkpoint.position import BEGINNING, Position
from shardwright.run.loop.step_log import StepRecord, open_step_log


def write(path: Path, start: Position, places: list[tuple[int, int]]) -> None:
    with open_step_log(path, start) as file:
        for epoch, step in places:
            file.write(StepRecord(epoch, step, 0.5, 1.0).to_json() + "\n")


def places(path: Path) -> list[tuple[int, int]]:
    steps = [StepRecord.from_json(line) for line in path.read_text().splitlines()]
    return [(step.epoch, step.step) for step in steps]


def test_steps_that_are_done_again_are_there_once(tmp_path: Path) -> None:
    path = tmp_path / "rank.0" / "steps.jsonl"
    write(path, BEGINNING, [(0, 0), (0, 1), (1, 0), (1, 1)])
    write(path, Position(step=3, epoch=1, batch=1), [(1, 1), (2, 0)])
    assert places(path) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    write(path, BEGINNING, [(0, 0)])
    assert places(path) == [(0, 0)]


def test_a_line_that_a_crash_has_cut_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    write(path, BEGINNING, [(0, 0)])
    with path.open("a") as file:
        file.write('{"epoch": 0, "st')
    write(path, Position(1, 0, 1), [(0, 1)])
    assert places(path) == [(0, 0), (0, 1)]
