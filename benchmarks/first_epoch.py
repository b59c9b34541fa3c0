"""What a network has learnt after its first epoch of Penn Treebank, by its mean and by bounds of
looks: does sharpening learn faster?

    python benchmarks/first_epoch.py --data ptb --out first-epoch.json --seeds 1,2,3
    python benchmarks/first_epoch.py --data ptb --out first-epoch.json --seeds 1 --only brnn,clip-10

The candidates are in first-epoch.toml. All of one seed are trained before those of the next; each
is written as soon as it is there, and what is written is not trained again. After --deadline
seconds nothing new starts. One process on a GPU; several of them, with other files, side by side.
"""

import argparse
import gc
import json
import shutil
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

import torch
from reproduce import present_commit
from reproduce_job import hardware

from bayesrnn.evaluate.sharpened import LOOK_AT, evaluate_sharpened, looking
from bayesrnn.files import write_atomic
from bayesrnn.recipe import Recipe, read_recipe
from bayesrnn.saving import load
from bayesrnn.train.loop import choose_device, train
from bayesrnn.train.task import LanguageTask

ROOT = Path(__file__).resolve().parent.parent
BOUNDS = {
    "one look": {"width": 1.5, "looks": 1, "draws": 1},
    "four looks": {"width": 2.0, "looks": 4, "draws": 1},
    "four looks, 16 draws": {"width": 2.0, "looks": 4, "draws": 16},
}
"""By looks of the softmax weights, each width the best of those tried of an ordinary network
(results/ptb/brnn.json)."""

Figures = dict[str, Any]


def measured(recipe: Recipe, task: LanguageTask) -> Figures:
    """Train one epoch and evaluate it, a cut in the shape of the training."""
    folder = Path(tempfile.mkdtemp())
    try:
        outcome = train(recipe, folder / "run", quiet=True, task=task)
        model = load(folder / "run").to(task.batches.device)
    finally:
        shutil.rmtree(folder)
    (epoch,) = outcome.epochs
    found = {key: epoch[f"{key}_perplexity"] for key in ("train", "valid")}
    found["seconds"] = round(outcome.seconds, 1)

    def bound(sharpened: Any, looks: int, draws: int) -> float:
        loader = task.stream("valid", recipe.train.streams, recipe.train.unroll)
        generator = torch.Generator(loader.device).manual_seed(1)
        how = {"looks": looks, "draws": draws}
        return evaluate_sharpened(sharpened, loader, "mean", generator, **how).perplexity

    if any(block.posterior.looks_at_data for block in model.each_block()):
        found["by the looks of the training"] = bound(model, 1, 1)
    for name, how in BOUNDS.items():
        wide = looking(model, LOOK_AT, how["width"], recipe.train.streams)
        found[name] = bound(wide, int(how["looks"]), int(how["draws"]))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", required=True, help="the Penn Treebank folder")
    add("--out", type=Path, required=True, help="the JSON file to write, or to go on with")
    add("--seeds", type=lambda text: [int(part) for part in text.split(",")], default=[1])
    add("--only", type=lambda text: text.split(","), help="these candidates alone")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="change every recipe")
    add("--deadline", type=float, default=float("inf"), metavar="SECONDS")
    add("--commit", default="", help="of the code (default: the checkout's)")
    given = parser.parse_args()
    until = time.monotonic() + given.deadline
    candidates = tomllib.loads(Path(__file__).with_name("first-epoch.toml").read_text())
    new = {"commit": given.commit or present_commit(), **hardware(), "bounds": BOUNDS, "runs": []}
    record = json.loads(given.out.read_text()) if given.out.exists() else new
    task = None
    for seed in given.seeds:
        for name in given.only or candidates:
            known = {(run["name"], run["seed"]) for run in record["runs"]}
            if (name, seed) in known or time.monotonic() > until:
                continue
            path, *changes = candidates[name]
            changes += [f"train.seed={seed}", "train.epochs=1", *given.set]
            recipe = read_recipe(ROOT / "recipes" / path, [f"data.path={given.data}", *changes])
            task = task or LanguageTask(recipe, choose_device(recipe.train.device))
            found = measured(recipe, task)
            run = {"name": name, "seed": seed, "recipe": path, "overrides": changes, **found}
            record["runs"].append(run)
            write_atomic(given.out, (json.dumps(record, indent=1) + "\n").encode())
            print(json.dumps(run), flush=True)
            gc.collect()
    return 0


if __name__ == "__main__":
    sys.exit(main())
