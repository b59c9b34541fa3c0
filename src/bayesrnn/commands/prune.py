"""`bayesrnn prune`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from bayesrnn.commands.options import AsJson, Data, Quiet, RunFolder
from bayesrnn.commands.tables import show
from bayesrnn.prune import prune_run


def prune(
    run: RunFolder,
    out: Annotated[Path, typer.Option(help="The folder of the pruned run, a new one.")],
    fraction: Annotated[
        float | None, typer.Option(min=0, max=1, help="Prune this part of all weights.")
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(min=0, help="Prune below this signal to noise (0.83 is a rule of thumb)."),
    ] = None,
    per_tensor: Annotated[
        bool, typer.Option("--per-tensor", help="The fraction of each tensor, not of all together.")
    ] = False,
    retrain: Annotated[
        int, typer.Option(min=0, metavar="EPOCHS", help="Train what is left for so many epochs.")
    ] = 0,
    scale: Annotated[
        bool, typer.Option("--scale", help="Keep the scales too, so that weights can be drawn.")
    ] = False,
    data: Data = "",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Set the weights of lowest signal to noise to 0, for a smaller file that evaluate reads.

    bayesrnn prune runs/ptb --fraction 0.8 --out runs/ptb-small

    bayesrnn prune runs/ptb --threshold 0.83 --retrain 5 --scale --out runs/ptb-small
    """
    if (fraction is None) == (threshold is None):
        raise typer.BadParameter("give either --fraction or --threshold")
    if threshold is not None and per_tensor:
        raise typer.BadParameter("--per-tensor is of --fraction; a threshold is the same for all")
    found = prune_run(run, out, fraction, threshold, per_tensor, retrain, scale, data, quiet)
    figures = {"run": str(run), "out": str(out), **asdict(found)}
    if not as_json:
        epochs = figures.pop("epochs")
        figures |= {k: v for k, v in (epochs[-1] if epochs else {}).items() if "valid" in k}
    show(figures, "pruning", as_json)
