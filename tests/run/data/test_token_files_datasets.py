"""Folders that `datasets` has saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardwright.errors import DataError
from shardwright.run.data.data import packed_text
from shardwright.run.data.token_files import token_sequences


def test_without_datasets_the_error_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{}")
    try:
        import datasets  # noqa: F401
    except ImportError:
        with pytest.raises(DataError, match=r"pip install 'shardwright\[datasets\]'"):
            token_sequences(tmp_path, 4)
    else:
        with pytest.raises(DataError, match="`datasets` cannot load this folder"):
            token_sequences(tmp_path, 4)


def test_lists_of_tokens_are_read_one_after_another(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [list(range(n, n + 1 + n % 7)) for n in range(100)]
    stream = torch.tensor([token for row in rows for token in row])
    whole = datasets.Dataset.from_dict({"input_ids": rows, "text": ["a", "bc"] * 50})
    whole.save_to_disk(tmp_path / "one", num_shards=3)
    ids, labels = token_sequences(tmp_path / "one", 16)
    rows_of_all = torch.arange(len(ids))
    assert torch.equal(ids[rows_of_all].flatten(), stream[: len(ids) * 16])
    assert torch.equal(labels[rows_of_all], ids[rows_of_all])
    labels = [[-100] * len(row) for row in rows[50:]]
    part = datasets.Dataset.from_dict({"input_ids": rows[50:], "labels": labels})
    part.save_to_disk(tmp_path / "part")
    ids, labels = token_sequences(tmp_path / "part", 16, vocab_size=200)
    assert ids[torch.tensor([0])][0, 0] == 50 and (labels[torch.tensor([1])] == -100).all()
    assert bytes(packed_text(6, tmp_path / "one")[0][0].tolist()) == b"a\0bc\0a"
    datasets.DatasetDict({"train": whole}).save_to_disk(tmp_path / "splits")
    with pytest.raises(DataError, match=r"has several splits: train\nuse .*splits/train"):
        token_sequences(tmp_path / "splits", 16)
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "text")
    with pytest.raises(DataError, match="has no column `input_ids`, only text"):
        token_sequences(tmp_path / "text", 16)
