"""Text files are read and written whole, or refused with the reason."""

from __future__ import annotations

import os
import resource
import stat
import threading
import tracemalloc
from pathlib import Path

import pytest

from shardwright import text_files
from shardwright.errors import ConfigError
from shardwright.text_files import read_text, write_text


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_text(path, "first")
    path.chmod(0o640)
    write_text(path, "second")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("second", 0o640)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            write_text(path, "x" * 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.filename == str(path)
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [
        ("plan.json", "second")
    ]


def test_a_name_of_as_many_bytes_as_file_systems_allow_is_written(tmp_path: Path) -> None:
    path = tmp_path / ("é" * 125 + ".json")
    write_text(path, "content")
    assert path.read_text(encoding="utf-8") == "content"
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_is_written_through_a_link_in_place_of_the_new_file(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("precious")
    (tmp_path / f".plan.json.{os.getpid()}.partial").symlink_to(other)
    write_text(tmp_path / "plan.json", "new")
    assert (other.read_text(), (tmp_path / "plan.json").read_text()) == ("precious", "new")


def test_a_device_or_pipe_without_an_end_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^/dev/zero: larger than 1000 bytes\n"):
        read_text("/dev/zero", ConfigError, max_bytes=1000)


@pytest.mark.parametrize("content", ["\ufeffa: 1\r\nb: 2\rc: é\n", ""])
def test_lines_end_as_in_files_opened_as_text(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.yaml").write_bytes(content.encode())
    expected = (tmp_path / "run.yaml").read_text(encoding="utf-8-sig")
    assert read_text(tmp_path / "run.yaml", ConfigError) == expected


def test_a_file_that_is_protected_against_writing_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    path.write_text("precious")
    # Root may write to files of any mode.
    monkeypatch.setattr(os, "access", lambda file, mode: (str(file), mode) != (str(path), os.W_OK))
    with pytest.raises(PermissionError) as caught:
        write_text(path, "new")
    assert (caught.value.filename, path.read_text()) == (str(path), "precious")


@pytest.mark.parametrize("name", ["a\0b", "a\ud800"])
def test_paths_that_the_file_system_cannot_encode_are_errors_of_files(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    with pytest.raises(OSError, match="not a path: it has control characters") as caught:
        write_text(path, "x")
    assert caught.value.filename == str(path)
    with pytest.raises(ConfigError, match="tmp"):
        read_text(path, ConfigError)
    assert not list(tmp_path.iterdir())


def test_a_named_pipe_is_read_if_something_is_written_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "run.yaml"
    os.mkfifo(pipe)
    writer = threading.Timer(0.1, pipe.write_text, ("a: 1",))
    writer.start()
    assert read_text(pipe, ConfigError) == "a: 1"
    writer.join()
    monkeypatch.setattr(text_files, "PIPE_SECONDS", 0.1)
    with pytest.raises(ConfigError, match=r"run\.yaml: a pipe to which nothing was written for"):
        read_text(pipe, ConfigError)


def test_a_pipe_of_a_shell_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "PIPE_SECONDS", 0.01)
    reader, writer = os.pipe()
    late = threading.Timer(0.2, lambda: (os.write(writer, b"late"), os.close(writer)))
    late.start()
    assert read_text(f"/dev/fd/{reader}", ConfigError) == "late"
    late.join()
    os.close(reader)


def test_a_pipe_from_which_nothing_reads_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, texts = tmp_path / "plan.json", list[str]()
    os.mkfifo(pipe)
    reader = threading.Timer(0.1, lambda: texts.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "late")
    reader.join()
    assert texts == ["late"]
    monkeypatch.setattr(text_files, "PIPE_SECONDS", 0.1)
    with pytest.raises(OSError, match="No such device or address") as caught:
        write_text(pipe, "x")
    assert caught.value.filename == str(pipe)
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        write_text("/dev/full", "x")


def test_a_path_of_several_lines_is_one_line_of_a_message() -> None:
    with pytest.raises(ConfigError, match=r"^a\\u000aerror: forged: no such file\n"):
        read_text("a\nerror: forged", ConfigError)


def test_a_small_file_takes_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("a: 1")
    tracemalloc.start()
    try:
        assert read_text(path, ConfigError) == "a: 1"
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 2 * text_files.PIECE_BYTES
