"""`bayesrnn evaluate`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console

from bayesrnn.bayes import Bayesian
from bayesrnn.commands.captions import evaluate_run
from bayesrnn.commands.options import (
    AsJson,
    Data,
    Device,
    DrawSeed,
    RunFolder,
    SpeechDecoding,
    Weights,
    check_file,
    check_flags,
    recipe_of,
)
from bayesrnn.commands.tables import show, shown, table_of, watching
from bayesrnn.description import complexity, describe
from bayesrnn.errors import Invalid
from bayesrnn.evaluate import (
    dynamic_evaluate,
    evaluate_labelled,
    evaluate_speech,
    evaluate_text,
    search_rate,
    write_predictions,
)
from bayesrnn.evaluate.ctc import Search, decoder
from bayesrnn.evaluate.dynamic import RATES
from bayesrnn.evaluate.reader import Watch
from bayesrnn.evaluate.sharpened import LOOKS, evaluate_sharpened, looking, search_look
from bayesrnn.saving import has_vocabulary, load, load_vocabulary
from bayesrnn.train.captioning import CaptionTask
from bayesrnn.train.loop import choose_device
from bayesrnn.train.speech import SpeechTask
from bayesrnn.train.task import LabelledTask, LanguageTask, Task, build_task

LOOK_AT = "decoder.*"
"""The weights that --look lets look: the softmax's."""


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
    look: Annotated[
        str | None,
        typer.Option(
            metavar="WIDTH|search",
            help="With --sharpened: looks of this width instead of the trained ones, as a part of "
            "each weight's own sigma; search tries several on the validation text first.",
        ),
    ] = None,
    look_at: Annotated[
        str | None,
        typer.Option(
            metavar="PATTERN", help=f"The weights that --look lets look (default: {LOOK_AT})."
        ),
    ] = None,
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
    by_variance: Annotated[
        bool,
        typer.Option(
            "--by-variance",
            help="With --dynamic: each weight learns in proportion to its posterior variance.",
        ),
    ] = False,
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
    decoding: SpeechDecoding = "prefix",
    seed: DrawSeed = 1,
    data: Data = "",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """How good a run's model is.

    The perplexity of a whole text, as one stream with the state carried; the error over all images
    or reviews; the perplexity and the scores of captions; or the error rate of speech. And what its
    weights, and for the training set with draws also the targets, take to describe.

    bayesrnn evaluate runs/ptb --split test

    bayesrnn evaluate runs/ptb --samples 10 --json

    bayesrnn evaluate runs/ptb --dynamic search --by-variance

    bayesrnn evaluate runs/ptb --sharpened --look search

    bayesrnn evaluate runs/reviews --samples 50 --predictions reviews.csv
    """
    if look_at is not None and look is None:
        raise typer.BadParameter("--look-at is of --look; give that too")
    if by_variance and dynamic is None:
        raise typer.BadParameter("--by-variance is of --dynamic; give that too")
    if sharpened:
        if samples is not None or segment is not None or streams != 1 or dynamic == "search":
            raise typer.BadParameter(
                "--sharpened reads the text in the shape of the training: leave out --segment, "
                "--samples and --streams; with it, --dynamic takes a rate, and no search"
            )
        learning = _rate(dynamic or "0") or 0.0, by_variance
        width = None if look is None else _width(look)
        phi: Literal["mean", "draw"] = "draw" if weights == "sample" else "mean"
        where = look_at or LOOK_AT
        _evaluate_sharpened(run, split, phi, width, where, seed, data, device, learning, as_json)
        return
    if look is not None:
        raise typer.BadParameter("--look is of --sharpened; give that too")
    if weights == "mean" and samples is not None:
        raise typer.BadParameter("--samples draws weights; leave out --weights mean")
    count = (samples or 10) if (weights == "sample" or samples is not None) else 0
    if dynamic is not None and count:
        raise typer.BadParameter("--dynamic moves the posterior mean; leave out draws")
    if dynamic is None and segment is not None:
        raise typer.BadParameter("--segment is of --dynamic; give that too")
    rate = _rate(dynamic) if dynamic is not None else None
    check_file(predictions)
    place = choose_device(device, "--device")
    model = load(run).to(place)
    recipe = recipe_of(run, data)
    flags = {"--streams": streams != 1, "--dynamic": dynamic is not None}
    flags |= {"--predictions": predictions is not None, "--beam": beam != 3, "--meteor": meteor}
    flags |= {"--decoding": decoding != "prefix"}
    check_flags(recipe, flags)
    task = build_task(recipe, place, load_vocabulary(run) if has_vocabulary(recipe) else None)
    generator = torch.Generator(place).manual_seed(seed)
    with watching() as watch:
        if isinstance(task, CaptionTask):
            scores = evaluate_run(model, task, split, count, beam, seed, predictions, meteor, watch)
        elif isinstance(task, SpeechTask):
            scores = _speech(model, task, split, count, generator, decoding, watch)
        elif isinstance(task, LabelledTask):
            scores = _labelled(model, task, split, count, generator, predictions, watch)
        elif dynamic is None:
            scores = _text(model, task, split, count, generator, streams, watch)
        else:
            unroll = segment or recipe.train.unroll
            scores = _dynamic(model, task, split, streams, unroll, rate, by_variance, watch)
    tried = scores.pop("search", None)
    figures: dict[str, Any] = {
        "run": str(run),
        "split": split,
        "weights": "sample" if count else "mean",
        **scores,
        **_description(model, task, split, scores.get("expected_nll"), generator),
    }
    if as_json:
        figures |= {} if tried is None else {"search": tried}
    else:
        figures = _measured(figures)
    show(figures, f"{split} {task.unit}", as_json)
    if tried is not None and not as_json:
        _show_trials("rate", tried)


