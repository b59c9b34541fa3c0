"""From the jobs of benchmarks/reproduce.py to results/ptb/ and results/summary.json.

    python results/collect_ptb.py OUT       # take in the jobs of OUT, then renew summary.json
    python results/collect_ptb.py           # renew summary.json from results/ptb/ alone
    python results/collect_ptb.py --check   # write nothing; exit 1 when summary.json differs

results/ptb/MODEL.json holds all seeds of a model, speed.json the speeds, and search.json what was
tried with other settings (overrides that the recipe does not have by now), its validation figures
alone. A job that was taken in before is replaced. An entry of the summary whose log is not in
results/ptb/ is left as it is, unless a job has the same figure. It needs the standard library only.
"""

import argparse
import json
import sys
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean
from typing import Any

from compare import read_published

FOLDER = Path(__file__).resolve().parent
PRUNED = (50, 70, 80, 90)
PRUNES = ("brnn",)
GAPS = (
    "brnn",
    "sharpened",
    "dropout",
    "dropout_tuned",
    "dropout_averaged",
    "variational_tied",
    "variational_untied",
)
BOUNDS = ("sharpened",)
"""Models whose figures are bounds; those of their mean are called so."""
BOUND = "perplexity (bound)"
STAND_FOR = "bayesrnn train {recipe} data.path=ptb train.seed=SEED --out RUN"

Job = dict[str, Any]
Figure = tuple[float, str, str]
"""A value, its unit, and the command to type after the training ("": none)."""


# ---- one job ----


def figures_of(job: Job) -> dict[str, Figure]:
    """Every figure there is of a job, by the last part of its key."""
    found = job["evaluations"]
    bound = "_bound" if job["model"] in BOUNDS else ""
    sharpened = look_flags(found.get("look"))
    flag = sharpened if bound else ""
    figures: dict[str, Figure] = {}

    def perplexity(metric: str, evaluation: str, options: str, unit: str = "perplexity") -> None:
        if evaluation in found:
            value = found[evaluation]["perplexity"]
            figures[metric] = (value, unit, f"bayesrnn evaluate RUN {options}")

    unit = BOUND if bound else "perplexity"
    for split in ("valid", "test"):
        perplexity(split, f"{split}{bound}", f"--split {split}{flag}", unit)
        if bound:
            perplexity(f"{split}_mean", split, f"--split {split}")
        name, rate = dynamic(found, split, bound)
        perplexity(f"{split}_de", name, f"--split {split}{flag} --dynamic {rate:g}", unit)
        name, rate = dynamic(found, split, bound, "dv")
        options = f"--split {split}{flag} --dynamic {rate:g} --by-variance"
        perplexity(f"{split}_de_by_variance", name, options, unit)
        if f"{split}_short_dv" in found:
            rate, segment = (found[f"{split}_short_dv"][key] for key in ("rate", "segment"))
            options = f"--split {split} --dynamic {rate:g} --by-variance --segment {segment}"
            perplexity(f"{split}_de_short", f"{split}_short_dv", options)
        options = f"--split {split}{look_flags(found.get('look_more'))}"
        perplexity(f"{split}_looks", f"{split}_bound_more", options, BOUND)
        draws = found.get(f"{split}_bound_weighed", {}).get("draws")
        perplexity(
            f"{split}_weighed", f"{split}_bound_weighed", f"{options} --samples {draws}", BOUND
        )
        if not bound:
            perplexity(f"{split}_look", f"{split}_bound", f"--split {split}{sharpened}", BOUND)
            name, rate = dynamic(found, split, "_bound")
            options = f"--split {split}{sharpened} --dynamic {rate:g}"
            perplexity(f"{split}_look_de", name, options, BOUND)
        for how, flags in (("", ""), ("_de", ""), ("_dv", " --by-variance")):
            evaluation = f"{split}_stream_bound{how}"
            moved = f" --dynamic {found.get(evaluation, {}).get('rate')}{flags}" if how else ""
            options = f"--split {split}{sharpened} --streams 1{moved}"
            metric = f"{split}_stream{how.replace('dv', 'de_by_variance')}"
            perplexity(metric, evaluation, options, BOUND)
        for how in ("", "_mc", "_de"):
            evaluation = f"{split}_tempered{how}"
            by = {"samples": 0, "rate": 0.0, "streams": 1} | found.get(evaluation, {})
            flags = f" --samples {by['samples']}" if how == "_mc" else ""
            flags += f" --dynamic {by['rate']}" if how == "_de" else ""
            flags += f" --streams {by['streams']}" if by["streams"] > 1 else ""
            options = f"--split {split}{flags} --temperature search"
            metric = f"{split}{'_mean' if bound else ''}_tempered{how}"
            perplexity(metric, evaluation, options)
    draws = found.get("test_mc", {}).get("samples")
    perplexity("test_mc", "test_mc", f"--split test --samples {draws}")
    first_look = "valid_epoch1" if bound else "valid_epoch1_look"
    for metric, more in ((first_look, ""), ("valid_epoch1_looks", "_more")):
        options = f"--split valid{look_flags(found.get(f'epoch1_look{more}'))}"
        perplexity(metric, f"epoch1_valid_bound{more}", options, BOUND)
    if job["epochs"] and not bound:
        first = job["epochs"][0]["valid_perplexity"]
        figures["valid_epoch1"] = (first, "perplexity (20 streams)", "")
    return figures | gaps(job) | (pruned(found) if job["model"] in PRUNES else {})


