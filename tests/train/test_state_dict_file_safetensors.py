"""Our files in the safetensors format, against the format's own library."""

from pathlib import Path

import pytest
import safetensors.torch
import torch

from shardwright.errors import CheckpointError
from shardwright.train.state_dict_file import DTYPES, read_safetensors, write_safetensors

TENSORS = {
    f"of {name}": (torch.arange(6).reshape(2, 3) % 2).to(dtype) for name, dtype in DTYPES.items()
} | {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3), "ones": torch.ones(3).half()}


def assert_same(got: dict[str, torch.Tensor]) -> None:
    assert got.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert got[name].dtype == tensor.dtype
        assert got[name].shape == tensor.shape
        assert torch.equal(got[name].float(), tensor.float()), name


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    asked = list[str]()

    def tensor(name: str) -> torch.Tensor:
        asked.append(name)
        return TENSORS[name]

    write_safetensors(tmp_path / "file", {n: t.to("meta") for n, t in TENSORS.items()}, tensor)
    assert asked == list(TENSORS)
    assert_same(safetensors.torch.load_file(tmp_path / "file"))
    assert_same(read_safetensors(tmp_path / "file"))


def test_we_read_what_the_library_writes(tmp_path: Path) -> None:
    safetensors.torch.save_file(TENSORS, tmp_path / "file", {"written by": "the library"})
    assert_same(read_safetensors(tmp_path / "file"))


def test_a_dtype_that_the_format_lacks_is_refused(tmp_path: Path) -> None:
    numbers = {"w": torch.zeros(2, dtype=torch.complex64)}
    with pytest.raises(
        CheckpointError, match=r"does not support the dtype torch\.complex64 of 'w'"
    ):
        write_safetensors(tmp_path / "file", numbers, lambda name: numbers[name])


@pytest.mark.parametrize("content", [b"", b"1234567", b"\xff" * 100, b"\x02" + b"\0" * 7 + b"[]"])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(CheckpointError, match="not a valid safetensors file"):
        read_safetensors(tmp_path / "file")


def test_a_file_that_was_cut_is_refused(tmp_path: Path) -> None:
    safetensors.torch.save_file(TENSORS, tmp_path / "file")
    content = (tmp_path / "file").read_bytes()
    (tmp_path / "file").write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match="not a valid safetensors file"):
        read_safetensors(tmp_path / "file")
