"""Tokens of local texts, packed into sequences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shardwright.errors import DataError
from shardwright.run.data.data import BYTE_VOCAB_SIZE, packed_text


def test_the_story_that_comes_along_fills_many_sequences_of_bytes() -> None:
    ids, labels = packed_text(64)
    assert ids.shape[1] == 64 and len(ids) > 100
    assert ids.dtype == torch.int64 and int(ids.max()) < BYTE_VOCAB_SIZE
    assert torch.equal(ids, labels)
    assert bytes(ids[0].tolist()).decode().startswith("The workshop")


def test_texts_of_a_folder_follow_each_other_with_a_mark_between(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("cde")
    (tmp_path / "a.txt").write_text("ab")
    ids, _ = packed_text(7, tmp_path)
    assert ids.tolist() == [[97, 98, 0, 99, 100, 101, 0]]


def test_what_does_not_fill_a_sequence_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("abcdefg")
    assert packed_text(3, file)[0].tolist() == [[97, 98, 99], [100, 101, 102]]


def test_a_tokenizer_file_is_used(tmp_path: Path) -> None:
    file, tokenizer = tmp_path / "a.txt", tmp_path / "tokenizer.json"
    file.write_text("one two two one")
    model = {"type": "WordLevel", "vocab": {"one": 0, "two": 1, "?": 2}, "unk_token": "?"}
    content = {"version": "1.0", "model": model, "pre_tokenizer": {"type": "Whitespace"}}
    empty = ("truncation", "padding", "normalizer", "post_processor", "decoder")
    content |= dict.fromkeys(empty) | {"added_tokens": []}
    tokenizer.write_text(json.dumps(content))
    assert packed_text(4, file, tokenizer)[0].tolist() == [[0, 1, 1, 0]]


def test_what_cannot_be_read_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="not UTF-8 text"):
        packed_text(1, tmp_path / "a.txt")
    with pytest.raises(DataError, match="no such file or folder"):
        packed_text(1, tmp_path / "absent.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"the folder contains no \.txt file"):
        packed_text(1, tmp_path / "empty")
    (tmp_path / "short.txt").write_text("ab")
    with pytest.raises(DataError, match="3 tokens are less than one sequence of seq_length 8"):
        packed_text(8, tmp_path / "short.txt")
    with pytest.raises(DataError, match=r"set `data\.tokenizer` to"):
        packed_text(1, tmp_path / "short.txt", tmp_path / "absent.json")


PLANTED = {"auto_map": {"AutoTokenizer": ["planted.Tokenizer", None], "AutoConfig": "planted.Own"}}


def test_code_beside_a_tokenizer_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some text")
    for name in ("tokenizer_config.json", "config.json"):
        (tmp_path / name).write_text(json.dumps(PLANTED))
    (tmp_path / "planted.py").write_text("open('run', 'w')")
    with pytest.raises(DataError, match=r"cannot load this tokenizer: .*custom code"):
        packed_text(4, tmp_path / "a.txt", tmp_path)
    (tmp_path / "damaged.json").write_text("{")
    with pytest.raises(DataError, match=r"damaged\.json: `transformers` cannot load"):
        packed_text(4, tmp_path / "a.txt", tmp_path / "damaged.json")
    assert not (tmp_path / "run").exists()
