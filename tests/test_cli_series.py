"""The command line with series."""

import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bayesrnn as br
from bayesrnn.data import load_rows
from bayesrnn.recipe import to_toml
from series_runs import series_recipe, write_series
from small_runs import Cli


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("series")
    br.train(series_recipe(folder, train={"epochs": 25}), folder / "run", quiet=True)
    return folder / "run"


def test_train_names_what_is_watched(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "recipe.toml").write_text(to_toml(series_recipe(tmp_path)))
    code, out, err = cli("train", tmp_path / "recipe.toml", "--out", tmp_path / "run", "--json")
    assert code == 0
    figures = json.loads(out)
    assert figures["valid_nll"] >= figures["best_valid_nll"]
    assert "values an epoch" in err


def test_evaluate_scores_the_next_row_each_column_and_forecasts(run: Path, cli: Cli) -> None:
    found = json.loads(cli("evaluate", run, "--samples", 5, "--horizon", 4, "--json").out)
    assert (found["values"], found["samples"]) == (2 * 59, 5)
    assert found["total"] == pytest.approx(found["aleatoric"] + found["epistemic"])
    assert found["rmse"] < found["persistence"]
    assert [column["column"] for column in found["columns"]] == ["flow", "heat"]
    recipe = br.read_recipe(run / "recipe.toml").data
    assert isinstance(recipe, br.SeriesData)
    squares = [(c["rmse"] / s) ** 2 for c, s in zip(found["columns"], recipe.spread, strict=True)]
    assert found["rmse"] ** 2 == pytest.approx(sum(squares) / 2)
    assert len(found["ahead"]["rmse"]) == 4
    mean = json.loads(cli("evaluate", run, "--json").out)
    assert (mean["samples"], mean["epistemic"], mean["expected_nll"]) == (0, 0, None)
    shown = cli("evaluate", run, "--horizon", 2).out
    assert "by column" in shown
    assert "forecasts from" in shown


def test_forecasts_are_scored_beside_the_last_season(run: Path, cli: Cli) -> None:
    command = ("evaluate", run, "--horizon", 4)
    found = json.loads(cli(*command, "--json").out)["ahead"]
    assert found["season"] == 16  # as the series was made
    assert len(found["seasonal"]) == 4
    assert found["seasonal"][3] < found["persistence"][3]
    shown = " ".join(cli(*command).out.split())
    assert "seasonal: the last 16 rows, over and over" in shown
    given = json.loads(cli(*command, "--season", 5, "--json").out)["ahead"]
    assert given["season"] == 5
    assert given["seasonal"][3] > given["persistence"][3] > 0
    assert given["rmse"] == found["rmse"]
    assert "seasonal" not in cli(*command, "--season", 1).out


