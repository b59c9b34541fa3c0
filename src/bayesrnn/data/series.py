"""Series of numbers (sensors, meters, markets): the rows of a CSV file, in the order of time."""

import csv
import hashlib
import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from bayesrnn.data.text import SPLITS
from bayesrnn.errors import UserError, WrongData, require
from bayesrnn.files import data_file, read_chunks

CSV = "a CSV file"


@dataclass(frozen=True)
class SeriesData:
    """The `[data]` table of a recipe for series.

    `path` is a CSV file with a line of names above the rows. The `columns` named are read and
    predicted together; `time` names the column that says when a row was (any text), if there is
    one. Cells are apart by `separator`. The first `split[0]` of the rows are to train on, the next
    `split[1]` to validate, the rest to test.

    The network reads (value - centre) / spread, with a number a column. By default they are the
    mean and the standard deviation of the rows to train on; the recipe that a run keeps has them
    as numbers, so that other files are read alike.
    """

    path: str
    columns: tuple[str, ...]
    time: str = ""
    separator: str = ","
    split: tuple[float, float, float] = (0.6, 0.2, 0.2)
    centre: tuple[float, ...] = ()
    spread: tuple[float, ...] = ()
    kind: ClassVar[str] = "series"

    def __post_init__(self) -> None:
        names, count = self.columns, len(self.columns)
        numbers = (self.centre, self.spread)
        fits = all(len(one) == count for one in numbers) or numbers == ((), ())
        require(
            (self.path != "", "path", "must name a CSV file, got ''"),
            (count >= 1, "columns", "must name at least one column"),
            (len(set(names)) == count, "columns", f"must name each once, got {list(names)}"),
            (
                self.time not in names,
                "time",
                f"must not be one of the columns to predict, got {self.time!r}",
            ),
            (len(self.separator) == 1, "separator", f"must be a character, got {self.separator!r}"),
            (
                all(part > 0 for part in self.split)
                and math.isclose(sum(self.split), 1, abs_tol=1e-6),
                "split",
                f"must be three fractions above 0 that sum to 1, got {list(self.split)}",
            ),
            (fits, "centre", "must have, like spread, a number a column, or both be left out"),
            (all(s > 0 for s in self.spread), "spread", "must be numbers above 0"),
        )


@dataclass(frozen=True, eq=False)
class Rows:
    """Some rows of a series: `values` [N, C], centred and spread, and `times` [N], what the file
    calls each (its number, where it has no column of time)."""

    values: NDArray[np.float32]
    times: Sequence[str]

    def __len__(self) -> int:
        return len(self.times)


@dataclass(frozen=True, eq=False)
class Series:
    """A series' rows by split; `digest` is that of the file's contents."""

    settings: SeriesData
    splits: Mapping[str, Rows]
    digest: str


def load_series(settings: SeriesData) -> Series:
    """The rows of the file, by split.

    Cells that are empty, or no finite numbers, are refused by their line and column.
    """
    table, times, digest = _read(settings)
    bounds = _bounds(settings, len(table))
    settings = _measured(settings, table[: bounds[1]])
    values = _scaled(settings, table)
    splits = {
        split: Rows(values[start:stop], times[start:stop])
        for split, start, stop in zip(SPLITS, bounds, bounds[1:], strict=False)
    }
    return Series(settings, splits, digest)


def load_rows(settings: SeriesData) -> Rows:
    """All rows of the file, by a run's own centre and spread."""
    require((settings.centre != (), "centre", "must be given: load_series measures it"))
    table, times, _ = _read(settings)
    return Rows(_scaled(settings, table), times)


def measured(settings: SeriesData) -> SeriesData:
    """The settings with centre and spread as numbers."""
    return settings if settings.centre else load_series(settings).settings


def _bounds(settings: SeriesData, rows: int) -> list[int]:
    """Where the splits begin, and the end of the last."""
    train, valid, _ = settings.split
    bounds = [0, round(rows * train), round(rows * (train + valid)), rows]
    for split, start, stop in zip(SPLITS, bounds, bounds[1:], strict=False):
        if stop - start < 2:
            raise WrongData(
                f"{settings.path} has {rows} rows, and {stop - start} of them for {split}: at "
                "least two are needed",
                "a file with more rows",
                "data.split",
            )
    return bounds


def _measured(settings: SeriesData, table: NDArray[np.float64]) -> SeriesData:
    """With the means and the standard deviations of these rows, unless there are some."""
    if settings.centre:
        return settings
    centre, spread = table.mean(axis=0), table.std(axis=0)
    for name, value in zip(settings.columns, spread, strict=True):
        if not 0 < value < math.inf:
            raise UserError(
                f"column {name!r} of {settings.path} is the same in all rows to train on, so there "
                "is nothing to predict; leave it out of data.columns"
            )
    return replace(settings, centre=tuple(centre.tolist()), spread=tuple(spread.tolist()))


def _scaled(settings: SeriesData, table: NDArray[np.float64]) -> NDArray[np.float32]:
    scaled = (table - np.array(settings.centre)) / np.array(settings.spread)
    return np.ascontiguousarray(scaled, dtype=np.float32)


def _read(settings: SeriesData) -> tuple[NDArray[np.float64], list[str], str]:
    """The columns' numbers [N, C], each row's time, and the digest of the file."""
    path = data_file(settings.path, CSV)
    data = b"".join(read_chunks(path))
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise WrongData(f"{path} is not UTF-8 text", f"{CSV} in UTF-8") from error
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=settings.separator)
    names = next(lines, [])
    if not names:
        raise WrongData(f"{path} has no line of names", f"{CSV} with names above its rows")
    wanted = [*settings.columns, *([settings.time] if settings.time else [])]
    missing = [name for name in wanted if name not in names]
    if missing:
        known = textwrap.shorten(", ".join(names), 200, placeholder=" ...")
        raise WrongData(
            f"{path} has no column {missing[0]!r} in its first line, only {known}",
            "a file that has it",
            "data.columns, data.time or data.separator",
        )
    places = [names.index(name) for name in settings.columns]
    when = names.index(settings.time) if settings.time else None
    table: list[list[float]] = []
    times: list[str] = []
    for cells in lines:
        if not cells:  # a blank line
            continue
        where = f"{path}, line {lines.line_num}"
        if len(cells) != len(names):
            raise WrongData(
                f"{where}: it has {len(cells)} cells, and the first line {len(names)}",
                "a file with a cell for each name",
                "data.separator",
            )
        row = [_number(cells[p], where, names[p]) for p in places]
        table.append(row)
        times.append(str(len(table)) if when is None else cells[when])
    numbers = np.array(table, dtype=np.float64).reshape(-1, len(places))
    return numbers, times, hashlib.sha256(data).hexdigest()


def _number(cell: str, where: str, column: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        said = "is empty" if cell.strip() == "" else f"is {cell!r}, not a finite number"
        raise WrongData(f"{where}: {column!r} {said}", "a file with a number there", "data.columns")
    return value


def unscaled(settings: SeriesData, values: NDArray[np.floating]) -> NDArray[np.float64]:
    """Values [..., C] as the file has them."""
    return values.astype(np.float64) * np.array(settings.spread) + np.array(settings.centre)
