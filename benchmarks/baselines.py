"""Who knows best what it does not know: Bayes by Backprop, dropout and ensembles on one text.

    python benchmarks/baselines.py --out runs/baselines --seeds 1,2,3 > baselines.json

Every network is trained with every seed, on the demo's text. Then each is asked, alone and (by the
name with "x N") all seeds of it together as an ensemble: how well does it predict the test text, is
it as sure as it should be, and does it notice the test text read backwards or shuffled, window by
window, by its entropy or by what its draws or members disagree about (mutual information). Runs
that are there already are only measured.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from reproduce import present_commit
from reproduce_job import hardware

import bayesrnn as br
from bayesrnn.bayes import Network
from bayesrnn.evaluate import detect, reversed_text, shuffled_text
from bayesrnn.train.task import EVALUATION_TOKENS, LanguageTask
from bayesrnn.watched import run_task

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
from demo import state_of_the_union  # noqa: E402

MASKS = ["dropout.kind=variational", "dropout.input=0.6", "dropout.output=0.6"]
MASKS += ["dropout.recurrent=0.3"]
LONG = ["train.epochs=24", "train.decay=0.7", "train.decay_after=16"]
AVERAGED = ["train.epochs=24", "train.decay=1.0", "train.average_after=12"]
NETWORKS: dict[str, tuple[str, list[str], tuple[int, ...]]] = {
    "plain": ("demo-plain", [], (0,)),
    "dropout": ("demo-plain", [*MASKS, *LONG], (0, 10, 50)),
    "bayesian": ("demo-brnn", [], (0, 10, 50)),
    "bayesian-long": ("demo-brnn", LONG, (0, 10, 50)),
    "dropout-averaged": ("demo-plain", [*MASKS, *AVERAGED], (0, 10)),
    "bayesian-averaged": ("demo-brnn", AVERAGED, (0, 10)),
}
"""The recipe, what is changed in it, and the numbers of draws (0: the mean). The rates of the masks
are the best on valid of three (0.4 and 0.2, 0.5 and 0.3, these: 121.1, 111.0 and 109.5, seed 1)."""
COMMAND = "python benchmarks/baselines.py --out RUNS"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder of the runs")
    parser.add_argument("--data", type=Path, help="a text file instead of the demo's")
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--only", default=",".join(NETWORKS), help="these networks alone")
    parser.add_argument("--commit", default="", help="of the code (default: the checkout's)")
    given = parser.parse_args()
    seeds = [int(seed) for seed in given.seeds.split(",")]
    text = given.data or state_of_the_union(given.out / "addresses.txt")
    rows: list[dict[str, Any]] = []
    for name in given.only.split(","):
        recipe, changes, counts = NETWORKS[name]
        runs = [given.out / f"{name}-{seed}" for seed in seeds]
        for seed, run in zip(seeds, runs, strict=True):
            settings = [f"data.path={text}", f"train.seed={seed}", *changes]
            br.train(br.read_recipe(ROOT / "recipes" / f"{recipe}.toml", settings), run, quiet=True)
        models = [br.load(run) for run in runs]
        task = run_task(runs[0], br.read_recipe(runs[0] / "recipe.toml"), torch.device("cpu"))
        assert isinstance(task, LanguageTask)
        for seed, model in zip(seeds, models, strict=True):
            rows += measured(model, task, counts, {"network": name, "seed": seed})
        if len(models) > 1:
            together = {"network": f"{name} x {len(models)}", "seed": None}
            rows += measured(br.Ensemble(models), task, [n for n in counts if n <= 10], together)
    found = {
        "command": f"{COMMAND} --seeds {given.seeds}"
        + ("" if given.only == ",".join(NETWORKS) else f" --only {given.only}")
        + ("" if given.data is None else " --data TEXT"),
        "commit": given.commit or present_commit(),
        **hardware(),
        "networks": {name: (f"recipes/{r}.toml", c) for name, (r, c, _) in NETWORKS.items()},
        "rows": rows,
    }
    print(json.dumps(found, indent=1))


def measured(
    model: Network, task: LanguageTask, counts: Sequence[int], of: dict[str, Any]
) -> list[dict[str, Any]]:
    """One network's, or ensemble's, figures by the numbers of draws."""
    ids = task.corpus.part("test")
    texts = {"text": ids, "reversed": reversed_text(ids), "shuffled": shuffled_text(ids)}
    found = {
        name: br.text_uncertainty(model, br.StreamLoader(each, 1, EVALUATION_TOKENS), counts)
        for name, each in texts.items()
    }
    here = found.pop("text")
    print(of, file=sys.stderr)
    return [
        {
            **of,
            **here[count].summary(),
            "ece": here[count].calibration().ece,
            "gap": br.entropy_gap(here[count], found["reversed"][count]).gap,
            **{name: asdict(detect(here[count], other[count])) for name, other in found.items()},
        }
        for count in counts
    ]


if __name__ == "__main__":
    main()
