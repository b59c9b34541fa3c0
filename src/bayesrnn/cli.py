"""The command line: a table of commands; the work is done elsewhere."""

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bayesrnn import __version__
from bayesrnn.bayes import Bayesian
from bayesrnn.bench import bench as time_steps
from bayesrnn.bench import report
from bayesrnn.data import StreamLoader, TextData, encode_file, load_text
from bayesrnn.errors import Invalid, UserError
from bayesrnn.evaluate import (
    Categorical,
    RateSearch,
    TextUncertainty,
    calibration_of_top,
    detect,
    dynamic_evaluate,
    entropy_gap,
    evaluate_labelled,
    evaluate_text,
    generate_text,
    reversed_text,
    search_rate,
    shuffled_text,
    text_uncertainty,
    unigram_entropy,
    write_predictions,
    write_tokens,
)
from bayesrnn.evaluate.calibration import BINS, calibration
from bayesrnn.evaluate.dynamic import RATES
from bayesrnn.evaluate.sharpened import evaluate_sharpened
from bayesrnn.evaluate.uncertainty import WINDOW, check_window, reading_cost
from bayesrnn.prune import prune_run
from bayesrnn.recipe import Recipe, read_recipe
from bayesrnn.saving import has_vocabulary, load, load_vocabulary
from bayesrnn.train.loop import choose_device
from bayesrnn.train.loop import train as train_recipe
from bayesrnn.train.task import EVALUATION_TOKENS, LabelledTask, LanguageTask, build_task

