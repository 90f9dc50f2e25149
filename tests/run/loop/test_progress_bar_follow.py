"""Following files that are being written."""

import errno
import re
import time
from pathlib import Path

import pytest

from shardwright.errors import ShardwrightWarning
from shardwright.run.loop.progress_bar import follow_files


def wait_for(lines: list[str], expected: list[str]) -> None:
    deadline = time.monotonic() + 60
    while lines != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    assert lines == expected


def test_lines_arrive_whole_and_once_while_the_file_grows(tmp_path: Path) -> None:
    path, lines = tmp_path / "log", list[str]()
    with follow_files({path: lines.append}):
        with path.open("w", buffering=1) as file:
            file.write("one\ntw")
            file.flush()
            wait_for(lines, ["one"])
            file.write("o\nthree\n")
            wait_for(lines, ["one", "two", "three"])
        with path.open("a") as file:
            file.write("unfinished")
    assert lines == ["one", "two", "three", "unfinished"]


def test_a_file_that_never_comes_gives_no_lines(tmp_path: Path) -> None:
    lines: list[str] = []
    with follow_files({tmp_path / "absent": lines.append}):
        pass
    assert lines == []


def test_a_file_in_the_place_of_another_is_read_from_its_beginning(tmp_path: Path) -> None:
    path, lines = tmp_path / "log", list[str]()
    with follow_files({path: lines.append}):
        with path.open("w", buffering=1) as file:
            file.write("one\n")
            wait_for(lines, ["one"])
            file.write("two\nunfinish")
        path.rename(tmp_path / "log.before")
        path.write_text("three\n")
        wait_for(lines, ["one", "two", "unfinish", "three"])


def test_lines_that_cannot_be_printed_are_one_warning(tmp_path: Path) -> None:
    path = tmp_path / "stdout"
    path.write_text("first\nsecond\n")

    def fail(line: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    told = rf"no longer printed: No space left on device\nread them in {re.escape(str(path))}"
    with pytest.warns(ShardwrightWarning, match=told) as caught, follow_files({path: fail}):
        pass
    assert len(caught) == 1
