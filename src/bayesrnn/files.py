"""Paths; reading files in pieces, and writing them so that a crash never leaves half a file."""

import csv
import errno
import hashlib
import io
import json
import math
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from bayesrnn.errors import UserError, WrongData

CHUNK_BYTES = 1 << 20


def expanded(path: str | Path) -> Path:
    """A path that a user gave, with ~ as their home."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(
            f"there is no home folder for the ~ of {path}; write the whole path"
        ) from error


def data_folder(path: str, wanted: str) -> Path:
    """The folder that data are in; what is `wanted` there is said where it is none."""
    folder = expanded(path)
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "does not exist"
        raise WrongData(f"{folder} {problem}", wanted)
    return folder


def data_file(path: str, wanted: str) -> Path:
    """The same of a file."""
    file = expanded(path)
    if not file.is_file():
        raise WrongData(f"{file} {'is not a file' if file.exists() else 'does not exist'}", wanted)
    return file


def whole_path(path: str) -> str:
    """The same from any folder, past all links."""
    whole = os.path.realpath(expanded(path))
    try:
        whole.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"the path {whole!r} is not UTF-8, so no recipe can hold it; rename the file or folder"
        ) from error
    return whole


def read_chunks(
    path: Path, chunk_bytes: int = CHUNK_BYTES, advance: Callable[[int], None] | None = None
) -> Iterator[bytes]:
    """The bytes of a file, piece by piece; `advance` is told the length of each piece."""
    try:
        with path.open("rb") as file:
            while chunk := file.read(chunk_bytes):
                if advance is not None:
                    advance(len(chunk))
                yield chunk
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror or error}; check the path and its permissions"
        ) from error


def read_bytes(path: Path) -> bytes:
    """All of a file."""
    return b"".join(read_chunks(path))


def as_text(data: bytes, path: Path) -> str:
    """What a file of that path holds, without a byte order mark."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (at byte {error.start}); convert it") from error


def sha256(path: Path, advance: Callable[[int], None] | None = None) -> str:
    """The SHA-256 digest of a file's contents, in hexadecimal."""
    digest = hashlib.sha256()
    for chunk in read_chunks(path, advance=advance):
        digest.update(chunk)
    return digest.hexdigest()


def fsync_folder(path: Path) -> None:
    """Make a rename inside this folder survive a power cut (Windows has no such call)."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def writing(path: Path, remedy: str = "choose another folder") -> Iterator[None]:
    """An unwritable place or a full disk becomes one line that names `path` and the remedy."""
    try:
        yield
    except OSError as error:
        advice = "free some space" if error.errno == errno.ENOSPC else remedy
        raise UserError(f"cannot write {path}: {error.strerror or error}; {advice}") from error


def file_to_write(path: Path) -> Path:
    """The file that takes what is written to a path: where that is a link, what it points to.
    Refused where it would not be a regular file (but a folder, a pipe, a device)."""
    with writing(path, "choose another"):  # a folder that may not be looked into, a name too long
        target = Path(os.path.realpath(path)) if path.is_symlink() else path
        of_system = target != path and path.absolute().parts[1:2] in (("dev",), ("proc",))
        if of_system or target.is_symlink() or (path.exists() and not path.is_file()):
            what = "a folder" if path.is_dir() else "no regular file"
            raise UserError(f"cannot write {path}: it is {what}; give the name of a file")
    return target


@contextmanager
def open_atomic(path: Path, remedy: str = "choose another folder") -> Iterator[BinaryIO]:
    """A file to write to; it takes its name only once it is complete and on the disk.

    When the block fails, an older file of that name stays as it was. Through a link, the file that
    it points to is written.
    """
    target = file_to_write(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    with writing(path, remedy):
        try:
            with temporary.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        fsync_folder(target.parent)


def write_atomic(path: Path, data: bytes) -> None:
    """Write a whole file at once: afterwards it holds either the old contents or the new."""
    with open_atomic(path) as file:
        file.write(data)


def to_json(figures: Any) -> str:
    """One line of JSON as its standard has it: a number that is not finite is null.

    >>> to_json({"perplexity": [4.5, math.inf]})
    '{"perplexity": [4.5, null]}'
    """
    return json.dumps(_finite(figures), allow_nan=False)


def _finite(figures: Any) -> Any:
    if isinstance(figures, Mapping):
        return {key: _finite(value) for key, value in figures.items()}
    if isinstance(figures, list | tuple):
        return [_finite(value) for value in figures]
    return None if isinstance(figures, float) and not math.isfinite(figures) else figures


def write_csv(path: Path, rows: Iterable[Sequence[str | int | float]]) -> None:
    """Write a table, a row a line. All text is quoted: a carriage return that is not would end the
    row."""
    table = io.StringIO()
    csv.writer(table, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC).writerows(rows)
    write_atomic(path, table.getvalue().encode())
