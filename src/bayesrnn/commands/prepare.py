"""`bayesrnn prepare`."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from bayesrnn.commands.options import AsJson, check_settings
from bayesrnn.commands.tables import show
from bayesrnn.data import SpeechData, load_speech, prepare_speech
from bayesrnn.errors import UserError
from bayesrnn.recipe import read_recipe


def prepare(
    context: typer.Context,
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe for speech.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Changes to it: data.path=an4 data.bands=40 ..."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Turn a corpus of speech into features, once.

    Their folder can then be given as data.path, on a machine without the audio and without a
    library for it.

    bayesrnn prepare recipes/an4-ml.toml data.path=an4 --out an4-mel
    """
    check_settings(context, [str(recipe), *(settings or ())])
    data = read_recipe(recipe, settings or ()).data
    if not isinstance(data, SpeechData):
        raise UserError(f"{recipe} is a recipe for {data.kind}; only speech is prepared")
    if out.exists():
        raise UserError(f"{out} exists; choose another --out")
    utterances = prepare_speech(data, out)
    found = load_speech(replace(data, path=str(out), valid=0))  # features are of all speakers
    everything = [one for split in found.splits.values() for one in split]
    figures = {
        "out": str(out),
        "utterances": utterances,
        "frames": sum(len(one.features) for one in everything),
        "labels": len(found.vocabulary) - 1,
        "targets": sum(len(one.labels) for one in everything),
        "bytes": sum(file.stat().st_size for file in out.iterdir()),
    }
    show(figures, "prepared", as_json)
