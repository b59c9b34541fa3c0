"""What `evaluate` does with a run on text."""

import math
from dataclasses import asdict
from functools import partial
from typing import Any, Literal

import torch

from bayesrnn.bayes import Bayesian, Network
from bayesrnn.commands.options import OrSearch, or_search
from bayesrnn.commands.temperature import heat_of
from bayesrnn.errors import Invalid
from bayesrnn.evaluate import dynamic_evaluate, evaluate_text, search_rate
from bayesrnn.evaluate.draws import each_draw
from bayesrnn.evaluate.dynamic import RATES
from bayesrnn.evaluate.reader import Watch
from bayesrnn.evaluate.sharpened import WIDTHS, evaluate_sharpened, looking, search_look
from bayesrnn.train.task import LanguageTask


def text(
    model: Network,
    task: LanguageTask,
    split: str,
    count: int,
    generator: torch.Generator,
    streams: int,
    temperature: OrSearch | None,
    watch: Watch,
) -> dict[str, Any]:
    """The perplexity of a text, at the mean or over `count` draws."""
    draws = len(each_draw(model, count))
    valid = partial(task.stream, "valid", streams)
    heat = heat_of(temperature, model, valid, count, generator, watch)
    loader = task.stream(split, streams)
    advance = watch(f"reading {split}", loader.targets * draws)
    found = evaluate_text(model, loader, count, generator, advance, heat.value)
    return {"streams": streams, **asdict(found), **heat.figures, **heat.tried}


def dynamic_text(
    model: Bayesian,
    task: LanguageTask,
    split: str,
    streams: int,
    unroll: int,
    rate: OrSearch,
    by_variance: bool,
    temperature: OrSearch | None,
    watch: Watch,
) -> dict[str, Any]:
    """Dynamic evaluation, and the rates and the temperatures tried if there was a search."""
    tried: dict[str, Any] = {}
    if rate == "search":
        loader = task.stream("valid", streams, unroll)
        advance = watch("trying rates on valid", loader.targets * len(RATES))
        search = search_rate(model, loader, RATES, advance=advance, by_variance=by_variance)
        rate, tried = search.rate, {"search": [asdict(trial) for trial in search.tried]}
    valid = partial(task.stream, "valid", streams, unroll)
    how = {"rate": rate, "by_variance": by_variance}
    heat = heat_of(temperature, model, valid, 0, None, watch, **how)
    loader = task.stream(split, streams, unroll)
    advance = watch(f"reading {split}", loader.targets)
    found = dynamic_evaluate(model, loader, rate, 0.0, advance, by_variance, heat.value)
    return {"streams": streams, **asdict(found), **heat.figures, **heat.tried, **tried}


def sharpened_bound(
    model: Bayesian,
    task: LanguageTask,
    split: str,
    shape: tuple[int, int],
    drawn: bool,
    look: OrSearch | None,
    look_at: str,
    looks: int,
    draws: int,
    rate: float,
    by_variance: bool,
    seed: int,
    watch: Watch,
) -> dict[str, Any]:
    """A sharpened model's bound in cuts of this `shape` (streams and steps), phi at its mean or
    `drawn`, with the looks of the training (None) or of another width, `looks` at each cut and
    `draws` around them, and the widths tried if there was a search."""
    own = (task.batches.streams, task.batches.unroll)
    key = "train.streams" if shape == own else "--streams"
    loader = task.stream(split, *shape, key=key)
    generator = torch.Generator(task.device).manual_seed(seed)
    chosen: dict[str, Any] = {}
    tried: dict[str, Any] = {}
    if look is not None:
        _check_looks(model, look_at)
    if look == "search":
        valid = task.stream("valid", *shape, key=key)
        advance = watch("trying looks on valid", valid.targets * len(WIDTHS))
        search = search_look(model, valid, look_at, WIDTHS, seed, advance, looks, draws)
        look, tried = search.look, {"search": [asdict(trial) for trial in search.tried]}
    if look is not None:
        model = looking(model, look_at, look, shape[0])
        chosen = {"look": look, "look_at": look_at}
    advance = watch(f"reading {split}", loader.targets)
    around: Literal["mean", "draw"] = "draw" if drawn else "mean"
    how = (rate, by_variance, looks, draws)
    found = evaluate_sharpened(model, loader, around, generator, advance, *how)
    return {**chosen, **asdict(found), **tried}


def _check_looks(model: Bayesian, look_at: str) -> None:
    """Say in the command's words what --look-at cannot name."""
    try:
        looking(model, look_at, 1.0, 1)
    except Invalid as error:
        raise Invalid([("--look-at", message) for _, message in error.problems]) from error


def rate_of(dynamic: str) -> OrSearch:
    """What --dynamic gives."""
    return or_search(dynamic, lambda rate: 0 <= rate < math.inf, "--dynamic is a rate, 0 or above")


def width_of(look: str) -> OrSearch:
    """What --look gives."""
    return or_search(look, lambda width: 0 < width < math.inf, "--look is a width above 0")
