"""The best epoch is kept, and training ends when there is no progress any more."""

import json
import math
from pathlib import Path

import pytest

from bayesrnn import load, train
from bayesrnn.errors import UserError
from bayesrnn.evaluate import evaluate_text
from bayesrnn.train.loop import choose_device
from bayesrnn.train.metrics import read_metrics
from bayesrnn.train.stopping import Progress, best_line
from bayesrnn.train.task import build_task
from labelled_runs import review_recipe
from small_runs import Cli, small_recipe

OVERFITS = {
    "posterior": {"kind": "delta"},
    "prior": {"kind": "uniform"},
    "model": {"hidden": 20, "embedding": 20},
    "train": {
        "epochs": 30,
        "streams": 8,
        "optimizer": "Adam",
        "lr": 0.03,
        "options": {},
        "keep": "best",
    },
}


def epochs(run: Path) -> list[dict[str, float]]:
    return [line for line in read_metrics(run) if line["kind"] == "epoch"]


def test_figures_that_are_undefined_do_not_count() -> None:
    progress = Progress()
    assert progress.note({"epoch": 1, "nll": 1.0, "bits": None}, "nll", ("bits",))
    assert not progress.note({"epoch": 2, "nll": 1.0, "bits": None}, "nll", ("bits",))
    assert (progress.best_epoch, progress.last_gain) == (1, 1)
    figures = [math.nan, None, 2.0, math.inf]
    lines = [{"epoch": epoch, "nll": nll} for epoch, nll in enumerate(figures, start=1)]
    assert best_line(lines, "nll", warm_up=0) == lines[2]
    assert best_line(lines, "nll", warm_up=3) is None
    assert Progress(**json.loads(json.dumps(progress.state_dict()))) == progress


def test_the_best_epoch_is_kept_and_patience_ends(tmp_path: Path) -> None:
    settings = {**OVERFITS, "train": {**OVERFITS["train"], "patience": 4}}
    recipe = small_recipe(tmp_path, **settings)
    outcome = train(recipe, tmp_path / "run", quiet=True)
    figures = [line["valid_perplexity"] for line in epochs(tmp_path / "run")]
    best = figures.index(min(figures)) + 1
    assert outcome.finished
    assert outcome.kept == best < len(figures) == best + 4 < 30
    task = build_task(recipe, choose_device("cpu"))
    again = evaluate_text(load(tmp_path / "run"), task.stream("valid"))
    assert again.perplexity == pytest.approx(min(figures), rel=1e-5)
    same = train(recipe, tmp_path / "run", quiet=True)  # there is nothing left to do
    assert (same.kept, same.steps, same.finished) == (outcome.kept, outcome.steps, True)


def test_it_is_kept_over_a_restart(tmp_path: Path) -> None:
    """Broken off after the best epoch, and again in the midst of one."""
    whole = small_recipe(tmp_path, **{**OVERFITS, "train": {**OVERFITS["train"], "epochs": 6}})
    train(whole, tmp_path / "one", quiet=True)
    for steps in (25, 47):
        cut = {**OVERFITS["train"], "epochs": 6, "max_steps": steps}
        train(small_recipe(tmp_path, **{**OVERFITS, "train": cut}), tmp_path / "two", quiet=True)
    outcome = train(whole, tmp_path / "two", quiet=True)
    assert outcome.kept == train(whole, tmp_path / "one", quiet=True).kept
    one, two = (load(tmp_path / name).moments() for name in ("one", "two"))
    assert all(one[name][0].equal(two[name][0]) for name in one)


def test_the_epochs_of_a_warm_up_are_neither_the_best_nor_without_progress(
    tmp_path: Path, cli: Cli
) -> None:
    early = train(small_recipe(tmp_path, **OVERFITS), tmp_path / "early", quiet=True).kept
    waits = {**OVERFITS["train"], "patience": 2, "warm_up": early + 3}
    recipe = small_recipe(tmp_path, **{**OVERFITS, "train": waits})
    outcome = train(recipe, tmp_path / "run", quiet=True)
    figures = [line["valid_perplexity"] for line in outcome.epochs]
    later = figures[early + 3 :]
    assert figures.index(min(figures)) + 1 == early  # there is no KL, so it is the same training
    assert outcome.kept == early + 3 + later.index(min(later)) + 1
    assert len(figures) >= early + 5
    run = tmp_path / "run"
    shown = json.loads(cli("train", run / "recipe.toml", "--out", run, "--quiet", "--json").out)
    assert shown["best_valid_perplexity"] == shown["valid_perplexity"] == min(later)


def test_the_test_set_chooses_nothing(tmp_path: Path) -> None:
    recipe = review_recipe(tmp_path, train={"keep": "best"})
    with pytest.raises(UserError, match="need a validation set"):
        train(recipe, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_of_averaged_weights_the_best_average_is_kept(tmp_path: Path) -> None:
    settings = {**OVERFITS, "train": {**OVERFITS["train"], "epochs": 8, "average_after": 2}}
    recipe = small_recipe(tmp_path, **settings)
    outcome = train(recipe, tmp_path / "run", quiet=True)
    figures = [line["valid_perplexity"] for line in outcome.epochs]
    assert outcome.kept == figures.index(min(figures)) + 1 > 2
    task = build_task(recipe, choose_device("cpu"))
    again = evaluate_text(load(tmp_path / "run"), task.stream("valid"))
    assert again.perplexity == pytest.approx(min(figures), rel=1e-5)
