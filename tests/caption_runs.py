"""Small captioned pictures that several tests share, and recipes for them."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from bayesrnn.recipe import Recipe, from_table
from small_runs import changed

COLOURS = ("red", "green", "blue")
THINGS = ("dog", "cat")
ENDS = ("", "in the snow", "that runs over the very long green lawn")
NUMBERS = 6
SPLITS = {"train": 36, "val": 9, "test": 9}


def write_captions(folder: Path, seed: int = 1) -> Path:
    """Pictures whose vector says their colour and thing; three captions each, of 3 to 12 words."""
    folder.mkdir(parents=True, exist_ok=True)
    dice = np.random.default_rng(seed)
    images, vectors = [], []
    for split, count in SPLITS.items():
        for number in range(count):
            colour, thing = number % 3, number // 3 % 2
            vector = 0.2 * dice.random(NUMBERS)
            vector[colour] += 1
            vector[3 + thing] += 1
            vectors.append(vector)
            start = f"A {COLOURS[colour]} {THINGS[thing]}"
            captions = [f"{start} {end}".strip() + "." for end in ENDS]
            images.append(
                {"filename": f"{split}{number}.jpg", "split": split, "captions": captions}
            )
    (folder / "captions.json").write_text(json.dumps({"images": images}))
    np.savez(
        folder / "features.npz",
        features=np.array(vectors, dtype=np.float16),
        filenames=np.array([image["filename"] for image in images]),
    )
    return folder / "captions.json"


def caption_recipe(folder: Path, **changes: dict[str, Any]) -> Recipe:
    table: dict[str, Any] = {
        "data": {
            "kind": "captions",
            "path": str(write_captions(folder / "captions")),
            "min_count": 1,
            "lengths": 3,
        },
        "model": {"numbers": NUMBERS, "norm": 4.0, "embedding": 8, "hidden": 10},
        "posterior": {"kind": "gaussian", "scale": 0.02},
        "prior": {"kind": "normal", "scale": 1.0},
        "train": {
            "epochs": 2,
            "streams": 16,
            "optimizer": "Adam",
            "lr": 0.02,
            "device": "cpu",
        },
    }
    return from_table(changed(table, changes))