def look_flags(look: dict[str, Any] | None) -> str:
    """How to ask for the looks that a search has found; without one, for those of the training."""
    if look is None:
        return " --sharpened"
    looks = look.get("looks", 1)
    return f" --sharpened --look {look['look']:g}" + (f" --looks {looks}" if looks > 1 else "")


def dynamic(found: dict[str, Any], split: str, bound: str, how: str = "de") -> tuple[str, float]:
    """Which evaluation is the one at the rate that was best on valid ("": there is none of this
    text yet), and that rate."""
    rates = {n: e["rate"] for n, e in found.items() if n.startswith(f"valid{bound}_{how}")}
    if len(rates) < 2:  # nothing was compared yet
        return "", 0.0
    best = min(rates, key=lambda name: found[name]["perplexity"])
    same = [
        name
        for name, figures in found.items()
        if name.startswith(f"{split}{bound}_{how}") and figures["rate"] == rates[best]
    ]
    return (same or [""])[0], rates[best]


def gaps(job: Job) -> dict[str, Figure]:
    """Fig. 3, and the entropies that the text gives."""
    found = job["evaluations"]
    parts = [found[name] for name in ("gap", "gap_more") if name in found]
    rows = {row["samples"]: row for part in parts for row in part["by_draws"]}
    unit = "nats a word"

    def command(draws: int) -> str:
        return f"bayesrnn uncertainty RUN --gap --samples {draws}"

    figures: dict[str, Figure] = {}
    if job["model"] in GAPS:
        figures |= {
            f"gap_{draws or 'mean'}": (row["gap"], unit, command(draws))
            for draws, row in sorted(rows.items())
        }
    if job["model"] == "brnn":
        figures |= {
            f"test_draws_{draws or 'mean'}": (
                row["perplexity"],
                f"perplexity ({parts[0]['streams']} streams; the command's draws are others)",
                f"bayesrnn evaluate RUN --split test --streams {parts[0]['streams']} "
                f"--samples {draws}",
            )
            for draws, row in sorted(rows.items())
            if "perplexity" in row
        }
    if job["model"] == "brnn" and 0 in rows:
        figures["entropy_reversed"] = (rows[0]["entropy_reversed"], unit, command(0))
        figures["unigram_entropy"] = (parts[0]["unigram_entropy"], unit, command(0))
    return figures


