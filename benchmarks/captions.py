"""Captions of Flickr8k: an LSTM with dropout against the same one by Bayes by Backprop (Fortunato
2017, Section 6.2). Three steps; the first two want a GPU, the last the extra `captions`.

    python benchmarks/captions.py grid CAPTIONS.json --out OUT    # settings, chosen on validation
    python benchmarks/captions.py run CAPTIONS.json --out OUT     # three seeds of the best of each
    python benchmarks/captions.py score CAPTIONS.json --out OUT > results/flickr8k.json

The features are the npz file beside the captions. OUT holds a JSON file a
candidate and one a run. The number of epochs is chosen with the other settings: a run of fewer
epochs is the beginning of a run of more. With `--part`, `--only` and `--seeds` several processes
share the work, side by side on one GPU.
"""

import json
import subprocess
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from bayesrnn.bayes import Bayesian
from bayesrnn.data import CaptionData, load_captions
from bayesrnn.evaluate.caption_scores import Measured, compare, score_captions
from bayesrnn.evaluate.captioned import caption_pictures, foreign_pictures, rank_captions
from bayesrnn.evaluate.captions import evaluate_captions
from bayesrnn.evaluate.decoding import Decoding, decode_captions
from bayesrnn.files import write_atomic
from bayesrnn.recipe import Recipe, read_recipe
from bayesrnn.saving import load
from bayesrnn.train.captioning import CaptionTask
from bayesrnn.train.loop import choose_device, train

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
KINDS = ("dropout", "brnn")
SEEDS = (1, 2, 3)
SAMPLES = 10
STEPS = ("grid", "run", "score")
"""The commands that lead to a number, in their order."""
WAYS = (
    Decoding(beam=1),
    Decoding(beam=3, power=0.0),
    Decoding(beam=3, power=0.7),
    Decoding(beam=5, power=0.0),
    Decoding(beam=5, power=0.7),
)
CANDIDATES: dict[str, dict[str, list[str]]] = {
    "dropout": {
        "recipe": [],
        "lr 0.0005": ["train.lr=0.0005"],
        "lr 0.002": ["train.lr=0.002"],
        "rates 0.5": ["dropout.input=0.5", "dropout.output=0.5"],
        "rates 0.7": ["dropout.input=0.7", "dropout.output=0.7"],
        "norm 40": ["model.norm=40.0"],
        "SGD": ["train.optimizer=SGD", "train.lr=1", "train.streams=20", "train.decay=0.85"],
        "variational 0.4": [
            "dropout.kind=variational",
            "dropout.input=0.4",
            "dropout.output=0.4",
        ],
        "variational 0.3, recurrent 0.2": [
            "dropout.kind=variational",
            "dropout.input=0.3",
            "dropout.output=0.3",
            "dropout.recurrent=0.2",
        ],
    },
    "brnn": {
        "recipe": [],
        "lr 0.5": ["train.lr=0.5"],
        "lr 2": ["train.lr=2"],
        "batches of 64": ["train.streams=64", "train.lr=2"],
        "half the scales": [
            'posterior."rnn.*".scale=[0.023, 0.046]',
            'posterior."*".scale=[0.046, 0.092]',
        ],
        "norm 40": ["model.norm=40.0"],
        "sigma1 e^-2": ["prior.sigma1=0.1353352832366127"],
        "sigma1 1": ["prior.sigma1=1.0"],
        "Adam": ["train.optimizer=Adam", "train.lr=0.001", "train.streams=64"],
    },
}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Captions = Annotated[Path, typer.Argument(help="Flickr8k's captions; features beside them.")]
Out = Annotated[Path, typer.Option(help="The folder of results.")]
Only = Annotated[str, typer.Option(help="dropout or brnn alone.")]
Changes = Annotated[list[str] | None, typer.Option("--set", help="Of all recipes.")]


def recipe_of(kind: str, captions: Path, changes: list[str]) -> Recipe:
    return read_recipe(RECIPES / f"flickr8k-{kind}.toml", [f"data.path={captions}", *changes])


