"""Forecasts without a model, against tables made by hand and series of known seasons."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import bayesrnn as br
from bayesrnn.errors import Invalid
from bayesrnn.evaluate.baselines import best_season, repeated
from bayesrnn.evaluate.series import backtest

ROWS = np.array([[4, 0], [1, 1], [3, 0], [5, 1], [2, 0], [3, 2], [6, 1], [1, 1], [4, 3], [7, 0]])
"""Of two columns, to be repeated by hand."""


def still() -> br.Bayesian:
    """Any network will do: the baselines are not its own."""
    net = br.Forecaster(2, br.SeriesSettings(hidden=2))
    return br.bayesianize(net, br.Delta(), br.Uniform())


def test_the_last_rows_come_again_in_their_order() -> None:
    found = repeated(ROWS.astype(float), [3, 5], steps=5, season=3)
    after_three = [[4, 0], [1, 1], [3, 0], [4, 0], [1, 1]]
    after_five = [[3, 0], [5, 1], [2, 0], [3, 0], [5, 1]]
    np.testing.assert_array_equal(found, np.stack([after_three, after_five], axis=1))
    last = repeated(ROWS.astype(float), [5], steps=2, season=1)
    np.testing.assert_array_equal(last, [[[2, 0]], [[2, 0]]])


def test_nothing_is_taken_from_where_the_forecast_begins_or_after() -> None:
    for season in (1, 2, 3, 4):
        known = ROWS.astype(float)
        known[4:] = np.nan
        assert np.isfinite(repeated(known, [4], steps=6, season=season)).all()
    with pytest.raises(br.Invalid, match="starts must be after 5 rows, got 4"):
        repeated(ROWS.astype(float), [4], steps=1, season=5)


def test_a_backtest_scores_them_as_a_hand_does() -> None:
    """From rows 5, 6 and 7, three ahead: squares of each column's difference, over both columns."""
    values = ROWS.astype(np.float32)
    found = backtest(still(), values, steps=3, origins=3, samples=0, paths=2, season=2)
    assert (found.origins, found.past, found.season) == (3, 5, 2)
    # said (the row 2 before; step 3 as step 1)     came
    # from 5: (5,1) (2,0) (5,1)                      (3,2) (6,1) (1,1)
    # from 6: (2,0) (3,2) (2,0)                      (6,1) (1,1) (4,3)
    # from 7: (3,2) (6,1) (3,2)                      (1,1) (4,3) (7,0)
    squares = [
        4 + 1 + 16 + 1 + 4 + 1,
        16 + 1 + 4 + 1 + 4 + 4,
        16 + 0 + 4 + 9 + 16 + 4,
    ]
    assert found.seasonal == pytest.approx([(total / 6) ** 0.5 for total in squares])
    # the last row: (2,0), (3,2), (6,1)
    squares = [
        1 + 4 + 9 + 1 + 25 + 0,
        16 + 1 + 4 + 1 + 4 + 4,
        1 + 1 + 1 + 1 + 1 + 1,
    ]
    assert found.persistence == pytest.approx([(total / 6) ** 0.5 for total in squares])
    alone = backtest(still(), values, steps=3, origins=3, samples=0, paths=2)
    assert alone.season == 1
    assert alone.seasonal == alone.persistence == found.persistence


def test_a_season_longer_than_the_past_is_waited_for() -> None:
    wave = np.sin(2 * np.pi * np.arange(60) / 20)[:, None].repeat(2, axis=1).astype(np.float32)
    found = backtest(still(), wave, steps=5, past=3, samples=0, paths=2, season=20)
    assert (found.origins, found.past) == (60 - 5 - 20 + 1, 3)
    assert max(found.seasonal) < 1e-5
    with pytest.raises(br.UserError, match=r"60 rows are too few .* after a season of 56; lower"):
        backtest(still(), wave, steps=5, samples=0, paths=2, season=56)
    with pytest.raises(br.Invalid, match="season must be at least 1, got 0"):
        backtest(still(), wave, steps=5, season=0)


@pytest.mark.parametrize("steps", [1, 4, 15, 48])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_season_of_a_series_is_found_where_it_has_one(steps: int, seed: int) -> None:
    dice = np.random.default_rng(seed)
    hours = np.arange(4000)
    day = 3 * np.sin(2 * np.pi * hours / 24)
    weekend = 2.0 * (hours // 24 % 7 > 4)
    noise = dice.normal(size=4000)
    for values, season in (
        (10 * day + noise, 24),
        (day + weekend + 0.3 * noise, 168),
        (noise, 1),
        (noise.cumsum(), 1),
    ):
        assert best_season(values[:, None], steps, longest=500) == season
    short = np.sin(2 * np.pi * np.arange(180) / 16) + dice.normal(0, 0.1, 180)
    assert best_season(short[:, None], steps, longest=30) == 16


def test_a_trend_hides_no_season_that_is_worth_something() -> None:
    hours = np.arange(3000)
    noise = np.random.default_rng(1).normal(size=3000)
    values = (0.05 * hours + 3 * np.sin(2 * np.pi * hours / 24) + noise)[:, None]
    assert best_season(values, 24, longest=500) == 24
    assert best_season(values, 1, longest=500) == 1  # the last row is nearer than the day before


def test_where_there_are_too_few_rows_to_tell_there_is_no_season() -> None:
    wave = np.sin(2 * np.pi * np.arange(40) / 8)[:, None]
    assert best_season(wave, 12, longest=20) == 8
    assert best_season(wave, 21, longest=20) == 1
    assert best_season(wave, 12, longest=7) != 8
    assert best_season(wave, 1, longest=0) == 1
    assert best_season(np.ones((9, 2)), 2, longest=4) == 1


def test_a_transformers_day_has_24_hours(data_folder: Callable[[str], Path]) -> None:
    path = data_folder("ett") / "ETTh1.csv"
    series = br.load_series(br.SeriesData(str(path), ("HUFL", "MUFL", "OT"), time="date"))
    for steps in (12, 24, 48):
        assert best_season(series.splits["train"].values, steps, longest=500) == 24


def test_a_season_of_nothing_is_refused() -> None:
    with pytest.raises(Invalid, match="steps must be at least 1, got 0"):
        best_season(np.arange(20.0)[:, None], 0, longest=5)
    with pytest.raises(Invalid, match="values must be finite"):
        best_season(np.full((20, 1), np.nan), 2, longest=5)
