"""On a GPU: the engine (compiled passes, aligned weights, one CUDA graph) against the eager step.

python benchmarks/engine_check.py recipes/ptb-brnn-medium.toml path/to/ptb > engine-check.json
python benchmarks/engine_check.py recipes/flickr8k-brnn.toml captions.json  # batches of many shapes
python benchmarks/engine_check.py recipes/an4-mdlstm-adaptive-weight-noise.toml an4  # likewise

Both start from the same seed and take the same 50 steps, over as many epochs as they are; the
losses must agree to what float32 allows (in bfloat16 the KL's value must: what is learnt is not
rounded). With train.look_after the first half of them does not look. The learning rate is a
tenth of the recipe's: at the full one the first steps are chaotic, and two runs that differ in the
last digit are apart after some twenty steps. Also says how often torch had to re-pack a recurrent
layer's weights (never).
"""

import gc
import json
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch

from bayesrnn.data import Batch, Loader
from bayesrnn.engine import products_in
from bayesrnn.models.layers import State
from bayesrnn.objective import FreeEnergy
from bayesrnn.recipe import Recipe, read_recipe
from bayesrnn.saving import build_model, build_module
from bayesrnn.train.step import Step, Update, build_optimizer
from bayesrnn.train.task import build_task

STEPS = 50


def losses(recipe: Recipe, engine: str, precision: str) -> dict[str, Any]:
    """The free energy's parts in each of the first steps."""
    settings = replace(recipe.train, engine=engine, precision=precision)  # type: ignore[arg-type]
    device = torch.device("cuda")
    torch.manual_seed(settings.seed)
    task = build_task(recipe, device)
    model = build_model(recipe, build_module(recipe, task.vocabulary)).to(device).train()
    optimizer = build_optimizer(settings, model, len(task.batches))
    said: list[str] = []
    objective = FreeEnergy(task.batches, recipe.bayes.kl)
    looks_from = STEPS // 2 if settings.look_after else 0
    state: State | None = None
    found: list[tuple[float, float, float]] = []
    with warnings.catch_warnings(record=True) as caught, products_in(precision):
        warnings.simplefilter("always")
        for number, batch in enumerate(islice(endless(task.batches), STEPS)):
            if number in (0, looks_from):  # a step of its own, as in a training
                model.looking = number >= looks_from
                update = Update(optimizer, settings.clip, device)
                update.set_rate(settings.lr / 10)
                take = Step(model, task.nll, objective, update, settings, said.append)
                gc.collect()  # the recording of the other one
            state = take(batch, None if batch.first else state)
            figures = update.read()
            found.append((figures.error / batch.targets, figures.kl, figures.norm))
    packed = sum("single contiguous chunk" in str(w.message) for w in caught)
    return {"steps": found, "said": said, "repacked": packed}


def endless(batches: Loader) -> Iterator[Batch]:
    """Epoch after epoch."""
    for epoch in count():
        batches.epoch = epoch
        yield from batches


def relative(one: float, other: float) -> float:
    """How far they are apart; 0 where both are 0, as the KL of points is."""
    return abs(one - other) / (abs(other) or 1.0)


def main() -> None:
    recipe = read_recipe(Path(sys.argv[1]), [f"data.path={sys.argv[2]}"])
    report: dict[str, Any] = {"hardware": torch.cuda.get_device_name(), "torch": torch.__version__}
    for precision in ("float32", "tf32", "bfloat16"):
        one, other = (losses(recipe, engine, precision) for engine in ("auto", "eager"))
        apart = [
            max(relative(a[i], b[i]) for a, b in zip(one["steps"], other["steps"], strict=True))
            for i in range(3)
        ]
        report[precision] = {
            "largest relative difference": dict(zip(("nll", "kl", "norm"), apart, strict=True)),
            "engine": one,
            "eager": other,
        }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
