"""`bayesrnn forecast`."""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bayesrnn.commands.options import (
    AsJson,
    Data,
    Device,
    DrawSeed,
    RunFolders,
    check_draws,
    check_file,
    load_runs,
    names_of,
    note,
)
from bayesrnn.commands.tables import print_table, show, table_of, watching
from bayesrnn.data import SeriesData, load_rows
from bayesrnn.data.series import digits, uneven, unscaled
from bayesrnn.errors import UserError
from bayesrnn.evaluate.draws import each_draw
from bayesrnn.evaluate.series import (
    PAST,
    PATHS,
    Forecast,
    longest_season,
    paths_each,
    rows_before,
)
from bayesrnn.evaluate.series import forecast as forecast_rows
from bayesrnn.files import write_csv
from bayesrnn.train.loop import choose_device
from bayesrnn.train.run import with_data

PLACES = ("mean", "lower", "upper")
"""What is said of where a step's value will be."""
SHOWN_STEPS = 4
"""Of a forecast, in the table for people."""


def forecast(
    runs: RunFolders,
    horizon: Annotated[int, typer.Option(min=1, help="How many rows to forecast.")] = 24,
    samples: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="How many draws of the weights; 0 is the posterior mean (default: 20, or 0 where "
            "all draws are the same).",
        ),
    ] = None,
    paths: Annotated[
        int | None,
        typer.Option(
            min=2, help=f"Paths that each draw is followed along (default: {PATHS} over all draws)."
        ),
    ] = None,
    past: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Rows read before the forecast (default: {PAST}, or a season of the model's "
            "where that has more).",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write every step's figures to this CSV file.")
    ] = None,
    seed: DrawSeed = 1,
    data: Data = "",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """What comes after the last row of a run's series.

    Or after that of another file with the same columns (--data). Of each column and step: the mean,
    the interval that should hold 90 % of what comes, and how much of the spread is noise
    (aleatoric) and how much the model's own doubt (epistemic), as standard deviations.

    bayesrnn forecast runs/ett --horizon 48 --out next.csv

    bayesrnn forecast runs/ett --data today.csv --json
    """
    check_file(out)
    place = choose_device(device, "--device")
    model, own = load_runs(runs, place)
    run, recipe = runs[0], with_data(runs[0], own, data)
    settings = recipe.data
    if not isinstance(settings, SeriesData):
        raise UserError(f"{run} is a run on {settings.kind}; only one on series can forecast")
    if samples is None:
        samples = 20 if model.draws_differ else 0
    elif samples > 0:
        check_draws(run, model, "--samples, or give --samples 0")
    paths = paths_each(len(each_draw(model, samples))) if paths is None else paths
    rows = load_rows(settings)
    if len(rows) == 0:
        raise UserError(f"{settings.path} has no rows to go on from")
    past = rows_before(model) if past is None else past
    read = uneven(rows.times[-past:])
    if read is not None:
        note(f"{settings.path}: {read}")
    began = torch.from_numpy(rows.values[-past:, None]).to(place)
    season = longest_season(model)
    if len(began) < season:
        note(
            f"{len(began)} rows are read, fewer than the model's season of {season}: the others "
            "count as the mean of their column"
        )
    with watching() as watch:
        advance = watch("forecasting", len(each_draw(model, samples)))
        found = forecast_rows(model, began, horizon, samples, paths, seed, advance)
    columns = _by_column(found, settings)
    if out is not None:
        write_csv(out, _lines(columns, digits(settings, 7), horizon))
    last = unscaled(settings, rows.values[-1]).tolist()
    figures = {**names_of(runs, as_json), "after": rows.times[-1], "rows_read": len(began)}
    figures |= {"horizon": horizon, "samples": samples, "paths": paths}
    if as_json:
        show({**figures, "columns": columns}, "", True)
        return
    show(figures, "forecast", False)
    _show(columns, last, digits(settings, 4), horizon)


def _by_column(found: Forecast, settings: SeriesData) -> dict[str, dict[str, list[float]]]:
    """The figures [steps] of each column, in its own unit."""
    ends = found.quantile(0.05), found.quantile(0.95)
    places = dict(zip(PLACES, (found.mean, *ends), strict=True))
    sizes = {"aleatoric": found.aleatoric.sqrt(), "epistemic": found.epistemic.sqrt()}
    own = {key: unscaled(settings, t[:, 0].cpu().numpy()) for key, t in places.items()}
    own |= {key: t[:, 0].double().cpu().numpy() * settings.spread for key, t in sizes.items()}
    return {
        name: {key: numbers[:, c].tolist() for key, numbers in own.items()}
        for c, name in enumerate(settings.columns)
    }


def _lines(
    columns: dict[str, dict[str, list[float]]], places: list[int], horizon: int
) -> list[list[Any]]:
    """A line a step and column, in so many digits."""
    keys = list(next(iter(columns.values())))
    lines: list[list[Any]] = [["step", "column", *keys]]
    for step in range(horizon):
        for (name, own), place in zip(columns.items(), places, strict=True):
            numbers = (float(f"{own[key][step]:.{place}g}") for key in keys)
            lines.append([step + 1, name, *numbers])
    return lines


def _show(
    columns: dict[str, dict[str, list[float]]], last: list[float], places: list[int], horizon: int
) -> None:
    """The mean and the interval at a few steps, for people, in so many digits."""
    part = range(1, SHOWN_STEPS + 1)
    steps = sorted({max(1, round(horizon * k / SHOWN_STEPS)) for k in part} | {1})
    heads = ["", "last row", *(f"step {step}" for step in steps)]
    table = table_of(*heads, title="mean [central 90 % interval]")
    for (name, own), now, place in zip(columns.items(), last, places, strict=True):
        three = [[f"{own[key][s - 1]:.{place}g}" for s in steps] for key in PLACES]
        cells = [f"{mean} [{lower}, {upper}]" for mean, lower, upper in zip(*three, strict=True)]
        table.add_row(name, f"{now:.{place}g}", *cells)
    print_table(table)
