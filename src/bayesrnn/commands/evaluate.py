"""`bayesrnn evaluate`."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bayesrnn.bayes import Bayesian
from bayesrnn.commands.captions import evaluate_run
from bayesrnn.commands.options import (
    AsJson,
    Data,
    Device,
    DrawSeed,
    RunFolder,
    Weights,
    check_flags,
    recipe_of,
)
from bayesrnn.commands.tables import show, shown, watching
from bayesrnn.evaluate import (
    RateSearch,
    dynamic_evaluate,
    evaluate_labelled,
    evaluate_text,
    search_rate,
    write_predictions,
)
from bayesrnn.evaluate.dynamic import RATES
from bayesrnn.evaluate.reader import Watch
from bayesrnn.evaluate.sharpened import evaluate_sharpened
from bayesrnn.saving import has_vocabulary, load, load_vocabulary
from bayesrnn.train.captioning import CaptionTask
from bayesrnn.train.loop import choose_device
from bayesrnn.train.task import LabelledTask, LanguageTask, build_task


def evaluate(
    run: RunFolder,
    split: Annotated[
        Literal["train", "valid", "test"], typer.Option(help="Which part of the data.")
    ] = "test",
    weights: Annotated[
        Weights | None, typer.Option(help="The posterior mean (default), or draws from it.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="How many draws (default 10 with --weights sample).")
    ] = None,
    streams: Annotated[
        int, typer.Option(min=1, help="Read a text as this many streams; 1 is exact.")
    ] = 1,
    sharpened: Annotated[
        bool,
        typer.Option(
            "--sharpened", help="A sharpened model's bound, in cuts of the shape it was trained on."
        ),
    ] = False,
    dynamic: Annotated[
        str | None,
        typer.Option(
            metavar="RATE|search",
            help="Learn at this rate from each segment once it is scored; search tries several "
            "rates on the validation text first.",
        ),
    ] = None,
    segment: Annotated[
        int | None,
        typer.Option(min=1, help="Steps a segment of --dynamic (default: the training's unroll)."),
    ] = None,
    predictions: Annotated[
        Path | None,
        typer.Option(
            help="Write each image's or review's prediction, and how sure (CSV); captions (JSON)."
        ),
    ] = None,
    beam: Annotated[int, typer.Option(min=1, help="Of captions: beginnings kept.")] = 3,
    meteor: Annotated[
        bool, typer.Option("--meteor", help="Of captions: METEOR too (needs Java, and a minute).")
    ] = False,
    seed: DrawSeed = 1,
    data: Data = "",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """How good a run's model is: the perplexity of a whole text, as one stream with the state
    carried; the error over all images or reviews; or the perplexity and the scores of captions.

    bayesrnn evaluate runs/ptb --split test

    bayesrnn evaluate runs/ptb --samples 10 --json

    bayesrnn evaluate runs/ptb --dynamic 0.1

    bayesrnn evaluate runs/reviews --samples 50 --predictions reviews.csv
    """
    if sharpened:
        if samples is not None or segment is not None or streams != 1 or dynamic == "search":
            raise typer.BadParameter(
                "--sharpened reads the text in the shape of the training: leave out --segment, "
                "--samples and --streams; with it, --dynamic takes a rate, and no search"
            )
        learning = _rate(dynamic or "0") or 0.0
        _evaluate_sharpened(run, split, weights or "mean", seed, data, device, learning, as_json)
        return
    if weights == "mean" and samples is not None:
        raise typer.BadParameter("--samples draws weights; leave out --weights mean")
    count = (samples or 10) if (weights == "sample" or samples is not None) else 0
    if dynamic is not None and count:
        raise typer.BadParameter("--dynamic moves the posterior mean; leave out draws")
    if dynamic is None and segment is not None:
        raise typer.BadParameter("--segment is of --dynamic; give that too")
    rate = _rate(dynamic) if dynamic is not None else None
    place = choose_device(device, "--device")
    model = load(run).to(place)
    recipe = recipe_of(run, data)
    flags = {"--streams": streams != 1, "--dynamic": dynamic is not None}
    flags |= {"--predictions": predictions is not None, "--beam": beam != 3, "--meteor": meteor}
    check_flags(recipe, flags)
    task = build_task(recipe, place, load_vocabulary(run) if has_vocabulary(recipe) else None)
    generator = torch.Generator(place).manual_seed(seed)
    search: RateSearch | None = None
    with watching() as reading:
        if isinstance(task, CaptionTask):
            scores = evaluate_run(
                model, task, split, count, beam, seed, predictions, meteor, reading
            )
        elif isinstance(task, LabelledTask):
            scores = _labelled(model, task, split, count, generator, predictions, reading)
        elif dynamic is None:
            loader = task.stream(split, streams)
            advance = reading(f"reading {split}", loader.targets * max(count, 1))
            text = evaluate_text(model, loader, count, generator, advance)
            scores = {"streams": streams, **asdict(text)}
        else:
            unroll = segment or recipe.train.unroll
            scores, search = _dynamic(model, task, split, streams, unroll, rate, reading)
    with model.weights("sample"), torch.no_grad():
        model.resample(generator=generator)
        complexity = model.kl().item() if model.has_description_length else None
    figures: dict[str, Any] = {
        "run": str(run),
        "split": split,
        "weights": "sample" if count else "mean",
        **scores,
        "complexity_nats": complexity,
    }
    if search is not None and as_json:
        figures["search"] = [asdict(trial) for trial in search.tried]
    show(figures, f"{split} {task.unit}", as_json)
    if search is not None and not as_json:
        tried = Table("rate", "valid perplexity", title="rates tried")
        for trial in search.tried:
            value = "diverged" if trial.perplexity is None else shown(trial.perplexity)
            tried.add_row(f"{trial.rate:g}", value)
        Console().print(tried)


def _labelled(
    model: Bayesian,
    task: LabelledTask,
    split: str,
    count: int,
    generator: torch.Generator,
    predictions: Path | None,
    reading: Watch,
) -> dict[str, Any]:
    """The scores of images or reviews; each one's prediction into a file, where one is given."""
    examples = task.examples(split)
    advance = reading(f"reading {split}", examples.targets * max(count, 1))
    found, prediction = evaluate_labelled(model, examples, task.output, count, generator, advance)
    if predictions is not None:
        write_predictions(predictions, task.data.splits[split], prediction)
    return {
        "examples": found.examples,
        "samples": count,
        **found.scores,
        "expected_nll": found.expected_nll,
    }


