"""`bayesrnn compress`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

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
from bayesrnn.compress import MOST_TRIES, CompressionCurve, compress_run, compression_of_run


def compress(
    run: RunFolder,
    out: Annotated[
        Path | None, typer.Option(help="The folder of the smaller run, a new one.")
    ] = None,
    allow: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="PERCENT", help="By how much the figure may rise (default: 1)."
        ),
    ] = None,
    step: Annotated[
        float | None, typer.Option(help="Round to multiples of this; nothing is measured.")
    ] = None,
    curve: Annotated[
        str | None,
        typer.Option(metavar="S,S,...", help="What each of these steps costs; nothing is written."),
    ] = None,
    scale: Annotated[
        bool,
        typer.Option("--scale", help="Keep a scale for each row, so that weights can be drawn."),
    ] = False,
    data: Data = "",
    device: Device = "auto",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Round weights and code them, in one or two bits each.

    The step is the coarsest at which the figure that training watched (the perplexity of the
    validation text, say) is no more than a percent above what it was.

    bayesrnn compress runs/book --out runs/book-small

    bayesrnn compress runs/book --allow 3 --scale --out runs/book-smaller

    bayesrnn compress runs/book --curve 0.05,0.1,0.2
    """
    if sum(value is not None for value in (allow, step, curve)) > 1:
        raise typer.BadParameter("give one of --allow, --step and --curve")
    if (out is None) != (curve is not None):
        raise typer.BadParameter(
            "--out is needed, to write to" if out is None else "a curve writes nothing: no --out"
        )
    if curve is not None and scale:
        raise typer.BadParameter("a curve is of the means; leave out --scale")
    recipe_of(run)
    if curve is not None:
        steps = numbers("--curve", curve)
        with watching(quiet) as watch:
            advance = watch("rounding", len(steps))
            found = compression_of_run(run, steps, data, device, lambda _: advance(1), note)
        _show_curve(run, found, as_json)
        return
    assert out is not None
    given = 1.0 if allow is None else allow
    with watching(quiet) as watch:
        advance = watch("rounding and coding", 1 + (MOST_TRIES if step is None else 0))
        done = compress_run(
            run, out, step, given / 100, scale, data, device, lambda *_: advance(1), note
        )
    show({"run": str(run), "out": str(out), **asdict(done)}, "compression", as_json)


def _show_curve(run: Path, found: CompressionCurve, as_json: bool) -> None:
    if as_json:
        show({"run": str(run), **asdict(found)}, "", as_json)
        return
    figure = found.figure.replace("_", " ")
    title = f"{figure} of {run}, rounded; {shown(found.before)} as it is"
    table = table_of("step", "zeros", "bits each", "bytes", "of dense", figure, title=title)
    for point in found.points:
        table.add_row(
            f"{point.step:g}",
            f"{100 * point.zeros:.1f} %",
            f"{point.coded_bits_per_weight:.3f}",
            f"{point.coded_bytes:,}",
            f"{point.coded_bytes / found.dense_bytes:.4f}",
            shown(point.error),
        )
    print_table(table)
