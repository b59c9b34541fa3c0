"""Recipes: TOML in and out, overrides, and every problem at once with its key."""

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bayesrnn import (
    Delta,
    Gaussian,
    ImageData,
    Laplace,
    MlpSettings,
    Normal,
    ReviewData,
    ReviewSettings,
    ScaleMixture,
    Sharpened,
    TextData,
    Uniform,
)
from bayesrnn.errors import Invalid, UserError
from bayesrnn.models.dropout import DropoutSettings
from bayesrnn.models.language import LanguageSettings
from bayesrnn.recipe import (
    POSTERIORS,
    PRIORS,
    BayesSettings,
    Recipe,
    differences,
    from_table,
    object_from_table,
    object_to_table,
    read_recipe,
    to_table,
    to_toml,
)
from bayesrnn.train.settings import TrainSettings

text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
positive = st.floats(1e-4, 1e4)
setting = positive | st.just("learn")
gaussians = st.builds(Gaussian, scale=positive) | st.builds(
    lambda low, more: Gaussian(scale=(low, low + more)), positive, st.floats(0, 5)
)
fixed = st.builds(Gaussian, scale=positive, learn_scale=st.just(False))
posteriors = gaussians | fixed | st.builds(Gaussian, estimator=st.just("fisher"))
mixtures = st.builds(
    ScaleMixture,
    pi=st.floats(0.01, 0.99) | st.just("learn"),
    sigma1=setting,
    sigma2=setting,
    group=st.sampled_from(["weight", "input", "tensor"]),
)
normals = st.builds(Normal, loc=st.floats(-5, 5) | st.just("fit"), scale=setting)
priors = mixtures | normals | st.builds(Laplace, scale=setting) | st.just(Uniform())
data = st.builds(
    TextData,
    path=text,
    tokens=st.sampled_from(["whitespace", "words", "characters"]),
    lowercase=st.booleans(),
    max_vocabulary=st.just(0) | st.integers(3, 10**6),
    split=st.sampled_from([(0.8, 0.1, 0.1), (0.5, 0.25, 0.25)]),
    cache=st.just("") | text,
)
models = st.builds(
    LanguageSettings, cell=st.sampled_from(["lstm", "gru", "rnn"]), hidden=st.integers(1, 2000)
)
rates = st.floats(0, 1, exclude_max=True)
dropouts = st.builds(
    DropoutSettings,
    input=rates,
    recurrent=rates,
    word=rates,
    tied=st.booleans(),
    shared=st.booleans(),
    noise=st.sampled_from(["bernoulli", "gaussian"]),
) | st.builds(DropoutSettings, kind=st.just("naive"), input=rates, output=rates)
trainings = st.builds(
    TrainSettings,
    lr=st.floats(1e-300, 2e38),
    seed=st.integers(0, 2**63 - 1),
    clip=st.just(0.0) | positive,
) | st.builds(
    TrainSettings,
    optimizer=st.just("Adam"),
    options=st.fixed_dictionaries(
        {}, optional={"betas": st.just((0.5, 0.75)), "eps": positive, "amsgrad": st.booleans()}
    ),
)
recipes = st.builds(
    Recipe,
    data=data,
    model=models,
    dropout=dropouts,
    posterior=posteriors | st.dictionaries(text, posteriors | st.just(Delta()), min_size=1),
    prior=priors | st.dictionaries(text, priors, min_size=1),
    bayes=st.builds(BayesSettings, where=st.lists(text, min_size=1, max_size=3).map(tuple)),
    train=trainings,
)