def write(path: Path, contents: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(contents).encode())


def hardware() -> str:
    gpu = torch.cuda.is_available()
    return f"1x {torch.cuda.get_device_name()}" if gpu else f"{torch.get_num_threads()} CPU threads"


@app.command()
def grid(
    captions: Captions,
    out: Out,
    epochs: Annotated[int, typer.Option(help="Of each candidate.")] = 40,
    seconds: Annotated[float, typer.Option(help="Start no candidate that may take longer.")] = 540,
    part: Annotated[str, typer.Option(help="I/N: the I-th of every N candidates.")] = "1/1",
    changes: Changes = None,
) -> None:
    """Train every candidate with one seed; those that have a file in OUT/grid already are not
    trained again."""
    began, longest = time.monotonic(), 0.0
    first, every = map(int, part.split("/"))
    turns = [
        (kind, name)
        for place in range(max(map(len, CANDIDATES.values())))
        for kind in KINDS
        for name in list(CANDIDATES[kind])[place : place + 1]
    ]
    for kind, name in turns[first - 1 :: every]:
        file = out / "grid" / f"{kind} {name}.json"
        if file.exists():
            continue
        if time.monotonic() - began + longest > seconds:
            print(f"no time left for {kind} {name!r} and what follows; run it again to go on")
            break
        own = CANDIDATES[kind][name]
        recipe = recipe_of(kind, captions, [f"train.epochs={epochs}", *own, *(changes or [])])
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            outcome = train(recipe, Path(folder) / "run", quiet=True)
        longest = max(longest, time.monotonic() - start)
        valid = [line["valid_perplexity"] for line in outcome.epochs]
        best = int(np.argmin(valid))
        found = {
            "kind": kind,
            "name": name,
            "changes": own,
            "best_epoch": best + 1,
            "best_valid": valid[best],
            "valid": valid,
            "train": [line["train_perplexity"] for line in outcome.epochs],
            "kl": outcome.epochs[-1]["kl"],
            "seconds": outcome.seconds,
            "hardware": hardware(),
        }
        print(f"{kind} {name!r}: {valid[best]:.3f} at epoch {best + 1}, {outcome.seconds:.0f} s")
        write(file, found)


def tried(out: Path, kind: str) -> list[dict[str, Any]]:
    """What `grid` has found so far."""
    return [json.loads(file.read_text()) for file in sorted((out / "grid").glob(f"{kind} *.json"))]