def pruned(found: dict[str, Any]) -> dict[str, Figure]:
    """Fig. 2, one ranking of all weights: by the size of their means, where that was measured, and
    as published, by signal to noise."""
    unit = "perplexity of valid"
    curves = found.get("prune", {})
    figures: dict[str, Figure] = {}
    for percent in PRUNED:
        command = f"bayesrnn prune RUN --fraction {percent / 100:g}"
        after = "--out SMALL && bayesrnn evaluate SMALL --split valid"
        for curve, by, keys in (
            ("all", "", ("", "_snr")),
            ("magnitude", " --by magnitude", ("",)),
        ):
            for row in curves.get(curve, ()):
                if round(100 * row["fraction"]) == percent:
                    figure = (row["error"], unit, f"{command}{by} {after}")
                    figures |= {f"prune_{percent}{key}": figure for key in keys}
        again = found.get(f"prune_{percent}_retrained")
        if again is not None:
            by = "" if again.get("by", "snr") == "snr" else f" --by {again['by']}"
            how = f"{command}{by} --retrain {again['retrain_epochs']} {after}"
            figures[f"prune_{percent}_retrained"] = (again["valid_perplexity"], unit, how)
    return figures


# ---- all of them ----


def entries(folder: Path) -> dict[str, dict[str, Any]]:
    """What results/ptb/ has to say, as entries of the summary."""
    published = {
        row["key"]: row.get("published")
        for section in read_published(folder)["section"]
        for row in section["rows"]
    }
    made: dict[str, dict[str, Any]] = {}

    def add(key: str, jobs: list[Job], values: list[float], unit: str, command: str, log: str):
        made[key] = {
            "value": float(f"{mean(values):.4g}"),
            "unit": unit,
            "published": published.get(key),
            "seeds": [job["seed"] for job in jobs],
            "hardware": together(job["hardware"] for job in jobs),
            "command": command,
            "commit": together(word for job in jobs for word in job["commit"].split(", ")),
            "log": log,
        }

    for path in sorted((folder / "ptb").glob("*.json")):
        if path.name in ("speed.json", "search.json"):
            continue
        jobs = json.loads(path.read_text())
        of_jobs = [figures_of(job) for job in jobs]
        for metric in dict.fromkeys(name for figures in of_jobs for name in figures):
            has = [(job, f[metric]) for job, f in zip(jobs, of_jobs, strict=True) if metric in f]
            has = best_way(has) if metric.startswith("prune_") else has
            train = STAND_FOR.format(recipe=jobs[0]["recipe"])
            first = "valid_epoch1" if jobs[0]["model"] in BOUNDS else "valid_epoch1_look"
            if metric.startswith(first):
                train = train.replace(" --out", " train.epochs=1 --out")
            after = together((figure[2] for _, figure in has), " or ")
            model = "test" if metric == "unigram_entropy" else jobs[0]["model"]
            add(
                f"ptb.{model}.{metric}",
                [job for job, _ in has],
                [figure[0] for _, figure in has],
                has[0][1][1],
                f"{train} && {after}" if after else train,
                f"ptb/{path.name}",
            )
    speed = folder / "ptb" / "speed.json"
    for model, found in json.loads(speed.read_text()).items() if speed.exists() else ():
        job = {"seed": 1, **found}
        command = f"python benchmarks/reproduce.py --data ptb --out OUT --speed --only {model}"
        value = [found["words_per_second"]]
        add(
            f"ptb.{model}.words_per_second",
            [job],
            value,
            "words a second",
            command,
            "ptb/speed.json",
        )
    return made


def best_way(has: list[tuple[Job, Figure]]) -> list[tuple[Job, Figure]]:
    """Only the jobs that went the way that costs least on valid, where they went several."""
    ways: dict[str, list[tuple[Job, Figure]]] = {}
    for job, figure in has:
        ways.setdefault(figure[2], []).append((job, figure))

    def cost(way: list[tuple[Job, Figure]]) -> float:  # seeds differ, so beside their own
        return mean(f[0] / job["evaluations"]["valid"]["perplexity"] for job, f in way)

    return min(ways.values(), key=cost)


