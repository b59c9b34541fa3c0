"""A report on runs on series: forecasts beside what came, and the scores of the library."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bayesrnn as br
from bayesrnn.data.series import unscaled
from bayesrnn.evaluate.series import backtest, evaluate_series, forecast, read_series
from bayesrnn.report import Choices, examine, write_page
from bayesrnn.report.figures import watched_key
from bayesrnn.report.forecasts import dates
from bayesrnn.report.readings import FRACTIONS
from bayesrnn.train.series import SeriesTask
from reported import Page
from series_runs import series_recipe, series_table, write_series
from small_runs import Cli, metrics

DRAWS = 3
ROWS = 60  # of the test split; the forecast is of a quarter of them, from the middle
STEPS = 15
START = ROWS // 2


def unwatched(what: str, total: int) -> Callable[[int], None]:
    return lambda done: None


def page_of(out: Path, *runs: Path) -> Page:
    choices = Choices((0, DRAWS))
    write_page([examine(run, run.name, choices, unwatched) for run in runs], choices, out)
    return Page(out)


@pytest.fixture(scope="module")
def page(folder: Path, still: Path, waves: Path) -> Page:
    return page_of(folder / "series.html", still, waves)


def task_of(run: Path) -> SeriesTask:
    return SeriesTask(br.read_recipe(run / "recipe.toml"), torch.device("cpu"))


def bands(page: Page, figure: str, run: int) -> dict[tuple[str, int], list[Any]]:
    """Of a run's bands their y values, by the view and the order in it."""
    found: dict[tuple[str, int], list[Any]] = {}
    for trace in page.data["figures"][figure]["data"]:
        view, index = trace.get("meta", ("", -1))
        if index == run:
            found[view, sum(key[0] == view for key in found)] = trace["y"]
    return found


def test_scores_by_draws_are_those_of_uncertainty(
    page: Page, waves: Path, still: Path, cli: Cli
) -> None:
    options = ("--samples", f"0,{DRAWS}", "--json")
    mean, drawn = json.loads(cli("uncertainty", waves, *options).out)["by_draws"]
    found = examine(waves, "waves", Choices((0, DRAWS)), unwatched)
    assert found.by_draws == [mean, drawn]
    plain = json.loads(cli("evaluate", still, "--json").out)
    for key, form in (("crps", ".4f"), ("coverage_90", ".1%"), ("width_90", ".4f")):
        assert page.rows[key] == [f"{plain[key]:{form}}", f"{drawn[key]:{form}}"]
    assert page.rows["rmse_mean"] == [f"{plain['rmse']:.4f}", f"{mean['rmse']:.4f}"]
    assert page.rows["rmse_draws"] == ["–", f"{drawn['rmse']:.4f}"]
    assert page.rows["persistence"] == [f"{drawn['persistence']:.4f}"] * 2
    assert page.rows["epistemic"] == ["0.0000", f"{drawn['epistemic']:.4f}"]
    held = page.data["figures"]["coverage"]["data"][1]
    shares = dict(zip(held["x"], held["y"], strict=True))
    assert (shares[0.5], shares[0.9]) == (drawn["coverage_50"], drawn["coverage_90"])
    assert f"all {2 * (ROWS - 1)} values of the test rows, each one step ahead" in page.text


