"""Everything that is measured of one trained run, in the order of importance.

`reproduce.py` starts this as a process of its own, once a run is trained:

    python benchmarks/reproduce_job.py JOB.json RUN --until SECONDS_OF_THE_CLOCK

Each figure is written to JOB.json as soon as it is there, under `evaluations`; a second call goes
on with those that are missing. All come from the functions that the command line uses.
"""

import argparse
import json
import math
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from fnmatch import fnmatchcase
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from bayesrnn.bayes import Bayesian, Gaussian
from bayesrnn.data import StreamLoader
from bayesrnn.errors import Invalid, UserError
from bayesrnn.evaluate import (
    dynamic_evaluate,
    entropy_gap,
    evaluate_text,
    reversed_text,
    search_temperature,
    text_uncertainty,
    unigram_entropy,
)
from bayesrnn.evaluate.dynamic import Diverged
from bayesrnn.evaluate.sharpened import LOOK_AT, WIDTHS, evaluate_sharpened, looking, search_look
from bayesrnn.files import write_atomic
from bayesrnn.models.dropout import Mask
from bayesrnn.prune import Ranking, choose, pruning_curve
from bayesrnn.pruned_run import prune_run
from bayesrnn.recipe import read_recipe
from bayesrnn.saving import load, load_vocabulary
from bayesrnn.train.loop import choose_device
from bayesrnn.train.task import EVALUATION_TOKENS, LanguageTask

Figures = dict[str, Any]
Step = tuple[str, Callable[[], Figures]]

STOPPED = 143
"""The exit code of a process that was told to stop."""
MAP_SIDE = 10
"""A pixel of a pruning map stands for so many rows and columns."""


