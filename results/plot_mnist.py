"""Draw docs/mnist.svg, validation error over epochs, from results/mnist.json (needs matplotlib).

python results/plot_mnist.py
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    log = json.loads((ROOT / "results" / "mnist.json").read_text())
    plt.rcParams |= {"svg.hashsalt": "bayesrnn", "font.size": 11, "axes.spines.top": False}
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for run in log["runs"]:
        epochs = [line["epoch"] for line in run["epochs"]]
        errors = [line["valid_error_percent"] for line in run["epochs"]]
        axes.plot(epochs, errors, label=run["name"], linewidth=1.8)
    axes.set(xlabel="epoch", ylabel="validation error, %", ylim=(1.2, 4.5))
    axes.spines["right"].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(ROOT / "docs" / "mnist.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
