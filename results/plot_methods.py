"""Draw docs/mnist.svg and docs/sentiment.svg from results/mnist.json and results/sentiment.json
(needs matplotlib): curves over epochs, a line the mean over the seeds, the band their range.

python results/plot_methods.py
"""

from typing import Any

import matplotlib.pyplot as plt
from drawing import begin, read_log, save, tidy
from matplotlib.axes import Axes

KINDS = {
    "none": "no dropout",
    "naive": "naive dropout",
    "variational": "variational dropout",
    "brnn": "Bayes by Backprop",
}


def curve(axes: Axes, runs: list[dict[str, Any]], figure: str, label: str) -> None:
    """The mean over the seeds of one figure, and how far they are apart."""
    by_seed = [[line[figure] for line in run["epochs"]] for run in runs]
    epochs = range(1, len(by_seed[0]) + 1)
    columns = list(zip(*by_seed, strict=True))
    (line,) = axes.plot(epochs, [sum(c) / len(c) for c in columns], label=label, linewidth=1.6)
    low, high = [min(c) for c in columns], [max(c) for c in columns]
    axes.fill_between(epochs, low, high, color=line.get_color(), alpha=0.2, linewidth=0)


def mnist() -> None:
    runs = read_log("mnist.json")["runs"]
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for name in dict.fromkeys(run["name"] for run in runs):
        curve(axes, [run for run in runs if run["name"] == name], "valid_error_percent", name)
    axes.set(xlabel="epoch", ylabel="validation error, %", ylim=(1.2, 4.5))
    axes.legend(frameon=False)
    tidy(axes)
    save(figure, "mnist.svg")


def sentiment() -> None:
    runs = read_log("sentiment.json")["runs"]
    figure, rows = plt.subplots(2, 2, figsize=(8, 5.6), layout="constrained", sharex=True)
    for column, cell in enumerate(("lstm", "gru")):
        for kind, label in KINDS.items():
            mine = [run for run in runs if (run["model"], run["cell"]) == (kind, cell)]
            curve(rows[0][column], mine, "test_rmse", label)
            curve(rows[1][column], mine, "test_nll", label)
        rows[0][column].set(title=cell.upper(), ylim=(0.145, 0.22))
        rows[1][column].set(xlabel="epoch", ylim=(-0.5, 3))
    rows[0][0].set(ylabel="test error, RMSE")
    rows[1][0].set(ylabel="test loss, nats a review")
    handles, labels = rows[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    for axes in rows.flat:
        tidy(axes)
    save(figure, "sentiment.svg")


if __name__ == "__main__":
    begin(11)
    mnist()
    sentiment()
