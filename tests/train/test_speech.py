"""Speech in the trainer: it learns tones, resumes exactly, and its figures are what they say."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from bayesrnn import FreeEnergy, load, train
from bayesrnn.bayes import Bayesian, block
from bayesrnn.data import Batch
from bayesrnn.engine import Replay
from bayesrnn.errors import UserError
from bayesrnn.evaluate.ctc import CtcOnDevice, beam_search, prefix_search
from bayesrnn.evaluate.speech import evaluate_speech
from bayesrnn.recipe import Recipe
from bayesrnn.saving import build_model, build_module
from bayesrnn.train.metrics import read_metrics
from bayesrnn.train.speech import LENGTHS, SpeechTask
from bayesrnn.train.step import Step, Update, build_optimizer
from speech_runs import speech_recipe, write_corpus

CPU = torch.device("cpu")
NOISE = {
    "posterior": {"kind": "gaussian", "scale": 0.075},
    "prior": {"kind": "normal", "loc": "fit", "scale": "fit"},
}


GRID = {"network": "mdlstm", "cells": [2, 4], "units": [4], "windows": [[2, 4], [1, 2]]}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("speech") / "toy")


@pytest.fixture(scope="module")
def learnt(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "learnt"
    train(speech_recipe(corpus, train={"epochs": 25, "keep": "best"}), run, quiet=True)
    return run


def test_it_learns_to_hear_tones(corpus: Path, learnt: Path) -> None:
    model, task = load(learnt), SpeechTask(speech_recipe(corpus), CPU)
    for decode in (prefix_search, beam_search):
        found = evaluate_speech(model, task.utterances("test"), decode)
        assert found.per < 10
        assert found.utterances == 6
    lines = [line for line in read_metrics(learnt) if line["kind"] == "epoch"]
    assert lines[-1]["train_nll"] < 0.3 * lines[0]["train_nll"]
    assert {"valid_nll", "valid_per", "test_nll", "test_per"} <= set(lines[0])
    best = min(line["valid_nll"] for line in lines)
    again = evaluate_speech(model, task.utterances("valid"))
    assert again.nll == pytest.approx(best, rel=1e-5)


def test_the_two_dimensional_network_learns_too(corpus: Path, tmp_path: Path) -> None:
    recipe = speech_recipe(
        corpus,
        model=GRID,
        train={"epochs": 3, "lr": 0.02},
    )
    outcome = train(recipe, tmp_path / "run", quiet=True)
    assert outcome.epochs[-1]["train_nll"] < outcome.epochs[0]["train_nll"]


@pytest.mark.parametrize("model", [{}, GRID], ids=["blstm", "mdlstm"])
def test_it_learns_about_the_same_in_bfloat16(
    model: dict[str, Any], corpus: Path, tmp_path: Path
) -> None:
    found = []
    for precision in ("float32", "bfloat16"):
        recipe = speech_recipe(corpus, model=model, train={"precision": precision, "epochs": 1})
        found.append(train(recipe, tmp_path / precision, quiet=True).epochs[-1]["train_nll"])
    assert found[1] == pytest.approx(found[0], rel=0.03)


def test_draws_are_averaged_as_probabilities(corpus: Path, learnt: Path, tmp_path: Path) -> None:
    recipe = speech_recipe(corpus, train={"epochs": 1}, **NOISE)
    train(recipe, tmp_path / "run", quiet=True)
    model, task = load(tmp_path / "run"), SpeechTask(recipe, CPU)
    loader = task.utterances("test")
    drawn = evaluate_speech(model, loader, samples=4, generator=torch.Generator().manual_seed(1))
    assert drawn.expected_nll is not None
    assert drawn.nll < drawn.expected_nll  # Jensen
    generator = torch.Generator().manual_seed(1)
    ones = [evaluate_speech(model, loader, samples=1, generator=generator) for _ in range(4)]
    assert drawn.expected_nll == pytest.approx(sum(one.nll for one in ones) / 4, rel=1e-6)


def test_what_is_not_there_is_said(corpus: Path) -> None:
    task = SpeechTask(speech_recipe(corpus, data={"valid": 0}), CPU)
    assert task.watched == "train_nll"
    with pytest.raises(UserError, match=r"no 'valid' set: data\.valid was 0"):
        task.utterances("valid")
    with pytest.raises(UserError, match=r"too short for its \d+ labels"):
        SpeechTask(speech_recipe(corpus, model={"stack": 30}), CPU)


def test_without_a_validation_set_training_figures_choose(corpus: Path, tmp_path: Path) -> None:
    recipe = speech_recipe(
        corpus, data={"valid": 0}, train={"epochs": 4, "keep": "best", "patience": 3}, **NOISE
    )
    outcome = train(recipe, tmp_path / "run", quiet=True)
    figures = [line["train_nll"] for line in outcome.epochs]
    assert outcome.kept == figures.index(min(figures)) + 1
    line = outcome.epochs[-1]
    targets = SpeechTask(recipe, CPU).batches.targets
    assert line["uniform_bits"] == pytest.approx(targets * math.log2(3))
    assert line["ratio"] == pytest.approx(line["total_bits"] / line["uniform_bits"])
    assert line["error_nats"] == pytest.approx(line["train_nll"] * targets)
    said = (tmp_path / "run" / "log.txt").read_text()
    told = f"train nll {line['train_nll']:.4g}, test per {line['test_per']:.4g}, kl"
    assert f"epoch {line['epoch']}: {told}" in said


@pytest.mark.parametrize("model", [{}, GRID], ids=["blstm", "mdlstm"])
def test_a_resumed_training_is_the_same_bit_for_bit(
    model: dict[str, Any], corpus: Path, tmp_path: Path
) -> None:
    train(speech_recipe(corpus, model=model, **NOISE), tmp_path / "one", quiet=True)
    for steps in (3, 0):
        recipe = speech_recipe(corpus, model=model, train={"max_steps": steps}, **NOISE)
        train(recipe, tmp_path / "two", quiet=True)
    one, two = (load_file(tmp_path / run / "model/model.safetensors") for run in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(one[name].equal(two[name]) for name in one)


def test_the_fisher_estimate_trains(corpus: Path, tmp_path: Path) -> None:
    posterior = {**NOISE["posterior"], "estimator": "fisher"}
    recipe = speech_recipe(corpus, posterior=posterior, prior=NOISE["prior"], train={"epochs": 1})
    before = train(recipe, tmp_path / "run", quiet=True)
    assert math.isfinite(before.epochs[0]["total_bits"])


# --- a step that can be recorded -----------------------------------------------------------------


def grid_recipe(corpus: Path, **changes: Any) -> Recipe:
    return speech_recipe(corpus, model=GRID, train={"streams": 5, **changes}, **NOISE)


def build(recipe: Recipe) -> tuple[SpeechTask, Bayesian]:
    torch.manual_seed(1)
    task = SpeechTask(recipe, CPU)
    return task, build_model(recipe, build_module(recipe, task.vocabulary)).train()


def step_of(
    recipe: Recipe, task: SpeechTask, model: Bayesian, nll: Callable[..., Any], device: torch.device
) -> Step:
    update = Update(
        build_optimizer(recipe.train, model, len(task.batches)), recipe.train.clip, device
    )
    update.set_rate(recipe.train.lr)
    return Step(model, nll, FreeEnergy(task.batches), update, recipe.train, lambda said: None)


def nll_on_device(model: Bayesian, batch: Batch, state: None) -> tuple[Tensor, None]:
    """What `SpeechTask.nll` is on a GPU."""
    return CtcOnDevice.apply(*model(batch.x), batch.y), None


def test_batches_have_few_shapes_and_the_kl_is_charged_once_an_epoch(corpus: Path) -> None:
    task, _ = build(grid_recipe(corpus))
    batches = list(task.batches)
    assert len({(batch.x.shape, batch.y.shape) for batch in batches}) <= LENGTHS
    filled = [batch for batch in batches if batch.x[0, :, 0].isnan().any()]
    assert len(filled) == 1
    assert sum(batch.share for batch in batches) == pytest.approx(1, abs=1e-12)
    assert sum(batch.targets for batch in batches) == task.batches.targets


def test_what_fills_up_a_batch_counts_nowhere(corpus: Path) -> None:
    task, model = build(grid_recipe(corpus))
    objective = FreeEnergy(task.batches)
    batch = next(b for b in task.batches if b.x[0, :, 0].isnan().any())
    inside = ~batch.x[..., 0].isnan()
    rows, frames = inside[0], int(inside.sum(dim=0).max())
    assert not rows.all()
    bare = replace(batch, x=batch.x[:frames, rows], y=batch.y[rows])
    found: list[list[Tensor]] = []
    for nll in (task.nll, nll_on_device):
        for each in (bare, batch):
            model.zero_grad()
            torch.manual_seed(5)
            loss = objective.loss(model, nll(model, each, None)[0], each)
            loss.backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            found.append([loss.error, loss.complexity, *gradients])
    expected, *others = found
    for other in others:
        for a, b in zip(expected, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_no_step_looks_at_a_value(corpus: Path) -> None:
    """On a device whose tensors have none, whatever asks for one fails."""
    recipe = grid_recipe(corpus, optimizer="SGD")
    task, _ = build(recipe)
    meta = torch.device("meta")

    def without_values(network: dict[str, Any], nll: Callable[..., Any]) -> None:
        model = build(speech_recipe(corpus, model=network, **NOISE))[1].to(meta)
        step = step_of(recipe, task, model, nll, meta)
        step.update.recordable = True  # as on a GPU
        batch = next(iter(task.batches))
        batch = replace(batch, x=batch.x.to(meta), y=batch.y.to(meta))
        step.run(batch, None, torch.zeros((), device=meta))

    without_values(GRID, nll_on_device)
    with pytest.raises((RuntimeError, NotImplementedError), match=r"[Mm]eta"):
        without_values(GRID, task.nll)  # torch's loss wants the lengths
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        without_values({}, nll_on_device)  # as does a packed sequence


def test_a_step_as_a_gpu_takes_it_is_the_ordinary_one(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without compiler and recording: the tuned model, the loss that can be recorded, and the share
    of the KL as a tensor, over an epoch."""
    recipe = grid_recipe(corpus, optimizer="SGD", lr=0.01)
    monkeypatch.setattr(block, "compiled", lambda function: function)
    found = []
    for fast in (False, True):
        task, model = build(recipe)
        step = step_of(recipe, task, model, nll_on_device if fast else task.nll, CPU)
        if fast:
            step._replay = Replay(step._function, CPU)
        for batch in task.batches:
            step(batch, None)
        found.append([*step.update.figures, *(p.detach() for p in model.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
