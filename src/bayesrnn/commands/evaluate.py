"""`bayesrnn evaluate`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from bayesrnn.bayes import Bayesian, Network
from bayesrnn.commands.captions import evaluate_run
from bayesrnn.commands.options import (
    OF_CAPTIONS,
    OF_SERIES,
    OF_TEXTS,
    AsJson,
    Data,
    Device,
    DrawSeed,
    OrSearch,
    RunFolders,
    Season,
    SpeechDecoding,
    Weights,
    check_draws,
    check_file,
    check_flags,
    load_runs,
    names_of,
    note_data,
    note_part,
    note_unknown,
    only_run,
)
from bayesrnn.commands.series import series_ahead, series_scores
from bayesrnn.commands.tables import print_table, show, shown, table_of, watching
from bayesrnn.commands.temperature import Temperature, note_split, output_of, temperature_of
from bayesrnn.commands.texts import dynamic_text, rate_of, sharpened_bound, text, width_of
from bayesrnn.description import complexity, describe
from bayesrnn.evaluate import evaluate_labelled, evaluate_speech, write_predictions
from bayesrnn.evaluate.ctc import Search, decoder
from bayesrnn.evaluate.draws import each_draw
from bayesrnn.evaluate.reader import Watch
from bayesrnn.evaluate.series import Backtest
from bayesrnn.evaluate.sharpened import LOOK_AT
from bayesrnn.saving import vocabulary_of
from bayesrnn.train.captioning import CaptionTask
from bayesrnn.train.loop import choose_device
from bayesrnn.train.run import with_data
from bayesrnn.train.series import SeriesTask
from bayesrnn.train.speech import SpeechTask
from bayesrnn.train.task import LabelledTask, LanguageTask, Task, build_task

SHARPENED = "Posterior sharpening"
"""A heading of the help."""


def evaluate(
    runs: RunFolders,
    split: Annotated[
        Literal["train", "valid", "test", "all"],
        typer.Option(help="Which part of the data; of texts, series and reviews also all of them."),
    ] = "test",
    weights: Annotated[
        Weights | None, typer.Option(help="The posterior mean (default), or draws from it.")
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="How many draws to average (0: the mean; default: 10 with --weights sample).",
        ),
    ] = None,
    temperature: Temperature = None,
    predictions: Annotated[
        Path | None,
        typer.Option(
            help="Write each image's or review's prediction, and how sure (CSV); captions (JSON)."
        ),
    ] = None,
    seed: DrawSeed = 1,
    data: Data = "",
    device: Device = "auto",
    as_json: AsJson = False,
    streams: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Read the text or series as this many streams (default: 1, which is exact; with "
            "--sharpened the training's).",
            rich_help_panel=OF_TEXTS,
        ),
    ] = None,
    dynamic: Annotated[
        str | None,
        typer.Option(
            metavar="RATE|search",
            help="Learn at this rate from each segment once it is scored; search tries several "
            "rates on the validation text first.",
            rich_help_panel=OF_TEXTS,
        ),
    ] = None,
    by_variance: Annotated[
        bool,
        typer.Option(
            "--by-variance",
            help="With --dynamic: each weight learns in proportion to its posterior variance.",
            rich_help_panel=OF_TEXTS,
        ),
    ] = False,
    segment: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens that --dynamic learns from, or --sharpened looks at, at a time (default: "
            "the training's unroll).",
            rich_help_panel=OF_TEXTS,
        ),
    ] = None,
    sharpened: Annotated[
        bool,
        typer.Option(
            "--sharpened",
            help="The bound of a model that looks at each cut before it scores it. Cuts have the "
            "shape of the training's; with --look also another (--streams, --segment). --samples "
            "is then the draws of each cut, weighed by importance (default and paper: 1).",
            rich_help_panel=SHARPENED,
        ),
    ] = False,
    look: Annotated[
        str | None,
        typer.Option(
            metavar="WIDTH|search",
            help="Look with this width, as a part of each weight's own sigma, whether or not the "
            "model was trained to; search tries several widths on the validation text first.",
            rich_help_panel=SHARPENED,
        ),
    ] = None,
    look_at: Annotated[
        str | None,
        typer.Option(
            metavar="PATTERN",
            help=f"The weights that --look lets look (default: {LOOK_AT}).",
            rich_help_panel=SHARPENED,
        ),
    ] = None,
    looks: Annotated[
        int,
        typer.Option(
            min=1,
            help="How often to look at each cut (paper: once).",
            rich_help_panel=SHARPENED,
        ),
    ] = 1,
    horizon: Annotated[
        int | None,
        typer.Option(
            min=1, help="Also score forecasts of this many rows.", rich_help_panel=OF_SERIES
        ),
    ] = None,
    season: Season = None,
    beam: Annotated[
        int,
        typer.Option(
            min=1, help="Beginnings of captions to keep; 1 is greedy.", rich_help_panel=OF_CAPTIONS
        ),
    ] = 3,
    meteor: Annotated[
        bool,
        typer.Option(
            "--meteor", help="METEOR too (needs Java, and a minute).", rich_help_panel=OF_CAPTIONS
        ),
    ] = False,
    decoding: SpeechDecoding = "prefix",
) -> None:
    """How good a run's model is.

    Of a text the perplexity, read as one stream with the state carried; of images and reviews the
    error; of captions perplexity and scores; of speech the error rate of labels; of a series how
    near the next rows, and forecasts, come to what came. Then what the weights take to describe
    and, for the training set with draws, the targets too.

    bayesrnn evaluate runs/ptb --split test

    bayesrnn evaluate runs/ptb --samples 10 --json

    bayesrnn evaluate runs/ptb --dynamic search --by-variance

    bayesrnn evaluate runs/ptb --sharpened --look search

    bayesrnn evaluate runs/reviews --samples 50 --predictions reviews.csv

    bayesrnn evaluate runs/ett --samples 20 --horizon 24

    bayesrnn evaluate runs/ptb-1 runs/ptb-2 runs/ptb-3
    """
    _check(
        weights, samples, streams, sharpened, look, look_at, looks, dynamic, segment, by_variance
    )
    if temperature is not None and sharpened:
        raise typer.BadParameter("--temperature is not for --sharpened; leave out one of them")
    heat = temperature_of(temperature)
    rate = None if dynamic is None else rate_of(dynamic)
    width = None if look is None else width_of(look)
    drawn = weights == "sample" or (bool(samples) and not sharpened)
    count = (samples or 10) if drawn else 0
    check_file(predictions)
    place = choose_device(device, "--device")
    model, own = load_runs(runs, place)
    run, recipe = runs[0], with_data(runs[0], own, data)
    if drawn:
        check_draws(run, model, "--samples and --weights sample")
    given, streams = streams, streams or 1
    flags = {"--sharpened": sharpened, "--streams": streams != 1, "--dynamic": dynamic is not None}
    flags |= {"--predictions": predictions is not None, "--beam": beam != 3, "--meteor": meteor}
    flags |= {"--decoding": decoding != "prefix", "--horizon": horizon is not None}
    flags |= {"--temperature": temperature is not None}
    for flag in ("--sharpened", "--dynamic"):
        if flags[flag]:
            only_run(runs, flag)
    check_flags(recipe, {**flags, "--season": season is not None, "--split all": split == "all"})
    if season is not None and horizon is None:
        raise typer.BadParameter("--season is of --horizon; give that too")
    task = build_task(recipe, place, vocabulary_of(run, recipe))
    note_data(runs, recipe, task.digest, data)
    if isinstance(task, LanguageTask):
        note_unknown(recipe.data.path, task.corpus.part(split), task.vocabulary)
    note_part(recipe, data, split)
    note_split(heat, split)
    generator = torch.Generator(place).manual_seed(seed)
    ahead: Backtest | None = None
    with watching() as watch:
        if isinstance(task, CaptionTask):
            scores = evaluate_run(model, task, split, count, beam, seed, predictions, meteor, watch)
        elif isinstance(task, SpeechTask):
            scores = _speech(model, task, split, count, generator, decoding, watch)
        elif isinstance(task, LabelledTask):
            scores = _labelled(model, task, split, count, generator, predictions, heat, watch)
        elif isinstance(task, SeriesTask):
            scores = series_scores(model, task, split, count, generator, streams, watch)
            if horizon is not None:
                ahead = series_ahead(model, task, split, horizon, season, count, seed, watch)
        elif sharpened:
            assert isinstance(model, Bayesian)
            assert rate != "search"
            shape = given or task.batches.streams, segment or task.batches.unroll
            of_looks = (drawn, width, look_at or LOOK_AT, looks, samples or 1)
            scores = sharpened_bound(
                model, task, split, shape, *of_looks, rate or 0.0, by_variance, seed, watch
            )
        elif rate is not None:
            assert isinstance(model, Bayesian)
            unroll = segment or recipe.train.unroll
            how = (rate, by_variance, heat)
            scores = dynamic_text(model, task, split, streams, unroll, *how, watch)
        else:
            scores = text(model, task, split, count, generator, streams, heat, watch)
    tried, columns = scores.pop("search", None), scores.pop("columns", None)
    temperatures = scores.pop("temperatures", None)
    figures: dict[str, Any] = {**names_of(runs, as_json), "split": split}
    figures |= {} if sharpened else {"weights": "sample" if count else "mean"}
    figures |= scores
    if isinstance(model, Bayesian) and not sharpened:
        figures |= _description(model, task, split, scores.get("expected_nll"), generator)
    if as_json:
        more = {"search": tried, "temperatures": temperatures, "columns": columns}
        more |= {"ahead": ahead and asdict(ahead)}
        figures |= {key: value for key, value in more.items() if value is not None}
        show(figures, "", True)
        return
    unasked = _unasked(figures, sharpened)
    unit = "text, sharpened: an upper bound" if sharpened else task.unit
    show({k: v for k, v in figures.items() if k not in unasked}, f"{split} {unit}", False)
    if tried is not None:
        _show_trials("look" if sharpened else "rate", tried)
    if temperatures is not None:
        _show_trials("temperature", temperatures)
    if columns is not None:
        _show_cases(columns, "the next row, by column, in its own unit")
    if ahead is not None:
        _show_ahead(ahead)


def _check(
    weights: Weights | None,
    samples: int | None,
    streams: int | None,
    sharpened: bool,
    look: str | None,
    look_at: str | None,
    looks: int,
    dynamic: str | None,
    segment: int | None,
    by_variance: bool,
) -> None:
    """Refuse flags that do not go together."""
    if samples == 0 and (sharpened or weights == "sample"):
        raise typer.BadParameter(
            "--samples 0 is the posterior mean; leave out --weights sample and --sharpened, or "
            "give 1 or more"
        )
    if look_at is not None and look is None:
        raise typer.BadParameter("--look-at is of --look; give that too")
    if by_variance and dynamic is None:
        raise typer.BadParameter("--by-variance is of --dynamic; give that too")
    if sharpened:
        if dynamic == "search":
            raise typer.BadParameter("with --sharpened, --dynamic takes a rate, and no search")
        if look is None and (streams is not None or segment is not None):
            raise typer.BadParameter(
                "the looks of the training are for cuts of its shape: with --streams or --segment "
                "give --look WIDTH, or search, too"
            )
        return
    if look is not None:
        raise typer.BadParameter("--look is of --sharpened; give that too")
    if looks != 1:
        raise typer.BadParameter("--looks is of --sharpened; give that too")
    if weights == "mean" and samples:
        raise typer.BadParameter("--samples draws weights; leave out --weights mean")
    if dynamic is not None and (weights == "sample" or samples):
        raise typer.BadParameter("--dynamic moves the posterior mean; leave out draws")
    if dynamic is None and segment is not None:
        raise typer.BadParameter("--segment is of --dynamic and --sharpened; give one of them too")


def _unasked(figures: Mapping[str, Any], sharpened: bool) -> set[str]:
    """What was not asked for: learning, figures by draws, those of the targets' description."""
    if sharpened:
        return set() if figures["rate"] else {"rate", "by_variance"}
    unasked: set[str] = set()
    if figures.get("expected_nll") is None:
        unasked |= {"expected_nll", "expected_perplexity"}
    if figures.get("error_nats") is None:
        unasked |= {"error_nats", "error_bits", "total_nats", "total_bits"}
        unasked |= {"uniform_bits", "ratio"}
    return unasked


