"""Training on series."""

from pathlib import Path
from typing import Any

import pytest
import torch

import bayesrnn as br
from bayesrnn.recipe import read_run_recipe
from bayesrnn.train.metrics import read_metrics
from series_runs import EPOCH, series_recipe, write_series


def test_it_learns_and_resumes_to_the_same_bits(tmp_path: Path) -> None:
    changes = {"epochs": 40}
    br.train(series_recipe(tmp_path, train=changes), tmp_path / "run", quiet=True)
    epochs = [m for m in read_metrics(tmp_path / "run") if m["kind"] == "epoch"]
    assert epochs[-1]["step"] == 40 * EPOCH
    assert epochs[-1]["train_nll"] < epochs[0]["train_nll"] - 0.5
    assert epochs[-1]["valid_rmse"] < 0.5 * epochs[0]["valid_rmse"]
    assert_resumes(tmp_path, train=changes)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_rows_that_a_season_needs_are_kept_for_the_resumption(tmp_path: Path, cell: str) -> None:
    """A season is longer than a step, and the run is broken off within an epoch."""
    model, train = {"cell": cell, "season": 16}, {"epochs": 9}
    br.train(series_recipe(tmp_path, model=model, train=train), tmp_path / "run", quiet=True)
    assert_resumes(tmp_path, model=model, train=train)


def assert_resumes(folder: Path, train: dict[str, Any], **changes: Any) -> None:
    for steps in (27, 0):  # broken off, and to the end
        part = series_recipe(folder, train=train | {"max_steps": steps}, **changes)
        br.train(part, folder / "parts", quiet=True)
    whole, parts = br.load(folder / "run"), br.load(folder / "parts")
    for name, tensor in whole.state_dict().items():
        assert torch.equal(parts.state_dict()[name], tensor)


def test_a_run_keeps_the_numbers_it_scales_by_and_notices_other_data(tmp_path: Path) -> None:
    recipe = series_recipe(tmp_path, train={"epochs": 2, "max_steps": 3})
    br.train(recipe, tmp_path / "run", quiet=True)
    kept = read_run_recipe(tmp_path / "run" / "recipe.toml").data
    assert isinstance(kept, br.SeriesData)
    assert kept.centre == br.load_series(recipe.data).settings.centre
    write_series(tmp_path, shift=3)
    with pytest.raises(br.UserError, match=r"the data are not those that the run .* began with"):
        br.train(recipe, tmp_path / "run", quiet=True)
    br.train(recipe, tmp_path / "run", fresh=True, quiet=True)
    again = read_run_recipe(tmp_path / "run" / "recipe.toml").data
    assert isinstance(again, br.SeriesData)
    assert again.centre[0] == pytest.approx(kept.centre[0] + 3, abs=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"train": {"precision": "bfloat16"}},
        {"posterior": {"kind": "sharpened", "scale": 0.05, "eta": 0.0016}},
        {"posterior": {"kind": "delta"}, "dropout": {"input": 0.2, "recurrent": 0.2}},
        {"model": {"cell": "lstm", "layers": 2}},
        {"model": {"cell": "lstm", "season": 16}, "train": {"precision": "bfloat16"}},
        {
            "model": {"season": 16},
            "posterior": {"kind": "sharpened", "scale": 0.05, "eta": 0.0016},
        },
        {
            "model": {"season": 16},
            "posterior": {"kind": "delta"},
            "dropout": {"input": 0.2, "recurrent": 0.2},
        },
    ],
)
def test_every_method_trains_on_series(tmp_path: Path, changes: dict[str, object]) -> None:
    recipe = series_recipe(tmp_path, **changes)
    outcome = br.train(recipe, tmp_path / "run", quiet=True)
    assert outcome.finished
    assert outcome.epochs[-1]["train_nll"] < outcome.epochs[0]["train_nll"]


@pytest.mark.parametrize(
    ("season", "train", "message"),
    [
        (
            45,
            {},
            r"44, the rows of a stream of 'train', got 45; lower it or train\.streams",
        ),
        (
            30,
            {"valid_streams": 2},
            r"29, the rows of a stream of 'valid', got 30; lower it or train\.valid_streams",
        ),
    ],
)
def test_a_season_that_no_stream_holds_is_refused(
    tmp_path: Path, season: int, train: dict[str, object], message: str
) -> None:
    recipe = series_recipe(tmp_path, model={"season": season}, train=train)
    with pytest.raises(
        br.Invalid, match=f"^model\\.season must be at most {message}, or give more rows$"
    ):
        br.train(recipe, tmp_path / "run", quiet=True)
    shorter = series_recipe(tmp_path, model={"season": season - 1}, train={**train, "epochs": 1})
    assert br.train(shorter, tmp_path / "run", quiet=True).finished


def test_the_loss_is_that_of_torch_and_each_value_counts_once(tmp_path: Path) -> None:
    from bayesrnn.train.series import SeriesTask

    recipe = series_recipe(tmp_path)
    task = SeriesTask(recipe, torch.device("cpu"))
    net = br.Forecaster(2, recipe.model)  # type: ignore[arg-type]
    model = br.bayesianize(net, br.Delta(), br.Uniform())
    batch = next(iter(task.batches))
    found, _ = task.nll(model, batch, None)
    raw, _ = model(batch.x)
    scale = torch.nn.functional.softplus(raw[..., 1])
    truth = -torch.distributions.Normal(raw[..., 0], scale).log_prob(batch.y)
    torch.testing.assert_close(found, truth.sum(dim=(0, 2)))
    assert found.shape == (4,)
    assert task.batches.targets == 2 * 176
