"""Series of numbers (sensors, meters, markets): the rows of a CSV file, in the order of time."""

import csv
import hashlib
import io
import itertools
import math
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from bayesrnn.data.splits import check_fractions, split_places
from bayesrnn.errors import UserError, WrongData, require
from bayesrnn.files import data_file, read_bytes

CSV = "a CSV file"

PUT_BACK = timedelta(hours=1)
"""How far a clock goes back when summer ends."""


@dataclass(frozen=True)
class SeriesData:
    """The `[data]` table of a recipe for series.

    - `path`: a CSV file with a line of names above the rows.
    - `columns`: the names of those that are read and predicted together.
    - `time`: the name of the column that says when a row was (any text; dates must not go
      backwards), if there is one.
    - `separator`: the character between cells.
    - `split`: the first `split[0]` of the rows are to train on, the next `split[1]` to validate,
      the rest to test.
    - `centre`, `spread`: the network reads (value - centre) / spread, with one number per column
      each. By default they are the mean and the standard deviation of the rows to train on; the
      recipe that a run keeps has them as numbers, so that other files are read alike.
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
        if isinstance(self.columns, str):  # which is a sequence of letters
            name = self.columns
            require(
                (False, "columns", f"must be a sequence of names, ({name!r},) say, got {name!r}")
            )
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
            (
                len(self.separator) == 1 and self.separator not in '"\r\n',
                "separator",
                f"must be a character, no quote and no end of a line, got {self.separator!r}",
            ),
            check_fractions(self.split),
            (fits, "centre", "must have, like spread, a number a column, or both be left out"),
            (all(map(math.isfinite, self.centre)), "centre", "must be finite numbers"),
            (all(0 < s < math.inf for s in self.spread), "spread", "must be numbers above 0"),
        )


@dataclass(frozen=True, eq=False)
class Rows:
    """Some rows of a series: their scaled values, and their times.

    `values` [N, C] are (value - centre) / spread. `times` [N] are what the file's column of time
    says, or the number of each row where there is no such column.
    """

    values: NDArray[np.float32]
    times: Sequence[str]

    def __len__(self) -> int:
        return len(self.times)


@dataclass(frozen=True, eq=False)
class Series:
    """The rows of a series, by split.

    `settings` have centre and spread as numbers; `digest` is the checksum of the file's contents.
    """

    settings: SeriesData
    splits: Mapping[str, Rows]
    digest: str

    def part(self, split: str) -> NDArray[np.float32]:
        """The values of a split, or of "all" splits in the order of time."""
        parts = self.splits.values() if split == "all" else [self.splits[split]]
        return np.concatenate([rows.values for rows in parts])


def load_series(settings: SeriesData) -> Series:
    """Read the rows of a CSV file, by split.

    A cell that is empty, or no finite number, raises an error that names its line and column.
    """
    table, times, digest = _read(settings)
    places = _places(settings, len(table))
    settings = _measured(settings, table[places["train"]])
    values = _scaled(settings, table)
    splits = {split: Rows(values[place], times[place]) for split, place in places.items()}
    return Series(settings, splits, digest)


def load_rows(settings: SeriesData) -> Rows:
    """Read all rows of a file, scaled by the centre and spread of `settings`, a run's own."""
    require((settings.centre != (), "centre", "must be given: load_series measures it"))
    table, times, _ = _read(settings)
    return Rows(_scaled(settings, table), times)


def measured(settings: SeriesData) -> SeriesData:
    """The settings with centre and spread as numbers."""
    return settings if settings.centre else load_series(settings).settings


def _places(settings: SeriesData, rows: int) -> dict[str, slice]:
    """Where the splits are among so many rows."""
    places = split_places(rows, settings.split)
    for split, place in places.items():
        count = place.stop - place.start
        if count < 2:
            raise WrongData(
                f"{settings.path} has {rows} rows, and {count} of them for {split}: at least two "
                "are needed",
                "a file with more rows",
                "data.split",
            )
    return places


