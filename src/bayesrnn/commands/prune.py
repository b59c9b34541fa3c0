"""`bayesrnn prune`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bayesrnn.commands.options import (
    AsJson,
    Data,
    Device,
    Quiet,
    RunFolder,
    note,
    numbers,
    recipe_of,
)
from bayesrnn.commands.tables import print_table, show, shown, table_of, watching
from bayesrnn.prune import Ranking, Structure
from bayesrnn.pruned_run import RunCurve, prune_run, run_curve
from bayesrnn.train.stopping import line_of


def prune(
    run: RunFolder,
    out: Annotated[
        Path | None,
        typer.Option(
            help="A new folder for the pruned run; with a curve and --retrain, for one run each."
        ),
    ] = None,
    fraction: Annotated[
        float | None, typer.Option(min=0, max=1, help="Prune this part of all weights.")
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(min=0, help="Prune below this signal to noise (0.83 is a rule of thumb)."),
    ] = None,
    curve: Annotated[
        str | None,
        typer.Option(metavar="F,F,...", help="What each of these fractions costs."),
    ] = None,
    thresholds: Annotated[
        str | None,
        typer.Option(metavar="L,L,...", help="What each of these thresholds costs."),
    ] = None,
    by: Annotated[
        Ranking, typer.Option(help="Rank by signal to noise, or by the mean's size alone.")
    ] = "snr",
    per_tensor: Annotated[
        bool,
        typer.Option(
            "--per-tensor", help="Prune that fraction of each tensor, not of all together."
        ),
    ] = False,
    split: Annotated[
        Literal["train", "valid", "test"] | None,
        typer.Option(help="What a curve reads (default: what training validated on)."),
    ] = None,
    streams: Annotated[
        int | None, typer.Option(min=1, help="For a curve, read a text as this many streams.")
    ] = None,
    retrain: Annotated[
        int, typer.Option(min=0, metavar="EPOCHS", help="Train what is left for this many epochs.")
    ] = 0,
    lr: Annotated[
        float | None,
        typer.Option(
            help="The rate to start retraining at (default: a tenth of the recipe's first, or its "
            "last where that is more); it falls to the recipe's last."
        ),
    ] = None,
    scale: Annotated[
        bool, typer.Option("--scale", help="Keep the scales too, so that weights can be drawn.")
    ] = False,
    data: Data = "",
    device: Device = "auto",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Set the weights that matter least to 0, or say what it costs.

    Those of lowest signal to noise go first. The smaller file is a run that evaluate reads.

    bayesrnn prune runs/ptb --curve 0,0.5,0.7,0.8,0.9

    bayesrnn prune runs/ptb --fraction 0.8 --out runs/ptb-small

    bayesrnn prune runs/ptb --threshold 0.83 --retrain 5 --scale --out runs/ptb-small

    bayesrnn prune runs/ptb --thresholds 0,0.1,0.5,1,2 --retrain 5 --out runs/ptb-table
    """
    several = curve is not None or thresholds is not None
    _check_choice(fraction, threshold, curve, thresholds, by, per_tensor)
    _check_rest(several, out, retrain, lr, split is not None or streams is not None, scale)
    recipe_of(run)
    if several:
        fractions = None if curve is None else numbers("--curve", curve)
        limits = None if thresholds is None else numbers("--thresholds", thresholds)
        with watching(hidden=quiet or bool(retrain)) as watch:
            advance = watch("pruning", len(fractions or limits or ()))
            found = run_curve(
                run,
                fractions,
                limits,
                split,
                streams,
                per_tensor,
                by,
                retrain,
                lr,
                out,
                data,
                device,
                quiet,
                lambda _: advance(1),
                note,
            )
        _show_curve(run, found, bool(retrain), as_json)
        return
    assert out is not None
    done = prune_run(
        run, out, fraction, threshold, per_tensor, retrain, scale, data, quiet, by, lr, device, note
    )
    figures: dict[str, Any] = {"run": str(run), "out": str(out), **asdict(done)}
    if not as_json:
        for key in ("epochs", "structure", *(() if retrain else ("kept_epoch",))):
            del figures[key]
        kept = line_of(done.epochs, done.kept_epoch)
        figures |= {key: value for key, value in kept.items() if "valid" in key}
    show(figures, "pruning", as_json)
    if not as_json:
        _show_structure(done.structure)


def _check_choice(
    fraction: float | None,
    threshold: float | None,
    curve: str | None,
    thresholds: str | None,
    by: Ranking,
    per_tensor: bool,
) -> None:
    """Which weights go is said in one way."""
    if sum(value is not None for value in (fraction, threshold, curve, thresholds)) != 1:
        raise typer.BadParameter(
            "give one of --fraction, --threshold, --curve (of fractions) and --thresholds"
        )
    if (threshold is not None or thresholds is not None) and (per_tensor or by != "snr"):
        raise typer.BadParameter(
            "a threshold is of the signal to noise, the same for all tensors: leave out "
            "--per-tensor and --by"
        )


def _check_rest(
    several: bool, out: Path | None, retrain: int, lr: float | None, reading: bool, scale: bool
) -> None:
    """What is given suits a curve (of `several` points), or one pruned run."""
    if lr is not None and not retrain:
        raise typer.BadParameter("--lr is of --retrain; give that too")
    if not several and reading:
        raise typer.BadParameter("--split and --streams are of --curve and --thresholds")
    if out is None and (retrain or not several):
        raise typer.BadParameter("--out is needed, to write to")
    if out is not None and several and not retrain:
        raise typer.BadParameter("a curve writes nothing without --retrain; leave out --out")
    if several and scale:
        raise typer.BadParameter("--scale is of --fraction and --threshold; a curve keeps scales")


def _show_curve(run: Path, found: RunCurve, retrained: bool, as_json: bool) -> None:
    if as_json:
        show({"run": str(run), **asdict(found)}, "", as_json)
        return
    by_threshold = any(point.threshold is not None for point in found.points)
    names = ["threshold" if by_threshold else "pruned", "weights", "percent left"]
    names += ["before", "retrained", "epochs"] if retrained else [found.figure.replace("_", " ")]
    title = f"{found.figure.replace('_', ' ')} of {run}, pruned"
    table = table_of(*names, "bits each", title=title)
    for point in found.points:
        first = f"{point.threshold:g}" if by_threshold else f"{100 * point.fraction:g} %"
        row = [first, f"{point.weights:,}", f"{point.percent:.1f}"]
        row += [shown(point.error)]
        row += [shown(point.retrained), str(point.retrain_epochs)] if retrained else []
        table.add_row(*row, shown(point.bits_per_weight))
    print_table(table)


def _show_structure(found: Structure) -> None:
    """The matrices, and the recurrent layers by gate."""
    heads = ("weight", "left", "of", "dead rows", "of", "dead columns", "of")
    table = table_of(*heads, title="matrices")
    table.columns[0].no_wrap = True
    for m in found.matrices:
        cells = (m.left, m.weights, m.dead_rows, m.rows, m.dead_columns, m.columns)
        table.add_row(m.name, *(f"{cell:,}" for cell in cells))
    print_table(table)
    if not found.layers:
        return
    gates = list(dict.fromkeys(gate for layer in found.layers for gate in layer.unfed_gates))
    names = [f"no input to {gate}" for gate in gates]
    table = table_of(
        "layer", "units", "no input at all", "not heard inside", *names, title="recurrent units"
    )
    for layer in found.layers:
        by_gate = [str(layer.unfed_gates.get(gate, "-")) for gate in gates]
        table.add_row(layer.layer, str(layer.units), str(layer.unfed), str(layer.unheard), *by_gate)
    print_table(table)
