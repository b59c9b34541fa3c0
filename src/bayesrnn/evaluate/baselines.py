"""Forecasts of a series that need no model: its last rows, over and over."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bayesrnn.errors import require

GAIN = 0.1
"""The share by which a season has to be better than one that it is a multiple of, or than none."""


def repeated(
    values: NDArray[np.floating], starts: Sequence[int], steps: int, season: int
) -> NDArray[np.floating]:
    """From each of B places in rows [N, C], the `season` rows before it over and over: [steps, B,
    C]. With a season of 1 that is persistence, with a longer one the seasonal naive forecast.

    >>> repeated(np.arange(9.0)[:, None], [4, 7], steps=4, season=3)[..., 0].tolist()
    [[1.0, 4.0], [2.0, 5.0], [3.0, 6.0], [1.0, 4.0]]
    """
    require((season >= 1, "season", f"must be at least 1, got {season}"))
    require((min(starts) >= season, "starts", f"must be after {season} rows, got {min(starts)}"))
    within = np.arange(steps) % season
    found: NDArray[np.floating] = values[np.asarray(starts) - season + within[:, None]]
    return found


def best_season(values: NDArray[np.floating], steps: int, longest: int) -> int:
    """The season of at most `longest` rows whose repetition would have forecast these rows best.

    It is 1 where none is better than the last row. All places count at once: what is said of a row
    h steps ahead (h from 1 to `steps`) is the row that came k = season * ceil(h / season) before
    it, so the mean squared error is that between rows k apart, averaged over h. Where the best
    season is a multiple of a shorter one (48 hours of 24, and any of 1) and by less than GAIN
    better in its root, it is the shorter one.
    """
    require(
        (steps >= 1, "steps", f"must be at least 1, got {steps}"),
        (bool(np.isfinite(values).all()), "values", "must be finite numbers"),
    )
    furthest = len(values) // 2  # of rows further apart there are too few pairs
    if steps > furthest:
        return 1
    wide = values.astype(np.float64)
    lags = range(1, min(furthest, longest + steps) + 1)
    apart = np.array([0.0, *(np.square(wide[lag:] - wide[:-lag]).mean() for lag in lags)])
    ahead = np.arange(1, steps + 1)
    errors = {}
    for season in range(1, max(longest, 1) + 1):
        before = season * -(-ahead // season)
        if before[-1] <= furthest:
            errors[season] = math.sqrt(apart[before].mean())
    best = min(errors, key=errors.__getitem__)
    enough = [season for season, error in errors.items() if error * (1 - GAIN) <= errors[best]]
    return next(season for season in enough if best % season == 0)