def _measured(settings: SeriesData, table: NDArray[np.float64]) -> SeriesData:
    """With the means and the standard deviations of these rows, unless there are some."""
    if settings.centre:
        return settings
    with np.errstate(over="ignore", invalid="ignore"):
        centre, spread = table.mean(axis=0), table.std(axis=0)
    ends = table.min(axis=0), table.max(axis=0)
    for name, value, least, most in zip(settings.columns, spread, *ends, strict=True):
        if least == most:  # the spread of equal numbers may be rounding, and not 0
            raise UserError(
                f"column {name!r} of {settings.path} is the same in all rows to train on, so there "
                "is nothing to predict; leave it out of data.columns"
            )
        if not 0 < value < math.inf:
            raise UserError(
                f"column {name!r} of {settings.path} goes from {least:g} to {most:g}, which a "
                "standard deviation cannot hold; give it in another unit"
            )
    return replace(settings, centre=tuple(centre.tolist()), spread=tuple(spread.tolist()))


def _scaled(settings: SeriesData, table: NDArray[np.float64]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        scaled = (table - np.array(settings.centre)) / np.array(settings.spread)
        values = np.ascontiguousarray(scaled, dtype=np.float32)
    for row, place in np.argwhere(~np.isfinite(values))[:1].tolist():
        name, value = settings.columns[place], table[row, place]
        raise UserError(
            f"{settings.path}, row {row + 1}: {name!r} is {value:g}, too far from the rows to "
            "train on for any network; mend the file"
        )
    return values


def _read(settings: SeriesData) -> tuple[NDArray[np.float64], list[str], str]:
    """The columns' numbers [N, C], each row's time, and the digest of the file."""
    path = data_file(settings.path, CSV)
    data = read_bytes(path)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise WrongData(f"{path} is not UTF-8 text", f"{CSV} in UTF-8") from error
    lines = _lines(path, text, settings.separator)
    _, names = next(lines, (0, []))
    _check_names(path, names, settings)
    places = [names.index(name) for name in settings.columns]
    when = names.index(settings.time) if settings.time else None
    table: list[list[float]] = []
    times: list[str] = []
    found_at: list[int] = []
    gap: int | None = None  # in a file of one column a blank line is an empty cell, but at the end
    for number, cells in lines:
        if not cells:
            gap = number if gap is None and len(names) == 1 else gap
            continue
        if gap is not None:
            _number("", f"{path}, line {gap}", names[0])
        where = f"{path}, line {number}"
        if len(cells) != len(names):
            raise WrongData(
                f"{where}: it has {len(cells)} cells, and the first line {len(names)}",
                "a file with a cell for each name",
                "data.separator",
            )
        table.append([_number(cells[p], where, names[p]) for p in places])
        times.append(str(len(table)) if when is None else cells[when])
        found_at.append(number)
    back = None if when is None else _goes_back(times)
    if back is not None:
        early, latest = back
        raise UserError(
            f"{path}, line {found_at[early]}: its time, {times[early]!r}, is before "
            f"{times[latest]!r} in line {found_at[latest]}; sort the rows, the oldest first, or "
            "leave data.time out"
        )
    numbers = np.array(table, dtype=np.float64).reshape(-1, len(places))
    return numbers, times, hashlib.sha256(data).hexdigest()


def _check_names(path: Path, names: Sequence[str], settings: SeriesData) -> None:
    """Refuse a first line that does not name each column that is to be read, once."""
    if not names:
        raise WrongData(f"{path} has no line of names", f"{CSV} with names above its rows")
    wanted = [*settings.columns, *([settings.time] if settings.time else [])]
    missing = [name for name in wanted if name not in names]
    if missing:
        known = textwrap.shorten(", ".join(map(repr, names)), 200, placeholder=" ...")
        raise WrongData(
            f"{path} has no column {missing[0]!r} in its first line, only {known}",
            "a file that has it",
            "data.columns, data.time or data.separator",
        )
    twice = [name for name in wanted if names.count(name) > 1]
    if twice:
        raise UserError(
            f"{path} has the column {twice[0]!r} {names.count(twice[0])} times in its first line; "
            "give each a name of its own"
        )


def as_dates(times: Sequence[str]) -> list[datetime] | None:
    """The times, where all of them are ISO dates; digits alone may be the number of a row.

    >>> as_dates(["2016-07-01"]), as_dates(["2016-07-01", "20160702"])
    ([datetime.datetime(2016, 7, 1, 0, 0)], None)
    """
    try:
        found = [datetime.fromisoformat(time.strip()) for time in times]
    except ValueError:
        return None
    return None if any(time.isdigit() for time in times) else found


def _goes_back(times: Sequence[str]) -> tuple[int, int] | None:
    """The first row that is earlier than the latest above it, by more than the hour that a clock is
    put back by, and that latest; None where there is none, or times are no dates that can be
    compared."""
    latest, behind = 0, timedelta(0)
    for row, step in enumerate(_steps(times), 1):
        behind -= step
        if behind > PUT_BACK:
            return row, latest
        if behind <= timedelta(0):
            latest, behind = row, timedelta(0)
    return None


def uneven(times: Sequence[str]) -> str | None:
    """One line where rows are missing or there twice, by their dates: a step of twice the usual
    one or more (months are not of one length), or none."""
    steps = _steps(times)
    [(usual, _)] = Counter(steps).most_common(1) or [(timedelta(0), 0)]
    odd = [row for row, step in enumerate(steps, 1) if step >= 2 * usual or step <= timedelta(0)]
    if usual <= timedelta(0) or not odd:
        return None
    before, first = times[odd[0] - 1 : odd[0] + 1]
    return (
        f"rows are taken to be at even steps, mostly {usual} here, but {len(odd):,} of "
        f"{len(times):,} are not: the first is {first!r}, after {before!r}; fill in what is "
        "missing, and take out what is there twice (an hour by which a clock was put forward or "
        "back is neither: give times in UTC)"
    )


def _steps(times: Sequence[str]) -> list[timedelta]:
    """From each row to the next; none where times are no dates that can be compared."""
    dates = as_dates(times) or []
    if len({date.tzinfo is None for date in dates}) > 1:
        return []
    return [after - before for before, after in itertools.pairwise(dates)]


def _lines(path: Path, text: str, separator: str) -> Iterator[tuple[int, list[str]]]:
    """The cells of each line, with its number (of several lines, that of the first)."""
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    while True:
        number = lines.line_num + 1
        try:
            cells = next(lines, None)
        except csv.Error as error:
            raise UserError(
                f"{path}, line {number}: it cannot be read from here on ({error}); check its quotes"
            ) from error
        if cells is None:
            return
        yield number, cells


def _number(cell: str, where: str, column: str) -> float:
    try:
        value = math.nan if "_" in cell else float(cell)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        said = "is empty" if cell.strip() == "" else f"is {cell!r}, not a finite number"
        remedy = "fill it in, or leave the column out of data.columns"
        if "," in cell:
            remedy = "write decimals with a point, and nothing between thousands"
        raise UserError(f"{where}: {column!r} {said}; {remedy}")
    return value


def unscaled(settings: SeriesData, values: NDArray[np.floating]) -> NDArray[np.float64]:
    """Values [..., C] as the file has them."""
    return values.astype(np.float64) * np.array(settings.spread) + np.array(settings.centre)


def digits(settings: SeriesData, fewest: int) -> list[int]:
    """How many significant digits a number of each column needs for changes within its spread to
    show, `fewest` or more: of 101325 within a thousandth, more than of 20 within 5.

    >>> digits(SeriesData("x.csv", ("p", "t"), centre=(101325, 20), spread=(0.001, 5)), 4)
    [12, 4]
    """
    pairs = zip(settings.centre, settings.spread, strict=True)
    return [min(fewest + int(math.log10(max(abs(c) / s, 1))), 17) for c, s in pairs]
