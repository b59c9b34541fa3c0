"""Pruned runs: a smaller run, its retraining, and what pruning costs a run.

A pruned run is a run like any other. `pruning.json` in its folder says what it was made from and
how, so that the same command goes on with it where it was interrupted.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bayesrnn.bayes import Bayesian
from bayesrnn.errors import UserError, require
from bayesrnn.files import expanded, write_atomic
from bayesrnn.prune import (
    Pruned,
    Ranking,
    Structure,
    bits_per_weight,
    prune,
    pruning_curve,
    structure,
)
from bayesrnn.recipe import Recipe
from bayesrnn.saving import (
    TENSORS,
    dense_bytes,
    load,
    load_recipe,
    means_alone,
    save_own,
    vocabulary_of,
)
from bayesrnn.train.loop import Outcome, choose_device, train
from bayesrnn.train.run import Run, shown, with_data
from bayesrnn.train.schedule import learning_rate
from bayesrnn.watched import run_task, watched_figure

# --- one pruned run ---------------------------------------------------------------------------


@dataclass(frozen=True)
class PrunedRun:
    """What `prune_run` has left: the weights, the size of the file, and the retraining.

    `file_bytes` are those of the new file, `dense_bytes` those of all the means, and `file_ratio`
    is the first over the second.
    """

    all_weights: int
    weights: int
    percent: float
    bits_per_weight: float | None
    file_bytes: int
    dense_bytes: int
    file_ratio: float
    structure: Structure
    finished: bool
    """False if retraining was interrupted; the same call goes on with it."""
    epochs: list[dict[str, Any]]
    """The figures of each epoch of retraining."""
    kept_epoch: int | None
    """The one of these epochs whose model the run has; None if there was none."""


@dataclass(frozen=True)
class Pruning:
    """How a run is pruned: see `prune`; for how many epochs to `retrain`, from which rate on (None:
    see `retraining`); whether the scales are kept."""

    fraction: float | None = None
    threshold: float | None = None
    per_tensor: bool = False
    by: Ranking = "snr"
    retrain: int = 0
    lr: float | None = None
    scale: bool = False

    def __post_init__(self) -> None:
        require(
            (self.retrain >= 0, "retrain", f"must be 0 or above, got {self.retrain}"),
            (self.lr is None or self.lr > 0, "lr", f"must be above 0, got {self.lr}"),
            (self.lr is None or self.retrain > 0, "lr", "is of retraining: set retrain too"),
        )


def prune_run(
    run: str | Path,
    out: str | Path,
    fraction: float | None = None,
    threshold: float | None = None,
    per_tensor: bool = False,
    retrain: int = 0,
    scale: bool = False,
    data: str = "",
    quiet: bool = False,
    by: Ranking = "snr",
    lr: float | None = None,
    device: str = "auto",
    warn: Callable[[str], None] | None = None,
) -> PrunedRun:
    """Prune a run's model into a new run, which is smaller on disk.

    - `fraction`, `threshold`, `per_tensor`, `by`: what to prune, as for `prune`.
    - `retrain`, `lr`: for how many epochs to train what is left, and from which rate on (see
      `retraining`). If that is interrupted, the same call goes on with it.
    - `scale`: keep the scales too; otherwise the new run has means alone.
    - `data`: where the data are, if they were moved.
    - `quiet`, `device`: of retraining: print nothing; the device ("auto": the recipe's own).
    - `warn`: called with one line if the data to retrain on have changed since the run's training.
    """
    run, out = expanded(run), expanded(out)
    how = Pruning(fraction, threshold, per_tensor, by, retrain, lr, scale)
    model, outcome = _prune_into(run, out, how, data, quiet, device, warn)
    total = model.full_count
    size, dense = (out / "model" / TENSORS).stat().st_size, dense_bytes(model)
    return PrunedRun(
        total,
        model.weight_count,
        100 * model.weight_count / total,
        bits_per_weight(model, _draws(model)),
        size,
        dense,
        size / dense,
        structure(model),
        outcome is None or outcome.finished,
        [] if outcome is None else outcome.epochs,
        None if outcome is None else outcome.kept or None,
    )


def _prune_into(
    run: Path,
    out: Path,
    how: Pruning,
    data: str,
    quiet: bool,
    device: str,
    warn: Callable[[str], None] | None = None,
) -> tuple[Bayesian, Outcome | None]:
    """Write the pruned run; the model as it ended, and how its retraining did, if there was one."""
    choose_device(device, "--device")
    target = Run(out)
    made = {"run": str(run.resolve()), **asdict(how)}
    _check_folder(target, made)
    model = load(run)
    recipe = load_recipe(run)
    if means_alone(model, recipe) and (how.retrain or how.scale):
        problem = (
            "so it cannot be retrained; write it with --scale"
            if how.retrain
            else "no scales that could be kept; leave out --scale"
        )
        raise UserError(f"{run} holds means alone, {problem}")
    if how.retrain:
        recipe = retraining(recipe, how.retrain, how.lr)
        if device != "auto":
            recipe = replace(recipe, train=replace(recipe.train, device=device))
    if data or how.retrain:
        recipe = with_data(run, recipe, data)
    task = None
    if how.retrain:
        task = run_task(run, recipe, choose_device(recipe.train.device), data, warn)
    prune(model, how.fraction, how.threshold, how.per_tensor, how.by)
    with target.locked():
        restored = target.prepare(recipe, fresh=False)
        if restored and warn is not None:
            warn(restored)
        write_atomic(target.pruning, (json.dumps(made, indent=1) + "\n").encode())
        vocabulary = vocabulary_of(run, recipe)
        if vocabulary is not None:
            vocabulary.save(target.vocabulary)
        if not target.model.exists():  # otherwise the same call goes on with its retraining
            save_own(model, target.model, mean_only=not how.scale)
    if not how.retrain:
        return model, None
    outcome = train(recipe, out, quiet=quiet, start=model, task=task)
    if outcome.finished and not how.scale:
        save_own(model, target.model, mean_only=True)
    return model, outcome


def _check_folder(target: Run, made: Mapping[str, Any]) -> None:
    """Refuse a folder that holds anything but the beginnings of this very pruning: one whose model
    was not written yet, or one that is retrained. (A recipe alone is compared later.)"""
    path = target.path
    if not path.exists() or (path.is_dir() and set(target.contents()) <= {target.recipe}):
        return
    try:
        found = json.loads(target.pruning.read_text())
    except (OSError, ValueError):
        found = None
    if found == made and (made["retrain"] or not target.model.exists()):
        return
    if isinstance(found, dict) and found != made:
        keys = [key for key in made if found.get(key) != made[key]]
        other = f"{keys[0]} is {shown(found.get(keys[0]))} there and {shown(made[keys[0]])} here"
        raise UserError(f"{path} holds another pruning: {other}; choose another --out")
    raise UserError(f"{path} exists and is not empty; choose another --out")


def retraining(recipe: Recipe, epochs: int, lr: float | None = None) -> Recipe:
    """The recipe for some more epochs of what is left after pruning.

    The rate falls evenly (by one factor per epoch) from `lr` to the one that the recipe ended with.
    Without `lr` it starts at a tenth of the recipe's first one, or at its last if that is more.
    """
    old = recipe.train
    last = learning_rate(old.epochs - 1, old.lr, old.decay, old.decay_after)
    first = max(last, old.lr / 10) if lr is None else lr
    decay = min(1.0, last / first) ** (1 / (epochs - 1)) if epochs > 1 else 1.0
    new = replace(
        old,
        epochs=epochs,
        lr=first,
        decay=decay,
        decay_after=1,
        warm_up=0,
        average_after=0,
        look_after=0,
        max_steps=0,
    )
    return replace(recipe, train=new)


def _draws(model: Bayesian) -> torch.Generator:
    """Of the draw that bits are counted at, where they are not exact."""
    return torch.Generator(next(model.parameters()).device).manual_seed(1)


# --- what pruning costs a run -----------------------------------------------------------------


@dataclass(frozen=True)
class RunCurve:
    """A run's watched figure at each fraction or threshold pruned.

    `figure` is its name: "valid_perplexity", say.
    """

    figure: str
    points: tuple[Pruned, ...]


def run_curve(
    run: str | Path,
    fractions: Sequence[float] | None = None,
    thresholds: Sequence[float] | None = None,
    split: str | None = None,
    streams: int | None = None,
    per_tensor: bool = False,
    by: Ranking = "snr",
    retrain: int = 0,
    lr: float | None = None,
    out: str | Path | None = None,
    data: str = "",
    device: str = "auto",
    quiet: bool = True,
    advance: Callable[[Pruned], None] | None = None,
    warn: Callable[[str], None] | None = None,
) -> RunCurve:
    """The figure that the run's training watched, at each fraction or threshold pruned.

    The run itself is never changed.

    - `fractions`, `thresholds`, `per_tensor`, `by`: as for `pruning_curve`.
    - `split`, `streams`: what to read; by default what training validated on.
    - `data`: where the run's data are, if they were moved.
    - `retrain`, `lr`, `out`: also retrain each pruned network for so many epochs (see
      `retraining`), into a folder of its own below `out`: all columns of Graves' Table 2.
    - `advance`: called with every point.
    - `warn`: called with one line if the run's data have changed since its training.
    """
    require((not retrain or out is not None, "out", "must be given to retrain into"))
    run, folder = expanded(run), None if out is None else expanded(out)
    place = choose_device(device, "--device")
    model = load(run).to(place)
    recipe = with_data(run, load_recipe(run), data)
    figure = watched_figure(run_task(run, recipe, place, data, warn), split, streams)

    def retrained(point: Pruned) -> Pruned:
        if folder is None or point.percent == 100:
            return replace(point, retrained=point.error)
        kind = "fraction" if point.threshold is None else "threshold"
        value: float = getattr(point, kind)
        how = Pruning(
            per_tensor=per_tensor, by=by, retrain=retrain, lr=lr, scale=True, **{kind: value}
        )
        short = f"{value:g}"
        name = f"{kind}-{short if float(short) == value else value}"
        after, outcome = _prune_into(run, folder / name, how, data, quiet, device)
        assert outcome is not None
        if not outcome.finished:
            raise KeyboardInterrupt  # which the training took as a sign to save, and said so
        bits = bits_per_weight(after, _draws(after))
        error = figure.of(after.to(place))
        return replace(point, retrained=error, retrain_epochs=retrain, bits_per_weight=bits)

    points = pruning_curve(
        model,
        figure.of,
        fractions,
        per_tensor,
        _draws(model),
        thresholds,
        by,
        None if retrain else advance,
    )
    if retrain:
        for index, point in enumerate(points):
            points[index] = retrained(point)
            if advance is not None:
                advance(points[index])
    return RunCurve(figure.name, tuple(points))
