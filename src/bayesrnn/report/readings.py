"""What is measured of a run on its data: a reader for each kind of data, and all give the same
names of figures."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bayesrnn.bayes import Bayesian
from bayesrnn.data import StreamLoader, TextData, load_text
from bayesrnn.evaluate import (
    TextUncertainty,
    caption_uncertainty,
    coverage,
    entropy_gap,
    evaluate_captions,
    evaluate_labelled,
    evaluate_speech,
    evaluate_text,
    labelled_uncertainty,
    reliability,
    reversed_text,
    risk_coverage,
    text_uncertainty,
    unigram_entropy,
)
from bayesrnn.evaluate.caption_scores import can_score
from bayesrnn.evaluate.ctc import greedy, prefix_search
from bayesrnn.evaluate.reader import Watch
from bayesrnn.evaluate.series import evaluate_series, read_series
from bayesrnn.evaluate.uncertainty import joined, reading_cost
from bayesrnn.prune import mixed, pruning_curve
from bayesrnn.recipe import Recipe
from bayesrnn.report.captions import speak
from bayesrnn.report.choices import Choices
from bayesrnn.report.forecasts import look_ahead
from bayesrnn.report.passage import TOP, Passage, passage_of_file, passage_of_split
from bayesrnn.saving import load_vocabulary, vocabulary_of
from bayesrnn.train.captioning import CaptionTask
from bayesrnn.train.series import SeriesTask
from bayesrnn.train.speech import SpeechTask
from bayesrnn.train.task import EVALUATION_TOKENS, LabelledTask, LanguageTask
from bayesrnn.watched import Figure, watched_figure

FRACTIONS = (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98)
"""Pruned for the curve."""
UNRANKED = "Its numbers are not right or wrong, so there is no risk against coverage."
UNSCORED = "Its captions have no BLEU and CIDEr; the scorers are in the extra bayesrnn[captions]."

SCORES = {
    "per": "label errors, %",
    "error_percent": "error, %",
    "nll": "NLL, nats each",
    "rmse": "RMSE",
}
"""What their keys do not say, and their units."""


def in_words(key: str) -> str:
    """A figure's name, for people.

    >>> in_words("valid_per"), in_words("test_rmse")
    ('valid label errors, %', 'test RMSE')
    """
    split, _, score = key.partition("_")
    return f"{split} {SCORES.get(score, score)}"


class Subject(NamedTuple):
    """What is read, and how: a run, its model and recipe; by which numbers of draws, in which
    device and part of the data; and who is told of the progress."""

    run: Path
    model: Bayesian
    recipe: Recipe
    counts: Sequence[int]
    choices: Choices
    watch: Watch


def read_text(subject: Subject) -> dict[str, Any]:
    """A text and its reverse, the passage, and the pruning curve on the validation text."""
    run, model, recipe, counts, choices, watch = subject
    settings, vocabulary = recipe.data, load_vocabulary(run)
    assert isinstance(settings, TextData)
    corpus = load_text(settings, vocabulary)

    def stream(ids: NDArray[np.int32], name: str) -> StreamLoader:
        return StreamLoader(ids, 1, EVALUATION_TOKENS, device=choices.device, name=name)

    def read(ids: NDArray[np.int32], what: str, top: int = 1) -> dict[int, TextUncertainty]:
        loader = stream(ids, what)
        advance = watch(f"reading {what}", reading_cost(model, loader.targets, counts))
        return text_uncertainty(model, loader, counts, choices.seed, top, advance)

    ids = _first(corpus.ids[choices.split], choices.tokens)
    text = read(ids, f"the {choices.split} text", TOP)
    backwards = read(reversed_text(ids), "it reversed")
    most = text[max(counts)]
    passage = passage_of_split(most, ids, settings, vocabulary, choices.split)
    if choices.text is not None:
        tokens = passage_of_file(choices.text, settings)
        own = read(np.array(vocabulary.encode(tokens), np.int32), str(choices.text), TOP)
        passage = Passage(str(choices.text), tokens, own[max(counts)], settings.tokens, vocabulary)
    valid = stream(_first(corpus.ids["valid"], choices.tokens), "valid")
    advance = watch("pruning", valid.targets * len(FRACTIONS))
    return {
        "digest": corpus.digest,
        "unit": settings.unit,
        "read": len(most.targets),
        "measured": (
            f"{'the first' if len(ids) < len(corpus.ids[choices.split]) else 'all'} "
            f"{len(most.targets):,} {settings.unit} of the {choices.split} text"
        ),
        "by_draws": [
            {
                **each.summary(),
                **asdict(each.calibration()),
                "entropy_reversed": backwards[count].total.mean().item(),
                "entropy_gap": entropy_gap(each, backwards[count]).gap,
            }
            for count, each in text.items()
        ],
        "unigram": unigram_entropy(ids),
        "reliability": reliability(most.max_probability, most.correct),
        "risk": risk_coverage(-most.max_probability, ~most.correct),
        "passage": passage,
        "pruning": pruning_curve(
            model,
            lambda m: evaluate_text(m, valid, advance=advance).perplexity,
            FRACTIONS,
            mixed(model),
        ),
        "pruning_score": "validation perplexity",
        "watched": LanguageTask.watched,
    }


def read_labelled(subject: Subject) -> dict[str, Any]:
    """Images or reviews: calibration, of classes or of numbers, and the pruning curve."""
    run, model, recipe, counts, choices, watch = subject
    task = LabelledTask(recipe, choices.device, vocabulary_of(run, recipe))
    examples = task.examples(choices.split)
    targets = task.data.splits[choices.split].y.cpu()
    by_draws: list[dict[str, Any]] = []
    for count in sorted(counts):
        advance = watch(f"reading the {choices.split} set", examples.targets * max(count, 1))
        generator = torch.Generator(choices.device).manual_seed(choices.seed)
        result, mean = evaluate_labelled(model, examples, task.output, count, generator, advance)
        by_draws.append({**labelled_uncertainty(result, mean, targets), **result.scores})
    notes = [f"It is trained on {task.unit}: there is no text to shade, and none to reverse."]
    diagram = risk = held = None
    if result.mixture is None:
        confidence, predicted = mean.mean.cpu().max(dim=1)
        diagram = reliability(confidence, predicted == targets)
        risk = risk_coverage(-confidence, predicted != targets)
    else:
        held = coverage(result.mixture.cdf(targets.to(choices.device)))
        notes.append(UNRANKED)
    return {
        "digest": task.digest,
        "unit": task.unit,
        "read": examples.targets,
        "measured": f"all {examples.targets:,} {task.unit} of the {choices.split} set",
        "by_draws": by_draws,
        "reliability": diagram,
        "risk": risk,
        "coverage": held,
        **_pruned(model, watched_figure(task), watch),
        "watched": task.watched,
        "notes": notes,
    }


def read_captions(subject: Subject) -> dict[str, Any]:
    """What people said of pictures, read by draws; what the model says of them; and the pruning
    curve."""
    run, model, recipe, counts, choices, watch = subject
    task = CaptionTask(recipe, choices.device, load_vocabulary(run))
    pictures = task.pictures(choices.split)
    loader = task.captions(choices.split, words=choices.tokens)
    advance = watch("reading what people said", reading_cost(model, loader.targets, counts))
    found = caption_uncertainty(model, loader, task.vectors, counts, choices.seed, advance=advance)
    by_draws = {count: joined(each) for count, each in found.items()}
    most = by_draws[max(counts)]
    watched = task.watched.partition("_")[0]
    held_out = task.captions(watched, words=choices.tokens)
    advance = watch("pruning", held_out.targets * len(FRACTIONS))
    every = "all" if len(loader.counts) == sum(map(len, pictures.captions)) else "the first"
    notes = [] if can_score() else [UNSCORED]
    return {
        "digest": task.digest,
        "unit": task.unit,
        "read": loader.targets,
        "measured": (
            f"{every} {loader.targets:,} words that people said of the {choices.split} pictures"
        ),
        "by_draws": [
            {**each.summary(), **asdict(each.calibration())} for each in by_draws.values()
        ],
        "reliability": reliability(most.max_probability, most.correct),
        "risk": risk_coverage(-most.max_probability, ~most.correct),
        "spoken": speak(model, task, choices.split, max(counts), choices.seed, watch),
        "pruning": pruning_curve(
            model,
            lambda m: evaluate_captions(m, held_out, task.vectors, advance=advance).perplexity,
            FRACTIONS,
            mixed(model),
        ),
        "pruning_score": f"{watched} perplexity",
        "watched": task.watched,
        "notes": notes,
    }


def read_speech(subject: Subject) -> dict[str, Any]:
    """Utterances: the loss, the label error rate, and the pruning curve."""
    run, model, recipe, counts, choices, watch = subject
    task = SpeechTask(recipe, choices.device, load_vocabulary(run))
    heard = task.utterances(choices.split)
    by_draws: list[dict[str, Any]] = []
    for count in sorted(counts):
        advance = watch(f"reading the {choices.split} set", heard.targets * max(count, 1))
        generator = torch.Generator(choices.device).manual_seed(choices.seed)
        found = evaluate_speech(model, heard, prefix_search, count, generator, advance)
        by_draws.append(asdict(found))
    return {
        "digest": task.digest,
        "unit": task.unit,
        "read": heard.targets,
        "measured": f"all {heard.targets:,} {task.unit} of the {choices.split} set",
        "by_draws": by_draws,
        "reliability": None,
        "risk": None,
        **_pruned(model, watched_figure(task, decode=greedy), watch),
        "watched": task.watched,
        "notes": [
            "It is trained on speech: there is no text to shade, and none to reverse. An "
            f"utterance's {task.unit} are scored all together, by every way to say them, so there "
            "are no single predictions to be calibrated on; `bayesrnn transcribe --samples 10` "
            "says how sure each label is. Labels are read off by prefix search; in the curves of "
            "learning and pruning, by the best path."
        ],
    }


def read_series_run(subject: Subject) -> dict[str, Any]:
    """A series: calibration one step ahead, forecasts of many, and the pruning curve."""
    _, model, recipe, counts, choices, watch = subject
    task = SeriesTask(recipe, choices.device)
    rows = task.stream(choices.split)
    by_draws: list[dict[str, Any]] = []
    for count in sorted(counts):
        advance = watch(f"reading the {choices.split} rows", rows.targets * max(count, 1))
        generator = torch.Generator(choices.device).manual_seed(choices.seed)
        reading = read_series(model, rows, count, generator, advance)
        by_draws.append(asdict(evaluate_series(reading, count)))
    values = by_draws[-1]["values"]
    return {
        "digest": task.digest,
        "unit": task.unit,
        "read": values,
        "measured": (
            f"all {values:,} {task.unit} of the {choices.split} rows, each one step ahead, in "
            "units of its column's spread"
        ),
        "by_draws": by_draws,
        "reliability": None,
        "risk": None,
        "coverage": coverage(reading.mixture.cdf(reading.targets)),
        "ahead": look_ahead(model, task, choices, max(counts), watch),
        **_pruned(model, watched_figure(task), watch),
        "watched": task.watched,
        "notes": [
            "It is trained on a series: there is no text to shade, and none to reverse.",
            UNRANKED,
        ],
    }


def _pruned(model: Bayesian, figure: Figure, watch: Watch) -> dict[str, Any]:
    """The pruning curve of what a run is judged by."""
    advance = watch("pruning", len(FRACTIONS))
    curve = pruning_curve(
        model, figure.of, FRACTIONS, mixed(model), advance=lambda point: advance(1)
    )
    return {"pruning": curve, "pruning_score": in_words(figure.name)}


def _first(ids: NDArray[np.int32], tokens: int) -> NDArray[np.int32]:
    """As many ids as `tokens` predictions need; 0: all."""
    return np.array(ids[: tokens + 1] if tokens else ids)
