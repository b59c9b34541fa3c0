"""What several commands take, and how it is checked."""

import difflib
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from bayesrnn.bayes import Ensemble, Network
from bayesrnn.data import (
    CaptionData,
    ImageData,
    ReviewData,
    SeriesData,
    SpeechData,
    TextData,
    Vocabulary,
)
from bayesrnn.data.vocabulary import END, UNKNOWN
from bayesrnn.errors import UserError
from bayesrnn.evaluate.ctc import Search
from bayesrnn.files import file_to_write
from bayesrnn.recipe import Recipe, differences, settings_like
from bayesrnn.saving import load, load_recipe, vocabulary_of
from bayesrnn.train.metrics import epochs_missing
from bayesrnn.train.run import PLACES, Run, changed_data, shown

OF_TEXTS, OF_SERIES, OF_CAPTIONS = "Texts", "Series", "Captions"
"""Headings of the help, for options that are of some data alone."""
RunFolder = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run's folder, as `train --out` made it.")
]
RunFolders = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN",
        help="A run's folder, as `train --out` made it; several are read as an ensemble.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]
Data = Annotated[
    str, typer.Option(help="Read the data from here, not from where they were in training.")
]
Device = Annotated[str, typer.Option(help="auto (a GPU where there is one), cpu or cuda.")]
DrawSeed = Annotated[
    int, typer.Option(min=0, max=2**63 - 1, metavar="N", help="The seed of the draws.")
]
SpeechDecoding = Annotated[
    Search,
    typer.Option(
        "--decoding",
        help="How labels of speech are read off: the best path, prefix search, or a beam.",
    ),
]
Season = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Rows a season, for the seasonal naive forecast beside the run's (default: what fits "
        "the rows to train on).",
        rich_help_panel=OF_SERIES,
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]
FLAGS: Mapping[str, Sequence[str]] = {
    "--predictions": (ImageData.kind, ReviewData.kind, CaptionData.kind),
    "--beam": (CaptionData.kind,),
    "--meteor": (CaptionData.kind,),
    "--decoding": (SpeechData.kind,),
    "--horizon": (SeriesData.kind,),
    "--season": (SeriesData.kind,),
    "--streams": (TextData.kind, SeriesData.kind),
    "--temperature": (TextData.kind, ImageData.kind, ReviewData.kind),
    "--split all": (TextData.kind, SeriesData.kind, ReviewData.kind),
    "--bins": (TextData.kind, ImageData.kind, ReviewData.kind),
}
"""Of flags that are for some kinds of data: which; those not here are for text."""
SIZES: Mapping[str, str] = {
    "inputs": "model.inputs",
    "classes": "model.classes",
    "numbers": "model.numbers",
    "frames_a_step": "the number of frames a step (model.stack or model.windows)",
}
"""Of a model, beside its words: of what it reads and gives, the same in all of an ensemble."""
Weights = Literal["mean", "sample"]


def check_flags(recipe: Recipe, used: Mapping[str, bool]) -> None:
    """Refuse a flag that is not for this kind of data."""
    for flag in (flag for flag, is_used in used.items() if is_used):
        if recipe.data.kind not in FLAGS.get(flag, (TextData.kind,)):
            raise typer.BadParameter(f"{flag} is not for a run on {recipe.data.kind}")


def check_settings(context: typer.Context, words: Sequence[str]) -> None:
    """Refuse an option that a command does not have, where it takes a recipe and settings; say
    which of its own may be meant, or how a setting is given."""
    options = [option for own in context.command.params for option in own.opts]
    for word in words:
        if word.startswith("-"):
            option = word.partition("=")[0]
            name = option.lstrip("-")
            keys = settings_like(name)
            close = difflib.get_close_matches(option, options, n=1, cutoff=0.7)
            if close and not any(f".{key}".endswith(f".{name}") for key in keys):
                raise typer.BadParameter(f"there is no option {option}; did you mean {close[0]}?")
            given = " or ".join(f"{key}=..." for key in keys) or "table.key=value"
            raise typer.BadParameter(
                f"there is no option {option}; settings of the recipe are given as {given}"
            )


def check_file(path: Path | None) -> None:
    """Refuse a file that cannot be written: now, not after all the work."""
    if path is None:
        return
    folder = file_to_write(path).parent
    if not folder.is_dir():
        raise UserError(f"cannot write {path}: there is no folder {folder}; make it first")
    if not os.access(folder, os.W_OK):
        raise UserError(f"cannot write {path}: the folder {folder} is read-only; choose another")


def recipe_of(run: Path) -> Recipe:
    """A run's recipe. Says so where the run has not come to its end."""
    recipe = load_recipe(run)
    missing = epochs_missing(run, recipe)
    if missing:
        command = "prune" if Run(run).pruning.exists() else "train"
        note(
            f"the training of {run} is not finished, {missing} of {recipe.train.epochs} epochs are "
            f"to come; run its {command} command again to go on"
        )
    return recipe


