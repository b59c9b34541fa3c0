"""Runs that are pruned: their folders, their retraining, and what pruning costs them."""

import errno
import json
import math
import os
import re
import shutil
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

import bayesrnn as br
from bayesrnn.prune import kept
from bayesrnn.pruned_run import prune_run, retraining, run_curve
from bayesrnn.saving import TENSORS
from bayesrnn.train.checkpoint import read_newest_checkpoint
from bayesrnn.train.loop import Trainer
from bayesrnn.train.schedule import learning_rate
from labelled_runs import image_recipe, review_recipe
from small_runs import Cli, assert_same_end, folder_contents, metrics, small_recipe


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pruning")
    br.train(small_recipe(folder, train={"epochs": 1}), folder / "run", quiet=True)
    return folder / "run"


def test_the_command_writes_a_run_that_evaluate_reads(cli: Cli, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "small"
    done = cli("prune", run, "--fraction", 0.5, "--out", out, "--json")
    assert done.code == 0, done.err
    figures = json.loads(done.out)
    assert figures["weights"] == figures["all_weights"] - round(0.5 * figures["all_weights"])
    assert figures["file_bytes"] == (out / "model" / TENSORS).stat().st_size
    expected = br.load(run)
    br.prune(expected, 0.5)
    found = br.load(out)
    for name, (loc, scale) in found.moments().items():
        assert torch.equal(loc, expected.moments()[name][0])
        assert scale is None
    done = cli("evaluate", out, "--json", "--device", "cpu")
    assert done.code == 0, done.err
    scores = json.loads(done.out)
    assert scores["complexity_nats"] is None
    assert math.isfinite(scores["perplexity"])


def test_retraining_a_run(run: Path, tmp_path: Path) -> None:
    first = br.load(run)
    br.prune(first, 0.5)
    masks = kept(first)
    found = prune_run(run, tmp_path / "small", 0.5, retrain=2, scale=True, quiet=True)
    assert [line["epoch"] for line in found.epochs] == [1, 2]
    model = br.load(tmp_path / "small")
    assert_zero_moments(model, masks)
    assert any(
        not torch.equal(loc, first.moments()[name][0]) for name, (loc, _) in model.moments().items()
    )
    checkpoint = read_newest_checkpoint(tmp_path / "small" / "checkpoints", print)
    assert checkpoint is not None
    state = checkpoint.tensors["parameters.safetensors"]
    for index, block in enumerate(model.each_block()):
        assert block.keep is not None
        assert torch.equal(state[f"blocks.{index}.keep"], block.keep)
    recipe = br.read_recipe(tmp_path / "small" / "recipe.toml", ["train.epochs=3"])
    br.train(recipe, tmp_path / "small", quiet=True)  # goes on, as pruned as it was
    assert_zero_moments(br.load(tmp_path / "small"), masks)


def test_the_score_is_that_of_the_epoch_kept(cli: Cli, run: Path, tmp_path: Path) -> None:
    """Points that overfit, so that the last epoch is not the best."""
    points = {"posterior": {"kind": "delta"}, "prior": {"kind": "uniform"}}
    train = {"optimizer": "Adam", "options": {}, "lr": 0.03, "epochs": 5, "keep": "best"}
    br.train(small_recipe(tmp_path, **points, train=train), tmp_path / "run", quiet=True)
    asked = ["prune", tmp_path / "run", "--fraction", 0.1, "--retrain", 6, "--quiet"]
    done = cli(*asked, "--out", tmp_path / "one", "--json")
    figures = json.loads(done.out)
    scores = [line["valid_perplexity"] for line in figures["epochs"]]
    assert figures["kept_epoch"] == scores.index(min(scores)) + 1 < 6
    shown = cli(*asked, "--out", tmp_path / "two").out
    assert re.search(rf"kept epoch\W+{figures['kept_epoch']}\W", shown)
    perplexity = re.search(r"valid perplexity\W+([\d.,]+)", shown)
    assert perplexity is not None
    assert float(perplexity[1].replace(",", "")) == pytest.approx(min(scores), rel=1e-3)
    whole = json.loads(cli("prune", run, "--fraction", 0.5, "--out", tmp_path / "3", "--json").out)
    assert whole["kept_epoch"] is None


def assert_zero_moments(model: br.Bayesian, masks: dict[str, Tensor]) -> None:
    for name, (loc, _) in model.moments().items():
        assert (loc[~masks[name]] == 0).all()
        assert torch.equal(kept(model)[name], masks[name])


def test_retraining_a_sharpened_run(tmp_path: Path) -> None:
    posterior = {"kind": "sharpened", "scale": 0.05, "eta": 0.0016}
    recipe = small_recipe(tmp_path, posterior=posterior, train={"epochs": 1, "options": {}})
    br.train(recipe, tmp_path / "run", quiet=True)
    found = prune_run(tmp_path / "run", tmp_path / "small", 0.5, retrain=1, quiet=True)
    assert found.finished
    assert found.bits_per_weight is not None


def test_one_line_for_what_is_wrong(cli: Cli, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine.txt").write_text("mine")
    means = tmp_path / "means"
    prune_run(run, means, 0.5, quiet=True)
    for code, words, arguments in [
        (1, "no such folder", (tmp_path / "none", "--fraction", 0.5, "--out", out)),
        (1, "is no run's folder", (full, "--fraction", 0.5, "--out", out)),
        (1, "not empty", (run, "--fraction", 0.5, "--out", full)),
        (1, "--scale", (means, "--fraction", 0.5, "--retrain", 1, "--out", out)),
        (1, "leave out --scale", (means, "--fraction", 0.5, "--scale", "--out", out)),
        (2, "--threshold", (run, "--out", out)),
        (2, "--out", (run, "--fraction", 0.5)),
        (2, "--out", (run, "--curve", "0.5", "--retrain", 1)),
        (2, "--out", (run, "--curve", "0.5", "--out", out)),
        (2, "--curve", (run, "--curve", "0.5,x")),
        (2, "fraction", (run, "--curve", "0.5,2")),
        (2, "--by", (run, "--thresholds", "0.5", "--by", "magnitude")),
        (2, "--retrain", (run, "--fraction", 0.5, "--lr", 1, "--out", out)),
        (2, "--split", (run, "--fraction", 0.5, "--split", "test", "--out", out)),
        (2, "--threshold", (run, "--fraction", 0.5, "--threshold", 1, "--out", out)),
        (1, "--device is 'banana'", (run, "--fraction", 0.5, "--device", "banana", "--out", out)),
        (2, "--per-tensor", (run, "--threshold", 1, "--per-tensor", "--out", out)),
        (2, "--fraction", (run, "--fraction", 2, "--out", out)),
    ]:
        done = cli("prune", *arguments)
        assert done.code == code, done.err
        assert "Traceback" not in done.err
        assert words in done.err.replace("\n", " ")
        assert not out.exists()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="there is no /proc here")
@pytest.mark.parametrize("retrain", [0, 1])
@pytest.mark.parametrize(
    "where", ["/.recipe.toml", "/.pruning.json", "/.vocabulary.json", "/.model", "/checkpoints"]
)
def test_a_pruning_that_a_full_disk_stopped_is_begun_again(
    where: str, retrain: int, cli: Cli, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, sync = tmp_path / "small", os.fsync
    command = ("prune", run, "--fraction", 0.5, "--retrain", retrain, "--out", out, "--quiet")

    def full(descriptor: int) -> None:
        if where in str(Path(f"/proc/self/fd/{descriptor}").resolve()):
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        done = cli(*command)
    if where == "/checkpoints" and not retrain:
        assert done.code == 0
        assert "exists and is not empty; choose another --out" in cli(*command).errors[0]
        return
    assert done.code == 1
    assert "No space left on device; free some space" in done.errors[0]
    again = cli(*command)
    assert again.code == 0, again.err
    prune_run(run, tmp_path / "other", 0.5, retrain=retrain, quiet=True)
    assert folder_contents(out / "model") == folder_contents(tmp_path / "other" / "model")


# --- retraining -------------------------------------------------------------------------------


def rates(recipe: br.Recipe) -> list[float]:
    given = recipe.train
    return [
        learning_rate(epoch, given.lr, given.decay, given.decay_after)
        for epoch in range(given.epochs)
    ]


def test_the_rate_falls_to_the_last_one(tmp_path: Path) -> None:
    recipe = small_recipe(
        tmp_path, train={"epochs": 70, "lr": 1.0, "decay": 0.9, "decay_after": 20}
    )
    last = rates(recipe)[-1]
    assert last < 0.01
    found = rates(retraining(recipe, 5))
    assert (found[0], found[-1]) == (pytest.approx(0.1), pytest.approx(last))
    assert all(b / a == pytest.approx(found[1] / found[0]) for a, b in pairwise(found))
    assert rates(retraining(recipe, 1)) == [pytest.approx(0.1)]
    assert rates(retraining(recipe, 3, lr=0.5))[0] == 0.5
    assert rates(retraining(recipe, 3, lr=1e-4)) == [1e-4] * 3  # it never rises
    short = small_recipe(tmp_path, train={"epochs": 2, "lr": 1.0})
    assert rates(retraining(short, 3)) == [1.0] * 3


@pytest.mark.parametrize("steps", [0, 7, 27])
def test_interrupted_retraining_goes_on(
    run: Path, tmp_path: Path, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped before the first step, within an epoch, or in the next one: the same end."""
    prune_run(run, tmp_path / "whole", 0.5, retrain=2, scale=True, quiet=True)
    plain = Trainer._update

    def interrupted(self: Trainer, batch: br.Batch) -> None:
        if self.step == steps:
            raise KeyboardInterrupt
        plain(self, batch)

    out = tmp_path / "part"
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prune_run(run, out, 0.5, retrain=2, scale=True, quiet=True)
    with pytest.raises(br.UserError, match=r"fraction is 0.5 there and 0.6 here"):
        prune_run(run, out, 0.6, retrain=2, scale=True, quiet=True)
    with pytest.raises(br.UserError, match=r"fraction is 0.5 there and unset here"):
        prune_run(run, out, threshold=0.6, retrain=2, scale=True, quiet=True)
    if steps == 0:  # `train` goes on just as well
        br.train(br.read_recipe(out / "recipe.toml"), out, quiet=True)
    else:
        assert prune_run(run, out, 0.5, retrain=2, scale=True, quiet=True).finished
    assert_same_end(out, tmp_path / "whole")


@pytest.fixture
def ctrl_c(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Somebody presses it in the first step of every training."""
    plain = Trainer._update

    def signalled(self: Trainer, batch: br.Batch) -> None:
        plain(self, batch)
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_update", signalled)
        yield


@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupted_retraining_is_gone_on_with_by_its_own_command(
    cli: Cli, run: Path, tmp_path: Path
) -> None:
    prune_run(run, tmp_path / "small", 0.5, retrain=2, scale=True, quiet=True)
    told = cli("evaluate", tmp_path / "small")
    assert "2 of 2 epochs are to come; run its prune command again to go on" in told.err


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("which", ["--thresholds", "--curve"])
def test_ctrl_c_ends_a_table_at_once(which: str, cli: Cli, run: Path, tmp_path: Path) -> None:
    done = cli("prune", run, which, "0.4,0.5", "--retrain", 1, "--out", tmp_path / "table")
    assert (done.code, done.out) == (130, "")
    assert "saved. Run the same command to go on" in done.err
    assert done.err.endswith("interrupted\n")
    assert "error" not in done.err
    assert len(list((tmp_path / "table").iterdir())) == 1


# --- curves -----------------------------------------------------------------------------------


def test_a_runs_curve_is_that_of_pruned_runs(cli: Cli, run: Path, tmp_path: Path) -> None:
    before = folder_contents(run)
    done = cli("prune", run, "--curve", "0,0.5,0.8", "--split", "test", "--device", "cpu", "--json")
    assert done.code == 0, done.err
    assert folder_contents(run) == before
    found = json.loads(done.out)
    assert found["figure"] == "test_perplexity"
    for point in found["points"]:
        out = tmp_path / f"{point['fraction']}"
        prune_run(run, out, point["fraction"], quiet=True)
        done = cli("evaluate", out, "--json", "--device", "cpu")
        assert json.loads(done.out)["perplexity"] == pytest.approx(point["error"], rel=1e-6)
    done = cli("prune", run, "--thresholds", "0,0.83,2", "--streams", 2, "--device", "cpu")
    assert done.code == 0, done.err
    assert "0.83" in done.out


def test_what_training_watched_is_the_default(run: Path) -> None:
    last = [line for line in metrics(run) if line["kind"] == "epoch"][-1]
    found = run_curve(run, [0.0], device="cpu")
    assert found.figure == "valid_perplexity"
    assert found.points[0].error == pytest.approx(last["valid_perplexity"], rel=1e-5)


@pytest.mark.parametrize(("kind", "figure"), [("images", "error_percent"), ("reviews", "rmse")])
def test_curves_of_labelled_runs(kind: str, figure: str, tmp_path: Path) -> None:
    recipe = {"images": image_recipe, "reviews": review_recipe}[kind](tmp_path)
    epochs = br.train(recipe, tmp_path / "run", quiet=True).epochs
    found = run_curve(tmp_path / "run", [0.0, 1.0], device="cpu")
    assert found.figure.endswith(figure)
    assert found.points[0].error == pytest.approx(epochs[-1][found.figure], rel=1e-5)
    assert run_curve(tmp_path / "run", [0.5], split="test", device="cpu").figure == f"test_{figure}"
    with pytest.raises(br.UserError, match="streams"):
        run_curve(tmp_path / "run", [0.5], streams=2, device="cpu")


def test_the_papers_table(cli: Cli, run: Path, tmp_path: Path) -> None:
    arguments = ("prune", run, "--thresholds", "0,0.5", "--retrain", 1, "--out", tmp_path / "table")
    arguments = (*arguments, "--device", "cpu", "--quiet")
    done = cli(*arguments, "--json")
    assert done.code == 0, done.err
    first, second = json.loads(done.out)["points"]
    assert (first["percent"], first["retrain_epochs"]) == (100, 0)
    assert first["retrained"] == first["error"]
    assert second["retrain_epochs"] == 1
    model = br.load(tmp_path / "table" / "threshold-0.5")
    assert model.weight_count == second["weights"]
    pruned = br.load(run)
    br.prune(pruned, threshold=0.5)
    assert_zero_moments(model, kept(pruned))
    assert second["retrained"] != second["error"]
    again = cli(*arguments, "--json")  # all is there: nothing is trained twice
    assert json.loads(again.out)["points"] == [first, second]
    shutil.rmtree(tmp_path / "table" / "threshold-0.5" / "checkpoints")
    assert "retrained" in cli(*arguments).out


def test_fractions_that_look_alike_have_folders_of_their_own(run: Path, tmp_path: Path) -> None:
    run_curve(run, [0.5, 0.50000001], retrain=1, out=tmp_path / "table", device="cpu")
    names = sorted(path.name for path in (tmp_path / "table").iterdir())
    assert names == ["fraction-0.5", "fraction-0.50000001"]
