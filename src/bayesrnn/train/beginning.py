"""What a training begins with: its data, found again from any folder, and another run's model."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from bayesrnn.bayes import Bayesian, with_prior
from bayesrnn.data import CaptionData, SeriesData, Vocabulary
from bayesrnn.data.series import measured
from bayesrnn.errors import UserError
from bayesrnn.files import expanded, whole_path
from bayesrnn.recipe import Data, Recipe, differences
from bayesrnn.saving import load, load_recipe, means_alone, vocabulary_of
from bayesrnn.train.run import PLACES, Run, shown


def located(data: Data, run: Run | None = None) -> Data:
    """With whole paths, and of a series the numbers it is scaled by (those of the `run` that is to
    go on): a run can be evaluated from any folder, and on other rows."""
    if isinstance(data, CaptionData) and data.features:
        data = replace(data, features=whole_path(data.features))
    data = replace(data, path=whole_path(data.path))
    if isinstance(data, SeriesData) and not data.centre:
        known = run.known_recipe() if run else None
        began = known.data if known else data
        if isinstance(began, SeriesData) and began.columns == data.columns:
            data = replace(data, centre=began.centre, spread=began.spread)
        data = measured(data)
    return data


def begun(run: str | Path, recipe: Recipe) -> tuple[Bayesian, Recipe, Vocabulary | None]:
    """The model of a run that another training goes on from, the recipe with its data scaled as the
    run's are, and the run's words. Where the recipe's prior is the start, that is what the run had
    learnt. A recipe for another model, or for data that are read in another way, is refused."""
    run = expanded(run)
    own, data = load_recipe(run), recipe.data
    if isinstance(data, SeriesData) and isinstance(own.data, SeriesData) and not data.centre:
        data = replace(data, centre=own.data.centre, spread=own.data.spread)
        recipe = replace(recipe, data=data)
    priors = recipe.prior.values() if isinstance(recipe.prior, Mapping) else [recipe.prior]
    own_prior = any(prior.named("start") for prior in priors)
    for key, (old, new) in differences(own, recipe).items():
        allowed = key in (*PLACES, "data.split", "data.split_seed") or key.startswith("train.")
        if not (allowed or (own_prior and key.split(".")[0] == "prior")):
            raise UserError(
                f"{key} is {shown(old)} in {run} and {shown(new)} here: what goes on from its "
                f"model must be for the same one; take {run / 'recipe.toml'} as the recipe"
            )
    model = load(run)
    if means_alone(model, own):
        raise UserError(
            f"{run} holds means alone, so its training cannot go on; give the run that it was "
            "made from, or write it with --scale"
        )
    if own_prior:
        model = with_prior(model, recipe.prior)
    return model, recipe, vocabulary_of(run, own)
