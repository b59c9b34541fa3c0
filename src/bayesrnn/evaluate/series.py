"""Series: the next row, scored over a whole series; and forecasts of many rows, by paths.

One step ahead, the distribution of a value is a mixture of Normals, one per draw. Further ahead
there is no such formula: a path goes on from what it has drawn itself. Each draw of the weights
(and masks) reads the rows so far and is then followed along several paths, so that what the noise
does (aleatoric) and what the draws disagree about (epistemic) can be told apart.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bayesrnn.bayes import Network, members_of
from bayesrnn.data.batching import StreamLoader
from bayesrnn.data.series import SeriesData
from bayesrnn.errors import UserError, require
from bayesrnn.evaluate.baselines import repeated
from bayesrnn.evaluate.draws import MOST_DRAWS, drawn, each_draw, evaluating
from bayesrnn.evaluate.intervals import calibration_of_numbers, coverage
from bayesrnn.evaluate.mixture import NormalMixture
from bayesrnn.evaluate.outputs import Normal
from bayesrnn.evaluate.perplexity import Cut, read_through
from bayesrnn.evaluate.reader import Advance, readers
from bayesrnn.models.layers import as_state, as_tensors
from bayesrnn.models.series import Forecaster

OUTPUT = Normal()
"""What a forecaster's output means."""
PAST = 500
"""Rows that a forecast reads before it begins, unless the forecaster's season has more."""
PATHS = 500
"""Of a forecast, over all draws: the 90 % interval of 25 would hold 83 % of what comes."""
READ_STEPS = 512
"""Rows a cut of what is read; the state is carried, so it changes memory only."""


# --- one step ahead ----------------------------------------------------------------------------


@dataclass(frozen=True)
class SeriesEvaluation:
    """The scores of predictions one step ahead, in units of each column's spread.

    - `nll`: in nats per value. For the value in its own unit, add the log of the spread.
    - `rmse`, `persistence`: the root mean squared error, and that of repeating the row before.
    - `crps`: the continuous ranked probability score.
    - `coverage_50`, `coverage_90`, `calibration_error`: what central intervals hold.
    - `width_90`: the mean width of the 90 % intervals.
    - `total`, `aleatoric`, `epistemic`: mean variances, total = aleatoric + epistemic.
    - `samples`: 0 for the posterior mean. With draws, densities are averaged; `expected_nll`
      averages their logs instead, and is None for the mean.
    """

    values: int
    samples: int
    nll: float
    expected_nll: float | None
    rmse: float
    persistence: float
    crps: float
    coverage_50: float
    coverage_90: float
    width_90: float
    calibration_error: float
    total: float
    aleatoric: float
    epistemic: float


@dataclass(frozen=True, eq=False)
class Reading:
    """What `read_series` predicted: the `mixture` [D, N, C] of the rows `targets` [N, C].

    `before` are the rows that came just before each.
    """

    mixture: NormalMixture
    targets: Tensor
    before: Tensor


def read_series(
    model: Network,
    loader: StreamLoader,
    samples: int = 0,
    generator: torch.Generator | None = None,
    advance: Advance | None = None,
) -> Reading:
    """The predicted distribution of every row of the loader, given the rows before it.

    `samples` is the number of draws, 0 for the posterior mean. Each draw keeps its weights and its
    own state over the whole series. `advance` is called with the number of targets after every cut.
    """
    raws: list[Tensor] = []
    with evaluating(model):
        for member in each_draw(model, samples):
            with drawn(member, samples, generator):
                cuts = read_through(loader, _cut(member), advance)
                raws.append(torch.cat([raw.flatten(0, 1).clone() for raw in cuts]))
    pairs = [(batch.x.flatten(0, 1), batch.y.flatten(0, 1)) for batch in loader.whole()]
    before, targets = (torch.cat(part) for part in zip(*pairs, strict=True))
    return Reading(OUTPUT.mixture(torch.stack(raws)), targets, before)


def evaluate_series(reading: Reading, samples: int) -> SeriesEvaluation:
    """The scores of what `read_series` found with `samples` draws."""
    mixture, targets = reading.mixture, reading.targets
    scores = asdict(calibration_of_numbers(mixture, targets))
    means, scales = mixture.means.double(), mixture.scales.double()
    aleatoric = scales.square().mean().item()
    epistemic = means.var(dim=0, correction=0).mean().item()
    each = [NormalMixture(m[None], s[None]) for m, s in zip(means, scales, strict=True)]
    expected = [one.nll(targets).mean().item() for one in each]
    return SeriesEvaluation(
        values=scores.pop("predictions"),
        samples=samples,
        expected_nll=sum(expected) / len(expected) if samples or len(each) > 1 else None,
        persistence=_root(reading.before.double() - targets),
        total=aleatoric + epistemic,
        aleatoric=aleatoric,
        epistemic=epistemic,
        **scores,
    )


