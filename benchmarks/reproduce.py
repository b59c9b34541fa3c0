"""Train every row of the Penn Treebank tables and measure all there is, side by side on one GPU.

    python benchmarks/reproduce.py --data ptb --out reproduced --jobs 4
    python benchmarks/reproduce.py --data ptb --out reproduced --only brnn,sharpened --seeds 1,2,3
    python benchmarks/reproduce.py --data ptb --out reproduced --speed
    python results/collect_ptb.py reproduced    # into results/, and make results

A job is a model and a seed. Its file, OUT/MODEL-SEED.json, holds the learning curve, the commands
and every evaluation (see reproduce_job.py), each written as soon as it is there. The run itself is
in OUT/runs and is deleted when its job is done (--keep: it stays). After --deadline seconds nothing
new starts and trainings stop at a checkpoint; the same command goes on from there. Exit code 0: all
is done; 3: something is left to do; 1: a job failed.

Runs are not kept, so what is to be measured later of a network needs it once more:

    python benchmarks/reproduce.py --data ptb --out reproduced --only brnn --again 'gap*'

takes the jobs of results/ptb, trains them again, and measures anew what is named, and what is
missing (--steps: of these alone). All other figures stay, if the learning curve says that it is the
same network; if it is not, they go.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECIPES = {
    "plain": "ptb-plain-small",
    "plain_medium": "ptb-plain-medium",
    "dropout": "ptb-dropout-medium",
    "dropout_tuned": "ptb-dropout-tuned",
    "dropout_averaged": "ptb-dropout-averaged",
    "variational_tied": "ptb-variational-tied-medium",
    "variational_untied": "ptb-variational-untied-medium",
    "brnn": "ptb-brnn-medium",
    "sharpened": "ptb-sharpened-medium",
    "best": "ptb-best",
    "variational_large": "ptb-variational-large",
}
"""By their names in results/summary.json."""
DEFAULT = [name for name in RECIPES if name != "variational_large"]
EARLY = ("brnn", "sharpened")
"""Those whose first epoch is evaluated by itself: its bounds are in no learning curve."""
SPEED_STEPS = 600
RECORDED = ROOT / "results" / "ptb"
SAME = 1e-6
"""By how much, relatively, the validation perplexities of one network differ at most when it is
trained again."""
GRACE_SECONDS = 30
"""How long after the deadline an evaluation that is under way may go on."""

PLAN: dict[str, Any] = {
    "samples": 10,
    "masked_samples": 100,
    "draw_streams": 1,
    "rate": 0.1,
    "rates": [0.02, 0.01, 0.005, 0.05],
    "variance_rates": [0.02, 0.05, 0.01, 0.1],
    "short_segment": 10,
    "looks": 4,
    "look_draws": 16,
    "bound_rates": [0.01, 0.005, 0.02],
    "bound_variance_rates": [0.05, 0.02, 0.1],
    "gap_draws": [0, 1, 2, 5, 10],
    "gap_draws_more": [20, 50],
    "prune_percents": [50, 70, 80, 90, 95],
    "retrain_percents": [80, 70, 90, 50],
    "retrain_epochs": 10,
    "steps": [],
}
QUICK_PLAN = PLAN | {
    "samples": 2,
    "masked_samples": 2,
    "rates": [0.05],
    "variance_rates": [0.05],
    "looks": 2,
    "look_draws": 2,
    "bound_rates": [0.05, 0.02],
    "bound_variance_rates": [0.05],
    "gap_draws": [0, 2],
    "gap_draws_more": [3],
    "prune_percents": [80],
    "retrain_percents": [80],
    "retrain_epochs": 1,
}
QUICK = [
    "model.embedding=8",
    "model.hidden=8",
    "train.epochs=2",
    "train.streams=4",
    "train.unroll=5",
    "train.valid_streams=1",
    "train.device=cpu",
]
"""For a trial on a CPU and a small text: that it works, not what comes out."""

Record = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """What the command line says."""

    data: str
    out: Path
    jobs: int
    until: float
    keep: bool
    plan: Record
    overrides: list[str]
    tag: str
    commit: str
    again: tuple[str, ...] = ()
    """Evaluations of the jobs of results/ptb to take once more, by patterns."""


class OutOfTime(Exception):
    """The deadline has passed; what is there is written."""


class Job:
    """One model and seed: its file, its run, its processes."""

    def __init__(
        self, model: str, seed: int, settings: Settings, tag: str = "", changes: Sequence[str] = ()
    ) -> None:
        self.model, self.settings = model, settings
        self.overrides = [*settings.overrides, *changes]
        self.name = "-".join(filter(None, [model, settings.tag, tag, str(seed)]))
        self.file = settings.out / f"{self.name}.json"
        self.run = settings.out / "runs" / self.name
        self.log = settings.out / "runs" / f"{self.name}.log"
        self.recipe = f"recipes/{RECIPES[model]}.toml"
        self.doing = ""
        fresh = {
            "model": model,
            "seed": seed,
            "recipe": self.recipe,
            "overrides": self.overrides,
            "commit": settings.commit,
            "side_by_side": settings.jobs,
            "complete": False,
            "trained": False,
            "commands": [],
            "plan": settings.plan,
            "epochs": [],
            "evaluations": {},
            "failed": {},
        }
        known = None if tag or settings.tag or not settings.again else self.recorded(seed)
        self.record: Record = (
            json.loads(self.file.read_text()) if self.file.exists() else known or fresh
        )
        if self.record["overrides"] != self.overrides:
            raise SystemExit(f"error: {self.file} was made with other settings; give a --tag")
        if self.record["plan"]["steps"] != settings.plan["steps"]:
            self.record["complete"] = False
        self.record["plan"] = settings.plan

    def recorded(self, seed: int) -> Record | None:
        """The job that results/ptb holds, to be trained again, without what is to be measured
        anew (None: there is none with these settings)."""
        file = RECORDED / f"{self.model}.json"
        jobs = json.loads(file.read_text()) if file.exists() else []
        same = [job for job in jobs if (job["seed"], job["overrides"]) == (seed, self.overrides)]
        if not same:
            return None
        (record,) = same
        for kind in ("evaluations", "failed"):
            record[kind] = {k: v for k, v in record[kind].items() if not self.taken_again(k)}
        commits = dict.fromkeys([*record["commit"].split(", "), self.settings.commit])
        curve = [line["valid_perplexity"] for line in record["epochs"]]
        new = {"commit": ", ".join(commits), "complete": False, "trained": False}
        return record | new | {"commands": [], "epochs": [], "curve_before": curve}

    def taken_again(self, evaluation: str) -> bool:
        return any(fnmatch(evaluation, pattern) for pattern in self.settings.again)

    # --- the stages --------------------------------------------------------------------------

    def work(self) -> str:
        """All that is left of the job; how it ended: done, stopped or failed."""
        if self.record["complete"]:
            return "done"
        began = time.monotonic()
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            self.write()
            self.early()
            self.train()
            self.evaluate()
            self.record["complete"] = True
        except OutOfTime:
            say(f"{self.name}: stopped while {self.doing}")
        except subprocess.CalledProcessError as error:
            say(f"{self.name}: {self.doing} failed (exit {error.returncode}); see {self.log}")
            return "failed"
        finally:
            seconds = self.record.get("work_seconds", 0.0) + time.monotonic() - began
            self.record["work_seconds"] = round(seconds, 1)
            self.write()
        if not self.record["complete"]:
            return "stopped"
        say(f"{self.name}: done, {seconds:.0f} s")
        if not self.settings.keep:
            shutil.rmtree(self.run, ignore_errors=True)
        return "done"

    def early(self) -> None:
        """Train one epoch and evaluate it, where that is wanted and the run is not further."""
        known = {**self.record["evaluations"], **self.record["failed"]}
        wanted = self.model in EARLY and "epoch1_valid_bound_more" not in known
        if wanted and len(self.curve()) <= 1:
            self.train("train.epochs=1")
            self.evaluate("--early")

    def train(self, *more: str) -> None:
        """Train to the end, with `more` settings for a part of it."""
        if self.record["trained"] and self.run.exists():
            return
        overrides = [*self.overrides, f"train.seed={self.record['seed']}", *more]
        settings = [f"data.path={self.settings.data}", *overrides]
        shown = " ".join(
            [
                "bayesrnn train",
                self.recipe,
                "data.path=ptb",
                *overrides,
                "--out",
                f"runs/{self.name}",
            ]
        )
        if shown not in self.record["commands"]:
            self.record["commands"].append(shown)
        command = ["-m", "bayesrnn", "train", str(ROOT / self.recipe), *settings]
        command += ["--out", str(self.run), "--quiet", "--json"]
        said = self.start("training", command, stop_at=self.settings.until)
        self.record["epochs"] = self.curve()
        outcome = json.loads(said)
        del outcome["run"]
        self.record["train"] = outcome
        self.record["trained"] = outcome["finished"] and not more
        if self.record["trained"]:
            self.compare()
        self.write()
        if not outcome["finished"]:
            raise OutOfTime

    def compare(self) -> None:
        """Forget the figures of a network that is not the one which was trained again."""
        before = self.record.pop("curve_before", None)
        curve = [line["valid_perplexity"] for line in self.record["epochs"]]
        if before is None:
            return
        pairs = zip(curve, before, strict=False)
        if len(curve) == len(before) and all(math.isclose(*p, rel_tol=SAME) for p in pairs):
            say(f"{self.name}: the same network as the one of results/ptb")
            return
        say(f"{self.name}: not the network of results/ptb; all is measured anew")
        self.record |= {"commit": self.settings.commit, "evaluations": {}, "failed": {}}

    def evaluate(self, *flags: str) -> None:
        """Measure what is missing."""
        until = self.settings.until
        script = str(ROOT / "benchmarks" / "reproduce_job.py")
        command = [script, str(self.file), str(self.run), "--until", str(until), *flags]
        try:
            said = self.start("evaluating", command, stop_at=until + GRACE_SECONDS)
        finally:
            self.record = json.loads(self.file.read_text())
        if not said.endswith("nothing is left\n"):
            raise OutOfTime

    def start(self, what: str, command: list[str], stop_at: float) -> str:
        """Run a process of ours, told to stop at that time; what it said."""
        self.doing = what
        if time.time() > self.settings.until:
            raise OutOfTime
        say(f"{self.name}: {what}")
        threads = max(1, (os.cpu_count() or 1) // self.settings.jobs)
        paths = filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")])
        environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        answers = self.log.with_suffix(".out")
        with self.log.open("a") as log, answers.open("w") as out:
            process = subprocess.Popen(
                [sys.executable, *command], stdout=out, stderr=log, env=environment
            )
            try:
                code = process.wait(timeout=max(0.1, stop_at - time.time()))
            except subprocess.TimeoutExpired:
                process.terminate()  # a training saves where it is, and says so
                if process.wait():
                    raise OutOfTime from None
                code = 0
            except BaseException:
                process.terminate()
                process.wait()
                raise
        if code:
            raise subprocess.CalledProcessError(code, command)
        return answers.read_text()

    # --- what is there -----------------------------------------------------------------------

    def write(self) -> None:
        temporary = self.file.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.record, indent=1) + "\n")
        temporary.replace(self.file)

    def curve(self) -> list[Record]:
        """The run's epochs, slim; what an earlier call kept where the run is not there."""
        path = self.run / "metrics.jsonl"
        if not path.exists():
            return list(self.record["epochs"])
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        epochs = []
        for line in (line for line in lines if line["kind"] == "epoch"):
            kept = {key: line[key] for key in ("epoch", "valid_perplexity", "train_perplexity")}
            speeds = speeds_of(lines, line["epoch"])
            speed = {"words_per_second": round(statistics.median(speeds))} if speeds else {}
            epochs.append({**kept, "kl": line["kl"], "seconds": line["seconds"], **speed})
        return epochs

    def status(self) -> str:
        if self.doing == "training":
            epochs = self.curve()
            last = epochs[-1] if epochs else None
            return f"epoch {last['epoch']} {last['valid_perplexity']:.1f}" if last else "training"
        count = len(json.loads(self.file.read_text())["evaluations"])
        return f"{count} evaluations"