def _dynamic(
    model: Bayesian,
    task: LanguageTask,
    split: str,
    streams: int,
    unroll: int,
    rate: float | None,
    reading: Watch,
) -> tuple[dict[str, Any], RateSearch | None]:
    """Dynamic evaluation at a rate, or at the best of a search on the validation text."""
    search = None
    if rate is None:
        loader = task.stream("valid", streams, unroll)
        advance = reading("trying rates on valid", loader.targets * len(RATES))
        search = search_rate(model, loader, RATES, advance=advance)
        rate = search.rate
    loader = task.stream(split, streams, unroll)
    advance = reading(f"reading {split}", loader.targets)
    text = dynamic_evaluate(model, loader, rate, advance=advance)
    return {"streams": streams, **asdict(text)}, search


def _evaluate_sharpened(
    run: Path,
    split: str,
    weights: Weights,
    seed: int,
    data: str,
    device: str,
    rate: float,
    as_json: bool,
) -> None:
    """`evaluate --sharpened`: phi is the mean, or drawn."""
    place = choose_device(device, "--device")
    model, recipe = load(run).to(place), recipe_of(run, data)
    check_flags(recipe, {"--sharpened": True})
    task = LanguageTask(recipe, place, load_vocabulary(run))
    loader = task.stream(split, recipe.train.streams, recipe.train.unroll)
    generator = torch.Generator(place).manual_seed(seed)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        row = bar.add_task(f"reading {split}", total=loader.targets)
        found = evaluate_sharpened(
            model,
            loader,
            "mean" if weights == "mean" else "draw",
            generator,
            lambda targets: bar.advance(row, targets),
            rate,
        )
    figures = {"run": str(run), "split": split, **asdict(found)}
    show(figures, f"{split} text, sharpened: an upper bound", as_json)


def _rate(dynamic: str) -> float | None:
    """The rate that --dynamic gives; None where it is to be searched for."""
    if dynamic == "search":
        return None
    try:
        rate = float(dynamic)
    except ValueError:
        rate = math.nan
    if not 0 <= rate < math.inf:
        raise typer.BadParameter(f"--dynamic is a rate, 0 or above, or search; got {dynamic!r}")
    return rate
