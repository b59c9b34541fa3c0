"""`bayesrnn features`."""

from pathlib import Path
from typing import Annotated

import typer

from bayesrnn.commands.options import AsJson, Device, check_file
from bayesrnn.commands.tables import show, watching
from bayesrnn.data import write_features
from bayesrnn.data.features import SUFFIXES
from bayesrnn.models.vision import find_pictures, load_vision, picture_features
from bayesrnn.train.loop import choose_device


def features(
    images: Annotated[
        Path, typer.Argument(metavar="PICTURES", help="A folder of pictures, or one picture.")
    ],
    out: Annotated[Path, typer.Option(help="The file to write: FILE.npz or FILE.safetensors.")],
    network: Annotated[
        str, typer.Option(help="A network of torchvision, or of timm as timm:NAME.")
    ] = "resnet50",
    weights: Annotated[
        str,
        typer.Option(help="Its weights, FILE.safetensors (default: its own, fetched once)."),
    ] = "",
    batch: Annotated[int, typer.Option(min=1, help="Pictures at a time.")] = 32,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Turn pictures into the vectors that captions are learnt from.

    A network for images does it. Use the same one for training and afterwards.

    bayesrnn features my-pictures --out mine.npz
    """
    if out.suffix not in SUFFIXES:
        raise typer.BadParameter(f"--out must end in {' or '.join(SUFFIXES)}, got {str(out)!r}")
    check_file(out)
    paths = find_pictures(images)
    place = choose_device(device, "--device")
    module, prepare = load_vision(network, weights)
    with watching() as watch:
        advance = watch("looking", len(paths))
        found = picture_features(paths, module, prepare, batch, place, advance)
    write_features(out, found)
    figures = {"pictures": len(paths), "numbers": found.vectors.shape[1], "file": str(out)}
    show(figures, "features", as_json)
