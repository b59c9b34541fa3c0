"""What rounding and coding saves of trained runs, beside pruning; on valid, and the choice on test.

For each run: the curve over steps; the coarsest step at which the figure that its training watched
rises by what is allowed at the most, its file, and the figure of the test set before and after; the
same for the largest fraction that can be pruned by size.

    python benchmarks/compression.py runs/demo-brnn runs/demo-plain > compression.json
"""

import argparse
import json
import platform
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import bayesrnn as br
from bayesrnn.compress import compress_run, compression_of_run
from bayesrnn.pruned_run import prune_run
from bayesrnn.saving import TENSORS
from bayesrnn.train.task import LanguageTask
from bayesrnn.watched import run_task, watched_figure

STEPS = (0.02, 0.035, 0.05, 0.07, 0.1, 0.14, 0.2)
FRACTIONS = (0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.98)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "runs", nargs="+", type=Path, help="trained runs, of text, images or reviews"
    )
    parser.add_argument("--samples", type=int, default=10, help="draws of one with scales")
    parser.add_argument("--allow", type=float, default=1, help="percent")
    arguments = parser.parse_args()
    allow = arguments.allow / 100
    found = {
        "command": "python benchmarks/compression.py " + " ".join(map(str, arguments.runs)),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "allowed": allow,
        "runs": [measured(run, allow, arguments.samples) for run in arguments.runs],
    }
    print(json.dumps(found, indent=1))


def measured(run: Path, allow: float, samples: int) -> dict[str, Any]:
    task = run_task(run, br.read_recipe(run / "recipe.toml"), torch.device("cpu"))
    figure = watched_figure(task, "test")

    def on_test(run: Path) -> float:
        return figure.of(br.load(run))

    with tempfile.TemporaryDirectory() as folder:
        small, whole = Path(folder) / "small", Path(folder) / "with-scales"
        chosen = asdict(compress_run(run, small, allow=allow))
        chosen |= {"test": on_test(run), "test_after": on_test(small)}
        if not br.load(run).all_points:
            compress_run(run, whole, step=chosen["step"], scale=True)
            chosen |= {
                "file_bytes_with_scales": (whole / "model" / TENSORS).stat().st_size,
                "file_bytes_with_scales_before": (run / "model" / TENSORS).stat().st_size,
            }
            if isinstance(task, LanguageTask):
                chosen |= {
                    "test_draws": by_draws(task, run, samples),
                    "test_draws_after": by_draws(task, whole, samples),
                }
        return {
            "run": run.name,
            "seed": br.read_recipe(run / "recipe.toml").train.seed,
            "compressed": chosen,
            "curve": asdict(compression_of_run(run, STEPS)),
            "pruned": pruned(run, (1 + allow) * chosen["before"], Path(folder) / "pruned", on_test),
        }


def pruned(
    run: Path, most: float, out: Path, on_test: Callable[[Path], float]
) -> dict[str, Any] | None:
    """The most that can be pruned by size within what is allowed."""
    points = br.run_curve(run, FRACTIONS, by="magnitude").points
    fits = [point.fraction for point in points if point.error <= most]
    if not fits:
        return None
    done = prune_run(run, out, max(fits), by="magnitude", quiet=True)
    return {
        "fraction": max(fits),
        "file_ratio": done.file_ratio,
        "valid": {point.fraction: point.error for point in points},
        "test_after": on_test(out),
    }


def by_draws(task: LanguageTask, run: Path, samples: int) -> float:
    """The perplexity of the test text by the average of so many draws."""
    generator = torch.Generator().manual_seed(1)
    return br.evaluate_text(br.load(run), task.stream("test"), samples, generator).perplexity


if __name__ == "__main__":
    main()
