"""Images: idx files by hand, the real ones where they are, and a clear line for broken ones."""

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from bayesrnn import ImageData, UserError, load_images
from labelled_runs import write_idx, write_images


def test_hand_made_files_are_read_as_they_were_written(tmp_path: Path) -> None:
    pixels = np.arange(3 * 2 * 2, dtype=np.uint8).reshape(3, 2, 2) * 21
    write_idx(tmp_path / "train-images-idx3-ubyte.gz", pixels)
    write_idx(tmp_path / "train-labels-idx1-ubyte.gz", np.array([2, 0, 1], np.uint8))
    write_idx(tmp_path / "t10k-images-idx3-ubyte.gz", pixels[:1])
    write_idx(tmp_path / "t10k-labels-idx1-ubyte.gz", np.array([7], np.uint8))
    splits = load_images(ImageData(str(tmp_path), valid=1)).splits
    assert splits["train"].y.tolist() == [2, 0]
    assert splits["valid"].y.tolist() == [1]
    assert splits["test"].y.tolist() == [7]
    assert torch.equal(splits["train"].x[1], torch.tensor([84.0, 105, 126, 147]) / 126)
    assert torch.equal(splits["valid"].x[0], torch.tensor([168.0, 189, 210, 231]) / 126)
    assert splits["valid"].names == ["train 2"]


def test_mnist_has_50000_10000_and_10000_images(data_folder: Callable[[str], Path]) -> None:
    folder = data_folder("mnist")
    data = load_images(ImageData(str(folder)))
    sizes = {name: tuple(part.x.shape) for name, part in data.splits.items()}
    assert sizes == {"train": (50_000, 784), "valid": (10_000, 784), "test": (10_000, 784)}
    assert data.splits["train"].y[:5].tolist() == [5, 0, 4, 1, 9]
    assert data.splits["test"].y[:5].tolist() == [7, 2, 1, 0, 4]
    highest = max(part.x.max().item() for part in data.splits.values())
    assert highest == pytest.approx(255 / 126)
    raw = gzip.decompress((folder / "train-images-idx3-ubyte.gz").read_bytes())
    last = np.frombuffer(raw, np.uint8)[-784:].astype(np.float32)
    assert torch.equal(data.splits["valid"].x[-1], torch.from_numpy(last / 126))
    counts = torch.cat([part.y for part in data.splits.values()]).bincount()
    assert len(counts) == 10
    assert counts.sum() == 70_000


def test_the_digest_is_that_of_the_contents(tmp_path: Path) -> None:
    one, same = (load_images(write_images(tmp_path / name)) for name in "ab")
    other = load_images(write_images(tmp_path / "c", seed=2))
    assert one.digest == same.digest != other.digest


def test_images_to_test_with_must_be_as_large_as_those_to_train_on(tmp_path: Path) -> None:
    settings = write_images(tmp_path)
    write_idx(tmp_path / "t10k-images-idx3-ubyte.gz", np.zeros((20, 5, 5), np.uint8))
    with pytest.raises(UserError, match="of 16 pixels to train on and of 25 to test with"):
        load_images(settings)


def test_bad_folders_and_files_get_one_line(tmp_path: Path) -> None:
    settings = write_images(tmp_path / "images")
    labels = tmp_path / "images/train-labels-idx1-ubyte.gz"
    images = tmp_path / "images/train-images-idx3-ubyte.gz"
    good = {path: path.read_bytes() for path in (labels, images)}

    def error() -> str:
        with pytest.raises(UserError) as caught:
            load_images(settings)
        for path, data in good.items():
            path.write_bytes(data)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    labels.unlink()
    assert "images has no train-labels-idx1-ubyte.gz; set data.path to a folder of" in error()
    labels.write_bytes(b"these are not compressed")
    assert "is damaged or not gzip" in error()
    labels.write_bytes(good[labels][:-9])
    assert "is damaged or not gzip" in error()
    damaged = bytearray(good[images])
    damaged[len(damaged) // 2] ^= 0xFF
    images.write_bytes(damaged)
    assert "is damaged or not gzip" in error()
    images.write_bytes(good[labels])
    assert "no idx file of bytes with 3 axes" in error()
    header = bytes([0, 0, 8, 1]) + struct.pack(">I", 5)
    labels.write_bytes(gzip.compress(header + b"\1\2\3"))
    assert "says it holds 5 bytes, so 13 in all, but has 11" in error()
    write_idx(labels, np.zeros(4, np.uint8))
    assert "images but 4 labels of train" in error()

    with pytest.raises(UserError, match=r"does not exist; set data\.path"):
        load_images(ImageData(str(tmp_path / "nowhere")))
    with pytest.raises(UserError, match="is not a folder"):
        load_images(ImageData(str(labels)))
    with pytest.raises(UserError, match=r"data\.valid=1000 takes them all"):
        load_images(ImageData(settings.path, valid=1000))
    with pytest.raises(ValueError, match="valid must be at least 1, got 0"):
        ImageData("x", valid=0)
