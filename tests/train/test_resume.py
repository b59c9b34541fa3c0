"""A run that was stopped and resumed ends bit for bit as one that never was."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bayesrnn.train import loop
from bayesrnn.train.loop import Trainer, train
from small_runs import (
    EPOCH,
    assert_same_end,
    checkpoint_contents,
    checkpoint_folders,
    metrics,
    small_recipe,
)

KINDS: dict[str, dict[str, Any]] = {
    "lstm, SGD": {},
    "gru, Adam": {
        "model": {"cell": "gru"},
        "train": {"optimizer": "Adam", "lr": 0.01, "options": {}},
    },
    "natural gradients": {"train": {"optimizer": "NaturalGradient", "options": {"momentum": 0.5}}},
    "plain": {"posterior": {"kind": "delta"}, "prior": {"kind": "uniform"}},
    "tied, fitted, Fisher": {
        "model": {"embedding": 8, "tied": True},
        "posterior": {"kind": "gaussian", "estimator": "fisher"},
        "prior": {"kind": "normal", "loc": "fit", "scale": "fit"},
        "train": {"draws": 2},
    },
    "learnt prior": {"prior": {"kind": "normal", "scale": "learn"}},
    "averaged": {"train": {"average_after": 1}},
    "looks late": {
        "posterior": {"kind": "sharpened", "scale": 0.05, "sigma0": 0.1, "eta": 0.05},
        "train": {"look_after": 1},
    },
    "warmed up": {"train": {"warm_up": 1}},
}


class Crash(Exception):
    """The process ends here without another word."""


def signalled(trainer: Trainer) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def crashed(trainer: Trainer) -> None:
    raise Crash


@pytest.fixture(autouse=True)
def often_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "LOG_STEPS", 4)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run of a kind that nothing happened to."""
    done: dict[str, Path] = {}

    def run(kind: str) -> Path:
        if kind not in done:
            folder = tmp_path_factory.mktemp("undisturbed")
            done[kind] = folder / "run"
            assert train(small_recipe(folder, **KINDS[kind]), done[kind], quiet=True).finished
        return done[kind]

    return run


def recipe_beside(other: Path, kind: str, **train_changes: Any) -> Any:
    """The same recipe, text and cache as those of an undisturbed run."""
    changes = dict(KINDS[kind])
    changes["train"] = changes.get("train", {}) | train_changes
    return small_recipe(other.parent, **changes)


