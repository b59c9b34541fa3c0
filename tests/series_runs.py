"""A small series that several tests share, and a recipe for it.

300 rows of two waves, one a quarter of a period behind the other and ten times as large, with
noise: 180 to train on, so that 4 streams of 11 steps make 4 steps an epoch.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np

from bayesrnn.recipe import Recipe, from_table
from small_runs import changed

EPOCH = 4  # steps


def write_series(folder: Path, rows: int = 300, name: str = "series.csv", shift: float = 0) -> Path:
    dice = np.random.default_rng(5)
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["when,flow,site,heat"]
    for t in range(rows):
        angle, noise = 2 * math.pi * t / 16, dice.normal(0, 0.1, 2)
        flow, heat = shift + math.sin(angle) + noise[0], 20 - 10 * math.cos(angle) + 10 * noise[1]
        lines.append(f"day {t},{flow:.6f},north,{heat:.6f}")
    path = folder / name
    path.write_text("\n".join(lines) + "\n")
    return path


def series_table(folder: Path, **changes: Any) -> dict[str, Any]:
    """A recipe's tables, `changed`."""
    path = folder / "series.csv"
    table: dict[str, Any] = {
        "data": {
            "kind": "series",
            "path": str(path if path.exists() else write_series(folder)),
            "columns": ["flow", "heat"],
            "time": "when",
        },
        "model": {"hidden": 8},
        "posterior": {"kind": "gaussian", "scale": 0.05},
        "prior": {"kind": "normal", "scale": 1.0},
        "train": {
            "epochs": 6,
            "streams": 4,
            "unroll": 11,
            "optimizer": "Adam",
            "lr": 0.02,
            "device": "cpu",
        },
    }
    return changed(table, changes)


def series_recipe(folder: Path, **changes: Any) -> Recipe:
    return from_table(series_table(folder, **changes))
