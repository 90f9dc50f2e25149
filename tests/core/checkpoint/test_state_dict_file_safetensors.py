"""Whole models as safetensors: every dtype and form of a tensor, and files that are damaged."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import shardwright as sw
from shardwright.errors import CheckpointError
from shardwright.run.loop.weights import load_weights

DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64),
)
WHOLE = torch.arange(12.0).reshape(3, 4)
TENSORS = {
    f"of_{dtype.itemsize}_{str(dtype)[6:]}": (torch.arange(6).reshape(2, 3) % 2).to(dtype)
    for dtype in DTYPES
} | {
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
    "transposed": WHOLE.T,
    "row": WHOLE[1],
    "rest": WHOLE[1:],
    "expanded": torch.ones(1, 3).expand(4, 3),
}


class Buffers(nn.Module):
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def blank() -> Buffers:
    return Buffers({name: torch.zeros_like(each).clone() for name, each in TENSORS.items()})


def assert_same(got: dict[str, Any]) -> None:
    assert got.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(got[name].to(torch.complex64), tensor.to(torch.complex64)), name


def test_every_dtype_and_view_comes_back_through_the_library(tmp_path: Path) -> None:
    file = tmp_path / "net.safetensors"
    sw.save_state_dict(Buffers(TENSORS), file)
    assert_same(safetensors.torch.load_file(file))
    net = blank()
    load_weights(net, file)
    assert_same(net.state_dict())


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    net, own = blank(), {name: each.clone().contiguous() for name, each in TENSORS.items()}
    safetensors.torch.save_file(own, tmp_path / "net.safetensors", {"written by": "the library"})
    sw.load_state_dict(net, tmp_path / "net.safetensors")
    assert_same(net.state_dict())


def test_a_tensor_that_the_format_lacks_is_refused(tmp_path: Path) -> None:
    net = Buffers({"w": torch.zeros(2, 2).to_sparse()})
    with pytest.raises(CheckpointError, match=r"net\.safetensors: safetensors cannot store"):
        sw.save_state_dict(net, tmp_path / "net.safetensors")
    assert not (tmp_path / "net.safetensors").exists()


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
@pytest.mark.parametrize("content", [b"", b"1234567", b"\xff" * 100, b"\x02" + b"\0" * 7 + b"[]"])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, suffix: str, content: bytes) -> None:
    (tmp_path / f"net.{suffix}").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"net\.{suffix}: cannot be read as {suffix}: \w"):
        sw.load_state_dict(nn.Linear(2, 2), tmp_path / f"net.{suffix}")


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_a_file_that_was_cut_is_refused(tmp_path: Path, suffix: str) -> None:
    net, file = nn.Linear(2, 2), tmp_path / f"net.{suffix}"
    sw.save_state_dict(net, file)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rf"net\.{suffix}: cannot be read as"):
        sw.load_state_dict(net, file)


@pytest.mark.parametrize("written", ["torch.save", "its old format", "pickle"])
def test_code_in_a_file_of_weights_is_not_run(tmp_path: Path, written: str) -> None:
    class Planted:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "run"),)

    content, file = {"weight": Planted()}, tmp_path / "net.bin"
    if written == "pickle":
        file.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, file, _use_new_zipfile_serialization=written == "torch.save")
    with pytest.raises(CheckpointError, match=r"net\.bin: cannot be read as bin"):
        load_weights(nn.Linear(2, 2), file)
    assert not (tmp_path / "run").exists()


def test_a_file_in_the_old_format_of_torch_is_read(tmp_path: Path) -> None:
    net, other = nn.Linear(2, 2), nn.Linear(2, 2)
    torch.save(net.state_dict(), tmp_path / "net.bin", _use_new_zipfile_serialization=False)
    sw.load_state_dict(other, tmp_path / "net.bin")
    assert torch.equal(other.weight, net.weight)