def write(folder: Path, contents: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(contents, encoding="utf-8", newline="")
    return path


def problems_of(table: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(Invalid) as caught:
        from_table(table)
    return dict(caught.value.problems)


DATA = {"data": {"path": "text"}}
IMAGES = {"kind": "images", "path": "x"}
REVIEWS = {"kind": "reviews", "path": "x"}


# --- in and out ------------------------------------------------------------------------------


@given(recipe=recipes)
def test_a_recipe_survives_toml(tmp_path_factory: pytest.TempPathFactory, recipe: Recipe) -> None:
    again = read_recipe(write(tmp_path_factory.mktemp("toml"), to_toml(recipe)))
    assert again == recipe
    assert differences(again, recipe) == {}
    for role in ("posterior", "prior"):  # the first pattern that matches counts
        old, new = getattr(recipe, role), getattr(again, role)
        if isinstance(old, dict):
            assert list(new) == list(old)


@given(recipe=recipes)
def test_a_recipes_toml_is_read_the_same_by_any_other_reader(recipe: Recipe) -> None:
    assert tomllib.loads(to_toml(recipe)) == to_table(recipe)


@given(value=posteriors | priors)
def test_a_posterior_or_prior_survives_its_table(value: Any) -> None:
    kinds: Any = POSTERIORS if type(value) in POSTERIORS.values() else PRIORS
    assert object_from_table(kinds, object_to_table(value)) == value


def test_numbers_of_numpy_are_numbers() -> None:
    """They print as np.float64(0.5), which is no TOML."""
    train = TrainSettings(lr=np.float64(0.5), streams=np.int64(3), drop_last=np.bool_(True))
    recipe = Recipe(TextData("text"), prior=Normal(scale=np.float32(0.25)), train=train)
    plain = TrainSettings(lr=0.5, streams=3, drop_last=True)
    expected = Recipe(TextData("text"), prior=Normal(scale=0.25), train=plain)
    assert tomllib.loads(to_toml(recipe)) == to_table(expected)
    assert object_to_table(recipe.prior) == {"kind": "normal", "loc": 0.0, "scale": 0.25}


def test_what_is_left_out_takes_its_default() -> None:
    assert from_table(DATA) == Recipe(TextData("text"))


def test_a_whole_number_will_do_for_a_number() -> None:
    recipe = from_table(DATA | {"train": {"lr": 1}})
    assert recipe.train.lr == 1.0
    assert type(recipe.train.lr) is float


# --- overrides -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("train.lr=0.25", lambda r: r.train.lr == 0.25),
        ("train.lr=1e-3", lambda r: r.train.lr == 0.001),
        ("train.epochs = 3", lambda r: r.train.epochs == 3),
        ("data.lowercase=true", lambda r: r.data.lowercase is True),
        ("data.path=my/other text.txt", lambda r: r.data.path == "my/other text.txt"),
        ('data.path="1984"', lambda r: r.data.path == "1984"),
        ("data.path=a=b", lambda r: r.data.path == "a=b"),
        ("data.path=C:\\new", lambda r: r.data.path == "C:\\new"),
        ("data.split=[0.5, 0.25, 0.25]", lambda r: r.data.split == (0.5, 0.25, 0.25)),
        ('bayes.where=["rnn.*"]', lambda r: r.bayes.where == ("rnn.*",)),
        ("prior.pi=learn", lambda r: r.prior == ScaleMixture(pi="learn")),
        ("train.options.momentum=0.9", lambda r: r.train.options == {"momentum": 0.9}),
        (
            'posterior."rnn.*".scale=0.5',
            lambda r: r.posterior == {"rnn.*": Gaussian(0.5), "*": Delta()},
        ),
    ],
)
def test_an_override_sets_one_key(override: str, found: Any, tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        data.path = "text"
        prior.kind = "scale_mixture"
        [posterior."rnn.*"]
        kind = "gaussian"
        [posterior."*"]
        kind = "delta"
        """,
    )
    assert not found(read_recipe(path))
    assert found(read_recipe(path, [override]))


def test_later_overrides_win(tmp_path: Path) -> None:
    path = write(tmp_path, 'data.path = "text"')
    assert read_recipe(path, ["train.lr=1", "train.lr=2"]).train.lr == 2.0


@pytest.mark.parametrize(
    ("file", "overrides", "posterior", "prior"),
    [
        (
            'posterior = {kind = "gaussian", scale = 0.1}\nprior = {kind = "normal", scale = 2.0}',
            ["posterior.kind=delta", "prior.kind=uniform"],
            Delta(),
            Uniform(),
        ),
        (
            'posterior = {kind = "gaussian", scale = 0.1}\n'
            'prior = {kind = "normal", loc = 1.0, scale = 2.0}',
            ["posterior.kind=sharpened", "prior.kind=laplace", "prior.loc=3"],
            Sharpened(scale=0.1),  # what both kinds have stays
            Laplace(3.0, 2.0),
        ),
        (
            'posterior."rnn.*" = {kind = "gaussian", scale = 0.1}\n'
            'posterior."*" = {kind = "delta"}\n'
            'prior."*" = {kind = "normal", scale = 2.0}',
            ['posterior."rnn.*".kind=delta', "prior.kind=uniform"],
            {"rnn.*": Delta(), "*": Delta()},
            Uniform(),
        ),
        (
            'posterior = {kind = "gaussian", scale = 3}\nprior."*" = {kind = "normal", scale = 2}',
            ['posterior={"rnn.*"={kind="delta"}, "*"={kind="gaussian"}}', 'prior={kind="uniform"}'],
            {"rnn.*": Delta(), "*": Gaussian()},
            Uniform(),
        ),
    ],
)
def test_another_kind_takes_out_what_it_does_not_have(
    file: str, overrides: list[str], posterior: Any, prior: Any, tmp_path: Path
) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(f'data.path = "x"\n{file}')
    recipe = read_recipe(path, overrides)
    assert (recipe.posterior, recipe.prior) == (posterior, prior)


def test_a_table_that_is_given_whole_takes_the_place_of_the_one_there(tmp_path: Path) -> None:
    path = write(tmp_path, 'data.path = "x"\ntrain.options = {momentum = 0.9, nesterov = true}')
    assert read_recipe(path, ["train.optimizer=Adam", "train.options={}"]).train.options == {}
    found = read_recipe(path, ["train.options={}", "train.options.momentum=0.5"]).train.options
    assert found == {"momentum": 0.5}
    assert len(read_recipe(path, ["train.options.momentum=0.5"]).train.options) == 2


@pytest.mark.parametrize("overrides", [["posterior.kind=delta", "posterior.scale=2"], []])
def test_what_a_kind_does_not_have_is_refused_where_it_was_meant(
    overrides: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "recipe.toml"
    kind = "gaussian" if overrides else "delta"
    path.write_text(f'data.path = "x"\nposterior = {{kind = "{kind}", scale = 0.1}}')
    with pytest.raises(Invalid, match=r"posterior\.scale is not a setting"):
        read_recipe(path, overrides)


@pytest.mark.parametrize("override", ["train.lr", "=3", " =3", "train lr=3", "a..b=3", ""])
def test_an_override_that_cannot_be_read_is_quoted(override: str, tmp_path: Path) -> None:
    path = write(tmp_path, 'data.path = "text"')
    with pytest.raises(Invalid, match=r"write it as table\.key=value") as caught:
        read_recipe(path, [override])
    assert repr(override) in str(caught.value)


# --- problems --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tables", "key", "said"),
    [
        ({"train": {"learning_speed": 3}}, "train.learning_speed", "is not a setting; allowed: "),
        ({"train": {"epoch": 3}}, "train.epoch", "did you mean epochs?"),
        ({"trian": {}}, "trian", "is not a table; did you mean train?"),
        ({"epochs": 3}, "epochs", "is not a table; did you mean train.epochs?"),
        ({"train": {"hidden": 3}}, "train.hidden", "did you mean model.hidden?"),
        ({"train": 3}, "train", "must be a table, got 3"),
        ({"posterior": 3}, "posterior", "must be a table, got 3"),
        ({"train": {"lr": "fast"}}, "train.lr", "must be a number, got 'fast'"),
        ({"train": {"lr": True}}, "train.lr", "must be a number, got True"),
        ({"train": {"lr": -1.0}}, "train.lr", "must be a finite number above 0, got -1.0"),
        ({"train": {"epochs": 1.5}}, "train.epochs", "must be a whole number, got 1.5"),
        (
            {"data": {"path": 3}},
            "data.path",
            "must be a string, got 3; quote it: 'data.path=\"3\"'",
        ),
        ({"data": {}}, "data.path", "is missing; give data.path=..."),
        ({"data": {"path": "x", "lowercase": 1}}, "data.lowercase", "must be true or false"),
        ({"data": {"path": "x", "split": [1, 2]}}, "data.split", "must be a list of 3 items"),
        ({"data": {"path": "x", "tokens": "bytes"}}, "data.tokens", '"words" or "characters"'),
        (
            {"bayes": {"where": "*"}},
            "bayes.where",
            "must be a list, each a string, got '*'; quote it: 'bayes.where=[\"*\"]'",
        ),
        ({"bayes": {"where": []}}, "bayes.where", "at least one name pattern"),
        ({"model": {"cell": "transformer"}}, "model.cell", '"lstm", "gru" or "rnn"'),
        ({"model": {"tied": True, "hidden": 3}}, "model.tied", "needs embedding = hidden"),
        ({"data": {"kind": "sounds"}}, "data.kind", "is 'sounds'; allowed: text, images, reviews"),
        ({"data": IMAGES | {"tokens": "words"}}, "data.tokens", "allowed: path, valid"),
        ({"data": IMAGES, "model": {"cell": "gru"}}, "model.cell", "allowed: inputs, hidden"),
        (
            {"data": IMAGES, "dropout": {"recurrent": 0.5}},
            "dropout",
            "of a network for images has input, output and noise only",
        ),
        (
            {
                "dropout": {"kind": "naive", "output": 0.5},
                "posterior": {"rnn.*": {"kind": "sharpened", "order": "second"}},
            },
            "dropout.kind",
            'must be "variational" with the second order of sharpening',
        ),
        ({"data": REVIEWS | {"classes": 1}}, "data.classes", "at least 2, got 1"),
        ({"prior": {"kind": "horseshoe"}}, "prior.kind", "is 'horseshoe'; allowed: uniform"),
        ({"prior": {"pi": 0.5}}, "prior.kind", "is missing; allowed: uniform, normal"),
        ({"prior": {"kind": "scale_mixture", "pi": 1.5}}, "prior.pi", "between 0 and 1, got 1.5"),
        (
            {"prior": {"kind": "normal", "scale": "fitted"}},
            "prior.scale",
            '"fit", "learn" or "start", got',
        ),
        ({"prior": {"kind": "normal", "scale": "start"}}, "prior.scale", "only with a loc that is"),
        ({"prior": {"kind": "laplace", "scale": "start"}}, "prior.scale", '"fit" or "learn"'),
        ({"prior": {"kind": "scale_mixture", "pi": "fit"}}, "prior.pi", "no closed-form optimum"),
        ({"prior": {"kind": "laplace", "scale": "fit"}}, "prior.scale", "only with a delta"),
        ({"prior": {"kind": "normal", "pi": 1}}, "prior.pi", "is not a setting; allowed: loc"),
        (
            {"posterior": {"kind": "delta", "scale": 1}},
            "posterior.scale",
            "is not a setting; allowed: none at all, so take it out",
        ),
        ({"bayes": {"kl": "exact"}}, "bayes.kl", "has no closed form"),
        ({"posterior": {"rnn.*": {"kind": "?"}}}, 'posterior."rnn.*".kind', "is '?'; allowed"),
        ({"posterior": {"decoder": {"weight": {"kind": "delta"}}}}, "posterior.decoder.kind", "is"),
        ({"train": {"options": {"speed": 1}}}, "train.options.speed", "is not an option of SGD"),
        ({"train": {"options": {"momentum": "x"}}}, "train.options", "must be a table"),
    ],
)
def test_a_problem_names_its_key_and_what_is_allowed(
    tables: dict[str, Any], key: str, said: str
) -> None:
    problems = problems_of(DATA | tables)
    assert list(problems) == [key]
    assert said in problems[key]


def test_all_problems_are_reported_at_once() -> None:
    problems = problems_of(
        {
            "data": {"pfad": "x"},
            "train": {"lr": -1.0, "learning_speed": 3, "epochs": 0, "unroll": "long"},
            "prior": {"kind": "scale_mixture", "pi": 2.0, "sigma1": -1.0},
            "posterior": {"kind": "cauchy"},
            "extra": {},
        }
    )
    assert set(problems) == {
        *("data.pfad", "data.path", "extra", "posterior.kind", "prior.pi", "prior.sigma1"),
        *("train.lr", "train.learning_speed", "train.epochs", "train.unroll"),
    }


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        (b"train.lr = ", "is not valid TOML"),
        (b"\xff\xfe\x00", "is not UTF-8 text, so it is no recipe"),
        (None, "no recipe at"),
    ],
)
def test_a_file_that_is_no_recipe_is_named(
    contents: bytes | None, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "recipe.toml"
    if contents is not None:
        path.write_bytes(contents)
    with pytest.raises(UserError, match=said) as caught:
        read_recipe(path)
    assert str(path) in str(caught.value)


def test_a_folder_is_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        read_recipe(tmp_path)


# --- differences -----------------------------------------------------------------------------


def test_differences_are_told_key_by_key() -> None:
    one = from_table(DATA | {"train": {"lr": 1.0, "options": {"momentum": 0.5}}})
    other = from_table(
        DATA
        | {
            "train": {"lr": 2.0},
            "prior": {"kind": "normal"},
            "posterior": {"*": {"kind": "gaussian", "scale": 0.05}},
        }
    )
    found = differences(one, other)
    assert found["train.lr"] == (1.0, 2.0)
    assert found["train.options.momentum"] == (0.5, None)
    assert found["prior.kind"] == ("scale_mixture", "normal")
    assert found["prior.pi"] == (0.25, None)
    assert found["prior.loc"] == (None, 0.0)
    assert found['posterior."*".kind'] == (None, "gaussian")
    assert not any(key.startswith(("data", "model", "bayes")) for key in found)


def test_the_order_of_patterns_is_a_difference() -> None:
    patterns = {"rnn.*": {"kind": "delta"}, "*": {"kind": "gaussian"}}
    one = from_table(DATA | {"posterior": patterns})
    other = from_table(DATA | {"posterior": dict(reversed(patterns.items()))})
    assert differences(one, other) == {"posterior": (["rnn.*", "*"], ["*", "rnn.*"])}


def test_the_kind_of_data_decides_the_kind_of_network() -> None:
    assert from_table({"data": {"path": "x"}}) == from_table(
        {"data": {"path": "x", "kind": "text"}}
    )
    images, reviews = (from_table({"data": data}) for data in (IMAGES, REVIEWS))
    assert (images.data, images.model) == (ImageData("x"), MlpSettings())
    assert (reviews.data, reviews.model) == (ReviewData("x"), ReviewSettings())
    with pytest.raises(
        ValueError, match="model must be MlpSettings for data of kind 'images', got"
    ):
        Recipe(ImageData("x"))
