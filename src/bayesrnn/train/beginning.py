"""What a training begins with: its data, found again from any folder, and another run's model."""

from dataclasses import replace
from pathlib import Path

from bayesrnn.bayes import Bayesian, with_prior
from bayesrnn.bayes.bayesianize import each_of
from bayesrnn.data import CaptionData, SeriesData, Vocabulary
from bayesrnn.data.series import measured
from bayesrnn.errors import UserError
from bayesrnn.files import expanded, whole_path
from bayesrnn.recipe import Data, Recipe, differences
from bayesrnn.saving import (
    blaming_recipe,
    load,
    load_recipe,
    load_vocabulary,
    means_alone,
    vocabulary_of,
)
from bayesrnn.train.checkpoint import newest_facts
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
    own_prior = any(prior.named("start") for prior in each_of(recipe.prior))
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
        with blaming_recipe():
            model = with_prior(model, recipe.prior)
    return model, recipe, vocabulary_of(run, own)


def kept_words(run: Run, words: Vocabulary | None) -> Vocabulary | None:
    """Those that the folder keeps, else these, of the run that is begun with: another run's model
    does not know what they number. Refused where both are there and differ."""
    if not run.vocabulary.exists():
        return words
    kept = load_vocabulary(run.path)
    if words not in (None, kept):
        raise UserError(
            f"{run.path} holds a run with other words than the one that is begun with; choose "
            "another --out, or --fresh to start over"
        )
    return kept


def split_anew(run: Path, recipe: Recipe, digest: str) -> str | None:
    """One line where some data of this digest may be tested on here and trained on in the run that
    was begun with. What was added at the end of a text or a series is not."""
    before, now = (
        (getattr(data, "split", ()), getattr(data, "split_seed", None))
        for data in (load_recipe(run).data, recipe.data)
    )
    if now[1] is None:  # nothing is shuffled
        why = "less is kept to train on than there" if now[0][:1] < before[0][:1] else None
    elif before == now and newest_facts(Run(run).checkpoints).get("data") == digest:
        why = None
    else:
        why = "data are shuffled before they are split, and it had others, or another split"
    if why is None:
        return None
    return (
        f"some of what is tested on here may be what {run} was trained with: {why}; evaluate on "
        "data that are all new to it"
    )