@dataclass(frozen=True)
class ColumnScores:
    """Of one column, in its own unit."""

    column: str
    rmse: float
    persistence: float
    crps: float
    coverage_90: float
    width_90: float


def scores_by_column(reading: Reading, settings: SeriesData) -> list[ColumnScores]:
    """Of each column what `read_series` found."""
    found = []
    for c, (name, spread) in enumerate(zip(settings.columns, settings.spread, strict=True)):
        own = NormalMixture(reading.mixture.means[..., c], reading.mixture.scales[..., c])
        targets = reading.targets[:, c]
        scores = calibration_of_numbers(own, targets)
        found.append(
            ColumnScores(
                name,
                scores.rmse * spread,
                _root(reading.before[:, c].double() - targets) * spread,
                scores.crps * spread,
                scores.coverage_90,
                scores.width_90 * spread,
            )
        )
    return found


def _cut(model: Network) -> Cut:
    """Raw outputs under the weights in force."""

    def cut(x: Tensor, y: Tensor, *carried: Tensor) -> tuple[Tensor, ...]:
        raw, state = model(x, as_state(carried))
        return raw, *as_tensors(state)

    return cut


# --- many steps ahead --------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Forecast:
    """What may come after each of B beginnings: `paths` [draws, paths per draw, steps, B, C]."""

    paths: Tensor

    @property
    def mean(self) -> Tensor:
        """The mean of all paths."""
        return self.paths.mean(dim=(0, 1))

    @property
    def aleatoric(self) -> Tensor:
        """The variance between the paths of a draw, averaged over draws."""
        return self.paths.var(dim=1).mean(dim=0)

    @property
    def epistemic(self) -> Tensor:
        """The variance of the draws' means, less what the noise of so few paths adds to it.

        It is 0 for a single draw. Together with the aleatoric one it is the variance of all paths.
        """
        if len(self.paths) == 1:
            return torch.zeros_like(self.mean)
        draws, paths = self.paths.shape[:2]
        between = self.paths.mean(dim=1).var(dim=0, correction=0)
        return (between - self.aleatoric * (draws - 1) / (draws * paths)).clamp_min(0.0)

    def quantile(self, p: float) -> Tensor:
        """The quantile of all paths, interpolated between the two that are nearest."""
        require((0 <= p <= 1, "p", f"must be between 0 and 1, got {p}"))
        ordered, _ = self.paths.flatten(0, 1).sort(dim=0)
        place = p * (len(ordered) - 1)
        low = int(place)
        return torch.lerp(ordered[low], ordered[min(low + 1, len(ordered) - 1)], place - low)

    def crps(self, target: Tensor) -> Tensor:
        """The continuous ranked probability score of the paths: E |x - y| - E |x - x'| / 2.

        It is in the target's unit.
        """
        ordered, _ = self.paths.flatten(0, 1).double().sort(dim=0)
        count = len(ordered)
        ranks = torch.arange(1 - count, count, 2, device=ordered.device, dtype=torch.float64)
        apart = torch.tensordot(ranks, ordered, dims=1) * 2 / (count * (count - 1))
        return (ordered - target).abs().mean(dim=0) - apart / 2

    def cdf(self, target: Tensor) -> Tensor:
        """The share of the paths below the target."""
        return (self.paths < target).double().mean(dim=(0, 1))


def forecast(
    model: Network,
    past: Tensor,
    steps: int,
    samples: int = 20,
    paths: int | None = None,
    seed: int = 1,
    advance: Advance | None = None,
) -> Forecast:
    """Forecast the `steps` rows that follow the rows `past` [T, B, C].

    - `samples`: the number of draws of the weights (0: the mean alone).
    - `paths`: how many paths each draw is followed along; by default about 500 over all draws, and
      at least 2 of each.
    - `seed`: of draws and paths.
    - `advance`: called after every draw.
    """
    paths = paths_each(len(each_draw(model, samples))) if paths is None else paths
    require(
        (past.dim() == 3 and len(past) > 0, "past", f"must be [T, B, C], got {list(past.shape)}"),
        (steps >= 1, "steps", f"must be at least 1, got {steps}"),
        (samples >= 0, "samples", f"must be 0 (the mean) or above, got {samples}"),
        (
            2 <= paths <= MOST_DRAWS,
            "paths",
            f"must be at least 2, {MOST_DRAWS:,} at the most, got {paths}",
        ),
    )
    noise = torch.Generator(past.device).manual_seed(seed)
    rows = torch.arange(past.shape[1], device=past.device).repeat_interleave(paths)
    found = []
    with evaluating(model):
        for reader in readers(model, samples, seed, past.device):
            for cut in past.split(READ_STEPS):
                raw = reader.read(cut)[-1]
            reader.take(rows)
            raw, path = raw[rows], []
            for _ in range(steps):
                mean, scale = OUTPUT.read(raw.float())
                path.append(
                    mean + scale * torch.randn(mean.shape, generator=noise, device=mean.device)
                )
                raw = reader.read(path[-1][None])[-1] if len(path) < steps else raw
            every = torch.stack(path).unflatten(1, (past.shape[1], paths))  # [steps, B, paths, C]
            found.append(every.permute(2, 0, 1, 3))
            if advance is not None:
                advance(1)
    return Forecast(torch.stack(found))


