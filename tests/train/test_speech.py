"""Speech in the trainer: it learns tones, resumes exactly, and its figures are what they say."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bayesrnn import load, train
from bayesrnn.errors import UserError
from bayesrnn.evaluate.ctc import beam_search, prefix_search
from bayesrnn.evaluate.speech import evaluate_speech
from bayesrnn.train.run import read_metrics
from bayesrnn.train.speech import SpeechTask
from speech_runs import speech_recipe, write_corpus

CPU = torch.device("cpu")
NOISE = {
    "posterior": {"kind": "gaussian", "scale": 0.075},
    "prior": {"kind": "normal", "loc": "fit", "scale": "fit"},
}


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
        model={"network": "mdlstm", "cells": [2, 4], "units": [4], "windows": [[2, 4], [1, 2]]},
        train={"epochs": 3, "lr": 0.02},
    )
    outcome = train(recipe, tmp_path / "run", quiet=True)
    assert outcome.epochs[-1]["train_nll"] < outcome.epochs[0]["train_nll"]


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


def test_a_resumed_training_is_the_same_bit_for_bit(corpus: Path, tmp_path: Path) -> None:
    train(speech_recipe(corpus, **NOISE), tmp_path / "one", quiet=True)
    for steps in (3, 0):
        recipe = speech_recipe(corpus, train={"max_steps": steps}, **NOISE)
        train(recipe, tmp_path / "two", quiet=True)
    one, two = (load_file(tmp_path / run / "model/model.safetensors") for run in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(one[name].equal(two[name]) for name in one)


def test_the_fisher_estimate_trains(corpus: Path, tmp_path: Path) -> None:
    posterior = {**NOISE["posterior"], "estimator": "fisher"}
    recipe = speech_recipe(corpus, posterior=posterior, prior=NOISE["prior"], train={"epochs": 1})
    before = train(recipe, tmp_path / "run", quiet=True)
    assert math.isfinite(before.epochs[0]["total_bits"])