def best_of(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The candidate with the lowest validation perplexity."""
    return min(found, key=lambda each: each["best_valid"])


@app.command()
def run(
    captions: Captions,
    out: Out,
    only: Only = "",
    seeds: Annotated[list[int] | None, typer.Option(help="1, 2 and 3, if not given.")] = None,
    changes: Changes = None,
) -> None:
    """Train the best of each kind with three seeds, and write all that is to be scored. Runs that
    are in OUT already are left out."""
    for seed in seeds or SEEDS:
        for kind in (k for k in KINDS if only in ("", k)):
            if (out / f"{kind}-{seed}.json").exists():
                continue
            own: list[str] = []
            if known := tried(out, kind):
                best = best_of(known)
                own = [*best["changes"], f"train.epochs={best['best_epoch']}"]
            own += [f"train.seed={seed}", *(changes or [])]
            write(out / f"{kind}-{seed}.json", one_run(kind, captions, own))


def one_run(kind: str, captions: Path, changes: list[str]) -> dict[str, Any]:
    recipe = recipe_of(kind, captions, changes)
    device = choose_device(recipe.train.device)
    with tempfile.TemporaryDirectory() as folder:
        outcome = train(recipe, Path(folder) / "run", quiet=True)
        model = load(Path(folder) / "run").to(device)
        task = CaptionTask(recipe, device)
    report = {
        "kind": kind,
        "changes": changes,
        "hardware": hardware(),
        "torch": torch.__version__,
        "seconds": outcome.seconds,
        "epochs": [
            {k: line[k] for k in ("epoch", "train_perplexity", "valid_perplexity", "kl", "seconds")}
            for line in outcome.epochs
        ],
        **perplexities(model, task),
        **spoken(model, task),
        **unsure(model, task),
    }
    print(f"{kind} {changes[-1]}: test perplexity {report['perplexity']:.3f}, ", end="")
    print(f"{outcome.seconds:.0f} s")
    return report


def perplexities(model: Bayesian, task: CaptionTask) -> dict[str, Any]:
    """By the mean and by draws; of the mean also each picture's summed NLL and its words."""
    loader = task.captions("test")
    mean = evaluate_captions(model, loader, task.vectors)
    generator = torch.Generator(task.device).manual_seed(1)
    drawn = evaluate_captions(model, loader, task.vectors, SAMPLES, generator)
    valid = evaluate_captions(model, task.captions("valid"), task.vectors)
    of, _ = task.pictures("test").encoded(task.vocabulary)
    nll = np.bincount(of, weights=mean.by_caption.numpy())
    return {
        "perplexity": mean.perplexity,
        "perplexity_mc": drawn.perplexity,
        "valid_perplexity": valid.perplexity,
        "nll": [round(x, 6) for x in nll.tolist()],
        "words": np.bincount(of, weights=loader.counts).tolist(),
    }


def spoken(model: Bayesian, task: CaptionTask) -> dict[str, Any]:
    """Captions in every way, of validation and test; by the mean and, of test, by draws."""
    vocabulary = task.vocabulary
    end, unknown = vocabulary.index["<eos>"], vocabulary.index["<unk>"]

    def say(split: str, way: Decoding, samples: int) -> list[str]:
        vectors = task.vectors[task.pictures(split).rows]
        found = decode_captions(model, vectors, end, way, samples, forbidden=[unknown], batch=500)
        return [" ".join(vocabulary.decode(caption.ids)) for caption in found]

    return {
        "ways": [asdict(way) for way in WAYS],
        "valid_captions": [say("valid", way, 0) for way in WAYS],
        "test_captions": [say("test", way, 0) for way in WAYS],
        "test_captions_mc": [say("test", way, SAMPLES) for way in WAYS],
        "test_captions_draws": [say("test", WAYS[2], 1)],
    }


def unsure(model: Bayesian, task: CaptionTask) -> dict[str, Any]:
    """Each test caption's figures, and the out-of-distribution check."""
    pictures = task.pictures("test")
    vectors, vocabulary = task.vectors[pictures.rows], task.vocabulary
    own = caption_pictures(model, vectors, pictures.names, vocabulary, WAYS[2], 0, SAMPLES)
    foreign = foreign_pictures(model, vectors, own, vocabulary)
    return {
        "captioned": asdict(own),
        "foreign": {name: asdict(each) for name, each in foreign.items()},
    }


@app.command()
def score(captions: Captions, out: Out) -> None:
    """Score what `run` wrote; prints one JSON object."""
    data = load_captions(CaptionData(str(captions)))
    references = {
        split: {n: list(c) for n, c in zip(p.names, p.captions, strict=True)}
        for split, p in data.splits.items()
    }
    found: dict[str, Any] = {"commit": commit(), "samples": SAMPLES}
    measured: dict[str, Measured] = {}
    for kind in KINDS:
        runs = [json.loads(path.read_text()) for path in sorted(out.glob(f"{kind}-*.json"))]
        found[kind], measured[kind] = score_kind(runs, references)
    gains = compare(measured["brnn"], measured["dropout"])
    found["bootstrap"] = {name: asdict(each) for name, each in gains.items()}
    found["grid"] = [each for kind in KINDS for each in tried(out, kind)]
    found["entries"] = entries(found)
    print(json.dumps(found))


def entries(found: dict[str, Any]) -> dict[str, Any]:
    """For results/summary.json. What is published is of COCO, so there is nothing to compare."""
    units = {"perplexity": "perplexity a word", "bleu4": "BLEU-4", "cider": "CIDEr"}
    values: dict[str, tuple[float, str]] = {}
    for kind in KINDS:
        values |= {f"{kind}.{k}": (found[kind]["summary"][k], unit) for k, unit in units.items()}
    for k in ("bleu4", "cider"):
        values[f"brnn_mc.{k}"] = (
            found["brnn"]["summary"][f"{k}_mc"],
            f"{units[k]}, {SAMPLES} draws",
        )
    for k in units:
        p = found["bootstrap"][k]["p"]
        values[f"bootstrap_p_{k}"] = (p, "share of resamples of pictures where BRNN is no better")
    seconds = found["brnn"]["summary"]["seconds_20_epochs"]
    values["brnn.train_seconds"] = (seconds, "s for 20 epochs")
    steps = [f"python benchmarks/captions.py {step} CAPTIONS.json --out OUT" for step in STEPS]
    common = {
        "published": None,
        "seeds": list(SEEDS),
        "hardware": found["brnn"]["runs"][0]["hardware"],
        "command": " && ".join(steps),
        "commit": found["commit"],
        "log": "flickr8k.json",
    }
    return {f"flickr8k.{k}": {"value": v, "unit": u, **common} for k, (v, u) in values.items()}


def score_kind(
    runs: list[dict[str, Any]], references: dict[str, dict[str, list[str]]]
) -> tuple[dict[str, Any], Measured]:
    """One kind's runs; the way to decode is the one with the best CIDEr on validation."""

    def scores(split: str, said: list[str]) -> Any:
        return score_captions(dict(zip(references[split], said, strict=True)), references[split])

    ways = runs[0]["ways"]
    by_way = [
        float(np.mean([scores("valid", r["valid_captions"][w]).scores["cider"] for r in runs]))
        for w in range(len(ways))
    ]
    way = int(np.argmax(by_way))
    seeds, parts = [], []
    for each in runs:
        mean = scores("test", each["test_captions"][way])
        parts.append((mean.by_picture["cider"], mean.bleu_counts, each["nll"], each["words"]))
        figures = each["captioned"]["pictures"]
        own = scores("test", [picture["caption"] for picture in figures])
        cider = torch.from_numpy(own.by_picture["cider"])
        seeds.append(
            {
                "changes": each["changes"],
                "hardware": each["hardware"],
                "seconds": each["seconds"],
                "epochs": each["epochs"],
                "perplexity": each["perplexity"],
                "perplexity_mc": each["perplexity_mc"],
                "valid_perplexity": each["valid_perplexity"],
                "test": mean.scores,
                "test_mc": scores("test", each["test_captions_mc"][way]).scores,
                "test_draw": scores("test", each["test_captions_draws"][0]).scores,
                "ranking": {
                    part: asdict(rank_captions(torch.tensor([p[part] for p in figures]), cider))
                    for part in ("total", "epistemic")
                },
                "uncertainty": {
                    part: float(np.mean([p[part] for p in figures]))
                    for part in ("confidence", "total", "aleatoric", "epistemic")
                },
                "foreign": each["foreign"],
            }
        )
    measured = Measured(*(np.array(part, dtype=np.float64) for part in zip(*parts, strict=True)))
    summary = {
        "perplexity": float(np.mean([s["perplexity"] for s in seeds])),
        "perplexity_mc": float(np.mean([s["perplexity_mc"] for s in seeds])),
        **{
            f"{name}{mc}": float(np.mean([s[f"test{mc}"][name] for s in seeds]))
            for name in ("bleu1", "bleu2", "bleu3", "bleu4", "cider", "rouge_l")
            for mc in ("", "_mc")
        },
        "seconds_20_epochs": float(np.mean([seconds_at(s["epochs"], 20) for s in seeds])),
    }
    chosen = {"way": ways[way], "valid_cider_by_way": by_way}
    return {"summary": summary, **chosen, "runs": seeds}, measured


def seconds_at(epochs: list[dict[str, Any]], count: int) -> float:
    """The time of the first `count` epochs; of fewer, in proportion."""
    last = epochs[min(count, len(epochs)) - 1]
    return last["seconds"] * count / last["epoch"]


def commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip()


if __name__ == "__main__":
    app()
