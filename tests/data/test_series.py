"""Series: rows of a CSV file, scaled, split, and read as streams."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from bayesrnn import Invalid, SeriesData, StreamLoader, UserError, load_series
from bayesrnn.data import load_rows
from bayesrnn.data.series import uneven, unscaled
from series_runs import write_series


def settings(path: Path, **changes: object) -> SeriesData:
    given = {"columns": ("flow", "heat"), "time": "when"} | changes
    return SeriesData(str(path), **given)  # type: ignore[arg-type]


def test_rows_are_split_in_their_order_and_scaled_by_those_to_train_on(tmp_path: Path) -> None:
    path = write_series(tmp_path)
    series = load_series(settings(path, split=(0.5, 0.3, 0.2)))
    cells = [line.split(",") for line in path.read_text().splitlines()[1:]]
    truth = np.array([[float(flow), float(heat)] for _, flow, _, heat in cells])
    assert {split: len(rows) for split, rows in series.splits.items()} == {
        "train": 150,
        "valid": 90,
        "test": 60,
    }
    assert series.settings.centre == pytest.approx(truth[:150].mean(axis=0))
    assert series.settings.spread == pytest.approx(truth[:150].std(axis=0))
    found = np.concatenate([rows.values for rows in series.splits.values()])
    assert found.dtype == np.float32
    np.testing.assert_allclose(unscaled(series.settings, found), truth, atol=1e-5)
    assert series.splits["valid"].times[0] == "day 150"
    train = series.splits["train"].values
    np.testing.assert_allclose(train.mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(train.std(axis=0), 1, atol=1e-6)


def test_other_rows_are_read_by_the_same_numbers(tmp_path: Path) -> None:
    own = load_series(settings(write_series(tmp_path))).settings
    other = write_series(tmp_path, rows=7, name="other.csv", shift=100)
    rows = load_rows(settings(other, centre=own.centre, spread=own.spread))
    assert len(rows) == 7
    assert rows.values[:, 0].min() > 90
    other.write_text("when,flow,heat\nnow,1,1\nthen,1,-1e60\n")
    with pytest.raises(UserError, match=r"other.csv, row 2: 'heat' is -1e\+60, too far from the"):
        load_rows(settings(other, centre=own.centre, spread=own.spread))
    with pytest.raises(Invalid, match="centre must be given"):
        load_rows(settings(other))


def test_small_changes_of_large_numbers_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "pressure.csv"
    values = [101325 + 0.001 * (t % 3) for t in range(30)]
    path.write_text("p\n" + "\n".join(f"{value:.3f}" for value in values))
    series = load_series(SeriesData(str(path), ("p",)))
    found = series.splits["train"].values[:3, 0]
    assert len(set(found.tolist())) == 3
    assert series.splits["train"].times[:2] == ["1", "2"]  # no column of time: the row's number
    np.testing.assert_allclose(np.diff(found), [1.2247, 1.2247], rtol=1e-3)


def test_other_separators_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = write_series(tmp_path)
    text = path.read_text()
    path.write_bytes(b"\xef\xbb\xbf" + text.replace(",", ";").encode())
    series = load_series(settings(path, columns=("heat",), time="", separator=";"))
    assert series.splits["train"].values.shape == (180, 1)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "when,",
            "time,",
            "no column 'when' in its first line, only 'time', 'flow', 'site', 'heat'",
        ),
        ("day 3,", "day 3,,", "line 5: it has 5 cells, and the first line 4"),
        ("day 3,", "day 3,x", "line 5: 'flow' is 'x"),
    ],
)
def test_a_damaged_file_is_named_with_its_line(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = write_series(tmp_path)
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(UserError) as raised:
        load_series(settings(path))
    assert str(path) in str(raised.value)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("cell", "said"),
    [("", "is empty"), ("nan", "is 'nan'"), ("inf", "'inf'"), ("1_0", "is '1_0'")],
)
def test_a_number_that_is_missing_is_refused(tmp_path: Path, cell: str, said: str) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a\n1\n2\n" + f'"{cell}"\n' + "4\n" * 9)
    with pytest.raises(UserError, match=rf"x.csv, line 4: 'a' .*{said}"):
        load_series(SeriesData(str(path), ("a",)))


def test_in_a_file_of_one_column_a_blank_line_is_a_gap_but_at_its_end(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a\n1\n2\n" + "4\n3\n" * 9 + "\n\n")
    assert sum(map(len, load_series(SeriesData(str(path), ("a",))).splits.values())) == 20
    path.write_text("a\n1\n2\n\n\n" + "4\n3\n" * 9)
    with pytest.raises(UserError, match=r"x.csv, line 4: 'a' is empty; fill it in"):
        load_series(SeriesData(str(path), ("a",)))
    path.write_text("a,b\n1,1\n\n" + "4,1\n3,1\n" * 9)  # with a separator there is no cell at all
    assert sum(map(len, load_series(SeriesData(str(path), ("a",))).splits.values())) == 19


@pytest.mark.parametrize(
    ("columns", "time"), [(("a",), ""), (("b",), "a"), (("b", "a"), "")], ids=str
)
def test_a_name_that_two_columns_have_says_nothing(
    tmp_path: Path, columns: tuple[str, ...], time: str
) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b,a\n" + "1,2,3\n4,5,6\n" * 9)
    with pytest.raises(UserError, match=r"x.csv has the column 'a' 2 times in its first line"):
        load_series(SeriesData(str(path), columns, time))
    series = load_series(SeriesData(str(path), ("b",)))
    assert series.splits["train"].values.shape == (11, 1)


def test_one_column_alone_is_not_read_letter_by_letter() -> None:
    with pytest.raises(ValueError, match=r"columns must be a sequence of names, \('OT',\) say"):
        SeriesData("x.csv", "OT")  # type: ignore[arg-type]


def test_a_blank_in_a_name_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("time, a\n" + "1, 2\n2, 3\n" * 9)
    with pytest.raises(UserError, match=r"no column 'a' in its first line, only 'time', ' a';"):
        load_series(SeriesData(str(path), ("a",)))


@pytest.mark.parametrize("rows", [20, 50_000])  # more than a cell of the csv module may have
def test_a_quote_that_is_not_closed_is_named_by_its_line(tmp_path: Path, rows: int) -> None:
    path = tmp_path / "x.csv"
    path.write_text('a,b\n1,2\n3,"4\n' + "5,6\n7,8\n" * rows)
    with pytest.raises(UserError, match=r"x.csv, line 3: it cannot be read .* check its quotes"):
        load_series(SeriesData(str(path), ("a",)))


@pytest.mark.parametrize(
    ("cell", "remedy"),
    [("0,5", "write decimals with a point"), ("1,234.5", "nothing between thousands")],
)
def test_decimal_commas_are_told_from_gaps(tmp_path: Path, cell: str, remedy: str) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a;b\n" + f"{cell};1\n" * 9)
    with pytest.raises(
        UserError, match=rf"line 2: 'a' is '{cell}', not a finite number; .*{remedy}"
    ):
        load_series(SeriesData(str(path), ("a",), separator=";"))


@pytest.mark.parametrize(
    ("times", "line"),
    [
        (["2024-01-03", "2024-01-02", "2024-01-01"], 3),  # the newest first, as markets give them
        (["2024-01-01 00:00", "2024-01-01 05:00", "2024-01-01 03:00"], 4),
        (["2024-01-01T00:00+00:00", "2024-01-01T04:00+00:00", "2024-01-01T03:00+02:00"], 4),
        (["2024-01-01 02:00", "2024-01-01 01:00", "2024-01-01 00:00"], 4),  # no step above an hour
        (["2024-10-27 02:00", "2024-10-27 02:45", "2024-10-27 02:00"], None),  # summer ends
        (["2024-10-27T02:30+02:00", "2024-10-27T02:00+01:00", "2024-10-27T03:00+01:00"], None),
        (["2024-01-01T05:00+05:00", "2024-01-01T01:00Z", "2024-01-01T01:00Z"], None),
        (["2024-01-02", "2024-01-01T00:00Z", "2024-01-01"], None),  # not to be compared
        (["day 3", "day 2", "day 1"], None),
        (["3", "2", "1"], None),
    ],
)
def test_dates_that_go_backwards_are_refused(
    tmp_path: Path, times: list[str], line: int | None
) -> None:
    path = tmp_path / "x.csv"
    path.write_text("t,a\n" + "".join(f"{time},{n % 3}\n" for n, time in enumerate(times)))
    scales = {"centre": (0.0,), "spread": (1.0,)}
    if line is None:
        assert load_rows(SeriesData(str(path), ("a",), "t", **scales)).times == times
    else:
        with pytest.raises(UserError, match=rf"x.csv, line {line}: its time, .* sort the rows"):
            load_rows(SeriesData(str(path), ("a",), "t", **scales))
    assert len(load_rows(SeriesData(str(path), ("a",), **scales))) == 3  # no time, no order


def test_rows_that_are_missing_or_there_twice_are_counted_by_their_dates() -> None:
    hours = [f"2024-01-01 {hour:02}:00" for hour in range(24)]
    months = [f"2024-{month:02}-01" for month in range(1, 13)]
    for even in (hours, months, ["2024-01-01"] * 9, ["1", "2", "9"], ["a", "b"], hours[:1], []):
        assert uneven(even) is None
    said = uneven(hours[:5] + hours[6:9] + hours[8:])
    assert said is not None
    assert (
        "mostly 1:00:00 here, but 2 of 24 are not: the first is '2024-01-01 06:00', after" in said
    )
    assert "after '2024-01-01 04:00'" in said
    put_back = uneven([*hours[:3], *hours[2:]])  # 02:00 comes twice: nothing is missing
    assert put_back is not None
    assert "back is neither: give times in UTC" in put_back


def test_what_cannot_be_learnt_from_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b\n" + "".join(f"{t},7\n" for t in range(20)))
    with pytest.raises(UserError, match=r"column 'b' of .* is the same in all rows to train on"):
        load_series(SeriesData(str(path), ("a", "b")))
    path.write_text("a\n" + "0.1\n" * 30)
    with pytest.raises(UserError, match=r"column 'a' of .* is the same in all rows to train on"):
        load_series(SeriesData(str(path), ("a",)))
    for size in ("200", "308", "-200"):
        path.write_text("a\n" + f"1e{size}\n1.5e{size}\n" * 10)
        with pytest.raises(
            UserError, match=rf"'a' of .* goes from 1e.*{size} to 1.5e.*another unit"
        ):
            load_series(SeriesData(str(path), ("a",)))
    path.write_text("a\n1\n2\n3\n")
    with pytest.raises(UserError, match="has 3 rows, and 0 of them for valid"):
        load_series(SeriesData(str(path), ("a",)))
    path.write_bytes(b"a\n\xff\n")
    with pytest.raises(UserError, match="is not UTF-8 text"):
        load_series(SeriesData(str(path), ("a",)))
    path.write_text("")
    with pytest.raises(UserError, match=r"x.csv has no line of names; set data.path to a CSV file"):
        load_series(SeriesData(str(path), ("a",)))
    with pytest.raises(UserError, match=r"none.csv does not exist; set data.path to a CSV file"):
        load_series(SeriesData(str(tmp_path / "none.csv"), ("a",)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"columns": ()}, "columns must name at least one"),
        ({"columns": ("a", "a")}, "columns must name each once"),
        ({"time": "flow"}, "time must not be one of the columns"),
        ({"separator": "ab"}, "separator must be a character"),
        ({"separator": '"'}, "separator must be a character, no quote"),
        ({"separator": "\n"}, "separator must be a character, no quote"),
        ({"split": (0.5, 0.5, 0.5)}, "split must be three fractions"),
        ({"centre": (1.0,)}, "centre must have, like spread, a number a column"),
        ({"centre": (1.0, 2.0), "spread": (1.0, 0.0)}, "spread must be numbers above 0"),
        ({"centre": (1.0, 2.0), "spread": (1.0, math.inf)}, "spread must be numbers above 0"),
        ({"centre": (1.0, math.nan), "spread": (1.0, 1.0)}, "centre must be finite numbers"),
    ],
)
def test_impossible_settings_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        settings(Path("x.csv"), **changes)


def test_streams_of_rows_are_those_of_their_places() -> None:
    """Each column read as a text of numbers is the same as the rows read together."""
    rows = np.arange(58, dtype=np.float32).reshape(29, 2)
    loader = StreamLoader(rows, streams=3, unroll=4, name="x")
    places = StreamLoader(np.arange(29), streams=3, unroll=4)
    assert loader.targets == 2 * places.targets == 2 * 27
    assert loader.left_over == 2 * places.left_over
    table = torch.from_numpy(rows)
    for batch, place in zip(loader, places, strict=True):
        assert batch.x.dtype == torch.float32
        assert torch.equal(batch.x, table[place.x])
        assert torch.equal(batch.y, table[place.y])
        assert (batch.first, batch.streams, batch.share) == (place.first, 3, place.share)
        assert batch.targets == 2 * place.targets
    assert math.isclose(sum(batch.share for batch in loader), 1)
    dropping = StreamLoader(rows, streams=3, unroll=4, drop_last=True)
    assert (dropping.targets, dropping.dropped) == (2 * 24, 2 * 3)


def test_too_few_rows_for_the_streams() -> None:
    rows = np.zeros((3, 2), np.float32)
    with pytest.raises(UserError, match=r"series 'x' has 3 rows, fewer than 5 streams need \(6\)"):
        StreamLoader(rows, streams=5, unroll=4, name="x")
    with pytest.raises(Invalid, match="one row of token ids, or rows of numbers, got float32"):
        StreamLoader(rows[0], streams=1, unroll=1)
