"""Draw docs/ptb-*.svg from results/ptb/ (needs matplotlib).

Learning curves, and Figs. 2 (pruning), 3 (entropy gap) and 5 (what pruning leaves of a layer) of
Fortunato et al. 2017.

python results/plot_ptb.py
"""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib.pyplot as plt
from drawing import ROOT, begin, save, tidy
from matplotlib.axes import Axes
from matplotlib.figure import Figure

MODELS = {
    "plain": ("LSTM (2 x 200)", "#7f7f7f"),
    "plain_medium": ("LSTM", "#3f3f3f"),
    "dropout": ("LSTM, dropout", "#e08214"),
    "dropout_tuned": ("LSTM, dropout, our schedule", "#fdb863"),
    "dropout_averaged": ("LSTM, dropout, averaged", "#b35806"),
    "variational_tied": ("variational, tied masks", "#8073ac"),
    "variational_untied": ("variational, untied masks", "#b2abd2"),
    "brnn": ("Bayesian", "#1b7837"),
    "sharpened": ("Bayesian, sharpened", "#2166ac"),
    "best": ("best", "#ff5a5f"),
}
PUBLISHED = "#999999"
LEFT = 0.7
"""Where the gap without draws stands, beside those by draws."""
Jobs = dict[str, list[dict[str, Any]]]
Drawn = Callable[[Axes, Jobs], bool]


def read_jobs(folder: Path) -> Jobs:
    """All seeds of each model there is, in the order of `MODELS`."""
    files = {model: folder / f"{model}.json" for model in MODELS}
    return {m: json.loads(file.read_text()) for m, file in files.items() if file.exists()}


def learning(axes: Axes, jobs: Jobs) -> bool:
    for model, seeds in jobs.items():
        label, colour = MODELS[model]
        for job in seeds:
            epochs = [line["epoch"] for line in job["epochs"]]
            values = [line["valid_perplexity"] for line in job["epochs"]]
            axes.plot(epochs, values, color=colour, linewidth=1.6, label=label)
            label = "_"  # further seeds
    axes.set(xlabel="epoch", ylabel="validation perplexity", ylim=(65, 135), xlim=(0, None))
    axes.legend(frameon=False, ncols=2)
    return bool(jobs)


def gap(axes: Axes, jobs: Jobs) -> bool:
    """The mean over the seeds, where all have it; at the left edge by the mean, or with dropout
    switched off."""
    for model, seeds in jobs.items():
        rows: dict[int, list[float]] = {}
        for job in seeds:
            parts = [job["evaluations"].get(name) for name in ("gap", "gap_more")]
            for row in (row for part in parts if part for row in part["by_draws"]):
                rows.setdefault(row["samples"], []).append(row["gap"])
        if not rows:
            continue
        seen = max(map(len, rows.values()))
        rows = {count: values for count, values in rows.items() if len(values) == seen}
        label, colour = MODELS[model]
        draws = sorted(count for count in rows if count)
        heights = [mean(rows[count]) for count in draws]
        axes.plot(draws, heights, "o-", color=colour, label=label, linewidth=1.6, markersize=4)
        if 0 in rows:
            axes.plot([LEFT], [mean(rows[0])], "D", color=colour, markersize=5, clip_on=False)
    said = (("Bayesian, 10 draws", 0.67), ("mean", 0.65), ("dropout off", 0.62), ("MC", 0.58))
    for text, height in said:
        axes.axhline(height, color=PUBLISHED, linewidth=0.8, linestyle=":")
        axes.annotate(
            f"{text} (published)",
            (1.0, height),
            xycoords=("axes fraction", "data"),
            fontsize=8,
            color=PUBLISHED,
            ha="right",
            va="bottom",
        )
    axes.set_xscale("log")
    axes.set_xticks([LEFT, 1, 2, 5, 10, 20, 50], ["mean,\noff", "1", "2", "5", "10", "20", "50"])
    axes.minorticks_off()
    axes.set(xlabel="draws of the weights", ylabel="entropy gap, nats a word")
    if axes.get_legend_handles_labels()[0]:
        axes.figure.legend(frameon=False, loc="outside lower center", ncols=2)
    return any("gap" in job["evaluations"] for seeds in jobs.values() for job in seeds)


