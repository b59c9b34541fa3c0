"""What rounding and coding saves of trained runs, beside pruning; on valid, and the choice on test.

For each run: the curve over steps; the coarsest step that costs at most a percent of the validation
figure, its file, and the test perplexity before and after; the same for the largest fraction that
can be pruned by size (with the file of that).

    python benchmarks/compression.py runs/demo-brnn runs/demo-plain > compression.json
"""

import argparse
import json
import platform
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import bayesrnn as br
from bayesrnn.compress import compress_run, compression_of_run
from bayesrnn.pruned_run import prune_run
from bayesrnn.saving import TENSORS
from bayesrnn.train.task import LanguageTask
from bayesrnn.watched import run_task

STEPS = (0.02, 0.035, 0.05, 0.07, 0.1, 0.14, 0.2)
FRACTIONS = (0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9)
ALLOW = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="runs on text")
    parser.add_argument("--samples", type=int, default=10, help="draws of one with scales")
    arguments = parser.parse_args()
    found = {
        "command": "python benchmarks/compression.py " + " ".join(map(str, arguments.runs)),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "allowed": ALLOW,
        "runs": [measured(run, arguments.samples) for run in arguments.runs],
    }
    print(json.dumps(found, indent=1))


def measured(run: Path, samples: int) -> dict[str, Any]:
    task = run_task(run, br.read_recipe(run / "recipe.toml"), torch.device("cpu"))
    assert isinstance(task, LanguageTask)
    with tempfile.TemporaryDirectory() as folder:
        small, whole = Path(folder) / "small", Path(folder) / "with-scales"
        chosen = asdict(compress_run(run, small, allow=ALLOW))
        chosen |= {"test": on_test(task, run), "test_after": on_test(task, small)}
        if not br.load(run).all_points:
            compress_run(run, whole, step=chosen["step"], scale=True)
            chosen |= {
                "file_bytes_with_scales": (whole / "model" / TENSORS).stat().st_size,
                "file_bytes_with_scales_before": (run / "model" / TENSORS).stat().st_size,
                "test_draws": on_test(task, run, samples),
                "test_draws_after": on_test(task, whole, samples),
            }
        return {
            "run": run.name,
            "seed": br.read_recipe(run / "recipe.toml").train.seed,
            "compressed": chosen,
            "curve": asdict(compression_of_run(run, STEPS)),
            "pruned": pruned(run, task, chosen["before"], Path(folder) / "pruned"),
        }


def pruned(run: Path, task: LanguageTask, before: float, out: Path) -> dict[str, Any] | None:
    """The most that can be pruned by size within what is allowed."""
    points = br.run_curve(run, FRACTIONS, by="magnitude").points
    fits = [point.fraction for point in points if point.error <= (1 + ALLOW) * before]
    if not fits:
        return None
    done = prune_run(run, out, max(fits), by="magnitude", quiet=True)
    return {
        "fraction": max(fits),
        "file_ratio": done.file_ratio,
        "valid": {point.fraction: point.error for point in points},
        "test_after": on_test(task, out),
    }


def on_test(task: LanguageTask, run: Path, samples: int = 0) -> float:
    """The perplexity of the test text."""
    generator = torch.Generator().manual_seed(1)
    return br.evaluate_text(br.load(run), task.stream("test"), samples, generator).perplexity


if __name__ == "__main__":
    main()
