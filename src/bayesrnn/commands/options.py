"""What several commands take, and how it is checked."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from bayesrnn.data import CaptionData, TextData
from bayesrnn.recipe import Recipe, read_recipe

RunFolder = Annotated[Path, typer.Argument(help="A run's folder, as `train --out` made it.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]
Data = Annotated[str, typer.Option(help="Read the data from here, not from where they were.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
DrawSeed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the draws.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]
Weights = Literal["mean", "sample"]


def check_flags(recipe: Recipe, used: Mapping[str, bool]) -> None:
    """--predictions is for all but text, --beam and --meteor for captions, every other flag here
    for text."""
    is_text, is_captions = (isinstance(recipe.data, kind) for kind in (TextData, CaptionData))
    fits = {"--predictions": not is_text, "--beam": is_captions, "--meteor": is_captions}
    for flag in (flag for flag, is_used in used.items() if is_used):
        if not fits.get(flag, is_text):
            raise typer.BadParameter(f"{flag} is not for a run on {recipe.data.kind}")


def recipe_of(run: Path, data: str) -> Recipe:
    """A run's recipe, with its data read from `data` where that is given."""
    recipe = read_recipe(run / "recipe.toml")
    return replace(recipe, data=replace(recipe.data, path=data)) if data else recipe


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
