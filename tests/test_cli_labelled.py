"""The command line with images and reviews."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bayesrnn.recipe import Recipe, to_toml
from bayesrnn.train import loop
from labelled_runs import image_recipe, review_recipe, write_images, write_reviews
from small_runs import Cli, write_recipe


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The finished run of a kind."""
    folder = tmp_path_factory.mktemp("finished")
    recipes: dict[str, Recipe] = {
        "images": image_recipe(folder),
        "ratings": review_recipe(folder),
        "classes": review_recipe(folder, data={"classes": 4}),
    }

    def run(kind: str) -> Path:
        if not (folder / "runs" / kind).exists():
            loop.train(recipes[kind], folder / "runs" / kind, quiet=True)
        return folder / "runs" / kind

    return run


@pytest.mark.parametrize(
    ("make", "watched"),
    [(image_recipe, "valid_error_percent"), (review_recipe, "test_rmse")],
)
def test_train_prints_what_is_watched(
    make: Callable[..., Recipe], watched: str, cli: Cli, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(make(tmp_path)))
    command = ["train", recipe, "--out", tmp_path / "run"]
    code, out, err = cli(*command, "train.epochs=1", "--json")
    assert code == 0
    figures = json.loads(out)
    assert figures[watched] == figures[f"best_{watched}"]
    assert {"train_nll", "error_bits", "complexity_bits"} <= set(figures)
    assert "perplexity" not in out + err
    assert f"epoch 1: train nll {figures['train_nll']:.4g}, {watched.replace('_', ' ')} " in err
    again, table, _ = cli(*command)
    assert again == 0
    assert watched.replace("_", " ") in table


@pytest.mark.parametrize(
    ("kind", "error"),
    [("images", "error_percent"), ("classes", "error_percent"), ("ratings", "rmse")],
)
def test_evaluate_prints_the_mean_and_the_average_of_draws(
    kind: str, error: str, cli: Cli, finished: Callable[[str], Path]
) -> None:
    def figures(*options: object) -> dict[str, Any]:
        code, out, _ = cli("evaluate", finished(kind), *options, "--json")
        assert code == 0
        return json.loads(out)

    mean = figures()
    assert (mean["split"], mean["weights"], mean["samples"]) == ("test", "mean", 0)
    assert mean["examples"] == (20 if kind == "images" else 22)
    assert mean["expected_nll"] is None
    assert mean["complexity_nats"] > 0
    assert mean[error] >= 0
    three = figures("--samples", 3)
    assert (three["weights"], three["samples"]) == ("sample", 3)
    assert three["nll"] <= three["expected_nll"]
    assert three == figures("--samples", 3) != figures("--samples", 3, "--seed", 2)
    assert figures("--split", "train")["examples"] == (80 if kind == "images" else 78)
    code, table, _ = cli("evaluate", finished(kind))
    assert code == 0
    assert error.replace("_", " ") in table


