"""Pruning by signal to noise (Graves 2011, Section 7).

A weight whose mean is small compared with its standard deviation can be set to 0 at little cost:
its density there is close to the highest it has. A pruned weight stays exactly 0, in the mean, in
every draw and in further training, whatever the optimiser; the KL is that of the weights left.

For what pruning does to a run, see pruned_run.py.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite, log
from typing import Literal, get_args

import torch
from torch import Tensor

from bayesrnn.bayes import Bayesian, check_bayesian
from bayesrnn.bayes.block import Block
from bayesrnn.description import complexity
from bayesrnn.errors import require

SAFE_THRESHOLD = (2 * log(2**0.5)) ** 0.5
"""Graves' rule of thumb, 0.83 (eq. 20): a weight whose signal to noise is below it is no less
probable at 0 than an average draw of it is."""

Ranking = Literal["snr", "magnitude"]
"""What weights are pruned by. "snr" is the signal to noise |mean| / standard deviation; Graves'
density at 0 beside that at the mode (eq. 19), and Laplace's estimate of what the free energy rises
by, mean^2 / (2 standard deviation^2), rank alike."""

Masks = dict[Block, dict[str, Tensor]]


# --- which weights matter -------------------------------------------------------------------------


def signal_to_noise(model: Bayesian) -> dict[str, Tensor]:
    """|mean| / standard deviation of each drawn weight, by name; 0 for a pruned weight.

    For a point, which has no deviation, and for a deviation of 0, it is |mean| alone.

    >>> net = torch.nn.Linear(2, 1, bias=False)
    >>> _ = torch.nn.init.constant_(net.weight, -0.1)
    >>> from bayesrnn import Gaussian, Normal, bayesianize
    >>> signal_to_noise(bayesianize(net, Gaussian(scale=0.05), Normal()))["weight"]
    tensor([[2.0000, 2.0000]])
    """
    check_bayesian(model)
    found: dict[str, Tensor] = {}
    for block in model.each_block():
        keep = None if block.keep is None else block.layout.split(block.keep)
        for name, (loc, scale) in block.moments().items():
            ratio = loc.abs() if scale is None else loc.abs() / scale.where(scale > 0, 1.0)
            found[name] = ratio if keep is None else ratio.where(keep[name], 0.0)
    return found


def _order_by(model: Bayesian, by: Ranking) -> dict[str, Tensor]:
    """What weights are ranked by, lowest first to go; -1 where it was pruned, so that it goes
    first."""
    if by == "snr":
        values = signal_to_noise(model)
    else:
        values = {name: loc.abs() for name, (loc, _) in model.moments().items()}
    left = kept(model)
    return {name: value.where(left[name], -1.0) for name, value in values.items()}


def prune(
    model: Bayesian,
    fraction: float | None = None,
    threshold: float | None = None,
    per_tensor: bool = False,
    by: Ranking = "snr",
) -> None:
    """Set the weights of lowest signal to noise to 0 for good.

    Give either `fraction` or `threshold`.

    - `fraction`: prune this fraction of all weights; those pruned before count among them.
    - `threshold`: prune all weights whose signal to noise is below it (`SAFE_THRESHOLD`, say).
    - `per_tensor`: take the fraction of each tensor, not of all together.
    - `by`: "snr", or "magnitude" to rank by |mean| alone. Neither this nor `per_tensor` goes with a
      threshold.
    """
    for block, masks in choose(model, fraction, threshold, per_tensor, by).items():
        block.prune(block.layout.join(masks))


def choose(
    model: Bayesian,
    fraction: float | None = None,
    threshold: float | None = None,
    per_tensor: bool = False,
    by: Ranking = "snr",
) -> Masks:
    """Which weights `prune` would leave: True for those, by block and name."""
    check_bayesian(model)
    fractions = [] if fraction is None else [fraction]
    thresholds = [] if threshold is None else [threshold]
    require(
        (
            len(fractions) + len(thresholds) == 1,
            "fraction",
            "or a threshold must be given, and not both",
        )
    )
    return next(_choices(model, fractions, thresholds, per_tensor, by))


@torch.no_grad()
def _choices(
    model: Bayesian,
    fractions: Sequence[float],
    thresholds: Sequence[float],
    per_tensor: bool,
    by: Ranking,
) -> Iterator[Masks]:
    """What each fraction, and then each threshold, would leave; the weights are sorted once."""
    require(
        (
            by in get_args(Ranking),
            "by",
            f"must be one of {', '.join(get_args(Ranking))}, got {by!r}",
        ),
        *(
            (0 <= fraction <= 1, "fraction", f"must be between 0 and 1, got {fraction}")
            for fraction in fractions
        ),
        *(
            (
                threshold >= 0 and isfinite(threshold),
                "threshold",
                f"must be a finite number, 0 or above, got {threshold}",
            )
            for threshold in thresholds
        ),
        (
            not thresholds or (by == "snr" and not per_tensor),
            "threshold",
            "is of the signal to noise, the same for all tensors: leave out by and per_tensor",
        ),
    )
    if not per_tensor and by == "snr":
        _check_comparable(model, bool(thresholds))
    values, left = _order_by(model, by), kept(model)

    def masks(keep: dict[str, Tensor]) -> Masks:
        return {
            block: {w.name: keep[w.name] & left[w.name] for w in block.layout.weights}
            for block in model.each_block()
        }

    ranked = _ranked(values, per_tensor) if fractions else {}
    for fraction in fractions:
        yield masks({name: place >= round(fraction * n) for name, (place, n) in ranked.items()})
    for threshold in thresholds:
        yield masks({name: value >= threshold for name, value in values.items()})


def _ranked(values: dict[str, Tensor], per_tensor: bool) -> dict[str, tuple[Tensor, int]]:
    """Each one's place, lowest first, and among how many: those of its tensor, or all."""
    if per_tensor:
        return {name: (_places([value])[0], value.numel()) for name, value in values.items()}
    total = sum(value.numel() for value in values.values())
    places = _places(list(values.values()))
    return {name: (place, total) for name, place in zip(values, places, strict=True)}


