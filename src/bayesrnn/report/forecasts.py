"""Forecasts on the page: from the middle of a split what a run saw coming, beside what came; and
how its errors grow with the number of steps ahead."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from bayesrnn.bayes import Bayesian
from bayesrnn.data.series import SeriesData, as_dates, digits, unscaled
from bayesrnn.evaluate.reader import Watch
from bayesrnn.evaluate.series import (
    Backtest,
    Forecast,
    backtest,
    forecast,
    longest_season,
    paths_each,
    rows_before,
)
from bayesrnn.report.choices import Choices
from bayesrnn.train.series import SeriesTask

Numbers = NDArray[np.float64]
STEPS = 48
"""Ahead, unless the split is short."""
SHOWN = 6
"""Columns on the page."""
FAN_PATHS = 1000
"""Of the forecast that is shown, over all draws."""
BACKTEST_PATHS = 250
"""Of each forecast that is scored."""
ORIGINS = 50
"""Places in the split to forecast from, for the scores."""


@dataclass(frozen=True, eq=False)
class Fan:
    """Of one column, in its own unit: the rows shown, past and to come; and, of each step ahead,
    the mean of the paths, the ends of the intervals that hold 50 % and 90 % of them, and the
    epistemic standard deviation. Numbers are told in so many `digits`."""

    digits: int
    rows: Numbers
    mean: Numbers
    half: tuple[Numbers, Numbers]
    most: tuple[Numbers, Numbers]
    doubt: Numbers


@dataclass(frozen=True, eq=False)
class Ahead:
    """What a run saw coming, from one place of a split; and its scores from many.

    `times` are those of the rows shown, of which `past` were before the forecast; `columns` is how
    many the series has, and `fans` are of those shown.
    """

    digest: str
    times: Sequence[str]
    past: int
    columns: int
    fans: Mapping[str, Fan]
    scores: Backtest

    @property
    def series(self) -> tuple[str, ...]:
        """The same for runs that can be shown together."""
        return (self.digest, *self.times)

    @property
    def doubts(self) -> bool:
        """Whether anything is epistemic."""
        return any(fan.doubt.any() for fan in self.fans.values())


def look_ahead(
    model: Bayesian, task: SeriesTask, choices: Choices, samples: int, watch: Watch
) -> Ahead:
    """Forecast by so many draws (0: the mean), STEPS ahead or a quarter of the split (less where a
    season of the model's leaves less)."""
    split, seed = choices.split, choices.seed
    rows, settings = task.series.splits[split], task.series.settings
    season = longest_season(model)
    steps = max(1, min(STEPS, len(rows) // 4, len(rows) - season))
    start = max(len(rows) // 2, season)
    first = max(0, start - steps)
    stop = start + steps
    began = rows.values[max(0, start - rows_before(model)) : start, None]
    advance = watch("forecasting", 2 * max(samples, 1))
    found = forecast(
        model,
        torch.from_numpy(began).to(task.device),
        steps,
        samples,
        paths_each(max(samples, 1), FAN_PATHS),
        seed,
        advance,
    )
    return Ahead(
        task.digest,
        rows.times[first:stop],
        start - first,
        len(settings.columns),
        _fans(found, unscaled(settings, rows.values[first:stop]), settings),
        backtest(
            model,
            rows.values,
            steps,
            ORIGINS,
            samples=samples,
            paths=paths_each(max(samples, 1), BACKTEST_PATHS),
            seed=seed,
            device=task.device,
            advance=advance,
            season=choices.season or task.season(split, steps),
        ),
    )


def _fans(found: Forecast, rows: Numbers, settings: SeriesData) -> dict[str, Fan]:
    """The columns on the page, by their names."""

    def own_unit(tensor: torch.Tensor) -> Numbers:
        return unscaled(settings, tensor[:, 0].cpu().numpy())

    mean = own_unit(found.mean)
    low, lower, upper, high = (own_unit(found.quantile(p)) for p in (0.05, 0.25, 0.75, 0.95))
    doubt = found.epistemic.sqrt()[:, 0].cpu().numpy() * settings.spread
    return {
        settings.columns[c]: Fan(
            digits(settings, 4)[c],
            rows[:, c],
            mean[:, c],
            (lower[:, c], upper[:, c]),
            (low[:, c], high[:, c]),
            doubt[:, c],
        )
        for c in shown_columns(len(settings.columns))
    }


def shown_columns(count: int) -> list[int]:
    """The first ones, and the last, which is often the one that matters.

    >>> shown_columns(3), shown_columns(9)
    ([0, 1, 2], [0, 1, 2, 3, 4, 8])
    """
    return list(range(count)) if count <= SHOWN else [*range(SHOWN - 1), count - 1]


def dates(times: Sequence[str]) -> list[str] | None:
    """The times as ISO dates without a zone; None where they are none, or do not go forwards.

    >>> dates(["2016-07-01", "2016-07-02 06:00"]), dates(["day 1", "day 2"])
    (['2016-07-01T00:00:00', '2016-07-02T06:00:00'], None)
    """
    found = [each.replace(tzinfo=None) for each in as_dates(times) or []]
    forwards = all(a < b for a, b in itertools.pairwise(found))
    return [each.isoformat() for each in found] if found and forwards else None


# --- on the page ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Shown:
    """Runs that forecast the same rows, by their places among the runs."""

    runs: Mapping[int, Ahead]

    @property
    def one(self) -> Ahead:
        """Of the rows, any of them will do."""
        return next(iter(self.runs.values()))

    @property
    def names(self) -> list[str]:
        """Of the columns that a run shows."""
        return list(dict.fromkeys(name for ahead in self.runs.values() for name in ahead.fans))

    def fans(self, column: str) -> dict[int, Fan]:
        """Of the runs that have it."""
        return {i: ahead.fans[column] for i, ahead in self.runs.items() if column in ahead.fans}


def side_by_side(runs: Sequence[Ahead | None]) -> list[Shown]:
    """Each series that runs forecast, once."""
    found: dict[tuple[str, ...], dict[int, Ahead]] = {}
    for place, ahead in enumerate(runs):
        if ahead is not None:
            found.setdefault(ahead.series, {})[place] = ahead
    return [Shown(each) for each in found.values()]
