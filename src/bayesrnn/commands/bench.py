"""`bayesrnn bench`."""

from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bayesrnn.bench import bench as time_steps
from bayesrnn.bench import report
from bayesrnn.commands.options import AsJson, Device
from bayesrnn.commands.tables import print_table
from bayesrnn.files import to_json
from bayesrnn.train.loop import choose_device


def bench(
    size: Annotated[
        Literal["small", "medium", "large"], typer.Option(help="200, 650 or 1500 units, 2 layers.")
    ] = "medium",
    steps: Annotated[int, typer.Option(min=1, help="Steps of each case, taking turns.")] = 20,
    device: Device = "auto",
    peers: Annotated[
        bool, typer.Option("--peers", help="Also time blitz and bayesian-torch (slow).")
    ] = False,
    case: Annotated[
        list[str] | None,
        typer.Option(help="Only this case beside the plain loop, by its name in the table."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time a training step: the plain network, the Bayesian one.

    The cases take turns, so that all are timed under the same load.

    bayesrnn bench --size medium --steps 20
    """
    place = choose_device(device, "--device")
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("taking turns", total=None)
        timings = time_steps(size, place, steps, peers, lambda: bar.advance(task), case or ())
    if as_json:
        print(to_json(report(timings, size, place)))
        return
    table = Table(title=f"one training step, {size}, {place}")
    for heading in ("case", "ms", "words/s", "times plain", "peak MiB"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for t in timings:
        peak = "-" if t.peak_mib is None else f"{t.peak_mib:,.0f}"
        row = f"{t.ms:,.1f}", f"{t.words_per_second:,.0f}", f"{t.times_plain:.2f}", peak
        table.add_row(t.case, *row)
    print_table(table)
