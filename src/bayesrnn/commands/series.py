"""What `evaluate` and `uncertainty` do with a run on series."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from bayesrnn.bayes import Network
from bayesrnn.evaluate.draws import each_draw
from bayesrnn.evaluate.reader import Watch
from bayesrnn.evaluate.series import (
    Backtest,
    backtest,
    evaluate_series,
    read_series,
    scores_by_column,
)
from bayesrnn.train.series import SeriesTask


def series_scores(
    model: Network,
    task: SeriesTask,
    split: str,
    count: int,
    generator: torch.Generator,
    streams: int,
    watch: Watch,
) -> dict[str, Any]:
    """The scores of the next row, by the mean or over `count` draws; and each column's."""
    loader = task.stream(split, streams)
    advance = watch(f"reading {split}", loader.targets * len(each_draw(model, count)))
    reading = read_series(model, loader, count, generator, advance)
    found = asdict(evaluate_series(reading, count))
    columns = scores_by_column(reading, task.series.settings)
    return {"streams": streams, **found, "columns": [asdict(column) for column in columns]}


def series_ahead(
    model: Network,
    task: SeriesTask,
    split: str,
    horizon: int,
    season: int | None,
    count: int,
    seed: int,
    watch: Watch,
) -> Backtest:
    """The scores of forecasts `horizon` steps ahead; without a season, beside the best."""
    return backtest(
        model,
        task.series.part(split),
        horizon,
        samples=count,
        seed=seed,
        device=task.device,
        advance=watch("forecasting", len(each_draw(model, count))),
        season=season or task.season(split, horizon),
    )


def series_uncertainty(
    model: Network,
    task: SeriesTask,
    split: str,
    counts: Sequence[int],
    seed: int,
    watch: Watch,
) -> list[dict[str, Any]]:
    """The scores of the next row for each number of draws: the same draws, as far as they go."""
    loader = task.stream(split)
    by_draws = []
    for count in counts:
        generator = torch.Generator(task.device).manual_seed(seed)
        advance = watch(f"reading {split}", loader.targets * len(each_draw(model, count)))
        found = asdict(
            evaluate_series(read_series(model, loader, count, generator, advance), count)
        )
        by_draws.append({"samples": found.pop("samples"), **found})
    return by_draws
