"""A report on runs on speech: what applies is shown, and is what the other commands say."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bayesrnn as br
from bayesrnn.evaluate.ctc import greedy
from bayesrnn.prune import bits_per_weight
from bayesrnn.report.choices import Choices
from bayesrnn.report.findings import examine
from bayesrnn.report.page import write_page
from bayesrnn.report.readings import FRACTIONS
from bayesrnn.report.table import head_rows
from bayesrnn.train.speech import SpeechTask
from reported import Page
from small_runs import Cli, metrics
from speech_runs import speech_recipe, write_corpus

GRID = {"network": "mdlstm", "cells": [2, 4], "units": [4], "windows": [[2, 4], [1, 2]]}


@pytest.fixture(scope="module")
def noisy(folder: Path) -> Path:
    write_corpus(folder / "toy")
    given = {"posterior": {"kind": "gaussian", "scale": 0.02}, "prior": {"kind": "normal"}}
    recipe = speech_recipe(folder / "toy", train={"epochs": 6, "keep": "best"}, **given)
    br.train(recipe, folder / "noisy", quiet=True)
    return folder / "noisy"


@pytest.fixture(scope="module")
def grid(folder: Path, noisy: Path) -> Path:
    recipe = speech_recipe(folder / "toy", model=GRID, data={"valid": 0}, train={"epochs": 1})
    br.train(recipe, folder / "grid", quiet=True)
    return folder / "grid"


@pytest.fixture(scope="module")
def page(folder: Path, noisy: Path, grid: Path) -> Page:
    choices = Choices((0, 2))
    found = [examine(run, run.name, choices, lambda w, n: lambda d: None) for run in (noisy, grid)]
    write_page(found, choices, folder / "speech.html")
    return Page(folder / "speech.html")


def test_scores_are_those_of_evaluate(page: Page, noisy: Path, grid: Path, cli: Cli) -> None:
    for place, run in enumerate((noisy, grid)):
        found = json.loads(cli("evaluate", run, "--json").out)
        assert page.rows["per_mean"][place] == f"{found['per']:.2f} %"
    drawn = json.loads(cli("evaluate", noisy, "--samples", 2, "--json").out)
    assert page.rows["per_draws"] == [f"{drawn['per']:.2f} %", "–"]
    assert page.rows["network"] == ["BLSTM 1 × 10", "2-D LSTM 2 + 4"]


def test_learning_is_that_of_the_metrics(page: Page, noisy: Path) -> None:
    lines = [line for line in metrics(noisy) if line["kind"] == "epoch"]
    figures = page.data["figures"]
    axes = [figures[key]["layout"]["yaxis"]["title"]["text"] for key in ("held_out", "held_out-2")]
    assert axes == ["valid label errors, %", "valid NLL, nats each"]
    assert page.lines("held_out") == [("noisy", [line["valid_per"] for line in lines])]
    assert [y for _, y in page.lines("held_out-2")] == [
        [line[key] for line in lines] for key in ("valid_nll", "train_nll")
    ]
    assert [name for name, _ in page.lines("held_out-3")] == ["grid"]  # of test, and called so
    assert page.lines("complexity_bits") == [("noisy", [line["complexity_bits"] for line in lines])]


def test_the_description_length_is_in_the_table(page: Page, noisy: Path) -> None:
    lines = [line for line in metrics(noisy) if line["kind"] == "epoch"]
    kept = min(lines, key=lambda line: line["valid_nll"])
    assert page.rows["ratio"] == [f"{kept['ratio']:,.3f}", "–"]
    exact = bits_per_weight(br.load(noisy))
    assert exact is not None
    assert page.rows["bits_per_weight"] == [f"{exact:,.3f}", "–"]


def test_the_figures_are_of_the_epoch_that_was_kept(noisy: Path) -> None:
    found = examine(noisy, "noisy", Choices((0,)), lambda w, n: lambda d: None)
    assert found.watched == "valid_nll"
    figures = ((1, 3, 7.0), (2, 1, 8.0), (3, 2, 9.0))
    lines = [{"epoch": e, "valid_nll": nll, "ratio": ratio} for e, nll, ratio in figures]
    best = replace(found, epochs=lines)
    last = replace(
        best, recipe=replace(found.recipe, train=replace(found.recipe.train, keep="last"))
    )
    ratios = [{key: cells for key, _, cells in head_rows([run])}["ratio"] for run in (best, last)]
    assert ratios == [[(8.0, "8.000")], [(9.0, "9.000")]]
    assert replace(best, epochs=[lines[0], lines[2]]).kept is None  # the best may be what was lost
    train = replace(found.recipe.train, epochs=5, warm_up=2)
    warm = replace(best, recipe=replace(found.recipe, train=train))
    assert warm.kept == lines[2]  # the epochs of the warm-up do not count
    assert replace(warm, epochs=lines[:2]).kept == lines[1]  # and in their midst it is the last
    lines = [line | {"valid_per": line["valid_nll"]} for line in lines]
    shown = {key: cells for key, _, cells in head_rows([replace(warm, epochs=lines)])}
    assert shown["best"] == [(2, "2")]


def test_pruning_is_scored_by_label_errors(page: Page, noisy: Path) -> None:
    (name, curve), *_ = page.lines("pruning")
    assert (name, len(curve)) == ("noisy", len(FRACTIONS))
    heard = SpeechTask(br.read_recipe(noisy / "recipe.toml"), torch.device("cpu"))
    for fraction, errors in list(zip(FRACTIONS, curve, strict=True))[::5]:
        model = br.load(noisy)
        br.prune(model, fraction=fraction)
        found = br.evaluate_speech(model, heard.utterances("valid"), greedy)
        assert errors == pytest.approx(found.per)
    axis = page.data["figures"]["pruning-2"]["layout"]["yaxis"]["title"]["text"]
    assert axis == "test label errors, %"


def test_what_does_not_apply_is_left_out_and_said(page: Page) -> None:
    left_out = {"entropy_gap", "entropies", "reliability", "risk_coverage"}
    assert left_out.isdisjoint(page.data["figures"])
    assert page.words == []
    assert "no single predictions to be calibrated on" in page.text
    assert [name for name, _ in page.lines("signal_to_noise")] == ["noisy"]
    assert "Layer 1, backwards: from its own last state" in page.text
    assert "Level 2: from its input, four directions side by side" in page.text