def speeds_of(lines: list[Record], epoch: int) -> list[float]:
    """Words a second in each line of figures of an epoch."""
    steps = [line for line in lines if line["kind"] == "step" and line["epoch"] == epoch]
    return [line["words_per_second"] for line in steps]


# --- all of them -----------------------------------------------------------------------------


def run_all(jobs: list[Job], count: int) -> int:
    """Every job, `count` at a time; the exit code."""
    active: set[Job] = set()
    over = threading.Event()

    def work(job: Job) -> str:
        active.add(job)
        try:
            return job.work()
        finally:
            active.discard(job)

    def watch() -> None:
        while not over.wait(30):
            shown = [f"{job.name}: {job.status()}" for job in list(active)]
            say("; ".join(shown) or "nothing under way")

    threading.Thread(target=watch, daemon=True).start()
    try:
        with ThreadPoolExecutor(count) as pool:
            ends = list(pool.map(work, jobs))
    finally:
        over.set()
    for job, end in zip(jobs, ends, strict=True):
        say(f"{job.name}: {end}")
    return 1 if "failed" in ends else 3 if "stopped" in ends else 0


def measure_speed(names: list[str], settings: Settings) -> int:
    """Words a second of each model alone on the machine, by some hundred steps of training."""
    file = settings.out / "speed.json"
    record: Record = json.loads(file.read_text()) if file.exists() else {}
    for name in names:
        if name in record or time.time() > settings.until:
            continue
        alone = replace(settings, jobs=1, plan=settings.plan | {"steps": ["none"]})
        job = Job(name, 1, alone, "speed", [f"train.max_steps={SPEED_STEPS}"])
        job.log.parent.mkdir(parents=True, exist_ok=True)
        job.train()
        job.evaluate()  # which notes the hardware, and no more
        lines = [json.loads(s) for s in (job.run / "metrics.jsonl").read_text().splitlines()]
        speeds = speeds_of(lines, 1)
        record[name] = {
            "words_per_second": statistics.median(speeds[2:] or speeds),  # the first ones compile
            "by_fifty_steps": speeds,
            "recipe": job.recipe,
            "commands": job.record["commands"],
            "commit": settings.commit,
            "hardware": job.record["hardware"],
        }
        job.file.unlink(missing_ok=True)
        shutil.rmtree(job.run, ignore_errors=True)
        file.write_text(json.dumps(record, indent=1) + "\n")
        say(f"{name}: {record[name]['words_per_second']:.0f} words a second")
    return 0 if set(names) <= set(record) else 3