def train_until(
    step: int, how: Callable[[Trainer], None], recipe: Any, out: Path
) -> loop.Outcome | None:
    """Train; after this step comes a signal, or the end of the process."""
    tick = Trainer._tick

    def watched(self: Trainer, batch: Any) -> None:
        tick(self, batch)
        if self.step == step:
            how(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_tick", watched)
        try:
            return train(recipe, out, quiet=True)
        except Crash:
            return None


@pytest.mark.parametrize(
    ("kind", "stops"),
    [
        ("lstm, SGD", [1]),
        ("lstm, SGD", [EPOCH - 1]),
        ("lstm, SGD", [EPOCH]),
        ("lstm, SGD", [EPOCH + 1, 2 * EPOCH - 1]),
        ("gru, Adam", [8, 9, 10]),
        ("gru, Adam", [EPOCH]),
        *((kind, [7, EPOCH]) for kind in list(KINDS)[2:]),
        ("averaged", [EPOCH, EPOCH + 1]),
        ("averaged", [EPOCH - 1, EPOCH + 13]),
    ],
)
def test_a_run_stopped_by_a_signal_ends_like_an_undisturbed_one(
    kind: str, stops: list[int], undisturbed: Callable[[str], Path], tmp_path: Path
) -> None:
    expected = undisturbed(kind)
    recipe = recipe_beside(expected, kind)
    for step in stops:
        outcome = train_until(step, signalled, recipe, tmp_path / "run")
        assert outcome is not None
        assert (outcome.steps, outcome.finished) == (step, False)
    outcome = train(recipe, tmp_path / "run", quiet=True)
    assert (outcome.steps, outcome.finished) == (2 * EPOCH, True)
    assert_same_end(tmp_path / "run", expected)


@pytest.mark.parametrize("minutes", [0.0, 5.0])
@pytest.mark.parametrize("kind", ["lstm, SGD", "plain"])
def test_a_run_that_crashed_ends_like_an_undisturbed_one(
    kind: str, minutes: float, undisturbed: Callable[[str], Path], tmp_path: Path
) -> None:
    expected = undisturbed(kind)
    recipe = recipe_beside(expected, kind, checkpoint_minutes=minutes)
    for step in (1, 4, 8, EPOCH, EPOCH + 1):
        assert train_until(step, crashed, recipe, tmp_path / "run") is None
        begun = (tmp_path / "run/checkpoints").exists()
        assert begun == (minutes == 0 and step > 1)
    assert train(recipe, tmp_path / "run", quiet=True).finished
    assert_same_end(tmp_path / "run", expected)


@pytest.mark.parametrize("kind", ["lstm, SGD", "plain"])
def test_a_crash_between_the_last_step_of_an_epoch_and_its_end_does_no_harm(
    kind: str,
    undisturbed: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = undisturbed(kind)
    recipe = recipe_beside(expected, kind, checkpoint_minutes=0)

    def crash(self: Trainer, lr: float) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_end_epoch", crash)
        with pytest.raises(Crash):
            train(recipe, tmp_path / "run", quiet=True)
    assert checkpoint_folders(tmp_path / "run")[-1].name == f"{EPOCH:09d}"
    train(recipe, tmp_path / "run", quiet=True)
    assert_same_end(tmp_path / "run", expected)


def test_metrics_written_after_the_checkpoint_are_written_once(
    undisturbed: Callable[[str], Path], tmp_path: Path
) -> None:
    """Stop at 6; crash at 9, after the line of step 8; stop at 7, before it is written again, so
    that it must not count as kept when a crash at 14 takes the run back to 7."""
    expected = undisturbed("lstm, SGD")
    recipe = recipe_beside(expected, "lstm, SGD")
    train_until(6, signalled, recipe, tmp_path / "run")
    train_until(9, crashed, recipe, tmp_path / "run")
    assert metrics(tmp_path / "run")[-1]["step"] == 8
    train_until(7, signalled, recipe, tmp_path / "run")
    assert metrics(tmp_path / "run")[-1]["step"] == 4
    train_until(14, crashed, recipe, tmp_path / "run")
    train(recipe, tmp_path / "run", quiet=True)
    assert_same_end(tmp_path / "run", expected)


def test_a_lost_metrics_file_does_not_stop_a_run(
    undisturbed: Callable[[str], Path], tmp_path: Path
) -> None:
    expected = undisturbed("lstm, SGD")
    recipe = recipe_beside(expected, "lstm, SGD")
    train_until(EPOCH, signalled, recipe, tmp_path / "run")
    (tmp_path / "run/metrics.jsonl").unlink()
    train(recipe, tmp_path / "run", quiet=True)
    later = [line for line in metrics(expected) if line["step"] > EPOCH]
    assert metrics(tmp_path / "run") == later


def test_resuming_a_finished_run_changes_nothing(
    undisturbed: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = undisturbed("lstm, SGD")
    recipe = recipe_beside(expected, "lstm, SGD")
    first = train(recipe, tmp_path / "run", quiet=True)

    def no_step(*_: object) -> None:
        raise AssertionError("there was nothing left to do")

    monkeypatch.setattr(Trainer, "_update", no_step)
    again = train(recipe, tmp_path / "run", quiet=True)
    assert (again.steps, again.finished, again.epochs) == (first.steps, True, first.epochs)
    assert_same_end(tmp_path / "run", expected)


@pytest.mark.parametrize("shorter", [{"epochs": 1}, {"max_steps": 7}, {"max_steps": EPOCH}])
def test_a_run_extended_later_ends_like_one_that_was_long_from_the_start(
    shorter: dict[str, int], undisturbed: Callable[[str], Path], tmp_path: Path
) -> None:
    """Only the lines of figures differ: one is written where the run ended at first."""
    expected = undisturbed("lstm, SGD")
    first = train(recipe_beside(expected, "lstm, SGD", **shorter), tmp_path / "run", quiet=True)
    assert first.finished
    assert first.steps == shorter.get("max_steps", EPOCH)
    train(recipe_beside(expected, "lstm, SGD"), tmp_path / "run", quiet=True)
    assert_same_end(tmp_path / "run", expected, with_steps=False)


def test_the_seed_decides_the_run(undisturbed: Callable[[str], Path], tmp_path: Path) -> None:
    expected = undisturbed("lstm, SGD")
    train(recipe_beside(expected, "lstm, SGD"), tmp_path / "same", quiet=True)
    assert_same_end(tmp_path / "same", expected)
    train(recipe_beside(expected, "lstm, SGD", seed=2), tmp_path / "other", quiet=True)
    ends = [
        checkpoint_contents(checkpoint_folders(run)[-1])[0]
        for run in (tmp_path / "other", expected)
    ]
    assert ends[0] != ends[1]