def _places(values: list[Tensor]) -> list[Tensor]:
    """Each one's place among them all, lowest first; among equals the first come first."""
    device = values[0].device
    flat = torch.cat([value.reshape(-1).to(device) for value in values])
    places = torch.empty_like(flat, dtype=torch.int64)
    places[flat.argsort(stable=True)] = torch.arange(len(flat), device=device)
    parts = places.split([value.numel() for value in values])
    return [p.view(v.shape).to(v.device) for p, v in zip(parts, values, strict=True)]


def pruning_order(model: Bayesian) -> dict[str, Tensor]:
    """For each weight the fraction of all weights (of its tensor's, where the model is `mixed`)
    pruned with it, by signal to noise: it is left by `prune(fraction)` where this is above the
    fraction. 0 where it was pruned before."""
    values = _order_by(model, "snr")
    return {
        name: ((place + 1).double() / total).where(values[name] >= 0, 0.0)
        for name, (place, total) in _ranked(values, mixed(model)).items()
    }


def mixed(model: Bayesian) -> bool:
    """Whether some weights are points and others are not, so that only those of one tensor can be
    ranked together by signal to noise."""
    return len({scale is None for _, scale in model.moments().values()}) > 1


def _check_comparable(model: Bayesian, by_threshold: bool) -> None:
    why = "some weights are points, which have no signal to noise to rank beside the others'"
    name, what = "per_tensor", f"must be set (--per-tensor): {why}"
    if by_threshold:
        name, what = (
            "threshold",
            f"cannot be set: {why}; use a fraction and per_tensor (--per-tensor)",
        )
    require(
        (not mixed(model), name, what),
        (
            not (by_threshold and model.all_points),
            "threshold",
            "cannot be set: all weights are points, which have no signal to noise; use a fraction",
        ),
    )


# --- what it costs ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Pruned:
    """A point of a pruning curve: a row of Graves' Table 2.

    - `fraction`, `threshold`: the part pruned, and the threshold it was pruned by (None where that
      was the fraction).
    - `weights`, `percent`: how many weights are left, and the same in percent.
    - `error`: the score with these weights.
    - `bits_per_weight`: the mean bits of a weight left (None where it has no description length).
    - `retrained`, `retrain_epochs`: the error after so many more epochs; the bits are then those
      after them.
    """

    fraction: float
    weights: int
    percent: float
    error: float
    bits_per_weight: float | None
    threshold: float | None = None
    retrained: float | None = None
    retrain_epochs: int = 0


FRACTIONS = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95)


def pruning_curve(
    model: Bayesian,
    score: Callable[[Bayesian], float],
    fractions: Iterable[float] | None = None,
    per_tensor: bool = False,
    generator: torch.Generator | None = None,
    thresholds: Iterable[float] | None = None,
    by: Ranking = "snr",
    advance: Callable[[Pruned], None] | None = None,
) -> list[Pruned]:
    """The score of a model at each fraction, or each threshold, pruned.

    The model is left as it was.

    - `score`: gets the pruned model and returns a number: the perplexity of a text, say, or the
      error on a test set.
    - `fractions`, `thresholds`: what to prune; without both, the `FRACTIONS` 0, 0.5, 0.7, 0.8, 0.9
      and 0.95.
    - `per_tensor`, `by`: as for `prune`.
    - `generator`: of the draw that bits are counted at; they are exact where the KL is.
    - `advance`: called with each point as soon as it is there.
    """
    check_bayesian(model)
    if fractions is None and thresholds is None:
        fractions = FRACTIONS
    given, limits = list(fractions or ()), list(thresholds or ())
    total = model.full_count
    wanted: list[tuple[float | None, float | None]] = [(fraction, None) for fraction in given]
    wanted += [(None, limit) for limit in limits]
    rows: list[Pruned] = []
    choices = _choices(model, given, limits, per_tensor, by)
    for (fraction, limit), masks in zip(wanted, choices, strict=True):
        with _pruned(model, masks):
            left = model.weight_count
            part = 1 - left / total if fraction is None else fraction
            bits = bits_per_weight(model, generator)
            error = float(score(model))
        rows.append(Pruned(part, left, 100 * left / total, error, bits, limit))
        if advance is not None:
            advance(rows[-1])
    return rows


