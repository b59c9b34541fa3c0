"""Draw docs/an4.svg, the losses of four networks over epochs (Graves 2011, Fig. 2), from
results/an4.json, which benchmarks/speech.py wrote (needs matplotlib).

python results/plot_an4.py
"""

import matplotlib.pyplot as plt
from drawing import begin, read_log, save, tidy

PANELS = {
    "ml": "maximum likelihood",
    "weight-noise": "weight noise",
    "adaptive-prior-weight-noise": "adaptive prior weight noise",
    "adaptive-weight-noise": "adaptive weight noise",
}
LINES = {"train_nll": "train (drawn weights)", "valid_nll": "validation", "test_nll": "test"}


def main() -> None:
    networks = read_log("an4.json")["networks"]
    begin(10)
    figure, panels = plt.subplots(2, 2, figsize=(8, 5.2), sharey=True, layout="constrained")
    for axes, (name, title) in zip(panels.flat, PANELS.items(), strict=True):
        curve = networks[name]["curve"]
        for number, (key, label) in enumerate(LINES.items()):
            if key in curve:
                axes.plot(curve["epoch"], curve[key], label=label, color=f"C{number}")
        axes.axvline(networks[name]["kept_epoch"], color="0.6", linewidth=0.8, linestyle=":")
        axes.set(title=title, xlabel="epoch", ylim=(0, 3))
        tidy(axes)
    for axes in panels[:, 0]:
        axes.set_ylabel("nats a phone")
    panels[0, 0].legend(frameon=False)
    save(figure, "an4.svg")


if __name__ == "__main__":
    main()
