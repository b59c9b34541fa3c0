"""Trains the forecasters of recipes/ett-*.toml and measures them on the test rows: one step ahead,
by steps ahead, and on a sensor that has drifted. One JSON object with every run's figures.

    python benchmarks/series.py --data ETTh1.csv --out runs/ett --commit HASH > ett.json
    python benchmarks/series.py --data ETTh1.csv --out runs/none model.season=0 > none.json

Runs that are there already are only measured; one that was stopped goes on.
"""

import argparse
import json
import platform
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

import bayesrnn as br
from bayesrnn.evaluate import auroc
from bayesrnn.evaluate.series import Reading, scores_by_column
from bayesrnn.train.metrics import read_metrics
from bayesrnn.train.series import SeriesTask

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
COMMAND = "python benchmarks/series.py --data ETTh1.csv --out RUNS"
MODELS = ("plain", "variational", "brnn")
DRAWS = 20
HORIZON = 24
SEASON = 24
"""Hours: of the seasonal naive forecast, whatever the networks read."""
DRIFT = 3.0
"""Of the drifted sensor's zero, in units of its spread."""
DRIFTED = "OT"


def measured(run: Path, recipe: br.Recipe) -> dict[str, Any]:
    """All figures of a finished run."""
    assert isinstance(recipe.data, br.SeriesData)
    model, task = br.load(run), SeriesTask(recipe, torch.device("cpu"))
    counts = (0, DRAWS) if model.draws_differ else (0,)
    column = recipe.data.columns.index(DRIFTED)
    values = task.series.splits["test"].values
    drifted = values.copy()
    drifted[:, column] += DRIFT
    found: dict[str, Any] = {"by_draws": [], "ahead": [], "drift": []}
    for count in counts:
        known, other = (read(model, rows, count) for rows in (values, drifted))
        found["by_draws"].append(asdict(br.evaluate_series(known, count)))
        ahead = br.backtest(model, values, HORIZON, samples=count, season=SEASON)
        found["ahead"].append(asdict(ahead))
        drift: dict[str, float] = {"samples": count}
        for part in ("aleatoric", "epistemic") if count else ("aleatoric",):
            inside, outside = (doubt(reading, part) for reading in (known, other))
            drift |= {part: inside.mean().item(), f"{part}_drifted": outside.mean().item()}
            drift[f"{part}_auroc"] = auroc(inside, outside)
        found["drift"].append(drift)
        if count == counts[-1]:
            found["columns"] = [asdict(c) for c in scores_by_column(known, task.series.settings)]
    epochs = [line for line in read_metrics(run) if line["kind"] == "epoch"]
    found["valid_nll"] = [round(line["valid_nll"], 4) for line in epochs]
    found["train_seconds"] = epochs[-1]["seconds"]
    return found


def read(model: br.Bayesian, values: Any, count: int) -> Reading:
    loader = br.StreamLoader(values, streams=1, unroll=512)
    return br.read_series(model, loader, count, torch.Generator().manual_seed(1))


def doubt(reading: Reading, part: str) -> torch.Tensor:
    """One part of each row's variance, averaged over the columns."""
    means, scales = reading.mixture.means.double(), reading.mixture.scales.double()
    if part == "epistemic":
        return means.var(dim=0, correction=0).mean(dim=1)
    return scales.square().mean(dim=(0, 2))


def hardware() -> str:
    """Where runs are trained, if there is a GPU, and where they are measured."""
    cores = f"{torch.get_num_threads()} CPU threads, {platform.machine()}"
    if not torch.cuda.is_available():
        return cores
    return f"1x {torch.cuda.get_device_name()} to train, {cores} to measure"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="ETTh1.csv")
    parser.add_argument("--out", type=Path, required=True, help="the runs' folder")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--commit", default="", help="the version that is run, for the log")
    parser.add_argument("changes", nargs="*", help="of the recipes, such as model.season=0")
    given = parser.parse_args()
    runs = {}
    for seed in map(int, given.seeds.split(",")):
        for name in MODELS:
            changes = [f"data.path={given.data}", *given.changes]
            recipe = br.read_recipe(RECIPES / f"ett-{name}.toml", changes)
            recipe = replace(recipe, train=replace(recipe.train, seed=seed))
            run = given.out / f"{name}-{seed}"
            br.train(recipe, run)
            runs[f"{name}-{seed}"] = measured(run, br.read_recipe(run / "recipe.toml"))
    print(
        json.dumps(
            {
                "command": " ".join([COMMAND, *given.changes]),
                "commit": given.commit,
                "hardware": hardware(),
                "torch": torch.__version__,
                "settings": {
                    "draws": DRAWS,
                    "horizon": HORIZON,
                    "season": SEASON,
                    "drift": [DRIFTED, DRIFT],
                },
                "runs": runs,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