def paths_each(draws: int, paths: int = PATHS) -> int:
    """Of each draw, for about so many of all.

    >>> paths_each(1), paths_each(20), paths_each(1000)
    (500, 25, 2)
    """
    return max(2, paths // draws)


def rows_before(model: Network) -> int:
    """How many rows a forecast reads, unless told: PAST, or a whole season of the forecaster's."""
    return max(PAST, longest_season(model))


def longest_season(model: Network) -> int:
    """That which a forecaster reads; 0 where none does."""
    modules = [member.module for member in members_of(model)]
    return max((m.season for m in modules if isinstance(m, Forecaster)), default=0)


@dataclass(frozen=True)
class Backtest:
    """How good forecasts from `origins` places of a series were, by the number of steps ahead.

    All are in units of each column's spread.

    - `rmse`: the root mean squared error of the forecasts' mean.
    - `persistence`, `seasonal`: that of repeating the last row, and that of repeating the last
      `season` rows.
    - `crps`: the continuous ranked probability score.
    - `coverage_90`: what central 90 % intervals hold.
    """

    origins: int
    past: int
    samples: int
    paths: int
    season: int
    rmse: tuple[float, ...]
    persistence: tuple[float, ...]
    seasonal: tuple[float, ...]
    crps: tuple[float, ...]
    coverage_90: tuple[float, ...]


def backtest(
    model: Network,
    values: NDArray[np.float32],
    steps: int,
    origins: int = 100,
    past: int | None = None,
    samples: int = 20,
    paths: int | None = None,
    seed: int = 1,
    device: torch.device | str = "cpu",
    advance: Advance | None = None,
    season: int = 1,
) -> Backtest:
    """Forecast from places that are spread evenly over rows [N, C], and compare with what came.

    - `steps`, `samples`, `paths`, `seed`, `advance`: as for `forecast`.
    - `origins`: the number of places.
    - `past`: how many rows each forecast reads; by default those of `rows_before`, and at most half
      of all rows, or a season of the model.
    - `season`: that of the seasonal naive forecast; `best_season` finds one.
    """
    require(
        (origins >= 1, "origins", f"must be at least 1, got {origins}"),
        (season >= 1, "season", f"must be at least 1, got {season}"),
    )
    paths = paths_each(len(each_draw(model, samples))) if paths is None else paths
    longest = max(len(values) // 2, longest_season(model))
    past = min(rows_before(model) if past is None else past, longest)
    last = len(values) - steps
    if past < 1 or last < past:
        lower = "lower --horizon, or " if 1 <= past < len(values) else ""
        raise UserError(
            f"{len(values)} rows are too few for forecasts of {steps} steps after {past} rows; "
            f"{lower}give more rows"
        )
    if last < season:
        raise UserError(
            f"{len(values)} rows are too few for forecasts of {steps} steps after a season of "
            f"{season}; lower --season or --horizon, or give more rows"
        )
    first = max(past, season)
    starts = np.unique(np.linspace(first, last, num=origins).astype(int)).tolist()
    begun = torch.from_numpy(np.stack([values[s - past : s] for s in starts], axis=1)).to(device)
    came = torch.from_numpy(np.stack([values[s : s + steps] for s in starts], axis=1)).to(device)
    found = forecast(model, begun, steps, samples, paths, seed, advance)
    pit = found.cdf(came)

    def rmse(said: Tensor) -> tuple[float, ...]:
        return _by_step(lambda step: _root(said[step] - came[step]), steps)

    def naive(season: int) -> tuple[float, ...]:
        return rmse(torch.from_numpy(repeated(values, starts, steps, season)).to(device))

    return Backtest(
        len(starts),
        past,
        samples,
        paths,
        season,
        rmse=rmse(found.mean),
        persistence=naive(1),
        seasonal=naive(season),
        crps=tuple(found.crps(came).mean(dim=(1, 2)).tolist()),
        coverage_90=_by_step(lambda step: coverage(pit[step], (0.9,)).share.item(), steps),
    )


def _by_step(of: Callable[[int], float], steps: int) -> tuple[float, ...]:
    return tuple(of(step) for step in range(steps))


def _root(difference: Tensor) -> float:
    return difference.double().square().mean().sqrt().item()