def _measured(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Without what was not asked for: figures by draws, and those of the targets' description."""
    left_out: set[str] = set()
    if figures.get("expected_nll") is None:
        left_out |= {"expected_nll", "expected_perplexity"}
    if figures["error_nats"] is None:
        left_out |= {"error_nats", "error_bits", "total_nats", "total_bits"}
        left_out |= {"uniform_bits", "ratio"}
    return {key: value for key, value in figures.items() if key not in left_out}


def _description(
    model: Bayesian,
    task: Task,
    split: str,
    expected_nll: float | None,
    generator: torch.Generator,
) -> dict[str, float | None]:
    """The description length: of the weights; and of the training targets, where they were read by
    draws (the mean's loss is no code length). Weights are sent once, for the training set."""
    targets = task.batches.targets
    error = None if expected_nll is None or split != "train" else expected_nll * targets
    return asdict(
        describe(error, complexity(model, generator), targets, task.labels, model.weight_count)
    )


def _speech(
    model: Bayesian,
    task: SpeechTask,
    split: str,
    count: int,
    generator: torch.Generator,
    decoding: Search,
    watch: Watch,
) -> dict[str, Any]:
    """The scores of utterances."""
    loader = task.utterances(split)
    advance = watch(f"reading {split}", loader.targets * max(count, 1))
    found = evaluate_speech(model, loader, decoder(decoding), count, generator, advance)
    return {"decoding": decoding, **asdict(found)}


def _labelled(
    model: Bayesian,
    task: LabelledTask,
    split: str,
    count: int,
    generator: torch.Generator,
    predictions: Path | None,
    watch: Watch,
) -> dict[str, Any]:
    """The scores of images or reviews; each one's prediction into a file, where one is given."""
    examples = task.examples(split)
    advance = watch(f"reading {split}", examples.targets * max(count, 1))
    found, prediction = evaluate_labelled(model, examples, task.output, count, generator, advance)
    if predictions is not None:
        write_predictions(predictions, task.data.splits[split], prediction)
    return {
        "examples": found.examples,
        "samples": count,
        **found.scores,
        "expected_nll": found.expected_nll,
    }


def _text(
    model: Bayesian,
    task: LanguageTask,
    split: str,
    count: int,
    generator: torch.Generator,
    streams: int,
    watch: Watch,
) -> dict[str, Any]:
    """The perplexity of a text."""
    loader = task.stream(split, streams)
    advance = watch(f"reading {split}", loader.targets * max(count, 1))
    return {"streams": streams, **asdict(evaluate_text(model, loader, count, generator, advance))}


def _dynamic(
    model: Bayesian,
    task: LanguageTask,
    split: str,
    streams: int,
    unroll: int,
    rate: float | None,
    by_variance: bool,
    watch: Watch,
) -> dict[str, Any]:
    """Dynamic evaluation at a rate, or at the best of a search on the validation text."""
    tried: dict[str, Any] = {}
    if rate is None:
        loader = task.stream("valid", streams, unroll)
        advance = watch("trying rates on valid", loader.targets * len(RATES))
        search = search_rate(model, loader, RATES, advance=advance, by_variance=by_variance)
        rate, tried = search.rate, {"search": [asdict(trial) for trial in search.tried]}
    loader = task.stream(split, streams, unroll)
    advance = watch(f"reading {split}", loader.targets)
    text = dynamic_evaluate(model, loader, rate, advance=advance, by_variance=by_variance)
    return {"streams": streams, **asdict(text), **tried}


def _show_trials(what: str, tried: Sequence[Mapping[str, Any]]) -> None:
    table = table_of(what, "valid perplexity", title=f"{what}s tried")
    for trial in tried:
        value = "diverged" if trial["perplexity"] is None else shown(trial["perplexity"])
        table.add_row(f"{trial[what]:g}", value)
    Console().print(table)


def _evaluate_sharpened(
    run: Path,
    split: str,
    around: Literal["mean", "draw"],
    look: float | Literal["search"] | None,
    look_at: str,
    seed: int,
    data: str,
    device: str,
    learning: tuple[float, bool],
    as_json: bool,
) -> None:
    """`evaluate --sharpened`, with the looks of the training or with those of `--look`."""
    place = choose_device(device, "--device")
    model, recipe = load(run).to(place), recipe_of(run, data)
    check_flags(recipe, {"--sharpened": True})
    task = LanguageTask(recipe, place, load_vocabulary(run))
    shape = recipe.train.streams, recipe.train.unroll
    loader = task.stream(split, *shape)
    generator = torch.Generator(place).manual_seed(seed)
    figures: dict[str, Any] = {"run": str(run), "split": split}
    tried: list[dict[str, Any]] = []
    with watching() as watch:
        if look is not None:
            _check_looks(model, look_at)
        if look == "search":
            valid = task.stream("valid", *shape)
            advance = watch("trying looks on valid", valid.targets * len(LOOKS))
            search = search_look(model, valid, look_at, LOOKS, seed, advance)
            look, tried = search.look, [asdict(trial) for trial in search.tried]
        if look is not None:
            model = looking(model, look_at, look, recipe.train.streams)
            figures |= {"look": look, "look_at": look_at}
        advance = watch(f"reading {split}", loader.targets)
        found = evaluate_sharpened(model, loader, around, generator, advance, *learning)
    figures |= asdict(found) | ({"search": tried} if tried and as_json else {})
    if not as_json and not found.rate:
        del figures["rate"], figures["by_variance"]
    show(figures, f"{split} text, sharpened: an upper bound", as_json)
    if tried and not as_json:
        _show_trials("look", tried)


def _check_looks(model: Bayesian, look_at: str) -> None:
    """Say in the command's words what --look-at cannot name."""
    try:
        looking(model, look_at, 1.0, 1)
    except Invalid as error:
        raise Invalid([("--look-at", message) for _, message in error.problems]) from error


def _width(look: str) -> float | Literal["search"]:
    """What --look gives."""
    if look == "search":
        return "search"
    try:
        width = float(look)
    except ValueError:
        width = math.nan
    if not 0 < width < math.inf:
        raise typer.BadParameter(f"--look is a width above 0, or search; got {look!r}")
    return width


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
