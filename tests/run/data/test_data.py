"""Data sets and batches, on small files that the tests write."""

import gzip
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from shardwright.errors import DataError
from shardwright.run.data.data import Batches, digits, mnist, mnist_or_digits

IMAGES = np.arange(5 * 3 * 2, dtype=np.uint8).reshape(5, 3, 2)
LABELS = np.array([3, 1, 4, 1, 5], dtype=np.uint8)


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(IMAGES))
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(LABELS)))
    return tmp_path


def test_mnist_is_read_plain_or_gzipped_and_normalized(folder: Path) -> None:
    images, labels = mnist(folder)
    assert images.shape == (5, 1, 3, 2)
    assert images.dtype == torch.float32
    expected = (IMAGES[:, None] / 255.0 - 0.1307) / 0.3081
    torch.testing.assert_close(images, torch.tensor(expected, dtype=torch.float32))
    assert labels.tolist() == [3, 1, 4, 1, 5]
    assert labels.dtype == torch.int64


def test_the_folder_is_by_default_data_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_PATH", str(folder))
    assert len(mnist()[1]) == 5


def test_without_a_folder_it_says_how_to_give_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATA_PATH", raising=False)
    with pytest.raises(DataError, match=r"set `data\.path` or the environment variable DATA_PATH"):
        mnist()


def test_a_missing_folder_says_which_and_what_it_should_hold(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent: no such folder\n.* train-images-idx3-ubyte and"):
        mnist(tmp_path / "absent")


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / "train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(
        DataError, match="contains neither train-labels-idx1-ubyte nor train-labels"
    ):
        mnist(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (idx(LABELS), "starts with 0x00000801, but .* 3 dimensions starts with 0x00000803"),
        (b"", "starts with 0x, but"),
        (idx(IMAGES)[:10], "truncated, 10 bytes are less than the header of 16"),
        (
            idx(IMAGES)[:-1],
            r"the shape \[5, 3, 2\] in its header needs 30 bytes, but the file has 29",
        ),
        (idx(IMAGES) + b"x", ".* needs 30 bytes, but the file has more"),
        (idx(IMAGES[:4]), "has 4 images, but .* has 5 labels"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(
    folder: Path, content: bytes, message: str
) -> None:
    (folder / "train-images-idx3-ubyte").write_bytes(content)
    with pytest.raises(DataError, match=f"train-images-idx3-ubyte:? {message}"):
        mnist(folder)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2**20, 2**10, 2**3), "in its header needs 8589934592 bytes, more than the limit"),
        ((2**32 - 1,) * 3, "more than the limit of 2147483648 bytes for gzip files"),
        ((5, 3, 2), "needs 30 bytes, but the file has more"),
    ],
)
def test_a_gzip_file_expands_to_no_more_than_its_header_and_the_limit(
    folder: Path, shape: tuple[int, ...], message: str
) -> None:
    (folder / "train-images-idx3-ubyte").unlink()
    bomb = struct.pack(">BBBB3I", 0, 0, 8, 3, *shape) + bytes(2**26)
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(bomb, 1))
    tracemalloc.start()
    with pytest.raises(DataError, match=message):
        mnist(folder)
    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()


def test_a_truncated_gzip_file_is_a_data_error(folder: Path) -> None:
    path = folder / "train-labels-idx1-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(DataError, match="incomplete or corrupt gzip file"):
        mnist(folder)
    path.write_bytes(b"not gzip at all")
    with pytest.raises(DataError, match="incomplete or corrupt gzip file"):
        mnist(folder)


def test_the_digits_are_scaled_and_may_be_enlarged_with_a_border() -> None:
    small, labels = digits()
    assert small.shape == (1797, 1, 8, 8)
    assert (small.min(), small.max()) == (0, 1)
    assert labels[:4].tolist() == [0, 1, 2, 3]
    large, _ = digits(28)
    assert large.shape == (1797, 1, 28, 28)
    torch.testing.assert_close(large[:, :, 3:26:3, 3:26:3], small)
    torch.testing.assert_close(large.sum(), 9 * small.sum(), rtol=1e-5, atol=0)
    with pytest.raises(DataError, match="image_size=7 is too small\nuse at least 8 pixels"):
        digits(7)


def test_mnist_is_taken_where_data_path_is_set_else_digits_alike(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATA_PATH", str(folder))
    torch.testing.assert_close(mnist_or_digits(), mnist())
    monkeypatch.delenv("DATA_PATH")
    images, labels = mnist_or_digits()
    assert images.shape == (1797, 1, 28, 28)
    torch.testing.assert_close(
        (images.mean(), images.std()), (torch.tensor(0.0), torch.tensor(1.0))
    )
    assert torch.corrcoef(torch.stack([images.flatten(), digits(28)[0].flatten()]))[0, 1] > 0.999
    assert torch.equal(labels, digits()[1])


def test_an_epoch_draws_each_sample_at_most_once_in_full_batches() -> None:
    batches = Batches((torch.arange(10), torch.arange(10) * 2), batch_size=3)
    drawn = list(batches.epoch(0))
    assert len(batches) == len(drawn) == 3
    assert all(len(x) == 3 and (y == 2 * x).all() for x, y in drawn)
    assert len({int(v) for x, _ in drawn for v in x}) == 9


def test_labels_that_are_the_tokens_are_read_once() -> None:
    class Tokens:
        reads = 0

        def __len__(self) -> int:
            return 8

        def __getitem__(self, rows: torch.Tensor) -> torch.Tensor:
            self.reads += 1
            return rows * 10

    tokens = Tokens()
    drawn = list(Batches((tokens, tokens, torch.arange(8)), batch_size=4).epoch(0))
    assert tokens.reads == len(drawn) == 2
    assert all(torch.equal(x, y) and torch.equal(x, 10 * rows) for x, y, rows in drawn)


def test_the_order_depends_on_seed_and_epoch_only() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        torch.rand(1)
        return [int(v) for (x,) in Batches((torch.arange(64),), 8, seed).epoch(epoch) for v in x]

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 1) != order(1, 0)


def test_tensors_that_give_no_batch_are_a_data_error() -> None:
    with pytest.raises(DataError, match=r"different numbers of samples: \[3, 4\]"):
        Batches((torch.zeros(3), torch.zeros(4)), 2)
    with pytest.raises(DataError, match="has only 3 samples, less than one batch of 4"):
        Batches((torch.zeros(3),), 4)


def test_an_epoch_goes_on_from_any_sample() -> None:
    batches = Batches((torch.arange(10),), batch_size=3)
    torch.testing.assert_close(list(batches.epoch(2, first=3)), list(batches.epoch(2))[1:])
    order = torch.cat([rows for (rows,) in batches.epoch(2)])
    (within,) = next(batches.epoch(2, first=4))
    torch.testing.assert_close(within, order[4:7])
