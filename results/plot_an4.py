"""Draw docs/an4.svg, the losses of four networks over epochs (Graves 2011, Fig. 2), from
results/an4.json, which benchmarks/speech.py wrote (needs matplotlib).

python results/plot_an4.py
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
PANELS = {
    "ml": "maximum likelihood",
    "weight-noise": "weight noise",
    "adaptive-prior-weight-noise": "adaptive prior weight noise",
    "adaptive-weight-noise": "adaptive weight noise",
}
LINES = {"train_nll": "train (drawn weights)", "valid_nll": "validation", "test_nll": "test"}


def main() -> None:
    networks = json.loads((ROOT / "results" / "an4.json").read_text())["networks"]
    plt.style.use("seaborn-v0_8-colorblind")
    plt.rcParams |= {"svg.hashsalt": "bayesrnn", "font.size": 10, "axes.spines.top": False}
    figure, panels = plt.subplots(2, 2, figsize=(8, 5.2), sharey=True, layout="constrained")
    for axes, (name, title) in zip(panels.flat, PANELS.items(), strict=True):
        curve = networks[name]["curve"]
        for number, (key, label) in enumerate(LINES.items()):
            if key in curve:
                axes.plot(curve["epoch"], curve[key], label=label, color=f"C{number}")
        axes.axvline(networks[name]["kept_epoch"], color="0.6", linewidth=0.8, linestyle=":")
        axes.set(title=title, xlabel="epoch", ylim=(0, 3))
        axes.spines["right"].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
    for axes in panels[:, 0]:
        axes.set_ylabel("nats a phone")
    panels[0, 0].legend(frameon=False)
    figure.savefig(ROOT / "docs" / "an4.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
