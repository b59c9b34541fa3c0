"""A training that goes on from the model of another run, with other data."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import bayesrnn as br
from bayesrnn.errors import UserError
from bayesrnn.recipe import Recipe, from_table, read_recipe, to_toml
from labelled_runs import review_recipe, write_reviews
from series_runs import series_recipe, write_series
from small_runs import Cli, assert_same_end, folder_contents, small_recipe, small_table

STILL: dict[str, Any] = {"train": {"lr": 1e-30}}
"""Training that changes nothing, so that what was begun with can be seen."""


def other_text(folder: Path) -> Path:
    """One whose most frequent words are not the first text's, and with a new one."""
    path = folder / "other.txt"
    path.write_text("w9 w8 w7 new\nw9 w7 w7\nw1\n" * 60)
    return path


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    br.train(small_recipe(tmp_path), tmp_path / "begun", quiet=True)
    return tmp_path / "begun"


def going_on(begun: Path, data: Path, **train: Any) -> Recipe:
    recipe = read_recipe(begun / "recipe.toml")
    return replace(
        recipe,
        data=replace(recipe.data, path=str(data)),
        train=replace(recipe.train, **train),
    )


def test_a_text_is_read_with_the_words_of_the_run_that_was_begun_with(
    begun: Path, tmp_path: Path
) -> None:
    data, more = other_text(tmp_path), tmp_path / "more"
    assert br.load_text(replace(going_on(begun, data).data)).vocabulary != br.load_vocabulary(begun)
    outcome = br.train(going_on(begun, data, lr=1e-30, epochs=1), more, quiet=True, start=begun)
    assert br.load_vocabulary(more) == br.load_vocabulary(begun)
    for mine, own in zip(br.load(more).parameters(), br.load(begun).parameters(), strict=True):
        torch.testing.assert_close(mine, own)
    corpus = br.load_text(replace(going_on(begun, data).data), br.load_vocabulary(begun))
    found = br.evaluate_text(br.load(begun), br.StreamLoader(corpus.ids["valid"], 1, 35))
    assert outcome.epochs[-1]["valid_nll"] == pytest.approx(found.nll, rel=1e-6)


def test_a_series_is_scaled_as_that_of_the_run_that_was_begun_with(tmp_path: Path) -> None:
    br.train(series_recipe(tmp_path), tmp_path / "begun", quiet=True)
    newer = write_series(tmp_path, name="newer.csv", shift=3)
    table: dict[str, Any] = {"data": {"path": str(newer)}, **STILL}
    recipe = series_recipe(tmp_path, **table)  # says nothing of a scale
    br.train(recipe, tmp_path / "more", quiet=True, start=str(tmp_path / "begun"))
    mine, own = (br.read_recipe(tmp_path / run / "recipe.toml").data for run in ("more", "begun"))
    assert isinstance(mine, br.SeriesData)
    assert isinstance(own, br.SeriesData)
    assert (mine.path, mine.centre, mine.spread) == (str(newer), own.centre, own.spread)


def test_what_was_interrupted_goes_on_by_the_same_command(
    begun: Path, tmp_path: Path, cli: Cli
) -> None:
    data = other_text(tmp_path)
    command = ["train", begun / "recipe.toml", f"data.path={data}", "--start", begun, "--quiet"]
    assert cli(*command, "--out", tmp_path / "whole").code == 0
    for more in (["train.max_steps=7"], []):
        assert cli(*command, *more, "--out", tmp_path / "twice").code == 0
    assert_same_end(tmp_path / "twice", tmp_path / "whole", with_steps=False)


def test_what_does_not_go_on_is_refused_before_anything_is_written(
    begun: Path, tmp_path: Path, cli: Cli
) -> None:
    def said(run: Path, *settings: object) -> str:
        result = cli(
            "train", begun / "recipe.toml", *settings, "--start", run, "--out", tmp_path / "more"
        )
        assert result.code == 1
        assert not (tmp_path / "more").exists()
        [line] = result.errors
        return line

    assert said(begun, "model.hidden=9").startswith(f"model.hidden is 8 in {begun} and 9 here: ")
    assert said(begun, "data.lowercase=true").startswith("data.lowercase is false in")
    assert "no run at" in said(tmp_path / "nowhere")
    cli("prune", begun, "--fraction", 0.5, "--out", tmp_path / "small")
    assert "holds means alone, so its training cannot go on" in said(tmp_path / "small")


OWN_PRIOR = ("prior.kind=normal", "prior.loc=start", "prior.scale=start")


def test_what_a_run_had_learnt_can_be_the_prior(begun: Path, tmp_path: Path, cli: Cli) -> None:
    """And it stays that while the training goes on, is interrupted, and goes on again."""
    data, learnt = other_text(tmp_path), br.load(begun).moments()
    command = ["train", begun / "recipe.toml", f"data.path={data}", *OWN_PRIOR, "--quiet"]
    command += ["--start", begun, "--out"]
    assert cli(*command, tmp_path / "whole").code == 0
    for more in (["train.max_steps=7"], []):
        assert cli(*command, tmp_path / "twice", *more).code == 0
    assert_same_end(tmp_path / "twice", tmp_path / "whole", with_steps=False)
    model = br.load(tmp_path / "whole")
    expected = 0.0
    for name, (loc, scale) in model.moments().items():
        there = torch.distributions.Normal(*learnt[name])
        q = torch.distributions.Normal(loc, scale)
        expected += float(torch.distributions.kl_divergence(q, there).double().sum())
    assert expected > 1.0
    with model.weights("sample"):
        model.resample()
        assert model.kl().item() == pytest.approx(expected, rel=1e-3)
    [said] = cli("evaluate", tmp_path / "whole", "--json").out.splitlines()
    assert json.loads(said)["complexity_nats"] == pytest.approx(expected, rel=1e-3)