def test_a_forecast_goes_on_from_the_last_row(run: Path, tmp_path: Path, cli: Cli) -> None:
    command = ("forecast", run, "--horizon", 5, "--samples", 4, "--paths", 6)
    found = json.loads(cli(*command, "--out", tmp_path / "f.csv", "--json").out)
    assert (found["after"], found["horizon"]) == ("day 299", 5)
    heat = found["columns"]["heat"]
    ends = zip(heat["lower"], heat["mean"], heat["upper"], strict=True)
    assert all(lower < mean < upper for lower, mean, upper in ends)
    assert 0 < heat["mean"][0] < 40
    with (tmp_path / "f.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 2 * 5
    last = lines[-1]
    assert (last["step"], last["column"]) == ("5", "heat")
    assert float(last["mean"]) == pytest.approx(heat["mean"][-1], rel=1e-5)
    assert "day 299" in cli(*command).out
    mean = json.loads(cli("forecast", run, "--samples", 0, "--horizon", 3, "--json").out)
    assert mean["columns"]["flow"]["epistemic"] == [0, 0, 0]
    assert mean["paths"] == 500


def test_a_run_with_a_season_is_used_like_any_other(run: Path, tmp_path: Path, cli: Cli) -> None:
    recipe = series_recipe(tmp_path, model={"season": 16}, train={"epochs": 25})
    br.train(recipe, tmp_path / "run", quiet=True)
    found = json.loads(cli("evaluate", tmp_path / "run", "--horizon", 20, "--json").out)
    assert len(found["ahead"]["rmse"]) == 20
    command = ("forecast", tmp_path / "run", "--horizon", 40, "--samples", 2, "--json")
    code, out, err = cli(*command)
    assert (code, err) == (0, "")
    assert len(json.loads(out)["columns"]["heat"]["mean"]) == 40
    assert cli(*command, "--past", 16).err == ""
    few = (
        "note: 15 rows are read, fewer than the model's season of 16: the others count as the mean "
        "of their column\n"
    )
    assert cli(*command, "--past", 15).err == few
    assert cli("forecast", run, tmp_path / "run", "--samples", 0, "--past", 15).err == few
    odd = cli(
        "train", tmp_path / "run" / "recipe.toml", "model.season=0.5", "--out", tmp_path / "b"
    )
    assert odd.code == 2
    assert odd.err.startswith("error: model.season must be ")
    assert len(odd.err.splitlines()) == 1


def test_all_of_a_newer_file_is_read_however_short_it_is(tmp_path: Path, cli: Cli) -> None:
    """One too short to learn from, too: the next rows of all its rows but the first."""
    recipe = series_recipe(tmp_path, model={"season": 16}, train={"epochs": 3})
    run = tmp_path / "run"
    br.train(recipe, run, quiet=True)
    newer = write_series(tmp_path, rows=40, name="newer.csv")
    given = (run, "--data", newer, "--split", "all", "--json")
    code, out, err = cli("evaluate", *given, "--horizon", 3)
    assert (code, err) == (0, "")
    found = json.loads(out)
    settings = br.read_recipe(run / "recipe.toml").data
    assert isinstance(settings, br.SeriesData)
    rows = torch.from_numpy(load_rows(replace(settings, path=str(newer))).values)
    with torch.no_grad():
        raw, _ = br.load(run)(rows[:-1, None])
    mean, scale = raw[:, 0, :, 0], torch.nn.functional.softplus(raw[:, 0, :, 1])
    nll = -torch.distributions.Normal(mean, scale).log_prob(rows[1:]).mean().item()
    assert found["values"] == 2 * 39
    assert found["nll"] == pytest.approx(nll, rel=1e-5)
    assert (found["ahead"]["past"], found["ahead"]["origins"]) == (20, 40 - 3 - 20 + 1)
    [by_draws] = json.loads(cli("uncertainty", *given, "--samples", 0).out)["by_draws"]
    assert by_draws["nll"] == pytest.approx(nll, rel=1e-5)
    for command in ("evaluate", "uncertainty"):
        told = cli(command, run, "--data", newer)
        note = f"note: this is the 'test' part of {newer}; --split all reads all of it\n"
        assert (told.code, told.err) == (0, note)


def test_missing_rows_are_told_of(tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "gaps.csv"
    lines = [f"2024-{1 + t // 28:02}-{1 + t % 28:02},{t % 7}" for t in range(84)]  # short months
    path.write_text("day,a\n" + "\n".join(lines[:9] + lines[11:]))
    given = {"path": str(path), "columns": ["a"], "time": "day"}
    recipe = series_recipe(tmp_path, data=given, train={"epochs": 1})
    (tmp_path / "recipe.toml").write_text(to_toml(recipe))
    _, _, err = cli("train", tmp_path / "recipe.toml", "--out", tmp_path / "run")
    told = "mostly 1 day, 0:00:00 here, but 3 of 82 are not: the first is '2024-01-12'"
    assert told in " ".join(err.split())
    forecast = ("forecast", tmp_path / "run", "--horizon", 1)
    assert cli(*forecast).err.startswith(f"note: {path}: rows are taken to be at even steps")
    assert cli(*forecast, "--past", 20).err == ""


def test_small_changes_of_large_numbers_show(tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "p.csv"
    values = (101325 + 0.001 * math.sin(t / 3) for t in range(120))
    path.write_text("p\n" + "\n".join(f"{value:.6f}" for value in values))
    given = {"path": str(path), "columns": ["p"], "time": ""}
    br.train(series_recipe(tmp_path, data=given, train={"epochs": 1}), tmp_path / "r", quiet=True)
    out = tmp_path / "f.csv"
    assert "101325.00" in cli("forecast", tmp_path / "r", "--horizon", 2, "--out", out).out
    found = json.loads(cli("forecast", tmp_path / "r", "--horizon", 2, "--json").out)["columns"]
    with out.open() as file:
        for line, lower, upper in zip(
            csv.DictReader(file), found["p"]["lower"], found["p"]["upper"], strict=True
        ):
            assert float(line["lower"]) == pytest.approx(lower, abs=1e-7)
            assert float(line["upper"]) == pytest.approx(upper, abs=1e-7)
            assert float(line["lower"]) < float(line["upper"])


def test_another_file_is_read_by_the_runs_own_numbers(run: Path, tmp_path: Path, cli: Cli) -> None:
    other = write_series(tmp_path, rows=40, shift=50)
    command = ("forecast", run, "--data", other, "--horizon", 1, "--json")
    found = json.loads(cli(*command).out)
    assert found["after"] == "day 39"
    assert found["columns"]["flow"]["mean"][0] == pytest.approx(50, abs=10)
    own = json.loads(cli("forecast", run, "--horizon", 1, "--json").out)
    assert found["columns"]["flow"]["epistemic"][0] > own["columns"]["flow"]["epistemic"][0]


def test_uncertainty_by_the_number_of_draws(run: Path, cli: Cli) -> None:
    found = json.loads(cli("uncertainty", run, "--samples", "0,5", "--json").out)
    by_draws = found["by_draws"]
    assert [each["samples"] for each in by_draws] == [0, 5]
    assert by_draws[0]["epistemic"] == 0 < by_draws[1]["epistemic"]
    assert {"crps", "coverage_90", "calibration_error"} <= set(by_draws[0])


def test_a_pruned_run_forecasts(run: Path, tmp_path: Path, cli: Cli) -> None:
    small = tmp_path / "small"
    assert cli("prune", run, "--fraction", 0.3, "--out", small).code == 0
    assert cli("evaluate", small, "--json").code == 0
    curve = json.loads(cli("prune", run, "--curve", "0,0.5", "--json").out)
    assert curve["figure"] == "valid_nll"
    found = json.loads(cli("forecast", small, "--horizon", 2, "--json").out)
    assert found["samples"] == 0  # its weights are points


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["evaluate", "RUN", "--sharpened"], "--sharpened is not for a run on series"),
        (["evaluate", "RUN", "--dynamic", "0.1"], "--dynamic is not for a run on series"),
        (["evaluate", "RUN", "--horizon", "60"], "60 rows are too few for forecasts of 60 steps"),
        (["evaluate", "RUN", "--season", "16"], "--season is of --horizon; give that too"),
        (
            ["evaluate", "RUN", "--horizon", "4", "--season", "57"],
            "60 rows are too few for forecasts of 4 steps after a season of 57; lower --season",
        ),
        (["evaluate", "RUN", "--horizon", "4", "--season", "0"], "greater than or equal to 1"),
        (["evaluate", "RUN", "--streams", "60"], "lower --streams, or give more rows"),
        (["uncertainty", "RUN", "--gap"], "--gap is not for a run on series"),
        (["generate", "RUN"], "is a run on series, which writes no text"),
        (["forecast", "RUN", "--data", "nowhere.csv"], "nowhere.csv does not exist"),
        (["forecast", "RUN", "--out", "nowhere/f.csv"], "there is no folder nowhere"),
        (["forecast", "RUN", "--paths", "1"], "greater than or equal to 2"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    run: Path, cli: Cli, command: list[str], message: str
) -> None:
    code, _, err = cli(*(run if word == "RUN" else word for word in command))
    assert code in (1, 2)
    assert message in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err


def test_only_a_run_on_series_forecasts(tmp_path: Path, cli: Cli) -> None:
    from small_runs import small_recipe

    br.train(small_recipe(tmp_path, train={"epochs": 1}), tmp_path / "run", quiet=True)
    for command in (["evaluate"], ["report", "--out", tmp_path / "page.html"]):
        _, _, err = cli(*command, tmp_path / "run", "--season", 4)
        assert "--season is not for a run on text" in " ".join(err.split())
    [line] = cli("forecast", tmp_path / "run").errors
    assert line.endswith("is a run on text; only one on series can forecast")


def test_a_file_without_rows_has_nothing_to_go_on_from(run: Path, tmp_path: Path, cli: Cli) -> None:
    empty = tmp_path / "empty.csv"
    empty.write_text("when,flow,site,heat\n")
    [line] = cli("forecast", run, "--data", empty).errors
    assert line == f"{empty} has no rows to go on from"


def test_data_of_another_kind_are_told_by_the_flag(run: Path, tmp_path: Path, cli: Cli) -> None:
    [line] = cli("evaluate", run, "--data", tmp_path).errors
    assert line == f"{tmp_path} is not a file; give a CSV file as --data"
    other = tmp_path / "other.csv"
    other.write_text(",".join(f"name{i}" for i in range(1000)) + "\n")
    [line] = cli("forecast", run, "--data", other).errors
    assert "in its first line, only 'name0', 'name1', " in line
    assert line.endswith("...; give a file that has it as --data")
