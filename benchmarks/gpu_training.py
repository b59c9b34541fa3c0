"""What a training adds to its steps: ms a step as one JSON object.

python benchmarks/gpu_training.py recipes/ptb-brnn-medium.toml path/to/ptb [KEY=VALUE ...]

Steps of a training as it runs, with its figures read and written; without them; of the same batch
over and over, and of random words; and how long the host is busy with one.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bayesrnn.engine import products_in
from bayesrnn.recipe import read_recipe
from bayesrnn.saving import build_model, build_module
from bayesrnn.train.loop import Trainer, choose_device
from bayesrnn.train.run import Run
from bayesrnn.train.step import build_optimizer
from bayesrnn.train.task import LanguageTask

STEPS, TIMES, QUEUED = 100, 3, 20


def measure(trainer: Trainer) -> dict[str, Any]:
    device = trainer.task.batches.device
    batches = trainer._batches()

    def wait() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def ms(step: Callable[[], object], count: int = STEPS) -> float:
        began = wait()
        for _ in range(count):
            step()
        return round(1000 * (wait() - began) / count, 3)

    def trained() -> None:
        trainer._update(next(batches))
        trainer._tick(batch)

    def bare() -> None:
        trainer._update(next(batches))
        trainer.step += 1

    def same() -> None:
        trainer.state = trainer.take(batch, trainer.state)

    trainer._clock = trainer._saved_at = time.monotonic()
    trainer.take.update.set_rate(trainer.settings.lr)
    batch = next(batches)
    trainer._update(batch)
    ms(trained, STEPS // 2)  # libraries choose their kernels, and a step is recorded
    found: dict[str, Any] = {
        "ms a step of training": [ms(trained) for _ in range(TIMES)],
        "without its records": [ms(bare) for _ in range(TIMES)],
        "the same batch": [ms(same) for _ in range(TIMES)],
    }
    ids = torch.randint(len(trainer.task.vocabulary or ()), (len(batch.x) + 1, batch.streams))
    batch = replace(batch, x=ids[:-1].to(device), y=ids[1:].to(device))
    found["a batch of random words"] = [ms(same) for _ in range(TIMES)]
    began = wait()
    for _ in range(QUEUED):
        same()
    found["host, ms a step"] = round(1000 * (time.perf_counter() - began) / QUEUED, 3)
    return found


def main() -> None:
    path, data, *changes = sys.argv[1:]
    recipe = read_recipe(Path(path), [f"data.path={data}", *changes])
    device = choose_device(recipe.train.device)
    torch.manual_seed(recipe.train.seed)
    task = LanguageTask(recipe, device)
    model = build_model(recipe, build_module(recipe, task.vocabulary)).to(device).train()
    optimizer = build_optimizer(recipe.train, model, len(task.batches))
    with tempfile.TemporaryDirectory() as folder, products_in(recipe.train.precision):
        run = Run(Path(folder) / "run")
        with run.locked():
            run.prepare(recipe, fresh=False)
            trainer = Trainer(recipe, run, task, model, optimizer, quiet=True)
            found = measure(trainer)
            trainer.close()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(json.dumps({"hardware": name, "torch": torch.__version__, **found}, indent=1))


if __name__ == "__main__":
    main()
