"""A run directory: its recipe, checkpoints and model; one process at a time."""

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from bayesrnn.data import CaptionData
from bayesrnn.errors import Invalid, UserError
from bayesrnn.files import expanded, whole_path, writing
from bayesrnn.recipe import (
    Recipe,
    differences,
    from_table,
    read_run_recipe,
    write_run_recipe,
)
from bayesrnn.storage import Damaged
from bayesrnn.train.checkpoint import newest_facts, steps_of

LEFTOVER = re.compile(
    r"\.(recipe\.toml|vocabulary\.json|pruning\.json|model|\d+)\.[0-9a-f]{8}\.(tmp|old)"
)
"""What a process that was killed has left half-written."""
PLACES = ("data.path", "data.features", "data.cache")
"""Where data are, not what they are: a run may go on where they were moved."""


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
        self.pruning = path / "pruning.json"  # of a pruned run: what it was made from, and how

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for this process; the lock ends with the process, however it ends."""
        with writing(self.path, "choose another --out"):
            self.path.mkdir(parents=True, exist_ok=True)
            file = self.lock.open("a+b", buffering=0)  # nothing is left to write when it is closed
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                file.seek(0)
                owner = file.read().decode().strip() or "unknown"
                raise UserError(
                    f"{self.path} is in use by another process (number {owner}); wait for it or "
                    "choose another --out"
                ) from error
            with writing(self.path):
                file.truncate(0)
                file.write(str(os.getpid()).encode())
            yield

    def check(self, recipe: Recipe, fresh: bool) -> None:
        """Refuse a folder that is not for this recipe; nothing is written."""
        if not self.path.is_dir():
            return
        known = self.recipe.exists() if fresh else self.known_recipe()
        if isinstance(known, Recipe):
            self._check_same(known, recipe)
        if known:
            return
        others = self.contents()
        if others:
            raise UserError(
                f"{self.path} is not empty and holds no run ({others[0].name} is there); "
                "choose another --out"
            )

    def check_model(self) -> None:
        """Refuse to replace a model that no checkpoint goes on to; nothing is written."""
        if self.model.exists() and not steps_of(self.checkpoints):
            raise UserError(
                f"{self.path} holds a model and no checkpoint to go on from; choose another --out, "
                "or --fresh to train it anew"
            )

    def check_data(self, digest: str) -> None:
        """Refuse other data than the run began with, wherever they are now; nothing is written."""
        if newest_facts(self.checkpoints).get("data") not in (None, digest):
            raise UserError(
                f"the data are not those that the run in {self.path} began with; put them back, "
                f"choose another --out (and --start {self.path}, to go on with its model), or "
                "start over with --fresh"
            )

    def prepare(self, recipe: Recipe, fresh: bool) -> str | None:
        """Make the folder this recipe's: new, resumed, or started over. One line where its recipe
        was damaged or gone, and is put back."""
        self.check(recipe, fresh)
        said = None if fresh else self._set_damaged_aside()
        if fresh:
            self._clear()
        for path in self._leftovers():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        write_run_recipe(self.recipe, recipe)
        return said

    def known_recipe(self) -> Recipe | None:
        """That of the run in the folder; where it is damaged or gone, the one which the newest good
        checkpoint was trained with. None where there is no run."""
        try:
            if self.recipe.exists():
                return read_run_recipe(self.recipe)
        except Damaged as error:
            found = self._recipe_of_checkpoint()
            if found is None:
                raise UserError(
                    f"{error}; no checkpoint says what it was, --fresh starts over"
                ) from error
            return found
        return self._recipe_of_checkpoint()

    def _recipe_of_checkpoint(self) -> Recipe | None:
        table = newest_facts(self.checkpoints).get("recipe")
        try:
            return None if table is None else from_table(table)
        except Invalid:  # of another version
            return None

    def _set_damaged_aside(self) -> str | None:
        """Keep a recipe that cannot be read under another name, and say what became of it."""
        if not self.recipe.exists():
            return f"{self.recipe} was gone, and is put back" if self.checkpoints.is_dir() else None
        try:
            read_run_recipe(self.recipe)
        except Damaged:
            numbered = (self.path / f"recipe.damaged-{number}.toml" for number in count(1))
            aside = next(path for path in numbered if not path.exists())
            self.recipe.rename(aside)
            return (
                f"{self.recipe} was damaged or edited, and is put back as the checkpoints have it; "
                f"what it was is in {aside.name}"
            )
        return None

    def contents(self) -> list[Path]:
        """What is in the folder, but for the lock and what was left half-written."""
        inside = self.path.iterdir() if self.path.is_dir() else ()
        return [p for p in inside if p not in (self.lock, *self._leftovers())]

    def _leftovers(self) -> list[Path]:
        folders = [folder for folder in (self.path, self.checkpoints) if folder.is_dir()]
        return [p for folder in folders for p in folder.iterdir() if LEFTOVER.fullmatch(p.name)]

    def _check_same(self, known: Recipe, recipe: Recipe) -> None:
        found = differences(known, recipe)
        moved = PLACES if "data" in newest_facts(self.checkpoints) else ()  # see check_data
        changed = {
            key: pair for key, pair in found.items() if key not in moved and not _grows(key, *pair)
        }
        if changed:
            listed = "; ".join(
                f"{key} is {shown(old)} there and {shown(new)} here"
                for key, (old, new) in list(changed.items())[:3]
            )
            more = f" (and {len(changed) - 3} more)" if len(changed) > 3 else ""
            raise UserError(
                f"{self.path} holds the run of another recipe: {listed}{more}; choose another "
                "--out, or --fresh to start over"
            )

    def _clear(self) -> None:
        """Remove what a run writes, and nothing else."""
        remedy = "remove it, or choose another --out"
        for path in (self.checkpoints, self.model, self.tensorboard):
            with writing(path, remedy):  # a run would go on from a checkpoint that stayed
                if path.exists():
                    shutil.rmtree(path)
        for path in (self.metrics, self.log, self.vocabulary, self.pruning, self.recipe):
            with writing(path, remedy):
                path.unlink(missing_ok=True)


def with_data(run: Path, recipe: Recipe, data: str) -> Recipe:
    """A run's recipe with its data read from `data`, where that is given; refused where there is
    nothing. Features of pictures that are no longer where they were are then looked for there."""
    if data:
        given = replace(recipe.data, path=whole_path(data))
        if isinstance(given, CaptionData) and not expanded(given.features).exists():
            given = replace(given, features="")
        recipe = replace(recipe, data=given)
    if expanded(recipe.data.path).exists():
        return recipe
    if data:
        raise UserError(f"{data} does not exist; give with --data where the data are")
    raise UserError(f"the data of {run} are no longer at {recipe.data.path}; say where with --data")


def changed_data(run: Path, recipe: Recipe, digest: str) -> str | None:
    """One line where the data of a run, which are of this digest now, are not those that it was
    trained with (as far as its checkpoints tell)."""
    if newest_facts(Run(run).checkpoints).get("data") in (None, digest):
        return None
    return (
        f"{recipe.data.path} is not what {run} was trained with: it has changed since; put it back "
        "for figures of the same data"
    )


def _grows(key: str, old: Any, new: Any) -> bool:
    """Whether a run may go on with this change: saved or stopped elsewhere, or made longer."""
    if key == "train.epochs":
        return bool(new > old)
    return key in ("train.checkpoint_minutes", "train.max_steps")


def shown(value: Any) -> str:
    """A setting's value, for people."""
    return "unset" if value is None else json.dumps(value, ensure_ascii=False)
