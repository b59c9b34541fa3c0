"""`bayesrnn caption`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from bayesrnn.commands.options import AsJson, Device, DrawSeed, RunFolder, check_file, recipe_of
from bayesrnn.commands.tables import print_table, shown, table_of, watching
from bayesrnn.data import CaptionData, read_features
from bayesrnn.errors import UserError
from bayesrnn.evaluate.captioned import caption_pictures
from bayesrnn.evaluate.decoding import Decoding
from bayesrnn.files import to_json
from bayesrnn.models import CaptionerSettings
from bayesrnn.saving import load, load_vocabulary
from bayesrnn.train.loop import choose_device

SHOWN = 50
"""Captions in a table; files have all."""


def caption(
    run: RunFolder,
    features: Annotated[
        Path, typer.Option(help="The pictures' features, by the network of the training.")
    ],
    image: Annotated[
        list[str] | None, typer.Option(help="Only this picture, by its file name; repeatable.")
    ] = None,
    samples: Annotated[
        int, typer.Option(min=0, help="Say the words of this many draws' average (0: the mean).")
    ] = 0,
    draws: Annotated[
        int, typer.Option(min=0, help="Also show what this many single draws say.")
    ] = 0,
    beam: Annotated[int, typer.Option(min=1, help="Beginnings kept; 1 is greedy.")] = 3,
    temperature: Annotated[
        float, typer.Option(min=0, help="Above 0: draw words at random, with --beam 1.")
    ] = 0.0,
    out: Annotated[
        Path | None, typer.Option(help="Write captions with every word's figures, as JSON.")
    ] = None,
    seed: DrawSeed = 1,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Caption pictures, and say how sure each caption is.

    The confidence is the geometric mean of its words' probabilities; epistemic is what draws of the
    weights disagree about, in nats a word.

    bayesrnn features my-pictures --out mine.npz

    bayesrnn caption runs/flickr8k --features mine.npz --image dog.jpg --draws 3
    """
    if temperature and beam != 1:
        raise typer.BadParameter("--temperature draws words one by one; give --beam 1")
    check_file(out)
    place = choose_device(device, "--device")
    model, recipe = load(run).to(place), recipe_of(run)
    if not isinstance(recipe.data, CaptionData) or not isinstance(recipe.model, CaptionerSettings):
        raise UserError(f"{run} is a run on {recipe.data.kind}, which captions no pictures")
    given = read_features(features)
    numbers = given.vectors.shape[1]
    if numbers != recipe.model.numbers:
        raise UserError(
            f"{features} has vectors of {numbers} numbers, but the run was trained on "
            f"{recipe.model.numbers}; make features with the same network"
        )
    rows = given.rows(image, "--image") if image else list(range(len(given.names)))
    names = [given.names[row] for row in rows]
    decoding = Decoding(beam=beam, temperature=temperature)
    with watching() as watch:
        found = caption_pictures(
            model,
            given.vectors[rows].to(place),
            names,
            load_vocabulary(run),
            decoding,
            samples,
            draws=draws,
            seed=seed,
            watch=watch,
        )
    if out is not None:
        found.write(out)
    if as_json:
        print(to_json({"run": str(run), **asdict(found)}))
        return
    table = table_of("picture", "caption", "confidence", "epistemic", title="captions")
    for each in found.pictures[:SHOWN]:
        lines = [each.caption, *(f"  draw: {text}" for text in each.draws)]
        if each.disputed:
            lines.append(f"  few draws say: {', '.join(each.disputed)}")
        said = "\n".join(lines)
        table.add_row(each.name, said, shown(each.confidence), shown(each.epistemic))
    print_table(table)
    if len(found.pictures) > SHOWN:
        print(f"{len(found.pictures) - SHOWN} more; give --out FILE.json for all")
