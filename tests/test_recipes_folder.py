"""Every recipe that is shipped can be read, built, and is what it says."""

import math
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bayesrnn import (
    Delta,
    DropoutSettings,
    Gaussian,
    Laplace,
    Normal,
    Posterior,
    Prior,
    ScaleMixture,
    Uniform,
    Vocabulary,
)
from bayesrnn.models import LanguageModel, LanguageSettings
from bayesrnn.recipe import Recipe, differences, read_recipe, to_toml
from bayesrnn.saving import build_model, build_module

RECIPES = sorted((Path(__file__).resolve().parents[1] / "recipes").glob("*.toml"))
ANYWHERE = "data.path=anywhere"


def recipe_called(stem: str) -> Recipe:
    path = next(path for path in RECIPES if path.stem == stem)
    return read_recipe(path, ["data.path=ptb"])


def test_there_are_recipes() -> None:
    assert "ptb-brnn-medium" in [path.stem for path in RECIPES]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_can_be_read_and_built_and_written_again(path: Path, tmp_path: Path) -> None:
    model = read_recipe(path, [ANYWHERE]).model
    sizes = [f"model.{key}=4" for key in ("embedding", "hidden") if hasattr(model, key)]
    recipe = read_recipe(path, [ANYWHERE, *sizes])
    vocabulary = Vocabulary(("a", "b", "<eos>", "<unk>"))
    assert build_model(recipe, build_module(recipe, vocabulary)).weight_count > 0
    (tmp_path / "copy.toml").write_text(to_toml(recipe))
    assert read_recipe(tmp_path / "copy.toml") == recipe


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_leaves_the_text_to_the_user(path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.path is missing; give data\.path="):
        read_recipe(path)


def test_the_medium_recipe_is_the_published_one() -> None:
    """Fortunato, Blundell, Vinyals 2017, Section A.1."""
    recipe = recipe_called("ptb-brnn-medium")
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
    stems = ("ptb-dropout-medium", "ptb-variational-tied-medium", "ptb-variational-large")
    zaremba, medium, large = map(recipe_called, stems)
    assert zaremba.dropout == DropoutSettings("naive", input=0.5, output=0.5)
    assert (zaremba.posterior, zaremba.prior) == (Delta(), Uniform())
    assert zaremba.model == medium.model
    train = zaremba.train
    assert (train.epochs, train.lr, train.decay, train.decay_after) == (39, 1.0, 0.8, 6)
    assert (train.clip, zaremba.model.init, zaremba.model.hidden) == (5.0, 0.05, 650)
    assert large.dropout == DropoutSettings(input=0.5, recurrent=0.3, output=0.5, word=0.3)
    assert (large.model.hidden, large.model.embedding, large.model.init) == (1500, 1500, 0.04)
    assert large.train.clip == 10.0
    assert medium.train.clip == 5.0
    for recipe in (medium, large):  # a step at lr 1 takes 1e-7 off each weight
        assert (recipe.train.epochs, recipe.train.decay_after) == (55, 10)
        assert recipe.train.decay == pytest.approx(1 / 1.15, rel=1e-4)
        assert recipe.posterior == Delta()
        assert isinstance(recipe.prior, Normal)
        assert isinstance(recipe.prior.scale, float)
        cuts = (929_589 - 1) // 20 // 35
        decay = 1 / (cuts * 20 * recipe.prior.scale**2)
        assert decay == pytest.approx(1e-7, rel=1e-3)


def test_tied_and_untied_differ_in_their_masks_alone() -> None:
    tied, untied = map(
        recipe_called, ("ptb-variational-tied-medium", "ptb-variational-untied-medium")
    )
    assert differences(tied, untied) == {"dropout.tied": (True, False)}


def test_the_sharpened_recipe_is_the_bayesian_one_sharpened() -> None:
    brnn, sharpened = map(recipe_called, ("ptb-brnn-medium", "ptb-sharpened-medium"))
    apart = set(differences(brnn, sharpened))
    assert {key for key in apart if not key.startswith("posterior.")} == {"train.precision"}
    assert len(apart) > 1


def test_the_best_recipe_is_no_larger_than_the_published_one() -> None:
    best, brnn = map(recipe_called, ("ptb-best", "ptb-brnn-medium"))
    assert isinstance(best.model, LanguageSettings)
    assert isinstance(brnn.model, LanguageSettings)
    assert replace(best.model, tied=False) == brnn.model
    with torch.device("meta"):
        network = LanguageModel.from_settings(10_000, best.model, best.dropout)
    assert sum(p.numel() for p in network.parameters()) <= 20e6


def test_what_is_to_be_searched_can_be_read() -> None:
    path = next(path for path in RECIPES if path.stem == "ptb-best")
    search = tomllib.loads((path.parents[1] / "benchmarks" / "ptb-search.toml").read_text())
    candidates = {tag: read_recipe(path, [ANYWHERE, *changes]) for tag, changes in search.items()}
    for tag, one in candidates.items():
        same = [other for other in candidates if candidates[other] == one]
        assert same == [tag]


def test_the_plain_recipes_are_without_any_regularisation() -> None:
    """Zaremba et al. 2014, Section 4.1 (small); Gal's medium one, stopped early."""
    small, medium = map(recipe_called, ("ptb-plain-small", "ptb-plain-medium"))
    for recipe in (small, medium):
        assert recipe.dropout == DropoutSettings()
        assert (recipe.posterior, recipe.prior) == (Delta(), Uniform())
        train = recipe.train
        assert (train.streams, train.lr, train.decay, train.decay_after) == (20, 1.0, 0.5, 4)
        assert train.clip == 5.0
    model, train = small.model, small.train
    assert (model.layers, model.hidden, model.embedding, model.init) == (2, 200, 200, 0.1)
    assert (train.unroll, train.epochs) == (20, 13)
    assert medium.model == recipe_called("ptb-brnn-medium").model
    assert medium.train.epochs < small.train.epochs
    assert medium.train.keep == "best"


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


def test_the_ten_networks_of_graves_are_the_published_ones() -> None:
    """Graves 2011, Table 1: one topology, one way of training, ten posteriors and priors."""
    table: dict[str, tuple[Posterior, Prior]] = {
        "adaptive-l1": (Delta(), Laplace("fit", "fit")),
        "adaptive-l2": (Delta(), Normal("fit", "fit")),
        "adaptive-mean-l2": (Delta(), Normal("fit", math.sqrt(0.1))),
        "l2": (Delta(), Normal(0.0, math.sqrt(0.1))),
        "ml": (Delta(), Uniform()),
        "l1": (Delta(), Laplace(0.0, 1 / 12)),
        "adaptive-mean-l1": (Delta(), Laplace("fit", 1 / 12)),
        "weight-noise": (Gaussian(0.075, learn_scale=False), Uniform()),
        "adaptive-prior-weight-noise": (
            Gaussian(0.075, learn_scale=False),
            Normal("fit", "fit"),
        ),
        "adaptive-weight-noise": (Gaussian(0.075), Normal("fit", "fit")),
    }
    recipes = {
        path.stem.removeprefix("an4-"): read_recipe(path, ["data.path=an4"])
        for path in RECIPES
        if path.stem.startswith("an4-") and "mdlstm" not in path.stem
    }
    assert recipes.keys() == table.keys()
    for name, recipe in recipes.items():
        assert (recipe.posterior, recipe.prior) == table[name]
        assert recipe.model == recipes["ml"].model
        assert recipe.model.init == 0.1
        assert recipe.train.keep == "best"
        compresses = recipe.posterior != Delta() and isinstance(recipe.prior, Normal)
        assert (recipe.data.valid == 0) == compresses  # these two need no early stopping
        assert replace(recipe.data, valid=0.1) == recipes["ml"].data
    for name in ("ml", "adaptive-weight-noise"):
        path = next(path for path in RECIPES if path.stem == f"an4-mdlstm-{name}")
        recipe = read_recipe(path, ["data.path=an4"])
        assert (recipe.posterior, recipe.prior) == table[name]
        labels = Vocabulary(("<blank>", *(f"p{i}" for i in range(39))))
        model = build_model(recipe, build_module(recipe, labels))
        assert model.weight_count == 139_536


def test_the_captioners_are_the_same_network_on_the_same_data() -> None:
    """How each is trained was chosen on the validation set, for each by itself."""
    dropout, brnn = (
        read_recipe(path, ["data.path=captions.json"])
        for stem in ("flickr8k-dropout", "flickr8k-brnn")
        for path in RECIPES
        if path.stem == stem
    )
    assert dropout.data == brnn.data
    assert dropout.model == brnn.model
    assert (dropout.posterior, brnn.dropout) == (Delta(), DropoutSettings())
    assert brnn.prior == ScaleMixture(0.25, math.exp(-1), math.exp(-7), "input")
    assert brnn.model.hidden == 512