def together(words: Iterable[str], between: str = ", ") -> str:
    return between.join(dict.fromkeys(words))


def renewed(folder: Path) -> dict[str, Any]:
    """The summary with these entries: in place where they are known, the others at the end. Those
    that came from results/ptb/ and are there no more are left out."""
    made = entries(folder)
    now = json.loads((folder / "summary.json").read_text())
    kept = {k: v for k, v in now.items() if k in made or not v["log"].startswith("ptb/")}
    return kept | made


# ---- taking in ----


def take_in(out: Path, folder: Path) -> None:
    """Copy the jobs of a folder that reproduce.py has filled."""
    jobs = [(path, json.loads(path.read_text())) for path in sorted(out.glob("*.json"))]
    speeds = [job for path, job in jobs if path.name == "speed.json"]
    trained = [(path, job) for path, job in jobs if job.get("trained")]
    if not trained and not speeds:
        raise SystemExit(f"error: {out} holds no trained job of benchmarks/reproduce.py")
    (folder / "ptb").mkdir(exist_ok=True)
    for path, job in trained:
        name = path.stem
        if not other_settings(job, folder.parent):
            slim(job)
            merge(folder / "ptb" / f"{job['model']}.json", job, lambda known: known["seed"])
        elif "valid" in job["evaluations"]:
            merge(folder / "ptb" / "search.json", tried(name, job), lambda known: known["name"])
        else:
            print(f"left out {name}: it has no evaluation of the validation text")
            continue
        print(f"took in {name}{'' if job['complete'] else ', which is not complete'}")
    for speed in speeds:
        file = folder / "ptb" / "speed.json"
        before = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(before | speed, indent=1) + "\n")
        print(f"took in the speed of {', '.join(speed)}")


def other_settings(job: Job, root: Path) -> list[str]:
    """The overrides of a job that its recipe does not say by itself."""
    path = root / job["recipe"]
    recipe = tomllib.loads(path.read_text()) if path.exists() else {}

    def says(override: str) -> bool:
        key, _, value = override.partition("=")
        table, _, name = key.partition(".")
        return bool(json.dumps(recipe.get(table, {}).get(name)) == value)

    return [override for override in job["overrides"] if not says(override)]


def slim(job: Job) -> None:
    """Leave out the one thing that is large, a pruning map, but for one network."""
    if (job["model"], job["seed"]) != ("brnn", 1):
        job["evaluations"].pop("prune_map", None)


def tried(name: str, job: Job) -> Job:
    """What there is to say of a job with other settings. Of the test text: nothing."""
    found = job["evaluations"]
    moved = [found[n]["perplexity"] for n in found if n.startswith("valid_de")]
    return {
        "name": name,
        **{key: job[key] for key in ("model", "seed", "overrides", "commit", "hardware")},
        "epochs": len(job["epochs"]),
        "valid": found["valid"]["perplexity"],
        "valid_de": min(moved, default=None),
        "curve": [round(line["valid_perplexity"], 2) for line in job["epochs"]],
    }


def merge(file: Path, job: Job, identity: Callable[[Job], Any]) -> None:
    """Put a job into a list of them, in the place of the one it replaces; a line each."""
    known = (
        {identity(other): other for other in json.loads(file.read_text())} if file.exists() else {}
    )
    known[identity(job)] = job
    lines = ",\n".join(json.dumps(known[key]) for key in sorted(known))
    file.write_text(f"[\n{lines}\n]\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, nargs="?", help="the OUT of benchmarks/reproduce.py")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if it differs")
    given = parser.parse_args()
    if given.out is not None and not given.check:
        take_in(given.out, FOLDER)
    summary = FOLDER / "summary.json"
    now, wanted = json.loads(summary.read_text()), renewed(FOLDER)
    if given.check:
        different = [key for key in now | wanted if now.get(key) != wanted.get(key)]
        if different:
            print(
                f"summary.json differs from results/ptb/: {', '.join(different)}", file=sys.stderr
            )
        return 1 if different else 0
    summary.write_text(json.dumps(wanted, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