def pruning(axes: Axes, jobs: Jobs) -> bool:
    found = [job["evaluations"] for job in jobs.get("brnn", ()) if "prune" in job["evaluations"]]
    kinds = {
        "magnitude": ("one ranking of all weights, by the size of the mean", "-"),
        "all": ("by signal to noise, as published", "-."),
        "per_tensor": ("of each matrix, by signal to noise", "--"),
    }
    colour = MODELS["brnn"][1]
    for key, (label, style) in kinds.items():
        for evaluations in found:
            rows = evaluations["prune"].get(key, ())
            percents = [100 * row["fraction"] for row in rows]
            values = [row["error"] for row in rows]
            axes.plot(percents, values, style, color=colour, label=label, linewidth=1.6)
            label = "_"
    again: dict[int, list[float]] = {}
    for evaluations in found:
        for name, figures in evaluations.items():
            if name.endswith("_retrained"):
                percent = int(name.split("_")[1])
                again.setdefault(percent, []).append(figures["valid_perplexity"])
    heights = [min(again[percent]) for percent in sorted(again)]
    axes.plot(sorted(again), heights, "o", color="#2166ac", label="retrained (the best of each)")
    axes.axvline(80, color=PUBLISHED, linewidth=0.8, linestyle=":")
    axes.annotate(
        "published: little impact up to here",
        (79, 1.0),
        xycoords=("data", "axes fraction"),
        fontsize=8,
        color=PUBLISHED,
        ha="right",
        va="top",
    )
    axes.set(xlabel="weights pruned, %", ylabel="validation perplexity", ylim=(75, 105))
    axes.legend(frameon=False, loc="center left")
    return bool(found)


def draw(content: Drawn, jobs: Jobs) -> Figure | None:
    """A figure of one plot; None where there is nothing to show."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    tidy(axes)
    return figure if content(axes, jobs) else None


def pruning_map(jobs: Jobs) -> Figure | None:
    """The weights left of the last layer when 80 % are pruned: dark where many are."""
    found = [job["evaluations"].get("prune_map") for job in jobs.get("brnn", ())]
    maps = next((part["matrices"] for part in found if part), None)
    if maps is None:
        return None
    figure, places = plt.subplots(1, 2, figsize=(7, 5), layout="constrained", sharey=True)
    titles = ("from the layer below", "from its own state")
    for axes, title, matrix in zip(places, titles, maps.values(), strict=True):
        squares = matrix["left_percent"]
        rows, columns = len(matrix["rows"]), len(matrix["columns"])
        image = axes.imshow(
            squares, "Greys", aspect="auto", vmin=0, vmax=100, extent=(0, columns, rows, 0)
        )
        gates = [rows * (2 * gate + 1) / 8 for gate in range(4)]
        axes.set_yticks(gates, ["input", "forget", "cell", "output"], rotation=90, va="center")
        axes.set(title=title, xlabel="unit read")
    figure.colorbar(image, ax=places, label="weights left, % of 10 x 10")
    return figure


def main() -> None:
    begin(11)
    jobs = read_jobs(ROOT / "results" / "ptb")
    plots: dict[str, Drawn] = {"learning": learning, "gap": gap, "pruning": pruning}
    figures = {name: draw(content, jobs) for name, content in plots.items()}
    figures["pruning-map"] = pruning_map(jobs)
    for name, figure in figures.items():
        if figure is not None:
            save(figure, f"ptb-{name}.svg")
            print(f"wrote docs/ptb-{name}.svg")


if __name__ == "__main__":
    main()
