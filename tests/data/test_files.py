import csv
import errno
import hashlib
import os
from pathlib import Path

import pytest

from bayesrnn.errors import UserError
from bayesrnn.files import (
    file_to_write,
    open_atomic,
    sha256,
    whole_path,
    write_atomic,
    write_csv,
)


def test_write_atomic_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def interrupted() -> None:
        with open_atomic(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    path = tmp_path / "file"
    with pytest.raises(UserError) as caught:
        write_atomic(path, b"new")
    assert str(caught.value).startswith(f"cannot write {path}: No space left on device; ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["missing", "file"])
def test_a_folder_that_cannot_hold_files(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    path = tmp_path / folder / "name"
    with pytest.raises(UserError, match=r"cannot write .*name: (No such|Not a dir)"):
        write_atomic(path, b"new")


def test_what_a_link_points_to_is_written(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "file", tmp_path / "link"
    link.symlink_to("there/file")
    for contents in (b"new", b"newer"):
        write_atomic(link, contents)
        assert link.is_symlink()
        assert target.read_bytes() == contents
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "link", "there"]


def test_only_a_regular_file_is_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to_pipe").symlink_to("pipe")
    (tmp_path / "round").symlink_to("round")
    for name in ("pipe", "to_pipe", "round"):
        path = tmp_path / name
        with pytest.raises(UserError, match=f"{path}: it is no regular file; give the name of"):
            write_atomic(path, b"x")
    assert (tmp_path / "pipe").is_fifo()
    with pytest.raises(UserError, match="it is no regular file"):
        file_to_write(Path("/dev/stdout"))  # which may well lead to a file


def test_a_name_that_is_too_long_is_one_line(tmp_path: Path) -> None:
    for write in (file_to_write, lambda path: write_atomic(path, b"x")):
        with pytest.raises(UserError, match=r"cannot write .*: File name too long; choose another"):
            write(tmp_path / ("x" * 300))


def test_a_table_is_read_back_whatever_is_in_it(tmp_path: Path) -> None:
    texts = ["a", "\r", "\n", "\r\n", '"', ",", "", " ", "\t", "é", "1"]
    write_csv(tmp_path / "a.csv", [["token", "nll"], *([text, 0.5] for text in texts)])
    with (tmp_path / "a.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    assert rows == [["token", "nll"], *([text, "0.5"] for text in texts)]


def test_sha256(tmp_path: Path) -> None:
    path = tmp_path / "file"
    data = bytes(range(256)) * 5000
    path.write_bytes(data)
    seen: list[int] = []
    assert sha256(path, seen.append) == hashlib.sha256(data).hexdigest()
    assert sum(seen) == len(data)
    with pytest.raises(UserError, match=r"cannot read .*gone: No such file"):
        sha256(tmp_path / "gone")


def test_a_path_that_no_recipe_can_hold_is_refused(tmp_path: Path) -> None:
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.txt")
    with pytest.raises(UserError, match="is not UTF-8, so no recipe can hold it; rename"):
        whole_path(odd)
    assert whole_path(str(tmp_path)) == os.path.realpath(tmp_path)