def _description(
    model: Bayesian,
    task: Task,
    split: str,
    expected_nll: float | None,
    generator: torch.Generator,
) -> dict[str, float | None]:
    """The description length: of the weights; and of the training targets, where they were read by
    draws (the mean's loss is no code length). Weights are sent once, for the training set."""
    cost = complexity(model, generator)
    if expected_nll is None or split != "train":
        return asdict(describe(None, cost, 0, None, model.weight_count))
    targets = task.batches.targets
    error = expected_nll * targets
    return asdict(describe(error, cost, targets, task.labels, model.weight_count))


def _speech(
    model: Network,
    task: SpeechTask,
    split: str,
    count: int,
    generator: torch.Generator,
    decoding: Search,
    watch: Watch,
) -> dict[str, Any]:
    """The scores of utterances."""
    loader = task.utterances(split)
    advance = watch(f"reading {split}", loader.targets * len(each_draw(model, count)))
    found = evaluate_speech(model, loader, decoder(decoding), count, generator, advance)
    return {"decoding": decoding, **asdict(found)}


def _labelled(
    model: Network,
    task: LabelledTask,
    split: str,
    count: int,
    generator: torch.Generator,
    predictions: Path | None,
    temperature: OrSearch | None,
    watch: Watch,
) -> dict[str, Any]:
    """The scores of images or reviews; each one's prediction into a file, where one is given."""
    output, heat = output_of(task, model, count, generator, temperature, watch)
    examples = task.examples(split)
    advance = watch(f"reading {split}", examples.targets * len(each_draw(model, count)))
    found, prediction = evaluate_labelled(model, examples, output, count, generator, advance)
    if predictions is not None:
        write_predictions(predictions, task.data.part(split), prediction, found.mixture)
    return {
        "examples": found.examples,
        "samples": count,
        **found.scores,
        "expected_nll": found.expected_nll,
        **heat.figures,
        **heat.tried,
    }


def _show_cases(cases: Sequence[Mapping[str, Any]], title: str) -> None:
    """A line a case."""
    table = table_of(*(key.replace("_", " ") for key in cases[0]), title=title)
    for case in cases:
        table.add_row(*map(shown, case.values()))
    print_table(table)


def _show_ahead(ahead: Backtest) -> None:
    title = (
        f"forecasts from {ahead.origins} places, after {ahead.past} rows each, in units of a "
        "column's spread"
    )
    scores = ["rmse", "persistence", "crps", "coverage_90"]
    if ahead.season > 1:
        title += f"; seasonal: the last {ahead.season} rows, over and over"
        scores.insert(2, "seasonal")
    found = asdict(ahead)
    steps = range(len(ahead.rmse))
    _show_cases([{"step": s + 1, **{key: found[key][s] for key in scores}} for s in steps], title)


def _show_trials(what: str, tried: Sequence[Mapping[str, Any]]) -> None:
    table = table_of(what, "valid perplexity", title=f"{what}s tried")
    for trial in tried:
        value = "diverged" if trial["perplexity"] is None else shown(trial["perplexity"])
        table.add_row(f"{trial[what]:g}", value)
    print_table(table)