app = typer.Typer(
    name="bayesrnn",
    help="Bayesian recurrent networks: train them, and ask what they do not know.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

RunFolder = Annotated[Path, typer.Argument(help="A run's folder, as `train --out` made it.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]
Data = Annotated[str, typer.Option(help="Read the data from here, not from where they were.")]
Weights = Literal["mean", "sample"]


def main() -> None:
    """Run a command; a user's mistake becomes one line and an exit code (1 failed, 2 wrong use)."""
    try:
        app()
    except Invalid as error:
        for key, message in error.problems:
            print(f"error: {key} {message}", file=sys.stderr)
        sys.exit(2)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror or error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(1)


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="A recipe's .toml file.")],
    settings: Annotated[
        list[str] | None, typer.Argument(help="Changes to it: train.lr=0.5 prior.pi=0.5 ...")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder (default: runs/ and the recipe's name).")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over, forgetting its run.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a recipe; goes on where --out holds a checkpoint of it.

    bayesrnn train recipes/ptb-brnn-medium.toml data.path=ptb --out runs/ptb

    bayesrnn train recipes/demo-brnn.toml data.path=book.txt train.epochs=5
    """
    out = out or Path("runs") / recipe.stem
    outcome = train_recipe(read_recipe(recipe, settings or ()), out, fresh, quiet)
    last = outcome.epochs[-1] if outcome.epochs else {}
    watched = outcome.watched
    figures: dict[str, Any] = {
        "run": str(out),
        "finished": outcome.finished,
        "steps": outcome.steps,
        "epochs": last.get("epoch", 0),
        **{key: value for key, value in last.items() if key.startswith("train_")},
        watched: last.get(watched),
        f"best_{watched}": min((line[watched] for line in outcome.epochs), default=None),
        "error_bits": last.get("error_bits"),
        "complexity_bits": last.get("complexity_bits"),
        "seconds": outcome.seconds,
    }
    _show(figures, "training", as_json)


@app.command()
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
        typer.Option(help="Write a CSV file: each image's or review's prediction, and how sure."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the draws.")] = 1,
    data: Data = "",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """How good a run's model is: the perplexity of a whole text, as one stream with the state
    carried; or the error over all images or reviews.

    bayesrnn evaluate runs/ptb --split test

    bayesrnn evaluate runs/ptb --samples 10 --json

    bayesrnn evaluate runs/ptb --dynamic 0.1

    bayesrnn evaluate runs/reviews --samples 50 --predictions reviews.csv
    """
    if sharpened:
        if dynamic is not None or samples is not None or segment is not None or streams != 1:
            raise typer.BadParameter(
                "--sharpened reads the text in the shape of the training: leave out --dynamic, "
                "--segment, --samples and --streams"
            )
        _evaluate_sharpened(run, split, weights or "mean", seed, data, device, as_json)
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
    recipe = _recipe(run, data)
    flags = {"--streams": streams != 1, "--dynamic": dynamic is not None}
    _check_flags(recipe, flags | {"--predictions": predictions is not None})
    task = build_task(recipe, place, load_vocabulary(run) if has_vocabulary(recipe) else None)
    generator = torch.Generator(place).manual_seed(seed)
    search: RateSearch | None = None
    scores: dict[str, Any]
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:

        def reading(what: str, targets: int) -> Callable[[int], None]:
            line = bar.add_task(what, total=targets)
            return lambda done: bar.advance(line, done)

        if isinstance(task, LabelledTask):
            examples = task.examples(split)
            advance = reading(f"reading {split}", examples.targets * max(count, 1))
            found, prediction = evaluate_labelled(
                model, examples, task.output, count, generator, advance
            )
            scores = {
                "examples": found.examples,
                "samples": count,
                **found.scores,
                "expected_nll": found.expected_nll,
            }
            if predictions is not None:
                write_predictions(predictions, task.data.splits[split], prediction)
        elif dynamic is None:
            loader = task.stream(split, streams)
            advance = reading(f"reading {split}", loader.targets * max(count, 1))
            text = evaluate_text(model, loader, count, generator, advance)
            scores = {"streams": streams, **asdict(text)}
        else:
            unroll = segment or recipe.train.unroll
            if rate is None:
                loader = task.stream("valid", streams, unroll)
                advance = reading("trying rates on valid", loader.targets * len(RATES))
                search = search_rate(model, loader, RATES, advance=advance)
                rate = search.rate
            loader = task.stream(split, streams, unroll)
            advance = reading(f"reading {split}", loader.targets)
            text = dynamic_evaluate(model, loader, rate, advance=advance)
            scores = {"streams": streams, **asdict(text)}
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
    _show(figures, f"{split} {task.unit}", as_json)
    if search is not None and not as_json:
        tried = Table("rate", "valid perplexity", title="rates tried")
        for trial in search.tried:
            shown = "diverged" if trial.perplexity is None else _shown(trial.perplexity)
            tried.add_row(f"{trial.rate:g}", shown)
        Console().print(tried)


@app.command()
def uncertainty(
    run: RunFolder,
    samples: Annotated[
        str,
        typer.Option(metavar="N[,N...]", help="How many draws; 0 is the posterior mean."),
    ] = "10",
    split: Annotated[
        Literal["train", "valid", "test"] | None,
        typer.Option(help="Which part of the run's text (default: test)."),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Read this text file instead.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write every token's figures, as FILE.csv or FILE.json.")
    ] = None,
    gap: Annotated[
        bool,
        typer.Option("--gap", help="Read the text reversed and shuffled too, and compare."),
    ] = False,
    foreign: Annotated[
        Path | None, typer.Option(help="With --gap: a text of another kind to compare with.")
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(min=1, help=f"With --gap: tokens a window to be told apart ({WINDOW})."),
    ] = None,
    bins: Annotated[int, typer.Option(min=1, help="Of the calibration errors.")] = BINS,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the draws.")] = 1,
    data: Data = "",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """What a run's model does not know of a text: entropy, its aleatoric and epistemic parts, and
    calibration; the entropy gap, and whether other texts stand out. Of images and reviews: the
    means and calibration.

    bayesrnn uncertainty runs/ptb --samples 0,1,10 --gap

    bayesrnn uncertainty runs/ptb --text letter.txt --out letter.csv
    """
    counts = _counts(samples)
    if text is not None and split is not None:
        raise typer.BadParameter("--split is of the run's own text; leave it or --text out")
    for flag, given in (("--foreign", foreign), ("--window", window)):
        if given is not None and not gap:
            raise typer.BadParameter(f"{flag} is of --gap; give that too")
    if out is not None and out.suffix not in (".csv", ".json"):
        raise typer.BadParameter(f"--out must end in .csv or .json, got {str(out)!r}")
    if out is not None and not out.parent.is_dir():
        raise UserError(f"cannot write {out}: there is no folder {out.parent}; make it first")
    place = choose_device(device, "--device")
    model, recipe = load(run).to(place), _recipe(run, data)
    settings = recipe.data
    if not isinstance(settings, TextData):
        _check_flags(recipe, {"--text": text is not None, "--out": out is not None, "--gap": gap})
        task = LabelledTask(recipe, place, load_vocabulary(run) if has_vocabulary(recipe) else None)
        _labelled_uncertainty(run, model, task, split or "test", counts, bins, seed, as_json)
        return
    vocabulary = load_vocabulary(run)
    if text is not None:
        name, ids = str(text), encode_file(text, settings, vocabulary)
    else:
        name = split or "test"
        ids = load_text(settings, vocabulary).ids[name]
    texts = {"text": ids}
    if gap:
        texts |= {"reversed": reversed_text(ids), "shuffled": shuffled_text(ids, seed)}
    if foreign is not None:
        texts["foreign"] = encode_file(foreign, settings, vocabulary)
    names = {"text": name, "foreign": str(foreign)}
    loaders = {
        which: StreamLoader(each, 1, EVALUATION_TOKENS, device=place, name=names.get(which, which))
        for which, each in texts.items()
    }
    if gap:
        for loader in loaders.values():  # said now, not after all the reading
            check_window(loader.targets, window or WINDOW)
    found: dict[str, dict[int, TextUncertainty]] = {}
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        for which, loader in loaders.items():
            line = bar.add_task(f"reading {which}", total=reading_cost(loader, counts))
            found[which] = text_uncertainty(
                model, loader, counts, seed, advance=partial(bar.advance, line)
            )
    here = found.pop("text")
    if out is not None:
        write_tokens(out, here.values(), vocabulary)
    by_draws = [
        {
            **each.summary(),
            **_scores(each, bins),
            **(_gap(each, found["reversed"][count]) if gap else {}),
        }
        for count, each in here.items()
    ]
    detections = [
        {"other": which, **asdict(detect(here[count], other[count], window or WINDOW))}
        for which, other in found.items()
        for count in here
    ]
    figures: dict[str, Any] = {
        "run": str(run),
        "text": name,
        "tokens": loaders["text"].targets,
        "unigram_entropy": unigram_entropy(ids),
    }
    if as_json:
        print(json.dumps({**figures, "by_draws": by_draws, "detection": detections}))
        return
    _show(figures, "text", False)
    _columns(by_draws, "by the number of draws (0: the mean), nats a token")
    if detections:
        keys = ("entropy_auroc", "entropy_aupr", "information_auroc", "information_aupr")
        heads = ("other text", "draws", *(key.replace("_", "\n") for key in keys))
        table = Table(*heads, title=f"other texts, told apart by windows of {window or WINDOW}")
        for case in detections:
            table.add_row(case["other"], str(case["samples"]), *(_shown(case[k]) for k in keys))
        Console().print(table)


@app.command()
def generate(
    run: RunFolder,
    prompt: Annotated[str, typer.Option(help="The text to go on from.")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="How many more tokens.")] = 100,
    temperature: Annotated[
        float, typer.Option(min=0, help="Below 1 is safer, above 1 bolder; 0 takes the likeliest.")
    ] = 1.0,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="The same seed gives the same text.")
    ] = 1,
    weights: Annotated[
        Weights, typer.Option(help="The posterior mean, or one draw for the whole text.")
    ] = "mean",
    as_json: AsJson = False,
) -> None:
    """Write text with a run's model.

    bayesrnn generate runs/ptb --prompt "the company said" --tokens 50 --temperature 0.8
    """
    model = load(run)
    settings = _recipe(run, "").data
    if not isinstance(settings, TextData):
        raise UserError(f"{run} is a run on {settings.kind}, which writes no text")
    generator = torch.Generator().manual_seed(seed)
    text = generate_text(
        model, prompt, settings, load_vocabulary(run), tokens, temperature, weights, generator
    )
    if as_json:
        print(json.dumps({"prompt": prompt, "text": text, "seed": seed, "weights": weights}))
    else:
        print(prompt + ("" if settings.tokens == "characters" or not prompt else " ") + text)


@app.command()
def prune(
    run: RunFolder,
    out: Annotated[Path, typer.Option(help="The folder of the pruned run, a new one.")],
    fraction: Annotated[
        float | None, typer.Option(min=0, max=1, help="Prune this part of all weights.")
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(min=0, help="Prune below this signal to noise (0.83 is a rule of thumb)."),
    ] = None,
    per_tensor: Annotated[
        bool, typer.Option("--per-tensor", help="The fraction of each tensor, not of all together.")
    ] = False,
    retrain: Annotated[
        int, typer.Option(min=0, metavar="EPOCHS", help="Train what is left for so many epochs.")
    ] = 0,
    scale: Annotated[
        bool, typer.Option("--scale", help="Keep the scales too, so that weights can be drawn.")
    ] = False,
    data: Data = "",
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
    as_json: AsJson = False,
) -> None:
    """Set the weights of lowest signal to noise to 0, for a smaller file that evaluate reads.

    bayesrnn prune runs/ptb --fraction 0.8 --out runs/ptb-small

    bayesrnn prune runs/ptb --threshold 0.83 --retrain 5 --scale --out runs/ptb-small
    """
    if (fraction is None) == (threshold is None):
        raise typer.BadParameter("give either --fraction or --threshold")
    if threshold is not None and per_tensor:
        raise typer.BadParameter("--per-tensor is of --fraction; a threshold is the same for all")
    found = prune_run(run, out, fraction, threshold, per_tensor, retrain, scale, data, quiet)
    figures = {"run": str(run), "out": str(out), **asdict(found)}
    if not as_json:
        epochs = figures.pop("epochs")
        figures |= {k: v for k, v in (epochs[-1] if epochs else {}).items() if "valid" in k}
    _show(figures, "pruning", as_json)


@app.command()
def bench(
    size: Annotated[
        Literal["small", "medium", "large"], typer.Option(help="200, 650 or 1500 units, 2 layers.")
    ] = "medium",
    steps: Annotated[int, typer.Option(min=1, help="Steps of each case, taking turns.")] = 20,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    peers: Annotated[
        bool, typer.Option("--peers", help="Also time blitz and bayesian-torch (slow).")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Time a training step: the plain network against the Bayesian one, in one run.

    bayesrnn bench --size medium --steps 20
    """
    place = choose_device(device, "--device")
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("taking turns", total=None)
        timings = time_steps(size, place, steps, peers, lambda: bar.advance(task))
    if as_json:
        print(json.dumps(report(timings, size, place)))
        return
    table = Table(title=f"one training step, {size}, {place}")
    for heading in ("case", "ms", "words/s", "times plain", "peak MiB"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for t in timings:
        peak = "-" if t.peak_mib is None else f"{t.peak_mib:,.0f}"
        row = f"{t.ms:,.1f}", f"{t.words_per_second:,.0f}", f"{t.times_plain:.2f}", peak
        table.add_row(t.case, *row)
    Console().print(table)


def _labelled_uncertainty(
    run: Path,
    model: Bayesian,
    task: LabelledTask,
    split: str,
    counts: Sequence[int],
    bins: int,
    seed: int,
    as_json: bool,
) -> None:
    """`uncertainty` of images or reviews: the same draws for every count, as far as they go."""
    if not isinstance(task.output, Categorical):
        raise UserError(f"{run} predicts numbers; this command is for text and for classes")
    examples = task.examples(split)
    targets = task.data.splits[split].y
    by_draws: list[dict[str, Any]] = []
    for count in counts:
        generator = torch.Generator(task.device).manual_seed(seed)
        _, found = evaluate_labelled(model, examples, task.output, count, generator)
        parts = ("total", "aleatoric", "epistemic")
        means = {part: getattr(found, part).double().mean().item() for part in parts}
        scores = asdict(calibration(found.mean.cpu(), targets.cpu(), bins))
        by_draws.append({"samples": count, **means, **scores})
    figures = {"run": str(run), "split": split, "examples": examples.targets}
    if as_json:
        print(json.dumps({**figures, "by_draws": by_draws}))
        return
    _show(figures, task.unit, False)
    _columns(by_draws, "by the number of draws (0: the mean), nats an example")


def _evaluate_sharpened(
    run: Path, split: str, weights: Weights, seed: int, data: str, device: str, as_json: bool
) -> None:
    """`evaluate --sharpened`: phi is the mean, or drawn."""
    place = choose_device(device, "--device")
    model, recipe = load(run).to(place), _recipe(run, data)
    _check_flags(recipe, {"--sharpened": True})
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
        )
    figures = {"run": str(run), "split": split, **asdict(found)}
    _show(figures, f"{split} text, sharpened: an upper bound", as_json)


def _check_flags(recipe: Recipe, used: Mapping[str, bool]) -> None:
    """--predictions is for all but text, every other flag here for text alone."""
    is_text = isinstance(recipe.data, TextData)
    for flag in (flag for flag, is_used in used.items() if is_used):
        if is_text == (flag == "--predictions"):
            raise typer.BadParameter(f"{flag} is not for a run on {recipe.data.kind}")


def _counts(samples: str) -> list[int]:
    """The numbers of draws that --samples gives."""
    try:
        counts = [int(part) for part in samples.split(",")]
    except ValueError:
        counts = [-1]
    if min(counts) < 0:
        raise typer.BadParameter(
            f"--samples is a number, 0 or above, or several with commas; got {samples!r}"
        )
    return sorted(set(counts))


def _scores(text: TextUncertainty, bins: int) -> dict[str, Any]:
    """What calibration adds to a text's summary."""
    scores = asdict(
        calibration_of_top(text.nll, text.brier, text.max_probability, text.correct, bins)
    )
    return {key: scores[key] for key in ("brier", "accuracy", "ece", "adaptive_ece", "aurc")}


def _gap(text: TextUncertainty, backwards: TextUncertainty) -> dict[str, float]:
    """What the reverse adds to a text's summary, which has its entropy as the total."""
    found = entropy_gap(text, backwards)
    return {"total_reversed": found.entropy_reversed, "entropy_gap": found.gap}


def _columns(cases: Sequence[Mapping[str, Any]], title: str) -> None:
    """A table with a line a figure and a column a case."""
    table = Table(title=title, show_header=False)
    for key in cases[0]:
        table.add_row(key.replace("_", " "), *(_shown(case[key]) for case in cases))
    Console().print(table)


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


def _recipe(run: Path, data: str) -> Recipe:
    """A run's recipe, with its data read from `data` where that is given."""
    recipe = read_recipe(run / "recipe.toml")
    return replace(recipe, data=replace(recipe.data, path=data)) if data else recipe


def _show(figures: dict[str, Any], title: str, as_json: bool) -> None:
    """One JSON object, or a short table; what is undefined is null, or a dash."""
    if as_json:
        print(json.dumps(figures))
        return
    table = Table(title=title, show_header=False)
    for key, value in figures.items():
        table.add_row(key.replace("_", " "), _shown(value))
    Console().print(table)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4f}" if abs(value) < 1000 else f"{value:,.0f}"
    return "-" if value is None else str(value)