@pytest.mark.parametrize("kind", ["images", "classes", "ratings"])
def test_evaluate_writes_how_sure_it_is_of_each_example(
    kind: str, cli: Cli, finished: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tmp_path / "predictions.csv"
    options = ["--samples", 5, "--predictions", path, "--json"]
    code, out, _ = cli("evaluate", finished(kind), *options)
    assert code == 0
    with path.open() as file:
        lines = list(csv.DictReader(file))
    figures = json.loads(out)
    assert len(lines) == figures["examples"]
    for line in lines:
        parts = [float(line[name]) for name in ("total", "aleatoric", "epistemic")]
        assert parts[0] == pytest.approx(parts[1] + parts[2], abs=1e-5)
    if kind == "ratings":
        assert all(float(line["epistemic"]) > 0 for line in lines)
        squares = [(float(line["predicted"]) - float(line["target"])) ** 2 for line in lines]
        assert figures["rmse"] == pytest.approx((sum(squares) / len(lines)) ** 0.5, rel=1e-4)
        read = [[float(line[key]) for key in ("lower", "target", "upper")] for line in lines]
        assert all(lower < upper for lower, _, upper in read)
        doubt = json.loads(cli("uncertainty", finished(kind), "--samples", 5, "--json").out)
        held = sum(lower <= target <= upper for lower, target, upper in read) / len(lines)
        assert doubt["by_draws"][0]["coverage_90"] == pytest.approx(held)
    else:
        wrong = sum(line["predicted"] != line["target"] for line in lines)
        assert figures["error_percent"] == pytest.approx(100 * wrong / len(lines))


def test_all_reviews_of_a_folder_are_read(
    cli: Cli, finished: Callable[[str], Path], tmp_path: Path
) -> None:
    newer = tmp_path / "newer"
    write_reviews(newer)
    run, file = finished("ratings"), tmp_path / "all.csv"
    given = (run, "--data", newer, "--split", "all", "--json")
    code, out, err = cli("evaluate", *given, "--predictions", file)
    assert (code, err, json.loads(out)["examples"]) == (0, "", 100)
    with file.open() as lines:
        assert len({line["example"] for line in csv.DictReader(lines)}) == 100
    assert json.loads(cli("uncertainty", *given, "--samples", 0).out)["examples"] == 100
    told = cli("evaluate", run, "--data", newer).err
    assert told == f"note: this is the 'test' part of {newer}; --split all reads all of it\n"


@pytest.mark.parametrize("classes", [2, 5])
def test_reviews_of_any_number_of_classes(classes: int, cli: Cli, tmp_path: Path) -> None:
    labels = [n % classes for n in range(60)]
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "subj.me").write_text("".join(f"word{label} or so\n" for label in labels))
    (mine / f"label.{classes}class.me").write_text("".join(f"{y}\n" for y in labels))
    data = {"path": str(mine), "classes": classes}
    point: dict[str, Any] = {"posterior": {"kind": "delta"}, "prior": {"kind": "uniform"}}
    recipe = review_recipe(tmp_path, data=data, train={"epochs": 20}, **point)
    (tmp_path / "recipe.toml").write_text(to_toml(recipe))
    run, file = tmp_path / "run", tmp_path / "found.csv"
    assert cli("train", tmp_path / "recipe.toml", "--out", run, "--quiet").code == 0
    found = json.loads(cli("evaluate", run, "--predictions", file, "--json").out)
    assert found["error_percent"] == 0
    with file.open() as lines:
        [first, *_] = csv.DictReader(lines)
    assert [key for key in first if key[1:].isdigit()] == [f"p{y}" for y in range(classes)]


@pytest.mark.parametrize("samples", [0, 3])
def test_classes_have_a_temperature(
    samples: int, cli: Cli, finished: Callable[[str], Path]
) -> None:
    run = finished("images")
    command = ["evaluate", run, "--samples", samples]
    as_it_is = json.loads(cli(*command, "--json").out)
    found = json.loads(cli(*command, "--temperature", "search", "--json").out)
    assert samples or found["error_percent"] == as_it_is["error_percent"]
    assert found["nll"] != as_it_is["nll"]
    best = min(found["temperatures"], key=lambda trial: trial["nll"])
    assert best["temperature"] / 1.1 <= found["temperature"] <= best["temperature"] * 1.1
    at = ["--temperature", best["temperature"], "--split", "valid", "--json"]
    assert json.loads(cli(*command, *at).out)["nll"] == pytest.approx(best["nll"], rel=1e-6)
    by_draws = ["uncertainty", run, "--samples", samples, "--temperature", "search", "--json"]
    [line] = json.loads(cli(*by_draws).out)["by_draws"]
    assert line["temperature"] == pytest.approx(found["temperature"])
    assert line["nll"] == pytest.approx(found["nll"])


