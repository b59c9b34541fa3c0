"""Training on images and reviews: it learns, and a run that was stopped ends as it would have."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bayesrnn import FreeEnergy, UserError, load
from bayesrnn.engine import Replay
from bayesrnn.recipe import Recipe
from bayesrnn.saving import build_model, build_module
from bayesrnn.train import loop
from bayesrnn.train.loop import Trainer, train
from bayesrnn.train.step import Step, Update, build_optimizer
from bayesrnn.train.task import LabelledTask, build_task
from labelled_runs import EPOCH, image_recipe, review_recipe, write_images
from small_runs import assert_same_end, epochs_only, metrics

MakeRecipe = Callable[..., Recipe]
PLAIN: dict[str, Any] = {"posterior": {"kind": "delta"}, "prior": {"kind": "uniform"}}
KINDS: dict[str, tuple[MakeRecipe, dict[str, Any]]] = {
    "images": (image_recipe, {}),
    "plain images": (image_recipe, PLAIN),
    "images, Fisher": (image_recipe, {"posterior": {"kind": "gaussian", "estimator": "fisher"}}),
    "ratings": (review_recipe, {}),
    "plain ratings": (
        review_recipe,
        PLAIN | {"model": {"cell": "lstm"}, "bayes": {"where": ["*"]}},
    ),
    "classes": (review_recipe, {"data": {"classes": 3}}),
    "ratings, dropout": (
        review_recipe,
        PLAIN | {"dropout": {"input": 0.1, "recurrent": 0.1, "word": 0.1}},
    ),
}
WATCHED = {
    "images": "valid_error_percent",
    "plain images": "valid_error_percent",
    "images, Fisher": "valid_error_percent",
    "ratings": "test_rmse",
    "plain ratings": "test_rmse",
    "ratings, dropout": "test_rmse",
    "classes": "test_error_percent",
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns(kind: str, tmp_path: Path) -> None:
    make, changes = KINDS[kind]
    recipe = make(tmp_path, **changes, train={"epochs": 25})
    outcome = train(recipe, tmp_path / "run", quiet=True)
    first, last = outcome.epochs[0], outcome.epochs[-1]
    watched = WATCHED[kind]
    assert outcome.watched == watched
    assert "perplexity" not in " ".join(first)
    assert last["train_nll"] < first["train_nll"] - 0.2
    assert last[watched] <= min(first[watched], 0.1 if watched == "test_rmse" else 10.0)


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_about_the_same_in_bfloat16(kind: str, tmp_path: Path) -> None:
    make, changes = KINDS[kind]
    found = []
    for precision in ("float32", "bfloat16"):
        recipe = make(tmp_path, **changes, train={"precision": precision})
        found.append(train(recipe, tmp_path / precision, quiet=True).epochs[-1]["train_nll"])
    assert found[1] == pytest.approx(found[0], abs=0.03)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stops", [[3], [EPOCH, EPOCH + 1, 2 * EPOCH - 1]])
def test_a_run_stopped_by_a_signal_ends_like_an_undisturbed_one(
    kind: str, stops: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "LOG_STEPS", 3)
    make, changes = KINDS[kind]
    recipe = make(tmp_path, **changes)
    assert train(recipe, tmp_path / "undisturbed", quiet=True).steps == 2 * EPOCH
    tick = Trainer._tick

    def watched(self: Trainer, batch: Any) -> None:
        tick(self, batch)
        if self.step in stops:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_tick", watched)
        for step in stops:
            assert train(recipe, tmp_path / "run", quiet=True).steps == step
    assert train(recipe, tmp_path / "run", quiet=True).finished
    assert_same_end(tmp_path / "run", tmp_path / "undisturbed")


def test_every_epoch_has_an_order_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []
    nll = LabelledTask.nll

    def watched(self: LabelledTask, model: Any, batch: Any, state: Any) -> Any:
        assert state is None
        seen.append(batch.x.sum(dim=1).tolist())
        return nll(self, model, batch, state)

    monkeypatch.setattr(LabelledTask, "nll", watched)
    train(image_recipe(tmp_path), tmp_path / "run", quiet=True)
    epochs = [[x for batch in seen[i : i + EPOCH] for x in batch] for i in (0, EPOCH)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == pytest.approx(sorted(epochs[1]))


def test_a_step_without_a_state_goes_through_the_recording(tmp_path: Path) -> None:
    """After the first step, with x and y alone as its inputs."""
    recipe, cpu = image_recipe(tmp_path), torch.device("cpu")
    recorded: list[tuple[Tensor, ...]] = []

    class Watched(Replay):
        def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
            recorded.append(inputs)
            return super().__call__(*inputs)

    task = build_task(recipe, cpu)
    model = build_model(recipe, build_module(recipe, task.vocabulary))
    update = Update(build_optimizer(recipe.train, model, len(task.batches)), 5.0, cpu)
    objective = FreeEnergy(task.batches)
    step = Step(model, task.nll, objective, update, recipe.train, lambda text: None)
    step._replay = Watched(lambda x, y: (), cpu)
    batches = [batch for batch, _ in zip(task.batches, range(3), strict=False)]
    assert [step(batch, None) for batch in batches] == [None] * 3
    assert [len(inputs) for inputs in recorded] == [2, 2]
    assert recorded[0][0] is batches[1].x


@pytest.mark.parametrize("kind", ["images", "ratings", "classes"])
def test_a_saved_model_scores_as_the_training_said(kind: str, tmp_path: Path) -> None:
    make, changes = KINDS[kind]
    recipe = make(tmp_path, **changes)
    train(recipe, tmp_path / "run", quiet=True)
    last = epochs_only(metrics(tmp_path / "run"))[-1]
    task = build_task(recipe, torch.device("cpu"))
    for name, value in task.validate(load(tmp_path / "run")).items():
        assert last[name] == pytest.approx(value, rel=1e-5)
    assert (tmp_path / "run/vocabulary.json").exists() == (kind != "images")


def test_reviews_with_a_validation_set_watch_it(tmp_path: Path) -> None:
    recipe = review_recipe(tmp_path, data={"split": [0.7, 0.1, 0.2]})
    outcome = train(recipe, tmp_path / "run", quiet=True)
    assert outcome.watched == "valid_rmse"
    assert not any(key.startswith("test_") for key in outcome.epochs[0])


def test_data_that_changed_are_noticed(tmp_path: Path) -> None:
    recipe = image_recipe(tmp_path, train={"max_steps": 3})
    train(recipe, tmp_path / "run", quiet=True)
    write_images(tmp_path / "images", seed=2)
    with pytest.raises(UserError, match="the data are not those that the run"):
        train(recipe, tmp_path / "run", quiet=True)


def test_images_that_do_not_fit_the_network_get_one_line(tmp_path: Path) -> None:
    recipe = image_recipe(tmp_path, model={"inputs": 784, "classes": 2})
    message = r"of 16 pixels in 3 classes.*change model\.inputs to 16 and model\.classes to 3"
    with pytest.raises(UserError, match=message):
        train(recipe, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
