"""Pruning by signal to noise (Graves 2011, Section 7).

A weight whose mean is small beside its standard deviation can be set to 0 at little cost: its
density there is close to the highest it has. What is pruned stays exactly 0, in the mean, in every
draw and in further training, whatever the optimiser; the KL is that of the weights left.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isfinite, log
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesrnn.bayes import Bayesian, Delta
from bayesrnn.bayes.block import Block
from bayesrnn.errors import Invalid, UserError, require
from bayesrnn.recipe import Recipe, read_recipe
from bayesrnn.saving import TENSORS, has_vocabulary, load, load_vocabulary, save
from bayesrnn.train.loop import train
from bayesrnn.train.run import Run
from bayesrnn.train.schedule import learning_rate

SAFE_THRESHOLD = (2 * log(2**0.5)) ** 0.5
"""Graves' rule of thumb, 0.83 (eq. 20): a weight pruned below it is, at 0, no less probable than an
average draw of it."""

Masks = dict[Block, dict[str, Tensor]]


# --- which weights matter -------------------------------------------------------------------------


def signal_to_noise(model: Bayesian) -> dict[str, Tensor]:
    """|mean| / standard deviation of each drawn weight, by name; 0 where it was pruned.

    For a point, which has no deviation, and for one of 0, it is |mean| alone.

    >>> net = torch.nn.Linear(2, 1, bias=False)
    >>> _ = torch.nn.init.constant_(net.weight, -0.1)
    >>> from bayesrnn import Gaussian, Normal, bayesianize
    >>> signal_to_noise(bayesianize(net, Gaussian(scale=0.05), Normal()))["weight"]
    tensor([[2.0000, 2.0000]])
    """
    found: dict[str, Tensor] = {}
    for block in model.each_block():
        keep = None if block.keep is None else block.layout.split(block.keep)
        for name, (loc, scale) in block.moments().items():
            ratio = loc.abs() if scale is None else loc.abs() / _noise(scale)
            found[name] = ratio if keep is None else ratio.where(keep[name], 0.0)
    return found


def _noise(scale: Tensor) -> Tensor:
    return scale.where(scale > 0, 1.0)


def prune(
    model: Bayesian,
    fraction: float | None = None,
    threshold: float | None = None,
    per_tensor: bool = False,
) -> None:
    """Set the weights of lowest signal to noise to 0 for good.

    Either a `fraction` of all weights (those pruned before count among them), or all whose signal
    to noise is below the `threshold` (`SAFE_THRESHOLD`, say). With `per_tensor` the fraction is of
    each tensor, not of all together.
    """
    for block, masks in choose(model, fraction, threshold, per_tensor).items():
        block.prune(block.layout.join(masks))


@torch.no_grad()
def choose(
    model: Bayesian,
    fraction: float | None = None,
    threshold: float | None = None,
    per_tensor: bool = False,
) -> Masks:
    """Which weights `prune` would leave: True for those, by block and name."""
    require(
        (
            (fraction is None) != (threshold is None),
            "fraction",
            "or a threshold must be given, and not both",
        ),
        (
            fraction is None or 0 <= fraction <= 1,
            "fraction",
            f"must be between 0 and 1, got {fraction}",
        ),
        (
            threshold is None or (threshold >= 0 and isfinite(threshold)),
            "threshold",
            f"must be a finite number, 0 or above, got {threshold}",
        ),
    )
    ratios, left = signal_to_noise(model), kept(model)
    ratios = {name: ratio.where(left[name], -1.0) for name, ratio in ratios.items()}
    if fraction is None:
        assert threshold is not None
        keep = {name: ratio >= threshold for name, ratio in ratios.items()}
    elif per_tensor:
        keep = {name: _highest([ratio], fraction)[0] for name, ratio in ratios.items()}
    else:
        _check_comparable(model)
        keep = dict(zip(ratios, _highest(list(ratios.values()), fraction), strict=True))
    return {
        block: {w.name: keep[w.name] & left[w.name] for w in block.layout.weights}
        for block in model.each_block()
    }


def _highest(ratios: list[Tensor], fraction: float) -> list[Tensor]:
    """True but for the lowest `fraction` of them all; among equals the first go first."""
    flat = torch.cat([ratio.reshape(-1).cpu() for ratio in ratios])
    keep = torch.ones(len(flat), dtype=torch.bool)
    keep[flat.argsort(stable=True)[: round(fraction * len(flat))]] = False
    parts = keep.split([ratio.numel() for ratio in ratios])
    return [p.view(r.shape).to(r.device) for p, r in zip(parts, ratios, strict=True)]


def _check_comparable(model: Bayesian) -> None:
    points = {block.posterior.std(block.parameters_by_name) is None for block in model.each_block()}
    if len(points) > 1:
        raise Invalid(
            [
                (
                    "per_tensor",
                    "must be set: some weights are points, which have no signal to noise to rank "
                    "beside the others'",
                )
            ]
        )


# --- what it costs ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Pruned:
    """A row of Graves' Table 2: how many weights are left, the same in percent, the error then,
    and the mean bits of a weight left (None where it has no description length)."""

    fraction: float
    weights: int
    percent: float
    error: float
    bits_per_weight: float | None


def pruning_curve(
    model: Bayesian,
    score: Callable[[Bayesian], float],
    fractions: Iterable[float] = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95),
    per_tensor: bool = False,
    generator: torch.Generator | None = None,
) -> list[Pruned]:
    """What `score` says of the model with each fraction pruned; the model is left as it was.

    `score` gets the pruned model: the perplexity of a text or the error on a test set, say. The
    bits are exact where the KL is, otherwise of one draw.
    """
    total = sum(block.layout.count for block in model.each_block())
    rows = []
    for fraction in fractions:
        with _pruned(model, choose(model, fraction, None, per_tensor)):
            left = model.weight_count
            bits = bits_per_weight(model, generator)
            rows.append(Pruned(fraction, left, 100 * left / total, float(score(model)), bits))
    return rows


def bits_per_weight(model: Bayesian, generator: torch.Generator | None = None) -> float | None:
    """The KL in bits, over the weights left; None where it is undefined or none is left."""
    if not model.has_description_length or model.weight_count == 0:
        return None
    with model.weights("sample"), torch.no_grad():
        model.resample(generator=generator)
        return model.kl().item() / log(2) / model.weight_count


@contextmanager
def _pruned(model: Bayesian, masks: Masks) -> Iterator[None]:
    """The model without those weights, for a while: nothing is forgotten."""
    before = {block: (block.keep, block.noise) for block in masks}
    for block, named in masks.items():
        block.mask(block.layout.join(named))
    try:
        yield
    finally:
        for block, (keep, noise) in before.items():
            block.mask(keep)
            block.noise = noise


@dataclass(frozen=True)
class Dead:
    """The rows and columns of a matrix in which every weight was pruned."""

    rows: Tensor
    columns: Tensor


def dead_units(model: Bayesian) -> dict[str, Dead]:
    """The dead rows and columns of each drawn matrix, by name.

    A row of a layer's weight is all that enters one unit (one gate of it, in an LSTM), a column all
    that leaves one input.
    """
    found: dict[str, Dead] = {}
    for name, keep in kept(model).items():
        if keep.dim() == 2:
            rows, columns = (~keep.any(dim=d) for d in (1, 0))
            found[name] = Dead(rows.nonzero().flatten(), columns.nonzero().flatten())
    return found


def kept(model: Bayesian) -> dict[str, Tensor]:
    """True for each drawn weight that is left, by name."""
    found: dict[str, Tensor] = {}
    for block in model.each_block():
        loc = block.parameters_by_name["loc"]
        keep = torch.ones_like(loc, dtype=torch.bool) if block.keep is None else block.keep
        found |= block.layout.split(keep)
    return found


# --- a run ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PrunedRun:
    """What `prune_run` has left: of the weights, and of the file (`dense_bytes`: all the means)."""

    all_weights: int
    weights: int
    percent: float
    bits_per_weight: float | None
    dead_rows: int
    dead_columns: int
    file_bytes: int
    dense_bytes: int
    file_ratio: float
    epochs: list[dict[str, Any]]
    """The figures of each epoch of retraining."""


def prune_run(
    run: Path,
    out: Path,
    fraction: float | None = None,
    threshold: float | None = None,
    per_tensor: bool = False,
    retrain: int = 0,
    scale: bool = False,
    data: str = "",
    quiet: bool = False,
) -> PrunedRun:
    """Prune a run's model into a new run, smaller on disk: means alone, unless `scale` is set.

    `retrain` is for how many epochs to train what is left, at the rate the run ended with.
    """
    target = Run(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not empty; choose another --out")
    recipe = read_recipe(run / "recipe.toml") if (run / "recipe.toml").exists() else None
    model = load(run)
    assert recipe is not None  # `load` has said so where there is none
    if retrain:
        recipe = _retraining(run, recipe, model, retrain)
    if data:
        recipe = replace(recipe, data=replace(recipe.data, path=str(Path(data).resolve())))
    prune(model, fraction, threshold, per_tensor)
    with target.locked():
        target.prepare(recipe, fresh=False)
        if has_vocabulary(recipe):
            load_vocabulary(run).save(target.vocabulary)
        if not retrain:
            save(model, target.model, mean_only=not scale)
    epochs: list[dict[str, Any]] = []
    if retrain:
        epochs = train(recipe, out, quiet=quiet, start=model).epochs
        if not scale:
            save(model, target.model, mean_only=True)
    total = sum(block.layout.count for block in model.each_block())
    dead = dead_units(model).values()
    size = (target.model / TENSORS).stat().st_size
    dense = _dense_bytes(model)
    return PrunedRun(
        total,
        model.weight_count,
        100 * model.weight_count / total,
        bits_per_weight(model, torch.Generator(next(model.parameters()).device).manual_seed(1)),
        sum(len(d.rows) for d in dead),
        sum(len(d.columns) for d in dead),
        size,
        dense,
        size / dense,
        epochs,
    )


def _retraining(run: Path, recipe: Recipe, model: Bayesian, epochs: int) -> Recipe:
    """The run's recipe for some more epochs, at the rate its last one had."""
    given = recipe.posterior
    named = [given] if not isinstance(given, Mapping) else list(given.values())
    points = all(isinstance(block.posterior, Delta) for block in model.each_block())
    if points and not any(isinstance(posterior, Delta) for posterior in named):
        raise UserError(
            f"{run} holds means alone, so it cannot be retrained; prune it with --scale"
        )
    old = recipe.train
    lr = learning_rate(old.epochs - 1, old.lr, old.decay, old.decay_after)
    new = replace(old, epochs=epochs, lr=lr, decay=1.0, decay_after=0, max_steps=0)
    return replace(recipe, train=new)


def _dense_bytes(model: Bayesian) -> int:
    """Of all means and all other tensors, without a file's head."""
    means = [loc for loc, _ in model.moments().values()]
    return sum(t.numel() * t.element_size() for t in (*means, *model.module.state_dict().values()))
