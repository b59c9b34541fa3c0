"""A run's figures: metrics.jsonl, a line a step or epoch, and TensorBoard where it is installed."""

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bayesrnn.errors import UserError
from bayesrnn.files import to_json, write_atomic, writing
from bayesrnn.recipe import Recipe
from bayesrnn.storage import Damaged
from bayesrnn.train.run import Run


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """All lines of a run's metrics.jsonl."""
    path = Run(run).metrics
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError as error:
        raise UserError(f"{run} has no metrics.jsonl, so it is no run") from error
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(_metrics_line(line))
        except (ValueError, RecursionError) as error:
            raise Damaged(
                f"{path} is damaged: line {number} is not JSON, or not a run's; run the same "
                "training again, which drops what cannot be read, or restore a copy"
            ) from error
    return found


def _metrics_line(text: bytes) -> dict[str, Any]:
    """One line, with what all readers count on: its kind, and figures."""
    match json.loads(text):
        case {"kind": str(kind), **figures} as line:
            if kind == "epoch" and not isinstance(figures.get("epoch"), int):
                raise ValueError("an epoch without its number")
            if any(not isinstance(value, int | float | None) for value in figures.values()):
                raise ValueError("a figure that is no number")
            return line
    raise ValueError("no line of metrics")


def _is_before(text: bytes, step: int, epoch: int) -> bool:
    """Whether this is a line that a run has written before its checkpoint at this step."""
    try:
        line = _metrics_line(text)
    except (ValueError, RecursionError):
        return False
    if line["kind"] == "epoch" and line["epoch"] > epoch:
        return False
    return line["kind"] != "end" and (line.get("step") or 0) <= step


def epochs_missing(run: Path, recipe: Recipe) -> int:
    """How many epochs of a run's training are still to come; 0 where it has come to its end (or
    says nothing of it, or nothing that can be read: its model is there all the same)."""
    if not Run(run).metrics.exists():
        return 0
    try:
        lines = read_metrics(run)
    except Damaged:
        return 0
    if lines and lines[-1]["kind"] == "end":
        return 0
    done = max((line["epoch"] for line in lines if line["kind"] == "epoch"), default=0)
    return max(recipe.train.epochs - done, 0)


class MetricsLog:
    """Appends to metrics.jsonl, and to TensorBoard where it is installed."""

    def __init__(
        self, run: Run, kept_bytes: int, step: int, epoch: int, warn: Callable[[str], None]
    ) -> None:
        """`kept_bytes` of the file stay: what a resumed run had written before its checkpoint, at
        this step and after so many epochs. Where they are damaged or gone, the lines that can be
        read stay, and `warn` is told."""
        self._path = run.metrics
        with writing(self._path):
            data = self._path.read_bytes() if self._path.exists() else b""
            written = data[:kept_bytes].splitlines()
            if len(data) < kept_bytes or not all(_is_before(line, step, epoch) for line in written):
                left = [line for line in data.splitlines() if _is_before(line, step, epoch)]
                warn(
                    f"{self._path} is damaged: what cannot be read of it is dropped, and "
                    f"{len(left)} lines are left. Only figures are lost; the training goes on from "
                    "its checkpoint, which is whole"
                )
                data = b"".join(line + b"\n" for line in left)
                kept_bytes = len(data)
                write_atomic(self._path, data)
            self._file = self._path.open("ab")
            self._file.truncate(kept_bytes)
            self._file.seek(0, os.SEEK_END)
        self._board = _tensorboard(run.tensorboard)

    def write(self, line: Mapping[str, Any]) -> None:
        with writing(self._path):
            self._file.write((to_json(line) + "\n").encode())
            self._file.flush()
        if self._board is not None:
            for key, value in line.items():
                if isinstance(value, (int, float)) and key != "step":
                    self._board.add_scalar(f"{line['kind']}/{key}", value, line["step"])

    def sync(self) -> int:
        """The bytes written so far, now on the disk."""
        with writing(self._path):
            os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of a line that could not be written, which was said
            self._file.close()
        if self._board is not None:
            self._board.close()


def _tensorboard(path: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(path))
