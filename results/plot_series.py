"""Draw docs/ett.svg, who overfits and how far ahead a forecast is worth something, from
results/ett.json and results/ett-no-season.json, which benchmarks/series.py wrote (needs
matplotlib).

python results/plot_series.py
"""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from drawing import begin, read_log, save, tidy

MODELS = {
    "plain": "plain",
    "variational": "variational dropout",
    "brnn": "Bayes by Backprop",
}
LOGS = {"ett.json": "-", "ett-no-season.json": ":"}
"""The line of each log: networks that read what was there a day before, and those that do not."""
PANELS = {"rmse": "RMSE of the mean", "crps": "CRPS", "coverage_90": "in the 90 % interval"}


def seeds(runs: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [run for key, run in runs.items() if key.startswith(f"{name}-")]


def main() -> None:
    begin(10)
    figure, grid = plt.subplots(2, 2, figsize=(9.5, 6.6), layout="constrained")
    left, *others = grid.flat
    by_score = dict(zip(PANELS, others, strict=True))
    for file, line in LOGS.items():
        runs = read_log(file)["runs"]
        for number, name in enumerate(MODELS):
            each, look = seeds(runs, name), {"color": f"C{number}", "linestyle": line}
            curves = np.array([run["valid_nll"] for run in each])
            left.plot(np.arange(1, curves.shape[1] + 1), curves.mean(axis=0), **look)
            ahead = [run["ahead"][-1] for run in each]
            hours = np.arange(1, len(ahead[0]["rmse"]) + 1)
            for score, axes in by_score.items():
                axes.plot(hours, np.mean([one[score] for one in ahead], axis=0), **look)
    day = by_score["rmse"].plot(hours, ahead[0]["seasonal"], color="black", linewidth=2)
    by_score["coverage_90"].axhline(0.9, color="0.5", linewidth=0.8)
    left.set(
        title="the next hour, validation", xlabel="epoch", ylabel="nats a value", ylim=(-0.15, 0.7)
    )
    for score, axes in by_score.items():
        axes.set(title=f"test: {PANELS[score]}", xlabel="hours ahead", xticks=range(0, 25, 6))
    by_score["coverage_90"].set(ylim=(0.5, 1))
    for score in ("rmse", "crps"):
        by_score[score].set(ylabel="in units of a column's spread")
    for axes in grid.flat:
        tidy(axes)
    colours = [plt.Line2D([], [], color=f"C{number}") for number in range(len(MODELS))]
    lines = [plt.Line2D([], [], color="0.4", linestyle=line) for line in LOGS.values()]
    figure.legend(
        [*colours, *lines, *day],
        [*MODELS.values(), "with a season", "without", "the day before, once more"],
        loc="outside lower center",
        ncols=3,
        frameon=False,
    )
    save(figure, "ett.svg")


if __name__ == "__main__":
    main()
