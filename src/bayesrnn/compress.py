"""Smaller files: every drawn weight's mean is rounded to a multiple of one step, and coded.

A posterior says how exactly a weight must be known: noise of its sigma was there in all of
training. So means can be rounded coarsely, most of them to 0. What is left of them are few
different whole numbers, of which a general coder makes a bit or two per weight (packing.py). This
is the description length of Graves (2011) as a file, at a fixed precision for all weights and with
a code that knows nothing of the prior.

None of these was better than one step for all weights: a step for each tensor, steps in proportion
to sigma, rounding that counts bits (docs/compression.md).
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bayesrnn.bayes import Bayesian, check_bayesian
from bayesrnn.errors import UserError, require
from bayesrnn.files import expanded
from bayesrnn.packing import check_step, coded_bytes, from_levels, to_levels
from bayesrnn.saving import (
    TENSORS,
    dense_bytes,
    has_own_priors,
    load,
    load_recipe,
    means_alone,
    save_own,
    vocabulary_of,
)
from bayesrnn.train.loop import choose_device
from bayesrnn.train.run import Run, with_data
from bayesrnn.watched import run_task, watched_figure

STEPS = (0.02, 0.05, 0.1, 0.2, 0.5)
PER_OCTAVE = 4
"""A search tries steps that are this many to a factor of two."""
OCTAVES = 10
"""How far below the largest weight a search goes."""
MOST_TRIES = 1 + (PER_OCTAVE * OCTAVES).bit_length() + PER_OCTAVE - 1
"""How many steps a search tries at the most."""


@dataclass(frozen=True)
class Compressed:
    """What rounding all means to multiples of `step` costs, and how small the model is then.

    - `error`: the score of the rounded model.
    - `zeros`: the part of the weights that is 0.
    - `coded_bytes`, `coded_bits_per_weight`: the length of the code of all drawn weights, in bytes
      and in bits per weight.
    """

    step: float
    error: float
    zeros: float
    coded_bytes: int
    coded_bits_per_weight: float


@contextmanager
def rounded(model: Bayesian, step: float) -> Iterator[None]:
    """The model as a file coded with this step would have its means, for a while."""
    means = [block.parameters_by_name["loc"] for block in model.each_block()]
    before = [loc.detach().clone() for loc in means]
    try:
        with torch.no_grad():
            for loc in means:
                loc.copy_(from_levels(to_levels(loc, step), step, loc.dtype))
        yield
    finally:
        with torch.no_grad():
            for loc, exact in zip(means, before, strict=True):
                loc.copy_(exact)


def compression_curve(
    model: Bayesian,
    score: Callable[[Bayesian], float],
    steps: Iterable[float] = STEPS,
    advance: Callable[[Compressed], None] | None = None,
) -> list[Compressed]:
    """The score of a model rounded to each of `steps`, and how small it is then.

    The model is left as it was. `score` is as for `pruning_curve`; `advance` is called with each
    point.
    """
    check_bayesian(model)
    wanted, rows = list(steps), []
    for step in wanted:
        check_step(step)
    for step in wanted:
        with rounded(model, step):
            error = float(score(model))
        levels = _levels(model, step)
        size, count = sum(map(coded_bytes, levels)), sum(map(Tensor.numel, levels))
        rows.append(Compressed(step, error, _zeros(levels), size, 8 * size / count))
        if advance is not None:
            advance(rows[-1])
    return rows


def coarsest_step(
    model: Bayesian,
    score: Callable[[Bayesian], float],
    most: float,
    advance: Callable[[float, float], None] | None = None,
) -> tuple[float, float]:
    """The coarsest step, within a fifth, at which `score` is at most `most`, and the score there.

    The search is by bisection, and then up to an octave further: scores waver a little from step to
    step, and one that is just above `most` hides those behind it. What is found was measured.
    `score` is as for `pruning_curve`; `advance` is called with each step tried, and its score.
    """
    check_bayesian(model)
    sizes = [float(block.mean().detach().abs().max()) for block in model.each_block()]
    largest = max(sizes)
    require(
        (all(map(math.isfinite, sizes)), "model", "must be finite, and is not: train it again"),
        (any(sizes), "model", "must have some weight that is not 0: give a step instead"),
    )
    errors: dict[int, float] = {}

    def step(place: int) -> float:  # three digits, as it is shown
        return float(f"{largest * 2 ** (-place / PER_OCTAVE):.3g}")

    def fits(place: int) -> bool:
        if place not in errors:
            with rounded(model, step(place)):
                errors[place] = float(score(model))
            if advance is not None:
                advance(step(place), errors[place])
        return errors[place] <= most

    coarse, fine = 0, PER_OCTAVE * OCTAVES
    if not fits(fine):
        raise UserError(
            f"even steps of {step(fine):g} end at {errors[fine]:.6g}, above {most:.6g}; allow more"
        )
    while coarse < fine:
        middle = (coarse + fine) // 2
        coarse, fine = (coarse, middle) if fits(middle) else (middle + 1, fine)
    further = range(max(fine - PER_OCTAVE, 0), fine)  # coarsest first
    found = next((place for place in further if fits(place)), fine)
    return step(found), errors[found]


def _levels(model: Bayesian, step: float) -> list[Tensor]:
    return [to_levels(loc, step) for loc, _ in model.moments().values()]


def _zeros(levels: list[Tensor]) -> float:
    """The part of them that is 0."""
    return sum(int((level == 0).sum()) for level in levels) / sum(map(Tensor.numel, levels))


# --- a run ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CompressedRun:
    """What `compress_run` has written.

    `file_bytes` are those of the new file, `dense_bytes` those of all the means as they were, and
    `file_ratio` is the first over the second. `figure` is the name of the watched figure
    ("valid_perplexity", say), `before` and `after` are its values. These three are None if the step
    was given, so that nothing had to be read.
    """

    step: float
    weights: int
    zeros: float
    file_bytes: int
    dense_bytes: int
    file_ratio: float
    figure: str | None
    before: float | None
    after: float | None


@dataclass(frozen=True)
class CompressionCurve:
    """A run's watched figure, as it is and at each step of rounding.

    `figure` is its name ("valid_perplexity", say), `before` its value as the run is, and
    `dense_bytes` the size of all the means.
    """

    figure: str
    before: float
    dense_bytes: int
    points: tuple[Compressed, ...]


def compress_run(
    run: str | Path,
    out: str | Path,
    step: float | None = None,
    allow: float = 0.01,
    scale: bool = False,
    data: str = "",
    device: str = "auto",
    advance: Callable[[float, float], None] | None = None,
    warn: Callable[[str], None] | None = None,
) -> CompressedRun:
    """Round and code a run's model into a new run, which is smaller on disk.

    - `step`: the step to round to. Without it, it is the coarsest at which the figure that training
      watched is at most `allow` above what it was: 0.01 for one percent. (A loss in nats may rise
      by log(1 + allow), as the log of a perplexity would.)
    - `scale`: keep the scales too; otherwise the new run has means alone.
    - `data`, `device`: where the run's data are, if they were moved, and the device to read them
      on.
    - `advance`: called with each step tried, and its figure.
    - `warn`: called with one line if the run's data have changed since its training, and if the
      step is chosen by the test set, because there is none to validate on.
    """
    require((allow >= 0, "allow", f"must be 0 or above, got {allow}"))
    run, target = expanded(run), Run(expanded(out))
    place = choose_device(device, "--device")
    _check_folder(target)
    recipe, model = load_recipe(run), load(run).to(place)
    if scale and means_alone(model, recipe):
        raise UserError(f"{run} holds means alone, no scales that could be kept; leave out --scale")
    if scale and has_own_priors(model):
        raise UserError(
            f"the prior of {run} is where it began, which takes more room than the rounded "
            "weights; leave out --scale"
        )
    if data or step is None:
        recipe = with_data(run, recipe, data)
    figure = before = after = None
    if step is None:
        figure = watched_figure(run_task(run, recipe, place, data, warn))
        if figure.name.startswith("test_") and warn is not None:
            warn(
                f"{run} has no validation set, so its test set chooses the step; give --step to "
                "choose it yourself"
            )
    with target.locked():  # now, not after all the work
        if figure is not None:
            before = figure.of(model)
            most = _most(figure.name, before, allow)
            step, after = coarsest_step(model, figure.of, most, advance)
        assert step is not None
        zeros = _zeros(_levels(model, step))  # which refuses a wrong step
        target.prepare(recipe, fresh=False)
        vocabulary = vocabulary_of(run, recipe)
        if vocabulary is not None:
            vocabulary.save(target.vocabulary)
        save_own(model, target.model, mean_only=not scale, step=step)
    size, dense = (target.model / TENSORS).stat().st_size, dense_bytes(model)
    name = None if figure is None else figure.name
    count = model.full_count
    return CompressedRun(step, count, zeros, size, dense, size / dense, name, before, after)


def compression_of_run(
    run: str | Path,
    steps: Iterable[float] = STEPS,
    data: str = "",
    device: str = "auto",
    advance: Callable[[Compressed], None] | None = None,
    warn: Callable[[str], None] | None = None,
) -> CompressionCurve:
    """The figure that the run's training watched, as it is and at each step of rounding.

    The run itself is never changed. `data`, `device` and `warn` are as for `compress_run`;
    `advance` is called with each point.
    """
    run = expanded(run)
    place = choose_device(device, "--device")
    model = load(run).to(place)
    recipe = with_data(run, load_recipe(run), data)
    name, score = watched_figure(run_task(run, recipe, place, data, warn))
    points = compression_curve(model, score, steps, advance)
    return CompressionCurve(name, score(model), dense_bytes(model), tuple(points))


def _most(figure: str, before: float, allow: float) -> float:
    if figure.endswith("_nll"):  # which may be below 0
        return before + math.log1p(allow)
    return before * (1 + allow)


def _check_folder(target: Run) -> None:
    """Refuse a folder that holds anything but the beginnings of such a run. (A recipe is compared
    later.)"""
    begun = {target.recipe, target.vocabulary}
    if target.path.exists() and not (target.path.is_dir() and set(target.contents()) <= begun):
        raise UserError(f"{target.path} exists and is not empty; choose another --out")