def test_a_fan_is_the_forecast_in_the_columns_own_unit(page: Page, waves: Path) -> None:
    task = task_of(waves)
    settings, values = task.series.settings, task.series.splits["test"].values
    past = torch.from_numpy(values[:START, None])
    paths = forecast(br.load(waves), past, STEPS, DRAWS, 1000 // DRAWS).paths[:, :, :, 0].double()
    for c, column in enumerate(("flow", "heat")):
        own = paths[..., c].numpy() * settings.spread[c] + settings.centre[c]
        *_, (name, mean), _ = page.lines(f"fan 0 {column}")
        assert name == "waves"
        assert mean[1:] == pytest.approx(own.mean(axis=(0, 1)), rel=1e-4)
        shown = bands(page, f"fan 0 {column}", 1)
        every = own.reshape(-1, STEPS)
        for low, high, band in ((5, 95, ("total", 0)), (25, 75, ("total", 1))):
            ends = [*np.percentile(every, high, 0), *np.percentile(every, low, 0)[::-1]]
            assert shown[band][1:-1] == pytest.approx(ends, rel=1e-4)
        assert shown["epistemic", 0] == shown["total", 0]
        noise = own.var(axis=1, ddof=1).mean(axis=0) / own.shape[1] * (1 - 1 / DRAWS)
        doubt = np.sqrt(np.maximum(own.mean(axis=1).var(axis=0) - noise, 0))
        upper = np.array(shown["epistemic", 1][1 : STEPS + 1])
        assert upper - mean[1:] == pytest.approx(1.6449 * doubt, rel=1e-2, abs=1e-4)
        assert upper.max() > max(mean[1:])


def test_beside_it_is_what_the_file_says(page: Page, folder: Path) -> None:
    with (folder / "s" / "series.csv").open() as file:
        lines = list(csv.DictReader(file))[-ROWS:][START - STEPS : START + STEPS]
    for column in ("flow", "heat"):
        came = [float(line[column]) for line in lines]
        *_, (name, y) = page.lines(f"fan 0 {column}")
        assert (name, y) == ("what came", pytest.approx(came, rel=1e-5, abs=1e-5))
        joints = {band[0] for band in bands(page, f"fan 0 {column}", 1).values()}
        joints |= {y[0] for _, y in page.lines(f"fan 0 {column}")[-3:-1]}
        assert joints == {y[STEPS - 1]}  # all go on from the last row that was read
    figure = page.data["figures"]["fan 0 heat"]
    axis, line = figure["layout"]["xaxis"], figure["layout"]["shapes"][0]
    assert len(axis["tickvals"]) == 4
    assert axis["ticktext"] == [lines[place + STEPS - 1]["when"] for place in axis["tickvals"]]
    assert line["x0"] == 0
    assert f"15 rows after {lines[STEPS - 1]['when']}" in page.text


def test_errors_ahead_are_those_of_the_backtest(page: Page, waves: Path, still: Path) -> None:
    expected = []
    for run, draws in ((still, 0), (waves, DRAWS)):
        values, paths = task_of(run).series.splits["test"].values, 250 // max(draws, 1)
        expected.append(
            backtest(br.load(run), values, STEPS, 50, samples=draws, paths=paths, season=16)
        )
    lines = [(name, pytest.approx(y, rel=1e-5)) for name, y in page.lines("error_ahead")]
    assert lines == [
        ("still", expected[0].rmse),
        ("still", expected[0].crps),
        ("waves", expected[1].rmse),
        ("waves", expected[1].crps),
        ("the last row", expected[0].persistence),  # once: it is the same series
        ("the last 16 rows", expected[0].seasonal),  # as it was made
    ]
    held = [(each[0], tuple(each[1])) for each in page.lines("coverage_ahead")]
    assert held == [("still", expected[0].coverage_90), ("waves", expected[1].coverage_90)]


def test_forecasts_begin_after_a_whole_season_of_the_model(tmp_path: Path) -> None:
    season, steps = 50, ROWS - 50
    table: dict[str, Any] = {"model": {"season": season}, "train": {"epochs": 2, "streams": 1}}
    br.train(series_recipe(tmp_path, **table), tmp_path / "run", quiet=True)
    page, series = (
        page_of(tmp_path / "page.html", tmp_path / "run"),
        task_of(tmp_path / "run").series,
    )
    past = torch.from_numpy(series.splits["test"].values[:season, None])
    paths = forecast(br.load(tmp_path / "run"), past, steps, DRAWS, 1000 // DRAWS).paths
    expected = unscaled(series.settings, paths[:, :, :, 0].double().mean(dim=(0, 1)).numpy())
    *_, (_, mean), _ = page.lines("fan 0 flow")
    assert mean[1:] == pytest.approx(expected[:, 0], rel=1e-4)
    assert {len(y) for _, y in page.lines("error_ahead")} == {steps}


def test_a_season_can_be_given(still: Path, tmp_path: Path, cli: Cli) -> None:
    out = tmp_path / "page.html"
    assert cli("report", still, "--samples", "0", "--season", 7, "--out", out).code == 0
    assert [name for name, _ in Page(out).lines("error_ahead")][2:] == [
        "the last row",
        "the last 7 rows",
    ]


def test_learning_and_pruning_are_of_the_loss(page: Page, waves: Path) -> None:
    lines = [line for line in metrics(waves) if line["kind"] == "epoch"]
    drawn = [y for name, y in page.lines("held_out") if name == "waves"]
    assert drawn == [[line[key] for line in lines] for key in ("valid_nll", "train_nll")]
    assert dict(page.lines("held_out-2"))["waves"] == [line["valid_rmse"] for line in lines]
    assert page.rows["last"][1] == f"{lines[-1]['valid_nll']:,.4g}"
    curve, task = dict(page.lines("pruning"))["waves"], task_of(waves)
    streams = br.read_recipe(waves / "recipe.toml").train.valid_streams
    for fraction, loss in list(zip(FRACTIONS, curve, strict=True))[::5]:
        model = br.load(waves)
        br.prune(model, fraction=fraction)
        reading = read_series(model, task.stream("valid", streams))
        assert loss == pytest.approx(evaluate_series(reading, 0).nll, rel=1e-5)
    axis = page.data["figures"]["pruning"]["layout"]["yaxis"]["title"]["text"]
    found = examine(waves, "waves", Choices((0,)), unwatched)
    assert (axis, watched_key(found)) == ("valid NLL, nats each", "valid_nll")


def test_points_have_paths_and_no_doubt(still: Path, tmp_path: Path) -> None:
    page = page_of(tmp_path / "page.html", still)
    shown = bands(page, "fan 0 flow", 0)
    _, (_, mean), _ = page.lines("fan 0 flow")[-3:]
    assert shown["epistemic", 1][1 : STEPS + 1] == pytest.approx(mean[1:])
    assert min(np.array(shown["total", 0][1 : STEPS + 1]) - mean[1:]) > 0
    names = {a.get("name") for tag, a in page.tags if tag == "input"}
    assert {"spread-0", "fan-0"}.isdisjoint(names)
    assert "no risk against coverage" in page.text
    assert {"entropies", "reliability", "risk_coverage"}.isdisjoint(page.data["figures"])


def test_a_text_and_a_series_share_a_page(bayes: Path, waves: Path, tmp_path: Path) -> None:
    page = page_of(tmp_path / "page.html", bayes, waves)
    assert [name for name, _ in page.lines("entropy_gap")] == ["bayes"]
    assert [name for name, _ in page.lines("coverage")] == ["waves"]
    assert page.rows["data"] == ["text", "series"]
    assert page.rows["persistence"][0] == page.rows["perplexity_mean"][1] == "–"
    fan = page.data["figures"]["fan 0 flow"]["data"]
    assert {trace["fillcolor"] for trace in fan if "meta" in trace} == {"var(--run-1)"}
    (box,) = (a for tag, a in page.tags if tag == "div" and "data-fans" in a)
    assert (box["data-run"], box["style"]) == ("1", "--shown:var(--run-1)")
    assert page.words


def test_runs_on_other_series_have_fans_of_their_own(waves: Path, tmp_path: Path) -> None:
    columns = [f"<b>{n}</b>" for n in range(8)]
    lines = [",".join(["time", *columns])]
    for hour in range(120):
        values = (np.sin(hour + np.arange(8)) * 3).tolist()
        when = f"2024-02-{1 + hour // 24:02} {hour % 24:02}:00"
        lines.append(",".join([when, *map(str, values)]))
    (tmp_path / "many.csv").write_text("\n".join(lines))
    given = {"path": str(tmp_path / "many.csv"), "columns": columns, "time": "time"}
    recipe = series_recipe(tmp_path, data=given, train={"epochs": 1})
    br.train(recipe, tmp_path / "many", quiet=True)
    page = page_of(tmp_path / "page.html", waves, tmp_path / "many")
    fans = [key for key in page.data["figures"] if key.startswith("fan")]
    assert fans == [
        "fan 0 flow",
        "fan 0 heat",
        *(f"fan 1 {columns[place]}" for place in (0, 1, 2, 3, 4, 7)),
    ]
    assert "Of 8 columns the first 5 and the last are shown." in page.text
    assert "<b>7</b>" in page.text
    assert "<b>7</b>" not in page.source
    figure = page.data["figures"][fans[-1]]
    came = figure["data"][-1]
    assert (came["x"][0], came["x"][-1]) == ("2024-02-05T06:00:00", "2024-02-05T17:00:00")
    assert "ticktext" not in figure["layout"]["xaxis"]
    assert [name for name, _ in page.lines("error_ahead")].count("the last row") == 2


def test_the_shortest_split_is_forecast_a_row_ahead(tmp_path: Path) -> None:
    write_series(tmp_path, rows=40)
    table = series_table(tmp_path, data={"split": [0.9, 0.05, 0.05]}, train={"epochs": 1})
    br.train(br.recipe.from_table(table), tmp_path / "run", quiet=True)
    page = page_of(tmp_path / "page.html", tmp_path / "run")
    assert [len(y) for _, y in page.lines("fan 0 flow")[-2:]] == [2, 2]
    assert len(page.lines("error_ahead")[0][1]) == 1
    assert "1 row after day 38" in page.text


@pytest.mark.parametrize(
    "times",
    [
        ["2024-03-31 02:00", "2024-03-31 02:00"],  # an hour twice
        ["20240101", "20240102"],  # may be the numbers of rows
        ["1", "2"],
        ["2024-01-01", "soon"],
    ],
)
def test_other_times_are_no_dates(times: list[str]) -> None:
    assert dates(times) is None
