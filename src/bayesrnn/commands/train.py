"""`bayesrnn train`."""

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from bayesrnn.commands.options import AsJson, Quiet, check_settings
from bayesrnn.commands.tables import show
from bayesrnn.description import Description
from bayesrnn.recipe import read_recipe
from bayesrnn.train.loop import train as train_recipe
from bayesrnn.train.stopping import best_line, line_of


def train(
    context: typer.Context,
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe's .toml file.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Changes to it: train.lr=0.5 prior.pi=0.5 ..."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder (default: runs/ and the recipe's name).")
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option(
            help="Begin with the model of this run, whose words and scales are kept: to go on with "
            "other data."
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over; the run that --out holds is lost.")
    ] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Train a recipe; goes on where --out holds a checkpoint of it.

    bayesrnn train recipes/ptb-brnn-medium.toml data.path=ptb --out runs/ptb

    bayesrnn train recipes/demo-brnn.toml data.path=book.txt train.epochs=5

    bayesrnn train runs/book/recipe.toml data.path=new.txt --start runs/book --out runs/more
    """
    check_settings(context, [str(recipe), *(settings or ())])
    out = out or Path("runs") / recipe.stem
    wanted = read_recipe(recipe, settings or ())
    outcome = train_recipe(wanted, out, fresh, quiet, start)
    last = line_of(outcome.epochs, outcome.kept)
    watched = outcome.watched
    every = outcome.epochs if len(outcome.epochs) == outcome.epoch else []  # none was lost
    best = best_line(every, watched, wanted.train.warm_up) or {}
    figures: dict[str, Any] = {
        "run": str(out),
        "finished": outcome.finished,
        "steps": outcome.steps,
        "epochs": outcome.epoch,
        "kept_epoch": outcome.kept or None,
        **{key: value for key, value in last.items() if key.startswith("train_")},
        watched: last.get(watched),
        f"best_{watched}": best.get(watched),
        **{field.name: last.get(field.name) for field in fields(Description) if last or as_json},
        "seconds": outcome.seconds,
    }
    show(figures, "training", as_json)
