"""Draw docs/compression.svg, what each bit of a weight buys, from results/compression.json, which
benchmarks/compression.py wrote (needs matplotlib).

python results/plot_compression.py
"""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from drawing import begin, read_log, save, tidy

MODELS = {"plain": "plain LSTM", "brnn": "Bayesian LSTM"}
DENSE_BITS = 32


def main() -> None:
    runs = read_log("compression.json")["runs"]
    begin(10)
    figure, axes = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
    for number, (name, label) in enumerate(MODELS.items()):
        colour = f"C{number}"
        each = [run for run in runs if name in run["run"]]
        coded = means([run["curve"]["points"] for run in each], "coded_bits_per_weight", "error")
        axes.plot(*coded, "o-", color=colour, markersize=4, label=f"{label}, rounded and coded")
        valid = np.mean([list(run["pruned"]["valid"].values()) for run in each], axis=0)
        left = 1 - np.array([float(part) for part in each[0]["pruned"]["valid"]])
        bits = 1 + DENSE_BITS * left  # a bit that says which, and the number itself
        axes.plot(bits, valid, "s:", color=colour, markersize=4, label=f"{label}, pruned by size")
        dense = np.mean([run["curve"]["before"] for run in each])
        axes.plot(DENSE_BITS, dense, "D", color=colour, markersize=6)
        axes.annotate(
            "as it is",
            (DENSE_BITS, dense),
            (0, -16),
            ha="center",
            textcoords="offset points",
            color=colour,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks([0.5, 1, 2, 4, 8, 16, 32], ["½", "1", "2", "4", "8", "16", "32"])
    axes.set(xlabel="bits a weight in the file", ylabel="validation perplexity", ylim=(115, 150))
    tidy(axes)
    axes.legend(frameon=False, fontsize=8, loc="upper right")
    save(figure, "compression.svg")


def means(curves: list[list[dict[str, Any]]], *keys: str) -> list[Any]:
    """Over the seeds, point by point."""
    return [np.mean([[point[key] for point in curve] for curve in curves], axis=0) for key in keys]


if __name__ == "__main__":
    main()
