"""`bayesrnn train`."""

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from bayesrnn.commands.options import AsJson, Quiet
from bayesrnn.commands.tables import show
from bayesrnn.description import Description
from bayesrnn.recipe import read_recipe
from bayesrnn.train.loop import train as train_recipe


def train(
    recipe: Annotated[Path, typer.Argument(help="A recipe's .toml file.")],
    settings: Annotated[
        list[str] | None, typer.Argument(help="Changes to it: train.lr=0.5 prior.pi=0.5 ...")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder (default: runs/ and the recipe's name).")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over, forgetting its run.")] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Train a recipe; goes on where --out holds a checkpoint of it.

    bayesrnn train recipes/ptb-brnn-medium.toml data.path=ptb --out runs/ptb

    bayesrnn train recipes/demo-brnn.toml data.path=book.txt train.epochs=5
    """
    out = out or Path("runs") / recipe.stem
    outcome = train_recipe(read_recipe(recipe, settings or ()), out, fresh, quiet)
    last = next((line for line in outcome.epochs if line["epoch"] == outcome.kept), {})
    watched = outcome.watched
    every = outcome.epochs if len(outcome.epochs) == outcome.epoch else []  # none was lost
    scores = [line[watched] for line in every if line[watched] is not None]
    figures: dict[str, Any] = {
        "run": str(out),
        "finished": outcome.finished,
        "steps": outcome.steps,
        "epochs": outcome.epoch,
        "kept_epoch": outcome.kept or None,
        **{key: value for key, value in last.items() if key.startswith("train_")},
        watched: last.get(watched),
        f"best_{watched}": min(scores, default=None),
        **{field.name: last.get(field.name) for field in fields(Description) if last or as_json},
        "seconds": outcome.seconds,
    }
    show(figures, "training", as_json)
