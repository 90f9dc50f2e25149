"""Mutated files end in success or in one error of ours, whatever was done to them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import shardwright as sw
from features import fuzzed_data
from features.fuzzed_files import CLUSTER, KINDS, STRATEGIES, fuzz
from mutations import ALIASES, CYCLE, MERGES, RAW
from random_cases import first_seed
from shardwright.core.cost.clusters import load_cluster
from shardwright.errors import ShardwrightError
from shardwright.run.config.load import load

TESTS = Path(__file__).parents[1]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.delitem(sys.modules, "fuzzed_model", raising=False)
    return tmp_path


@pytest.mark.random
@pytest.mark.parametrize("kind", KINDS)
def test_some_mutated_files_end_in_success_or_one_error(kind: str, folder: Path) -> None:
    first = first_seed()
    endings = fuzz(kind, range(first, first + 24), folder)
    assert not endings.raw, endings.raw
    assert endings.refused > 5


@pytest.mark.random
@pytest.mark.parametrize("kind", fuzzed_data.KINDS)
def test_some_mutated_data_and_records_end_in_success_or_one_error(kind: str, folder: Path) -> None:
    first, kinds = first_seed(), fuzzed_data.KINDS
    count = len(kinds[kind].examples())
    assert fuzz(kind, range(count), folder, mutate=False, kinds=kinds).success == count
    endings = fuzz(kind, range(first, first + 24), folder, kinds=kinds)
    assert not endings.raw, endings.raw


@pytest.mark.parametrize(
    ("kind", "seed"),
    [("config", 558), ("plan", 183), ("plan", 1862), ("plan", 2451), ("cluster", 949)],
)
def test_files_that_once_hung_or_ended_in_a_raw_error_do_not(
    kind: str, seed: int, folder: Path
) -> None:
    endings = fuzz(kind, range(seed, seed + 1), folder)
    assert not endings.raw, endings.raw


@pytest.mark.parametrize("kind", KINDS)
def test_unchanged_files_are_read(kind: str, folder: Path) -> None:
    count = len(KINDS[kind].examples())
    assert fuzz(kind, range(count), folder, mutate=False).success == count


@pytest.mark.slow
@pytest.mark.random
@pytest.mark.parametrize("kind", KINDS)
def test_five_hundred_mutated_files_end_in_success_or_one_error(kind: str) -> None:
    command = [sys.executable, "-m", "features.fuzzed_files", kind, str(first_seed()), "500"]
    done = subprocess.run(
        command,
        cwd=TESTS,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=3500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    endings = json.loads(done.stdout)
    assert not endings["raw"], "\n".join(map(str, endings["raw"].items()))
    assert endings["success"] + endings["refused"] == 500


def read_each(path: Path) -> None:
    """Every reader refuses the file with an error that names it."""
    readers = (
        load,
        load_cluster,
        sw.Plan.load,
        lambda path: sw.load_strategies(sw.WithLoss(None, None), path),  # type: ignore[arg-type]
    )
    for reader in readers:
        with pytest.raises(ShardwrightError) as caught:
            reader(path)
        assert path.name in str(caught.value)
        assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("text", [*RAW, ALIASES, MERGES, CYCLE, "", *KINDS])
def test_whatever_is_in_a_file_is_refused_by_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    read_each(path)


def test_files_that_cannot_be_read_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "broken").symlink_to(tmp_path / "broken")
    for name in ("folder", "absent", "broken", "absent/file"):
        read_each(tmp_path / name)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    read_each(tmp_path / "binary")


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "lab.yaml").write_bytes(b"\xef\xbb\xbf" + CLUSTER.encode())
    assert load_cluster(tmp_path / "lab.yaml").name == "lab"
    (tmp_path / "pins.json").write_bytes(
        b"\xef\xbb\xbf" + json.dumps({**STRATEGIES, "strategies": {}}).encode()
    )
    sw.load_strategies(sw.WithLoss(None, None), tmp_path / "pins.json")  # type: ignore[arg-type]