class Evaluations:
    """One trained model, and what there is to measure of it."""

    def __init__(self, run: Path, plan: Figures, done: dict[str, Figures]) -> None:
        self.run, self.plan, self.done = run, plan, done
        self.recipe = read_recipe(run / "recipe.toml")
        self.device = choose_device(self.recipe.train.device)
        self.model: Bayesian = load(run).to(self.device)
        blocks = list(self.model.each_block())
        self.looks = any(block.posterior.looks_at_data for block in blocks)
        self.points = self.model.all_points
        self.masked = any(isinstance(part, Mask) for part in self.model.modules())
        self.draws = plan["masked_samples" if self.points else "samples"]
        self.can_look = any(
            isinstance(block.posterior, Gaussian) and fnmatchcase(weight.name, LOOK_AT)
            for block in blocks
            for weight in block.layout.weights
        )

    @cached_property
    def task(self) -> LanguageTask:
        return LanguageTask(self.recipe, self.device, load_vocabulary(self.run))

    def steps(self) -> Iterator[Step]:
        """All that suits this model, the most important first."""
        plan, splits = self.plan, ("valid", "test")
        for split in splits:
            yield split, partial(self.perplexity, split)
        if self.can_look:
            for more in ("", "_more"):
                yield f"look{more}", partial(self.look, more)
                for split in splits:
                    yield f"{split}_bound{more}", partial(self.bound, split, f"look{more}")
            for split in splits:
                how = {"draws": plan["look_draws"]}
                yield f"{split}_bound_weighed", partial(self.bound, split, "look_more", **how)
        if not self.points or self.masked:
            yield "test_mc", partial(self.perplexity, "test", self.draws)
        for split in splits:
            yield f"{split}_de", partial(self.dynamic, split, plan["rate"])
        if not self.points:
            yield "prune", self.prune
        if not self.points or self.masked:
            yield "gap", partial(self.gap, plan["gap_draws"])
        if not self.points and not self.looks:
            for percent in plan["retrain_percents"]:
                yield f"prune_{percent}_retrained", partial(self.retrain, percent)
        if not self.points:
            yield "prune_map", self.prune_map
        for rate in plan["rates"]:
            yield f"valid_de_{rate:g}", partial(self.dynamic, "valid", rate)
        yield "test_de_chosen", lambda: self.dynamic("test", self.chosen("valid_de"))
        if not self.points and not self.looks:
            for rate in plan["variance_rates"]:
                yield f"valid_dv_{rate:g}", partial(self.dynamic, "valid", rate, True)
            yield "test_dv_chosen", lambda: self.dynamic("test", self.chosen("valid_dv"), True)
            for split in splits:
                yield f"{split}_short_dv", partial(self.by_short_segments, split)
        if self.can_look:
            for how in ("de", "dv"):
                by_variance = how == "dv"
                for rate in plan["bound_variance_rates" if by_variance else "bound_rates"]:
                    given = ("valid", "look", rate, by_variance)
                    yield f"valid_bound_{how}_{rate:g}", partial(self.bound, *given)
                yield f"test_bound_{how}_chosen", partial(self.chosen_bound, how)
            for split in splits:
                yield f"{split}_stream_bound", partial(self.bound, split, "look", streams=1)
                for how in ("de", "dv"):
                    yield f"{split}_stream_bound_{how}", partial(self.stream_bound, split, how)
        if not self.points or self.masked:
            yield "valid_mc", partial(self.perplexity, "valid", self.draws)
            yield "gap_more", partial(self.gap, plan["gap_draws_more"])
        for how in ("", "_mc", "_de") if not self.points or self.masked else ("", "_de"):
            yield f"temperature{how}", partial(self.temperature, how)
            for split in splits:
                yield f"{split}_tempered{how}", partial(self.tempered, split, how)

    def early_steps(self) -> Iterator[Step]:
        """Those of a model that can look after its first epoch."""
        yield "epoch1_valid", partial(self.perplexity, "valid")
        for more in ("", "_more"):
            look = f"epoch1_look{more}"
            yield look, partial(self.look, more, "epoch1_")
            yield f"epoch1_valid_bound{more}", partial(self.bound, "valid", look)

    # --- one step each -----------------------------------------------------------------------

    def perplexity(self, split: str, samples: int = 0, temperature: float = 1.0) -> Figures:
        """By the mean, or by draws: `evaluate [--samples N]`."""
        streams = self.plan["draw_streams"] if samples else 1
        generator = torch.Generator(self.device).manual_seed(1)
        loader = self.task.stream(split, streams)
        found = evaluate_text(self.model, loader, samples, generator, temperature=temperature)
        return {"streams": streams, **asdict(found)}

    def dynamic(
        self, split: str, rate: float, by_variance: bool = False, segment: int = 0
    ) -> Figures:
        """`evaluate --dynamic RATE [--by-variance]`; the published rate is 0.1."""
        loader = self.task.stream(split, 1, segment or self.recipe.train.unroll)
        found = dynamic_evaluate(self.model, loader, rate, by_variance=by_variance)
        return {"streams": 1, **asdict(found)}

    def temperature(self, how: str) -> Figures:
        """`--temperature search`: by the mean, by draws (_mc), or learning at the rate that was
        best on valid (_de)."""
        if how == "_de":
            rate, valid = self.chosen("valid_de"), self._segments("valid")
            return {"rate": rate, **asdict(search_temperature(self.model, valid, rate=rate))}
        samples = self.draws if how else 0
        generator = torch.Generator(self.device).manual_seed(1)
        valid = self.task.stream("valid", self.plan["draw_streams"] if samples else 1)
        return asdict(search_temperature(self.model, valid, samples, generator))

    def tempered(self, split: str, how: str) -> Figures:
        """The same text's perplexity at that temperature."""
        if f"temperature{how}" not in self.done:
            raise UserError(f"there is no temperature{how}: it was left out or failed")
        search = self.done[f"temperature{how}"]
        temperature = search["temperature"]
        if how == "_de":
            rate, loader = search["rate"], self._segments(split)
            found = dynamic_evaluate(self.model, loader, rate, temperature=temperature)
            return {"temperature": temperature, "streams": 1, **asdict(found)}
        samples = self.draws if how else 0
        return {"temperature": temperature, **self.perplexity(split, samples, temperature)}

    def _segments(self, split: str) -> StreamLoader:
        return self.task.stream(split, 1, self.recipe.train.unroll)

    def by_short_segments(self, split: str) -> Figures:
        """`evaluate --dynamic RATE --by-variance --segment N`, at the rate of longer ones."""
        return self.dynamic(split, self.chosen("valid_dv"), True, self.plan["short_segment"])

    def chosen(self, tried: str) -> float:
        """The rate that was best on valid, among all that were tried there."""
        found = [figures for name, figures in self.done.items() if name.startswith(tried)]
        if not found:
            raise UserError(f"there is no rate to choose: every {tried} was left out or failed")
        return float(min(found, key=lambda figures: figures["perplexity"])["rate"])

    def look(self, more: str, when: str = "") -> Figures:
        """How wide to look: `evaluate --sharpened --look search`; where more than one look is
        taken, not less wide than with one."""
        looks, widths = (self.plan["looks"] if more else 1), WIDTHS
        if more:
            widths = tuple(w for w in WIDTHS if w >= self.found(f"{when}look")["look"])[:3]
        how = {"widths": widths, "looks": looks}
        found = search_look(self.model, self._shaped("valid"), LOOK_AT, **how)
        return {"looks": looks, **asdict(found)}

    def found(self, look: str) -> Figures:
        """What that search has found; an older one was by one look."""
        if look not in self.done:
            raise UserError(f"there is no width to look with: {look} was left out or failed")
        return {"looks": 1, **self.done[look]}

    def bound(
        self,
        split: str,
        look: str,
        rate: float = 0.0,
        by_variance: bool = False,
        draws: int = 1,
        streams: int = 0,
    ) -> Figures:
        """`evaluate --sharpened --look WIDTH --looks N [--samples N] [--dynamic RATE
        [--by-variance]] [--streams N]`, in the shape of the training unless `streams` says
        otherwise, as wide as that search has found."""
        found = self.found(look)
        loader = self._shaped(split, streams)
        model = looking(self.model, LOOK_AT, found["look"], loader.streams)
        generator = torch.Generator(self.device).manual_seed(1)
        how = {"rate": rate, "by_variance": by_variance, "looks": found["looks"], "draws": draws}
        return {
            "look": found["look"],
            **asdict(evaluate_sharpened(model, loader, "mean", generator, **how)),
        }

    def chosen_bound(self, how: str) -> Figures:
        rate = self.chosen(f"valid_bound_{how}")
        return self.bound("test", "look", rate, by_variance=how == "dv")

    def stream_bound(self, split: str, how: str) -> Figures:
        """The dynamic bound of a text read as one stream, at the rate that was best on valid: by
        the mean, and of a rate by variance, by the bound in the shape of the training."""
        by_variance = how == "dv"
        rate = self.chosen("valid_bound_dv" if by_variance else "valid_de")
        return self.bound(split, "look", rate, by_variance, streams=1)

    def _shaped(self, split: str, streams: int = 0) -> StreamLoader:
        train = self.recipe.train
        return self.task.stream(split, streams or train.streams, train.unroll)

    def gap(self, draws: list[int]) -> Figures:
        """`uncertainty --gap --samples ...` (Fig. 3); 0 is the mean, or dropout switched off."""
        ids = self.task.corpus.ids["test"]
        streams = self.plan["draw_streams"]
        texts = {"test": ids, "reversed": reversed_text(ids)}
        here, backwards = (
            text_uncertainty(
                self.model,
                StreamLoader(
                    text,
                    streams,
                    max(1, EVALUATION_TOKENS // streams),
                    device=self.device,
                    name=name,
                ),
                draws,
            )
            for name, text in texts.items()
        )
        rows = [
            {
                **asdict(entropy_gap(here[count], backwards[count])),
                "perplexity": here[count].summary()["perplexity"],
                "epistemic": here[count].summary()["epistemic"],
                "epistemic_reversed": backwards[count].summary()["epistemic"],
            }
            for count in here
        ]
        return {"streams": streams, "unigram_entropy": unigram_entropy(ids), "by_draws": rows}

    def prune(self) -> Figures:
        """The curve of Fig. 2, by one ranking of all weights and by one of each tensor; and by the
        size of the mean alone."""

        def valid(model: Bayesian) -> float:
            return evaluate_text(model, self.task.stream("valid")).perplexity

        fractions = [0.0, *(percent / 100 for percent in self.plan["prune_percents"])]
        found: Figures = {}
        rankings: dict[str, tuple[bool, Ranking]] = {
            "all": (False, "snr"),
            "per_tensor": (True, "snr"),
            "magnitude": (False, "magnitude"),
        }
        for key, (per_tensor, by) in rankings.items():
            generator = torch.Generator(self.device).manual_seed(1)
            rows = pruning_curve(self.model, valid, fractions, per_tensor, generator, by=by)
            found[key] = [asdict(row) for row in rows]
        return found

    def retrain(self, percent: int) -> Figures:
        """`prune --fraction F --by RANKING --retrain EPOCHS`, by the ranking that costs less here,
        then `evaluate --split valid`."""
        out = self.run.with_name(f"{self.run.name}-pruned-{percent}")
        epochs = self.plan["retrain_epochs"]

        def cost(key: str) -> float:  # nan where it was not measured: then by signal to noise
            rows = self.done.get("prune", {}).get(key, [])
            same = [row["error"] for row in rows if round(100 * row["fraction"]) == percent]
            return same[0] if same else math.nan

        by: Ranking = "magnitude" if cost("magnitude") < cost("all") else "snr"
        pruned = prune_run(self.run, out, percent / 100, retrain=epochs, quiet=True, by=by)
        if not pruned.finished:
            raise SystemExit(STOPPED)  # the next call goes on with it
        model = load(out).to(self.device)
        figures = {
            "retrain_epochs": epochs,
            "by": by,
            **{key: getattr(pruned, key) for key in ("weights", "percent", "file_ratio")},
            **{
                f"{split}_perplexity": evaluate_text(model, self.task.stream(split)).perplexity
                for split in ("valid", "test")
            },
            "valid_perplexity_by_epoch": [line["valid_perplexity"] for line in pruned.epochs],
        }
        shutil.rmtree(out)
        return figures

    def prune_map(self) -> Figures:
        """What 80 % pruned leaves of the last recurrent layer (Fig. 5): the weights left of every
        row and column, and of squares of the two matrices, in percent."""
        masks = {name: m for named in choose(self.model, 0.8).values() for name, m in named.items()}
        last = self.recipe.model.layers - 1  # type: ignore[union-attr]
        found: Figures = {"fraction": 0.8, "side": MAP_SIDE, "matrices": {}}
        for name in (f"rnn.weight_ih_l{last}", f"rnn.weight_hh_l{last}"):
            keep = masks[name].float()
            squares = torch.nn.functional.avg_pool2d(keep[None], MAP_SIDE, ceil_mode=True)[0]
            found["matrices"][name] = {
                "rows": keep.sum(dim=1).int().tolist(),
                "columns": keep.sum(dim=0).int().tolist(),
                "left_percent": (100 * squares).round().int().tolist(),
            }
        return found


def hardware() -> Figures:
    """What it runs on, in words."""
    if torch.cuda.is_available():
        place = f"1x {torch.cuda.get_device_name()}"
    else:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        place = f"{cores} CPU cores"
    return {"hardware": place, "torch": torch.__version__, "python": platform.python_version()}


def work_through(job: Path, run: Path, until: float, early: bool) -> bool:
    """Take every step that is missing, until the time is up; whether none is left."""
    record = json.loads(job.read_text())
    record |= hardware()
    done, failed = record["evaluations"], record["failed"]
    wanted = [] if early else record["plan"]["steps"]  # none named: all
    evaluations = Evaluations(run, record["plan"], done)
    record["bayesian_weights"] = evaluations.model.weight_count

    def write() -> None:
        write_atomic(job, (json.dumps(record, indent=1) + "\n").encode())

    write()
    for name, step in evaluations.early_steps() if early else evaluations.steps():
        if name in done or name in failed or (wanted and name not in wanted):
            continue
        if time.time() > until:
            return False
        began = time.monotonic()
        try:
            figures = step()
            done[name] = {**figures, "took_seconds": round(time.monotonic() - began, 2)}
        except (UserError, Invalid, Diverged) as error:
            failed[name] = str(error)
        write()
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=Path, help="the job's JSON file, as reproduce.py wrote it")
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--until", type=float, default=float("inf"), help="start nothing later")
    parser.add_argument("--early", action="store_true", help="only what the first epoch needs")
    given = parser.parse_args()
    if work_through(given.job, given.run, given.until, given.early):
        print("nothing is left")


if __name__ == "__main__":
    main()
