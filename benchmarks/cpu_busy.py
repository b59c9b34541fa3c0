"""What other work on the machine costs: steps of training by threads that wait for each other long,
as OpenMP has it, and briefly, as the command line has it; alone, and beside a busy process.

python benchmarks/cpu_busy.py > busy.json
"""

import json
import os
import statistics
import subprocess
import sys
from contextlib import ExitStack
from typing import Any

import torch

from bayesrnn.starting import SPINS

SIZES = ("small", "medium")
CASES = ("plain, here", "Bayesian, here")
THREADS = {
    "wait long": {"GOMP_SPINCOUNT": "300000"},  # what GNU's OpenMP does where nothing is said
    "wait briefly": {"GOMP_SPINCOUNT": SPINS},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
STEPS, ROUNDS = 5, 3
BUSY = "while True: pass"


def main() -> None:
    found: dict[str, Any] = {"threads": torch.get_num_threads(), "torch": torch.__version__}
    for size in SIZES:
        rounds = [
            {(load, kind): steps(size, load, kind) for load in (0, 1) for kind in THREADS}
            for _ in range(ROUNDS)
        ]
        for load in (0, 1):
            for kind in THREADS:
                found[f"{size}, {kind}, beside {load} busy"] = {
                    case: statistics.median(each[load, kind][case] for each in rounds)
                    for case in CASES
                }
    print(json.dumps(found, indent=1))


def steps(size: str, load: int, kind: str) -> dict[str, float]:
    """Median milliseconds of a step of each case, beside so many busy processes."""
    words = ["-m", "bayesrnn", "bench", "--size", size, "--steps", str(STEPS), "--device", "cpu"]
    words += [word for case in CASES for word in ("--case", case)]
    with ExitStack() as others:
        for _ in range(load):
            other = others.enter_context(subprocess.Popen([sys.executable, "-c", BUSY]))
            others.callback(other.kill)
        done = subprocess.run(
            [sys.executable, *words, "--json"],
            env={**os.environ, **THREADS[kind]},
            capture_output=True,
            text=True,
            check=True,
        )
    return {timing["case"]: timing["ms"] for timing in json.loads(done.stdout)["timings"]}


if __name__ == "__main__":
    main()
