"""Small labelled data that several tests share, and recipes for them."""

import gzip
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bayesrnn import ImageData, ReviewData, load
from bayesrnn.recipe import Recipe, from_table
from bayesrnn.saving import save_own
from small_runs import changed

EPOCH = 8  # steps


def write_idx(path: Path, array: NDArray[np.uint8]) -> None:
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(gzip.compress(header + array.tobytes(), mtime=0))


def write_images(folder: Path, seed: int = 1) -> ImageData:
    """90 images of 4 x 4 noise in 3 classes, each with a bright row that tells which; 20 to test.
    Ten are for validation, so that batches of 10 make 8 steps an epoch."""
    folder.mkdir(parents=True, exist_ok=True)
    dice = np.random.default_rng(seed)
    for name, count in (("train", 90), ("t10k", 20)):
        labels = dice.integers(0, 3, count, dtype=np.uint8)
        pixels = dice.integers(0, 120, (count, 4, 4), dtype=np.uint8)
        pixels[np.arange(count), labels] += 100
        write_idx(folder / f"{name}-images-idx3-ubyte.gz", pixels)
        write_idx(folder / f"{name}-labels-idx1-ubyte.gz", labels)
    return ImageData(str(folder), valid=10)


def write_reviews(folder: Path, **changes: Any) -> ReviewData:
    """100 short reviews by two critics, whose words tell the rating; 78 of them to train on, so
    that batches of 10 make 8 steps an epoch, the last one smaller."""
    dice = random.Random(3)
    words = {"bad": 0.1, "dull": 0.3, "fair": 0.5, "good": 0.7, "great": 0.9}
    for author, count in (("B+B", 60), ("A+A", 40)):
        place = folder / "scaledata" / author
        place.mkdir(parents=True, exist_ok=True)
        texts, ratings = [], []
        for _ in range(count):
            word, rating = dice.choice(list(words.items()))
            filler = [dice.choice(["the", "film", "was", "and"]) for _ in range(dice.randint(0, 6))]
            texts.append(" ".join([*filler, word, word]))
            ratings.append(rating)
        labels = {
            "subj": texts,
            "rating": [f"{rating:g}" for rating in ratings],
            "label.3class": [str((r > 0.4) + (r >= 0.7)) for r in ratings],
            "label.4class": [str((r > 0.3) + (r > 0.5) + (r >= 0.8)) for r in ratings],
        }
        for name, lines in labels.items():
            (place / f"{name}.{author}").write_text("\n".join(lines) + "\n")
    given = {"words": 8, "split": (0.78, 0.0, 0.22)} | changes
    return ReviewData(str(folder), **given)


def image_recipe(folder: Path, **changes: Any) -> Recipe:
    write_images(folder / "images")
    table = {
        "data": {"kind": "images", "path": str(folder / "images"), "valid": 10},
        "model": {"inputs": 16, "hidden": 12, "classes": 3},
    }
    return _recipe(table, changes)


def review_recipe(folder: Path, **changes: Any) -> Recipe:
    write_reviews(folder / "reviews")
    data = {"kind": "reviews", "path": str(folder / "reviews"), "words": 8}
    table = {
        "data": {**data, "split": [0.78, 0.0, 0.22]},
        "model": {"cell": "gru", "embedding": 8, "hidden": 10},
        "bayes": {"where": ["embedding.weight", "rnn.*", "decoder.weight"]},
    }
    return _recipe(table, changes)


def _recipe(table: dict[str, Any], changes: dict[str, Any]) -> Recipe:
    table["posterior"] = {"kind": "gaussian", "scale": 0.02}
    table["prior"] = {"kind": "normal", "scale": 1.0}
    table["train"] = {
        "epochs": 2,
        "streams": 10,
        "optimizer": "Adam",
        "lr": 0.02,
        "device": "cpu",
    }
    return from_table(changed(table, changes))


def make_sure(run: Path, scale: float = 30) -> None:
    """Give a run means so large that probabilities of some classes are 0 in single precision."""
    model = load(run)
    for block in model.each_block():
        block.parameters_by_name["loc"].data.normal_(std=scale)
    save_own(model, run / "model")
