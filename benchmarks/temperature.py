"""What one temperature, chosen on valid, changes on test: loss, entropy, calibration, entropy gap.

For each run on text, by the posterior mean and by the average of draws (where draws differ):
figures of the test text with logits as they are and divided by the temperature that
`search_temperature` finds; and the gap between the test text reversed and the test text. With
--rate also the perplexity of dynamic evaluation, at a temperature of its own.

    python benchmarks/temperature.py runs/demo-brnn runs/demo-plain > temperature.json
"""

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from reproduce_job import hardware

import bayesrnn as br
from bayesrnn.evaluate import reversed_text
from bayesrnn.train.task import EVALUATION_TOKENS, LanguageTask
from bayesrnn.watched import run_task

SHOWN = ("nll", "perplexity", "total", "epistemic")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="trained runs on text")
    parser.add_argument("--samples", type=int, default=10, help="draws to average")
    parser.add_argument("--streams", type=int, default=1, help="streams to read texts as")
    parser.add_argument("--rate", type=float, help="of dynamic evaluation")
    given = parser.parse_args()
    found = {
        "command": shlex.join(["python", "benchmarks/temperature.py", *sys.argv[1:]]),
        "samples": given.samples,
        "streams": given.streams,
        "rate": given.rate,
        **hardware(),
        "runs": [measured(run, given) for run in given.runs],
    }
    print(json.dumps(found, indent=1))


def measured(run: Path, given: argparse.Namespace) -> dict[str, Any]:
    task = run_task(run, br.read_recipe(run / "recipe.toml"), torch.device("cpu"))
    assert isinstance(task, LanguageTask), f"{run} is no run on text"
    model = br.load(run)
    counts = [0, given.samples] if model.draws_differ else [0]
    return {
        "run": str(run),
        "averages": [averaged(model, task, count, given.streams) for count in counts],
        "dynamic": None if given.rate is None else dynamic(model, task, given.rate),
    }


def averaged(model: br.Bayesian, task: LanguageTask, count: int, streams: int) -> dict[str, Any]:
    """By the mean (0) or so many draws."""
    generator = torch.Generator().manual_seed(1)
    search = br.search_temperature(model, task.stream("valid", streams), count, generator)
    ids = task.corpus.part("test")
    loaders = [
        br.StreamLoader(each, streams, EVALUATION_TOKENS // streams)
        for each in (ids, reversed_text(ids))
    ]
    figures: dict[str, Any] = {}
    for when, temperature in (("as it is", 1.0), ("tempered", search.temperature)):
        text, backwards = (
            br.text_uncertainty(model, loader, (count,), temperature=temperature)[count]
            for loader in loaders
        )
        summary = text.summary()
        gap = br.entropy_gap(text, backwards)
        scores = {name: summary[name] for name in SHOWN}
        figures[when] = {**scores, "ece": text.calibration().ece, "gap": gap.gap}
    tried = [asdict(trial) for trial in search.tried]
    return {"samples": count, "temperature": search.temperature, "valid": tried, **figures}


def dynamic(model: br.Bayesian, task: LanguageTask, rate: float) -> dict[str, Any]:
    """Of dynamic evaluation."""
    valid, test = (task.stream(split, 1, task.batches.unroll) for split in ("valid", "test"))
    search = br.search_temperature(model, valid, rate=rate)
    figures = {
        when: br.dynamic_evaluate(model, test, rate, temperature=temperature).perplexity
        for when, temperature in (("as it is", 1.0), ("tempered", search.temperature))
    }
    tried = [asdict(trial) for trial in search.tried]
    return {"temperature": search.temperature, "valid": tried, **figures}


if __name__ == "__main__":
    main()