def test_each_time_it_is_what_was_learnt_last(begun: Path, tmp_path: Path) -> None:
    recipe = replace(going_on(begun, other_text(tmp_path)), prior=br.Normal("start", "start"))
    br.train(recipe, tmp_path / "second", quiet=True, start=begun)
    last = br.load(tmp_path / "second").moments()
    still = replace(recipe, train=replace(recipe.train, lr=1e-30, epochs=1))
    br.train(still, tmp_path / "third", quiet=True, start=tmp_path / "second")
    model = br.load(tmp_path / "third")
    torch.testing.assert_close(model.moments(), last)
    with model.weights("sample"):
        model.resample()
        assert model.kl().item() == pytest.approx(0.0, abs=1e-3)


def test_a_pattern_that_names_no_weight_is_refused_in_one_line(
    begun: Path, tmp_path: Path, cli: Cli
) -> None:
    recipe = tmp_path / "recipe.toml"
    start = {"kind": "normal", "loc": "start", "scale": "start"}
    table = small_table(tmp_path, prior={"nosuch.*": start, "*": {"kind": "normal"}})
    recipe.write_text(to_toml(from_table(table)))
    result = cli("train", recipe, "--start", begun, "--out", tmp_path / "more")
    assert result.code == 2
    assert not (tmp_path / "more").exists()
    [line] = result.errors
    assert line.startswith("recipe: prior pattern 'nosuch.*' matches no trainable parameter")


def test_such_a_run_is_pruned_and_compressed_by_its_means(
    begun: Path, tmp_path: Path, cli: Cli
) -> None:
    recipe = replace(going_on(begun, other_text(tmp_path)), prior=br.Normal("start", "start"))
    run = tmp_path / "second"
    br.train(recipe, run, quiet=True, start=begun)
    pruning = ["prune", run, "--fraction", 0.5, "--retrain", 1, "--quiet"]
    assert cli(*pruning, "--out", tmp_path / "pruned").code == 0
    assert cli("compress", run, "--step", 0.01, "--out", tmp_path / "coded").code == 0
    for small in ("pruned", "coded"):
        assert cli("evaluate", tmp_path / small).code == 0
    result = cli("compress", run, "--step", 0.01, "--scale", "--out", tmp_path / "no")
    assert result.code == 1
    assert result.errors == [
        f"the prior of {run} is where it began, which takes more room than the rounded weights; "
        "leave out --scale"
    ]


def test_a_run_goes_on_from_another_one_alone(begun: Path) -> None:
    before = folder_contents(begun)
    with pytest.raises(UserError, match=rf"the data are not those .* --start {begun}, to go on"):
        br.train(going_on(begun, other_text(begun.parent)), begun, quiet=True, start=begun)
    assert folder_contents(begun) == before


def test_a_folder_that_has_other_words_is_refused(begun: Path, tmp_path: Path) -> None:
    """Of a process that died before its first checkpoint, say."""
    recipe, more = going_on(begun, other_text(tmp_path)), tmp_path / "more"
    br.train(recipe, more, quiet=True)
    shutil.rmtree(more / "checkpoints")
    shutil.rmtree(more / "model")
    before = folder_contents(more)
    with pytest.raises(UserError, match="more holds a run with other words than the one that is"):
        br.train(recipe, more, quiet=True, start=begun)
    assert folder_contents(more) == before
    br.train(recipe, more, quiet=True, start=begun, fresh=True)
    assert br.load_vocabulary(more) == br.load_vocabulary(begun)


def test_what_was_learnt_before_and_is_tested_on_now_is_said(begun: Path, tmp_path: Path) -> None:
    def said(start: Path, recipe: Recipe) -> str:
        br.train(recipe, tmp_path / "more", fresh=True, quiet=True, start=start)
        return (tmp_path / "more" / "log.txt").read_text()

    mind = "some of what is tested on here may be what "
    longer = tmp_path / "longer.txt"
    longer.write_text((tmp_path / "text.txt").read_text() + "\nw9 w8 w7 w6" * 60)
    recipe = going_on(begun, longer, epochs=1)
    assert mind not in said(begun, recipe)
    less = replace(recipe, data=replace(recipe.data, split=(0.5, 0.25, 0.25)))
    assert f"{mind}{begun} was trained with: less is kept to train on than there" in said(
        begun, less
    )
    reviews = review_recipe(tmp_path / "first", train={"epochs": 1})
    br.train(reviews, tmp_path / "reviews", quiet=True)
    assert mind not in said(tmp_path / "reviews", reviews)
    write_reviews(tmp_path / "first" / "added")
    added = replace(reviews, data=replace(reviews.data, path=str(tmp_path / "first")))
    assert f"{mind}{tmp_path / 'reviews'} was trained with: data are shuffled" in said(
        tmp_path / "reviews", added
    )
    other = replace(reviews, data=replace(reviews.data, split_seed=9))
    assert mind in said(tmp_path / "reviews", other)
