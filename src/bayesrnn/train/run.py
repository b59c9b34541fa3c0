"""A run directory: its recipe, metrics, checkpoints and model; one process at a time."""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bayesrnn.errors import UserError
from bayesrnn.files import write_atomic
from bayesrnn.recipe import Recipe, differences, read_recipe, to_toml

MAY_GROW = ("train.epochs", "train.max_steps", "train.checkpoint_minutes")
"""What a resumed run may set anew without becoming another run."""


class Run:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe = path / "recipe.toml"
        self.vocabulary = path / "vocabulary.json"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.log = path / "log.txt"
        self.lock = path / ".lock"
        self.tensorboard = path / "tensorboard"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for this process; the lock ends with the process, however it ends."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = self.lock.open("a+")
        except OSError as error:
            raise UserError(
                f"cannot write to {self.path}: {error.strerror or error}; choose another --out"
            ) from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                file.seek(0)
                owner = file.read().strip() or "unknown"
                raise UserError(
                    f"{self.path} is in use by another process (number {owner}); wait for it or "
                    "choose another --out"
                ) from error
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield

    def prepare(self, recipe: Recipe, fresh: bool) -> None:
        """Make the folder this recipe's: new, resumed, or started over."""
        known = {p.name for p in (self.lock,)}
        others = [p for p in self.path.iterdir() if p.name not in known]
        if self.recipe.exists() and fresh:
            self._clear()
        elif self.recipe.exists():
            self._check_same(recipe)
        elif others:
            raise UserError(
                f"{self.path} is not empty and holds no run ({others[0].name} is there); "
                "choose another --out"
            )
        write_atomic(self.recipe, to_toml(recipe).encode())

    def _check_same(self, recipe: Recipe) -> None:
        found = differences(read_recipe(self.recipe), recipe)
        changed = {key: pair for key, pair in found.items() if key not in MAY_GROW}
        if changed:
            listed = "; ".join(
                f"{key} is {_show(old)} there and {_show(new)} here"
                for key, (old, new) in list(changed.items())[:3]
            )
            more = f" (and {len(changed) - 3} more)" if len(changed) > 3 else ""
            raise UserError(
                f"{self.path} holds the run of another recipe: {listed}{more}; choose another "
                "--out, or --fresh to start over"
            )

    def _clear(self) -> None:
        """Remove what a run writes, and nothing else."""
        for path in (self.checkpoints, self.model, self.tensorboard):
            shutil.rmtree(path, ignore_errors=True)
        for path in (self.metrics, self.log, self.vocabulary, self.recipe):
            path.unlink(missing_ok=True)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """All lines of a run's metrics.jsonl."""
    path = run / "metrics.jsonl"
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except FileNotFoundError as error:
        raise UserError(f"{run} has no metrics.jsonl, so it is no run") from error


class MetricsLog:
    """Appends to metrics.jsonl, and to TensorBoard where it is installed."""

    def __init__(self, run: Run, kept_bytes: int) -> None:
        """`kept_bytes` of the file stay: what a resumed run has written before its checkpoint."""
        self._file = run.metrics.open("ab")
        self._file.truncate(kept_bytes)
        self._board = _tensorboard(run.tensorboard)

    def write(self, line: Mapping[str, Any]) -> None:
        self._file.write((json.dumps(line) + "\n").encode())
        self._file.flush()
        if self._board is not None:
            for key, value in line.items():
                if isinstance(value, (int, float)) and key != "step":
                    self._board.add_scalar(f"{line['kind']}/{key}", value, line["step"])

    def sync(self) -> int:
        """The bytes written so far, now on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def _tensorboard(path: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(path))


def _show(value: Any) -> str:
    return "unset" if value is None else json.dumps(value, ensure_ascii=False)