def load_runs(runs: Sequence[Path], device: torch.device) -> tuple[Network, Recipe]:
    """The model and the recipe of a run; of several an ensemble, and the first one's recipe."""
    first = runs[0]
    members, recipe = [load(first)], recipe_of(first)
    for run in runs[1:]:
        members.append(load(run))
        own = recipe_of(run)
        other = _reads_otherwise(recipe, own)
        if other:
            raise UserError(
                f"{run} reads its data in another way than {first} ({other}), and cannot be in one "
                "ensemble with it; give runs that differ in other settings"
            )
        if vocabulary_of(run, recipe) != vocabulary_of(first, recipe):
            raise UserError(
                f"{run} has another vocabulary than {first}, and cannot be in one ensemble with "
                "it; give runs that were trained on the same data"
            )
        for size, what in SIZES.items():
            here, there = (getattr(each.model, size, None) for each in (own, recipe))
            if here != there:
                raise UserError(
                    f"{what} is {here} in {run} and {there} in {first}, so they cannot be in one "
                    "ensemble; give runs that agree in it"
                )
    if len({run.resolve() for run in runs}) < len(runs):
        raise UserError("an ensemble is of several runs, and one is given twice; give each once")
    model = Ensemble(members) if len(members) > 1 else members[0]
    return model.to(device), recipe


def _reads_otherwise(recipe: Recipe, other: Recipe) -> str | None:
    """The first setting of the data, but for where they lie, that is another one."""
    for key, (old, new) in differences(recipe, other).items():
        if key.startswith("data.") and key not in PLACES:
            return f"{key} is {shown(new)}, not {shown(old)}"
    return None


def only_run(runs: Sequence[Path], flag: str) -> Path:
    """The one run that this flag is for."""
    if len(runs) > 1:
        raise typer.BadParameter(f"{flag} is of one run, and {len(runs)} are given")
    return runs[0]


def names_of(runs: Sequence[Path], as_json: bool) -> dict[str, Any]:
    """What the figures are of, to stand before them."""
    if len(runs) == 1:
        return {"run": str(runs[0])}
    return {"runs": [str(run) for run in runs] if as_json else ", ".join(map(str, runs))}


def note_data(runs: Sequence[Path], recipe: Recipe, digest: str, data: str) -> None:
    """Say where the data (of this digest, by the first run's recipe) are not what a run was trained
    with; `data` that were given instead are meant to be others."""
    for run in () if data else runs:
        changed = changed_data(run, recipe, digest)
        own = load_recipe(run).data.path
        if changed and own != recipe.data.path:
            changed = f"{recipe.data.path}, which all are read on, is not what {run} was trained "
            changed += f"with: that was {own}, with other data"
        if changed:
            note(changed)


def note_part(recipe: Recipe, data: str, split: str) -> None:
    """Say where only a part is read of `data` that were given: all of them may be new to a run."""
    settings = recipe.data
    whole = isinstance(settings, (SeriesData, ReviewData))
    whole = whole or (isinstance(settings, TextData) and Path(settings.path).is_file())
    if data and split != "all" and whole:
        note(f"this is the '{split}' part of {settings.path}; --split all reads all of it")


def note_unknown(text: str, ids: NDArray[np.int32], vocabulary: Vocabulary) -> None:
    """Say where a run's vocabulary knows less than half of a text: it may be no such text. The ends
    of lines are no words of it."""
    words = ids[ids != vocabulary.index.get(END, -1)]
    share = np.count_nonzero(words == vocabulary.index[UNKNOWN]) / max(len(words), 1)
    if share > 0.5:
        note(
            f"{share:.0%} of the tokens of {text} are none that the run knows, and are read as "
            f"{UNKNOWN}; give a text like the one it was trained with for figures that mean much"
        )


def note(text: str) -> None:
    """One line that is no error."""
    print(f"note: {text}", file=sys.stderr)


def check_draws(run: Path, model: Network, flags: str) -> None:
    """Draws are asked for, by these flags: refused where each would be the same."""
    if not model.draws_differ:
        raise UserError(
            f"every draw of {run} is the same, since its weights are points and no masks are "
            f"drawn: leave out {flags}"
        )


def draw_counts(samples: str) -> list[int]:
    """The numbers of draws that --samples gives."""
    try:
        counts = [int(part) for part in samples.split(",")]
    except ValueError:
        counts = [-1]
    if min(counts) < 0:
        raise typer.BadParameter(
            f"--samples is a number, 0 or above, or several with commas; got {samples!r}"
        )
    return sorted(set(counts))


OrSearch = float | Literal["search"]
"""A number, or the best of a search on the validation text."""


def or_search(given: str, fits: Callable[[float], bool], what: str) -> OrSearch:
    """What a flag gives that takes a number or "search"; `what` says which numbers fit."""
    if given == "search":
        return "search"
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not fits(value):
        raise typer.BadParameter(f"{what}, or search; got {given!r}")
    return value


def numbers(flag: str, text: str) -> list[float]:
    """The numbers of a flag that takes several."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{flag} takes numbers with commas, got {text!r}") from error