def test_where_a_temperature_cannot_be(cli: Cli, finished: Callable[[str], Path]) -> None:
    for command in ("evaluate", "uncertainty"):
        for heat in (1, 2, "search"):
            code, _, err = cli(command, finished("ratings"), "--temperature", heat)
            assert (code, "--temperature is of classes" in err) == (2, True)
        code, _, err = cli(command, finished("classes"), "--temperature", "search")
        said = " ".join(err.replace("│", " ").split())
        assert (code, "search needs a validation set, and this run has none" in said) == (2, True)
        assert cli(command, finished("classes"), "--temperature", 2).code == 0


def test_wrong_use_gets_one_line(cli: Cli, finished: Callable[[str], Path], tmp_path: Path) -> None:
    code, _, err = cli("evaluate", finished("images"), "--streams", 2)
    assert code == 2
    assert "--streams is not for a run on images" in err
    for flag in (["--dynamic", 0.1], ["--sharpened"]):
        code, _, err = cli("evaluate", finished("ratings"), *flag)
        assert code == 2
        assert f"{flag[0]} is not for a run on reviews" in err
    for command in ("evaluate", "uncertainty"):
        code, _, err = cli(command, finished("images"), "--split", "all")
        assert code == 2
        assert "--split all is not for a run on images" in err
    code, _, err = cli("evaluate", finished("ratings"), "--split", "valid")
    assert (code, err.count("\n")) == (1, 1)
    assert "there is no 'valid' set, only train, test" in err
    code, _, err = cli("evaluate", finished("images"), "--data", tmp_path / "nowhere")
    assert (code, err.count("\n")) == (1, 1)
    assert "nowhere does not exist; give with --data where the data are" in err
    code, _, err = cli("generate", finished("ratings"))
    assert (code, err.count("\n")) == (1, 1)
    assert "is a run on reviews, which writes no text" in err
    code, _, err = cli("evaluate", finished("ratings"), "--predictions", tmp_path / "no/such.csv")
    assert (code, err.count("\n")) == (1, 1)
    assert "cannot write" in err
    recipe = write_recipe(tmp_path, train={"max_steps": 2})
    assert cli("train", recipe, "--out", tmp_path / "text", "--quiet")[0] == 0
    code, _, err = cli("evaluate", tmp_path / "text", "--predictions", tmp_path / "x.csv")
    assert code == 2
    assert "--predictions is not for a run on text" in err


def test_networks_of_other_sizes_are_no_ensemble(
    cli: Cli, finished: Callable[[str], Path], tmp_path: Path
) -> None:
    recipe = image_recipe(tmp_path, model={"classes": 5}, train={"epochs": 1})
    loop.train(recipe, tmp_path / "five", quiet=True)
    for command in ("evaluate", "uncertainty"):
        code, _, err = cli(command, finished("images"), tmp_path / "five")
        assert (code, err.count("\n")) == (1, 1)
        assert f"model.classes is 5 in {tmp_path / 'five'} and 3 in" in err


def test_a_run_that_was_trained_with_other_data_is_told_of(
    cli: Cli, finished: Callable[[str], Path], tmp_path: Path
) -> None:
    recipe = image_recipe(tmp_path, train={"epochs": 1})
    loop.train(recipe, tmp_path / "same", quiet=True)
    assert cli("evaluate", finished("images"), tmp_path / "same").err == ""
    write_images(tmp_path / "images", seed=2)
    loop.train(recipe, tmp_path / "other", quiet=True)
    for command in ("evaluate", "uncertainty"):
        code, _, err = cli(command, finished("images"), tmp_path / "other")
        assert (code, err.count("\n")) == (0, 1)
        assert f"is not what {tmp_path / 'other'} was trained with: that was " in err
        code, _, err = cli(command, tmp_path / "other", tmp_path / "same")
        assert (code, err.count("\n")) == (0, 1)
        assert f"is not what {tmp_path / 'same'} was trained with: it has changed since" in err
