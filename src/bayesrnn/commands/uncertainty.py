"""`bayesrnn uncertainty`."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bayesrnn.bayes import Bayesian
from bayesrnn.commands.captions import uncertainty_of_run
from bayesrnn.commands.options import (
    AsJson,
    Data,
    Device,
    DrawSeed,
    RunFolder,
    check_flags,
    draw_counts,
    recipe_of,
)
from bayesrnn.commands.tables import columns, show, shown, watching
from bayesrnn.data import CaptionData, StreamLoader, TextData, encode_file, load_text
from bayesrnn.errors import UserError
from bayesrnn.evaluate import (
    Categorical,
    TextUncertainty,
    detect,
    entropy_gap,
    evaluate_labelled,
    reversed_text,
    shuffled_text,
    text_uncertainty,
    unigram_entropy,
    write_tokens,
)
from bayesrnn.evaluate.calibration import BINS, calibration
from bayesrnn.evaluate.uncertainty import WINDOW, check_window, reading_cost
from bayesrnn.saving import has_vocabulary, load, load_vocabulary
from bayesrnn.train.captioning import CaptionTask
from bayesrnn.train.loop import choose_device
from bayesrnn.train.task import EVALUATION_TOKENS, LabelledTask


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
    seed: DrawSeed = 1,
    data: Data = "",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """What a run's model does not know of a text: entropy, its aleatoric and epistemic parts, and
    calibration; the entropy gap, and whether other texts stand out. Of images and reviews: the
    means and calibration. Of captions: whether unsure ones are bad ones, and whether a wrong
    picture or noise makes the model less sure.

    bayesrnn uncertainty runs/ptb --samples 0,1,10 --gap

    bayesrnn uncertainty runs/ptb --text letter.txt --out letter.csv
    """
    counts = draw_counts(samples)
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
    model, recipe = load(run).to(place), recipe_of(run, data)
    settings = recipe.data
    if isinstance(settings, CaptionData):
        check_flags(recipe, {"--text": text is not None, "--out": out is not None, "--gap": gap})
        captions = CaptionTask(recipe, place, load_vocabulary(run))
        _caption_uncertainty(run, model, captions, split or "test", counts, seed, as_json)
        return
    if not isinstance(settings, TextData):
        check_flags(recipe, {"--text": text is not None, "--out": out is not None, "--gap": gap})
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
            line = bar.add_task(f"reading {which}", total=reading_cost(loader.targets, counts))
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
    show(figures, "text", False)
    columns(by_draws, "by the number of draws (0: the mean), nats a token")
    if detections:
        keys = ("entropy_auroc", "entropy_aupr", "information_auroc", "information_aupr")
        heads = ("other text", "draws", *(key.replace("_", "\n") for key in keys))
        table = Table(*heads, title=f"other texts, told apart by windows of {window or WINDOW}")
        for case in detections:
            table.add_row(case["other"], str(case["samples"]), *(shown(case[k]) for k in keys))
        Console().print(table)


def _caption_uncertainty(
    run: Path,
    model: Bayesian,
    task: CaptionTask,
    split: str,
    counts: Sequence[int],
    seed: int,
    as_json: bool,
) -> None:
    """`uncertainty` of captions."""
    with watching() as watch:
        by_draws = [uncertainty_of_run(model, task, split, count, seed, watch) for count in counts]
    figures = {"run": str(run), "split": split, "pictures": len(task.pictures(split))}
    if as_json:
        print(json.dumps({**figures, "by_draws": by_draws}))
        return
    show(figures, "captions", False)
    columns(by_draws, "by the number of draws (0: the mean), nats a word")


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
    show(figures, task.unit, False)
    columns(by_draws, "by the number of draws (0: the mean), nats an example")


def _scores(text: TextUncertainty, bins: int) -> dict[str, Any]:
    """What calibration adds to a text's summary."""
    scores = asdict(text.calibration(bins))
    return {key: scores[key] for key in ("brier", "accuracy", "ece", "adaptive_ece", "aurc")}


def _gap(text: TextUncertainty, backwards: TextUncertainty) -> dict[str, float]:
    """What the reverse adds to a text's summary, which has its entropy as the total."""
    found = entropy_gap(text, backwards)
    return {"total_reversed": found.entropy_reversed, "entropy_gap": found.gap}
