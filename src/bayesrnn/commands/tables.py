"""Figures for people, as tables, or for programs, as JSON."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Column, Table

from bayesrnn.evaluate.reader import Watch
from bayesrnn.files import to_json

TITLES = {
    "kl": "kl (nats each)",
    "bound": "bound (nats each)",
    "per": "label errors (%)",
    "percent": "percent left",
    "unigram_entropy": "unigram entropy (nats)",
}
"""What people read in place of a figure's key, where that does not say its unit."""


@contextmanager
def watching(hidden: bool = False) -> Iterator[Watch]:
    """Bars of progress, on a terminal alone and unless `hidden`; gone afterwards."""
    console = Console(stderr=True)
    off = hidden or not console.is_terminal
    with Progress(console=console, transient=True, disable=off) as bar:
        yield lambda what, total: partial(bar.advance, bar.add_task(escape(what), total=total))


def show(figures: dict[str, Any], title: str, as_json: bool) -> None:
    """One JSON object, or a short table; what is undefined is null, or a dash."""
    if as_json:
        print(to_json(figures))
        return
    table = table_of("", "", title=title, show_header=False)
    for key, value in figures.items():
        unit = " (nats each)" if key.endswith("nll") else ""
        table.add_row(TITLES.get(key, key.replace("_", " ") + unit), shown(value))
    print_table(table)


def columns(cases: Sequence[Mapping[str, Any]], title: str) -> None:
    """A table with a line a figure and a column a case."""
    table = table_of("", *("" for _ in cases), title=title, show_header=False)
    for key in cases[0]:
        table.add_row(key.replace("_", " "), *(shown(case[key]) for case in cases))
    print_table(table)


def print_table(table: Table) -> None:
    """On the terminal; what users named is no markup, whatever brackets and colons are in it. A
    title that is wider than its table stands above it, in one line where there is room."""
    console = Console(markup=False, emoji=False)
    if table.title and cell_len(str(table.title)) > console.measure(table).maximum:
        console.print(table.title, style="table.title", highlight=False)
        table.title = None
    console.print(table)


def table_of(*headings: str, title: str, show_header: bool = True) -> Table:
    """An empty table; what is too long for the terminal is folded, never cut."""
    heads = (Column(heading, overflow="fold") for heading in headings)
    return Table(*heads, title=title, show_header=show_header)


def shown(value: Any) -> str:
    """A figure for people.

    >>> [shown(value) for value in (1234567, 1234.5, 32.1, 0.00002, 0.0, True, None, "mean")]
    ['1,234,567', '1,234', '32.1', '2e-05', '0', 'yes', '-', 'mean']
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and math.isfinite(value):
        if abs(value) >= 1000:
            return f"{value:,.0f}"
        if 0 < abs(value) < 0.001:
            return f"{value:.3g}"
        return f"{value:.4f}".rstrip("0").rstrip(".")
    if isinstance(value, int):
        return f"{value:,}"
    return "-" if value is None else str(value)
