"""Every recipe that is shipped can be read, built, and is what it says."""

import math
from pathlib import Path

import pytest

from bayesrnn import Delta, DropoutSettings, Gaussian, Normal, ScaleMixture, Uniform, Vocabulary
from bayesrnn.recipe import read_recipe, to_toml
from bayesrnn.saving import build_model, build_module

RECIPES = sorted((Path(__file__).resolve().parents[1] / "recipes").glob("*.toml"))
SMALL = ["data.path=anywhere", "model.hidden=4"]


def test_there_are_recipes() -> None:
    assert "ptb-brnn-medium" in [path.stem for path in RECIPES]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_can_be_read_and_built_and_written_again(path: Path, tmp_path: Path) -> None:
    recipe = read_recipe(path, SMALL)
    vocabulary = Vocabulary(("a", "b", "<eos>", "<unk>"))
    model = build_model(recipe, build_module(recipe, vocabulary))
    assert model.weight_count > 0
    (tmp_path / "copy.toml").write_text(to_toml(recipe))
    assert read_recipe(tmp_path / "copy.toml") == recipe


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_leaves_the_text_to_the_user(path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.path is missing; give data\.path="):
        read_recipe(path)


def test_the_medium_recipe_is_the_published_one() -> None:
    """Fortunato, Blundell, Vinyals 2017, Section A.1."""
    path = next(path for path in RECIPES if path.stem == "ptb-brnn-medium")
    recipe = read_recipe(path, ["data.path=ptb"])
    model, train = recipe.model, recipe.train
    assert (model.cell, model.layers, model.hidden, model.embedding) == ("lstm", 2, 650, 650)
    assert (train.streams, train.unroll, train.epochs, train.clip) == (20, 35, 70, 5.0)
    assert (train.optimizer, train.lr, train.decay, train.decay_after) == ("SGD", 1.0, 0.9, 20)
    assert train.drop_last
    prior = recipe.prior
    assert prior == ScaleMixture(0.25, math.exp(-1), math.exp(-7), "input")
    s = math.sqrt(0.25 * math.exp(-1) ** 2 + 0.75 * math.exp(-7) ** 2)
    assert isinstance(recipe.posterior, dict)
    for pattern, low, high in (("rnn.*", s / 4, s / 2), ("*", s / 2, s)):
        posterior = recipe.posterior[pattern]
        assert isinstance(posterior, Gaussian)
        assert posterior.scale == pytest.approx((low, high), rel=1e-4)
    assert list(recipe.posterior) == ["rnn.*", "*"]


def test_the_dropout_recipes_are_the_published_ones() -> None:
    """Zaremba et al. 2014, Section 4.1; Gal's large network, from his code."""
    zaremba, medium, large = (
        read_recipe(path, ["data.path=ptb"])
        for stem in ("ptb-dropout-medium", "ptb-variational-medium", "ptb-variational-large")
        for path in RECIPES
        if path.stem == stem
    )
    assert zaremba.dropout == DropoutSettings("naive", input=0.5, output=0.5)
    assert (zaremba.posterior, zaremba.prior) == (Delta(), Uniform())
    assert zaremba.model == medium.model
    assert zaremba.train == medium.train
    train = zaremba.train
    assert (train.epochs, train.lr, train.decay, train.decay_after) == (39, 1.0, 0.8, 6)
    assert (train.clip, zaremba.model.init, zaremba.model.hidden) == (5.0, 0.05, 650)
    assert large.dropout == DropoutSettings(input=0.5, recurrent=0.3, output=0.5, word=0.3)
    assert (large.model.hidden, large.model.embedding, large.model.init) == (1500, 1500, 0.04)
    assert (large.train.epochs, large.train.decay_after, large.train.clip) == (55, 10, 10.0)
    assert large.train.decay == pytest.approx(1 / 1.15)
    for recipe in (medium, large):  # a step at lr 1 takes 1e-7 off each weight
        assert recipe.posterior == Delta()
        assert isinstance(recipe.prior, Normal)
        assert isinstance(recipe.prior.scale, float)
        cuts = (929_589 - 1) // 20 // 35
        decay = 1 / (cuts * 20 * recipe.prior.scale**2)
        assert decay == pytest.approx(1e-7, rel=1e-3)


def test_the_demos_twins_differ_only_in_being_bayesian_and_in_schedule() -> None:
    same_schedule = ["train.epochs=1", "train.decay=1", "train.decay_after=0"]
    both = [
        read_recipe(path, ["data.path=text", *same_schedule])
        for path in RECIPES
        if path.stem.startswith("demo-")
    ]
    assert len(both) == 2
    assert both[0].data == both[1].data
    assert both[0].model == both[1].model
    assert both[0].train == both[1].train


def test_the_captioners_differ_only_in_what_keeps_them_from_overfitting() -> None:
    dropout, brnn = (
        read_recipe(path, ["data.path=captions.json", "train.lr=0.001"])
        for stem in ("flickr8k-dropout", "flickr8k-brnn")
        for path in RECIPES
        if path.stem == stem
    )
    assert dropout.data == brnn.data
    assert dropout.model == brnn.model
    assert dropout.train == brnn.train
    assert (dropout.posterior, brnn.dropout) == (Delta(), DropoutSettings())
    assert brnn.prior == ScaleMixture(0.25, math.exp(-1), math.exp(-7), "input")
    assert brnn.model.hidden == 512
