"""What the pictures in docs/ have in common (needs matplotlib)."""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent


def begin(size: int) -> None:
    """Choose the colours, and letters of this size; the same names inside a file every time."""
    plt.style.use("seaborn-v0_8-colorblind")
    plt.rcParams |= {"svg.hashsalt": "bayesrnn", "font.size": size, "axes.spines.top": False}


def read_log(name: str) -> Any:
    return json.loads((ROOT / "results" / name).read_text())


def tidy(axes: Axes) -> None:
    """Only the axes that are read, and lines to read values by."""
    axes.spines["right"].set_visible(False)
    axes.grid(axis="y", alpha=0.3)


def save(figure: Figure, name: str) -> None:
    figure.savefig(ROOT / "docs" / name, metadata={"Date": None})
