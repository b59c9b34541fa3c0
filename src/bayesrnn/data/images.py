"""Labelled images in idx files, the format of MNIST."""

import gzip
import hashlib
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from bayesrnn.data.labelled import Examples, Labelled
from bayesrnn.errors import UserError, WrongData, require
from bayesrnn.files import data_folder, read_bytes

PIXEL_UNIT = 126.0
"""Pixels are divided by this (Blundell et al. 2015, Section 5.1)."""
BYTES = 0x08  # an idx file's mark of unsigned bytes
WANTED = "a folder of idx files"


@dataclass(frozen=True)
class ImageData:
    """The `[data]` table of a recipe for images.

    `path` is a folder with train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz and the same two
    of t10k. The last `valid` images of train are for validation; t10k is the test set.
    """

    path: str
    valid: int = 10_000
    kind: ClassVar[str] = "images"

    def __post_init__(self) -> None:
        require(
            (self.path != "", "path", "must name a folder of images, got ''"),
            (self.valid >= 1, "valid", f"must be at least 1, got {self.valid}"),
        )


def load_images(settings: ImageData) -> Labelled:
    """Read the images, each as a flat row of pixels / 126, and their classes."""
    folder = data_folder(settings.path, WANTED)
    digest = hashlib.sha256()
    train = _read_pair(folder, "train", digest)
    test = _read_pair(folder, "t10k", digest)
    sizes = [part.x.shape[1] for part in (train, test)]
    if sizes[0] != sizes[1]:
        raise UserError(
            f"{folder} has images of {sizes[0]} pixels to train on and of {sizes[1]} to test with; "
            "they do not belong together"
        )
    kept = len(train) - settings.valid
    if kept < 1:
        raise WrongData(
            f"{folder} has {len(train)} images to train on, and data.valid={settings.valid} takes "
            "them all",
            "a folder with more",
            "data.valid",
        )
    splits = {"train": _part(train, 0, kept), "valid": _part(train, kept, len(train)), "test": test}
    return Labelled(splits, digest.hexdigest())


def _read_pair(folder: Path, name: str, digest: "hashlib._Hash") -> Examples:
    pixels = _read_idx(folder / f"{name}-images-idx3-ubyte.gz", 3, digest)
    labels = _read_idx(folder / f"{name}-labels-idx1-ubyte.gz", 1, digest)
    if len(pixels) != len(labels):
        raise UserError(
            f"{folder} has {len(pixels)} images but {len(labels)} labels of {name}; they do not "
            "belong together"
        )
    x = torch.from_numpy(pixels.reshape(len(pixels), -1).astype(np.float32)) / PIXEL_UNIT
    y = torch.from_numpy(labels.astype(np.int64))
    return Examples(x, y, [f"{name} {number}" for number in range(len(y))])


def _part(examples: Examples, start: int, stop: int) -> Examples:
    return Examples(examples.x[start:stop], examples.y[start:stop], examples.names[start:stop])


def _read_idx(path: Path, axes: int, digest: "hashlib._Hash") -> NDArray[np.uint8]:
    """The array in an idx file: two zeros, the type, axes, their lengths, the data."""
    if not path.is_file():
        raise WrongData(f"{path.parent} has no {path.name}", WANTED)
    packed = read_bytes(path)
    digest.update(packed)
    try:
        data = gzip.decompress(packed)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} is damaged or not gzip ({error}); get it again") from error
    start = 4 * (1 + axes)
    if len(data) < start or data[:4] != bytes([0, 0, BYTES, axes]):
        raise UserError(f"{path} is no idx file of bytes with {axes} axes; get it again")
    shape = struct.unpack(f">{axes}I", data[4:start])
    expected = start + math.prod(shape)
    if len(data) != expected or math.prod(shape) == 0:
        raise UserError(
            f"{path} says it holds {' x '.join(map(str, shape))} bytes, so {expected} in all, but "
            f"has {len(data)}; get it again"
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)
