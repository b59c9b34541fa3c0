"""Figures for people, as tables, or for programs, as JSON."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bayesrnn.evaluate.reader import Watch


@contextmanager
def watching(hidden: bool = False) -> Iterator[Watch]:
    """Bars of progress, on a terminal alone and unless `hidden`; gone afterwards."""
    console = Console(stderr=True)
    off = hidden or not console.is_terminal
    with Progress(console=console, transient=True, disable=off) as bar:
        yield lambda what, total: partial(bar.advance, bar.add_task(what, total=total))


def show(figures: dict[str, Any], title: str, as_json: bool) -> None:
    """One JSON object, or a short table; what is undefined is null, or a dash."""
    if as_json:
        print(json.dumps(figures))
        return
    table = Table(title=title, show_header=False)
    for key, value in figures.items():
        table.add_row(key.replace("_", " "), shown(value))
    Console().print(table)


def columns(cases: Sequence[Mapping[str, Any]], title: str) -> None:
    """A table with a line a figure and a column a case."""
    table = Table(title=title, show_header=False)
    for key in cases[0]:
        table.add_row(key.replace("_", " "), *(shown(case[key]) for case in cases))
    Console().print(table)


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4f}" if abs(value) < 1000 else f"{value:,.0f}"
    return "-" if value is None else str(value)