BEGAN = time.monotonic()


def say(line: str) -> None:
    print(f"[{time.monotonic() - BEGAN:5.0f} s] {line}", flush=True)


def present_commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    if not found:
        raise SystemExit("error: this is no git checkout; give its --commit")
    return found


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def variants(path: str) -> dict[str, list[str]]:
    try:
        found = tomllib.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"cannot read {path}: {error}") from error
    return {str(tag): [str(change) for change in changes] for tag, changes in found.items()}


def names(text: str) -> list[str]:
    chosen = text.split(",")
    unknown = [name for name in chosen if name not in RECIPES]
    if unknown:
        known = ", ".join(RECIPES)
        raise argparse.ArgumentTypeError(f"there is no {', '.join(unknown)}; choose from {known}")
    return chosen


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", required=True, help="the Penn Treebank folder")
    add("--out", type=Path, required=True, help="where the JSON files go, and OUT/runs")
    add("--only", type=names, default=DEFAULT, help=f"of {', '.join(RECIPES)}")
    add("--seeds", type=numbers, default=[1])
    add("--jobs", type=int, default=1, help="how many side by side")
    add("--deadline", type=float, default=float("inf"), metavar="SECONDS")
    add("--keep", action="store_true", help="keep the runs")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="change every recipe")
    add("--tag", default="", help="part of the names of the jobs, for other settings")
    add(
        "--variants",
        type=variants,
        default={"": []},
        metavar="FILE.toml",
        help='one job for each line TAG = ["KEY=VALUE", ...]',
    )
    add(
        "--steps",
        type=lambda text: text.split(","),
        metavar="NAME,...",
        help="only these evaluations: valid,valid_de to choose by, say",
    )
    add(
        "--again",
        type=lambda text: tuple(text.split(",")),
        default=(),
        metavar="NAME,...",
        help="measure these anew of the jobs of results/ptb, and what is missing (valid_*)",
    )
    add("--samples", type=int, help=f"draws of the MC perplexity ({PLAN['samples']})")
    add("--masked-samples", type=int, help=f"of dropout's ({PLAN['masked_samples']})")
    add("--draw-streams", type=int, help="read a text as so many streams by draws (1: exact)")
    add("--gap-draws", type=numbers, help="of the entropy gap, first (0,1,2,5,10)")
    add("--gap-draws-more", type=numbers, help="and last of all (20,50)")
    add("--retrain-epochs", type=int, help=f"after pruning ({PLAN['retrain_epochs']})")
    add("--commit", default="", help="of the code (default: the checkout's)")
    add("--speed", action="store_true", help="only measure words a second, one model at a time")
    add("--quick", action="store_true", help="a trial: tiny networks, on a CPU")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    plan = QUICK_PLAN if given.quick else PLAN
    wanted = {key: getattr(given, key, None) for key in plan}
    settings = Settings(
        data=str(Path(given.data).resolve()),
        out=given.out,
        jobs=given.jobs,
        until=time.time() + given.deadline,
        keep=given.keep,
        plan=plan | {key: value for key, value in wanted.items() if value is not None},
        overrides=[*(QUICK if given.quick else []), *given.set],
        tag=given.tag,
        commit=given.commit or present_commit(),
        again=given.again,
    )
    settings.out.mkdir(parents=True, exist_ok=True)
    if given.speed:
        return measure_speed(given.only, settings)
    jobs = [
        Job(model, seed, settings, tag, changes)
        for seed in given.seeds
        for model in given.only
        for tag, changes in given.variants.items()
    ]
    return run_all(jobs, given.jobs)


if __name__ == "__main__":
    sys.exit(main())
