import errno
import hashlib
import os
from pathlib import Path

import pytest

from bayesrnn.errors import UserError
from bayesrnn.files import open_atomic, sha256, write_atomic


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


def test_sha256(tmp_path: Path) -> None:
    path = tmp_path / "file"
    data = bytes(range(256)) * 5000
    path.write_bytes(data)
    seen: list[int] = []
    assert sha256(path, seen.append) == hashlib.sha256(data).hexdigest()
    assert sum(seen) == len(data)
    with pytest.raises(UserError, match=r"cannot read .*gone: No such file"):
        sha256(tmp_path / "gone")
