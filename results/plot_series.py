"""Draw docs/ett.svg, who overfits and how far ahead a forecast is worth something, from
results/ett.json, which benchmarks/series.py wrote (needs matplotlib).

python results/plot_series.py
"""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
MODELS = {
    "plain": "plain",
    "variational": "variational dropout",
    "brnn": "Bayes by Backprop",
}


def seeds(runs: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [run for key, run in runs.items() if key.startswith(f"{name}-")]


def main() -> None:
    runs = json.loads((ROOT / "results" / "ett.json").read_text())["runs"]
    plt.rcParams |= {"svg.hashsalt": "bayesrnn", "font.size": 10, "axes.spines.top": False}
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    for number, (name, label) in enumerate(MODELS.items()):
        colour = f"C{number}"
        each = seeds(runs, name)
        curves = np.array([run["valid_nll"] for run in each])
        epochs = np.arange(1, curves.shape[1] + 1)
        left.plot(epochs, curves.mean(axis=0), color=colour, label=label)
        left.fill_between(epochs, curves.min(axis=0), curves.max(axis=0), color=colour, alpha=0.2)
        ahead = [run["ahead"][-1] for run in each]
        steps = np.arange(1, len(ahead[0]["crps"]) + 1)
        middle.plot(steps, np.mean([one["crps"] for one in ahead], axis=0), color=colour)
        held = np.mean([one["coverage_90"] for one in ahead], axis=0)
        right.plot(steps, held, color=colour)
    right.axhline(0.9, color="0.5", linestyle=":")
    left.set(
        title="the next hour, validation", xlabel="epoch", ylabel="nats a value", ylim=(-0.1, 1)
    )
    middle.set(title="test: CRPS", xlabel="hours ahead", ylabel="in units of a column's spread")
    right.set(title="test: in the 90 % interval", xlabel="hours ahead", ylim=(0.5, 1))
    for axes in (left, middle, right):
        axes.spines["right"].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
    left.legend(frameon=False)
    figure.savefig(ROOT / "docs" / "ett.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