def bits_per_weight(model: Bayesian, generator: torch.Generator | None = None) -> float | None:
    """The KL in bits, over the weights left; None where it is undefined or none is left."""
    nats = complexity(model, generator) if model.weight_count else None
    return None if nats is None else nats / log(2) / model.weight_count


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


# --- rows and units that died -----------------------------------------------------------------


@dataclass(frozen=True)
class Dead:
    """The rows and columns of a matrix in which every weight was pruned, by their numbers."""

    rows: Tensor
    columns: Tensor


def dead_units(model: Bayesian) -> dict[str, Dead]:
    """The dead rows and columns of each drawn matrix, by name.

    A row of a layer's weight is all that enters one unit (in an LSTM, one gate of it); a column is
    all that leaves one input.
    """
    found: dict[str, Dead] = {}
    for name, keep in kept(model).items():
        if keep.dim() == 2:
            rows, columns = (~keep.any(dim=d) for d in (1, 0))
            found[name] = Dead(rows.nonzero().flatten(), columns.nonzero().flatten())
    return found


@dataclass(frozen=True)
class Matrix:
    """What is left of a drawn matrix."""

    name: str
    weights: int
    left: int
    rows: int
    dead_rows: int
    columns: int
    dead_columns: int


@dataclass(frozen=True)
class Units:
    """What is left of a recurrent layer of `units` units.

    `unfed` counts units that nothing enters any more (except a bias), `unheard` those that tell
    their own layer nothing, and `unfed_gates`, by gate, those with a gate that nothing enters.
    """

    layer: str
    units: int
    unfed: int
    unheard: int
    unfed_gates: dict[str, int]


@dataclass(frozen=True)
class Structure:
    """The rows, columns and units that pruning has left dead, by matrix and by layer."""

    matrices: tuple[Matrix, ...]
    layers: tuple[Units, ...]


GATES = {4: ("input", "forget", "cell", "output"), 3: ("reset", "update", "new"), 1: ("unit",)}
"""By how many there are, in the order of nn.LSTM, nn.GRU and nn.RNN."""


def structure(model: Bayesian) -> Structure:
    """What pruning has left of a model's matrices and recurrent layers."""
    masks, dead = kept(model), dead_units(model)
    matrices = [
        Matrix(
            name,
            masks[name].numel(),
            int(masks[name].sum()),
            masks[name].shape[0],
            len(gone.rows),
            masks[name].shape[1],
            len(gone.columns),
        )
        for name, gone in dead.items()
    ]
    names = (re.fullmatch(r"(.*)weight_hh_(l\d+(_reverse)?)", name) for name in dead)
    layers = [
        _units(masks, match[1], match[2])
        for match in names
        if match and _gates(masks[match[0]]) in GATES  # else it has projections
    ]
    return Structure(tuple(matrices), tuple(layers))


def _gates(keep: Tensor) -> float:
    """Of a recurrent matrix [gates x units, units]."""
    return keep.shape[0] / keep.shape[1]


def _units(masks: dict[str, Tensor], path: str, layer: str) -> Units:
    inner = masks[f"{path}weight_hh_{layer}"]  # [gates x units, units]
    outer = masks.get(f"{path}weight_ih_{layer}")
    fed = inner.any(dim=1) | (outer.any(dim=1) if outer is not None else True)
    units = inner.shape[1]
    gates = fed.view(-1, units)
    return Units(
        f"{path}{layer}",
        units,
        int((~gates.any(dim=0)).sum()),
        int((~inner.any(dim=0)).sum()),
        {name: int((~gate).sum()) for name, gate in zip(GATES[len(gates)], gates, strict=True)},
    )


def kept(model: Bayesian) -> dict[str, Tensor]:
    """True for each drawn weight that is left, by name."""
    check_bayesian(model)
    found: dict[str, Tensor] = {}
    for block in model.each_block():
        loc = block.parameters_by_name["loc"]
        keep = torch.ones_like(loc, dtype=torch.bool) if block.keep is None else block.keep
        found |= block.layout.split(keep)
    return found
