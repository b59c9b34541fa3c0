"""Real processes that are killed, or asked to stop."""

import json
import os
import pty
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bayesrnn.recipe import read_recipe
from bayesrnn.storage import read_folder
from bayesrnn.train.loop import train
from bayesrnn.train.metrics import epochs_missing
from bayesrnn.train.run import LEFTOVER
from small_runs import (
    EPOCH,
    assert_same_end,
    checkpoint_folders,
    environment,
    small_recipe,
    train_command,
    write_recipe,
)

PATIENCE = 120.0  # seconds until a process counts as stuck


def steps_saved(run: Path) -> int:
    folder = run / "checkpoints"
    names = [p.name for p in folder.iterdir()] if folder.exists() else []
    return max((int(name) for name in names if name.isdigit()), default=0)


def is_writing(run: Path) -> bool:
    """Whether a checkpoint is half-written at this moment."""
    folder = run / "checkpoints"
    return folder.exists() and any(path.name.endswith(".tmp") for path in folder.iterdir())


def start(recipe: Path, run: Path, *settings: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        train_command(recipe, run, *settings),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until(process: subprocess.Popen[str], reached: Callable[[], bool]) -> None:
    """Watch a process closely; it must not end by itself, nor hang."""
    deadline = time.monotonic() + PATIENCE
    while not reached():
        time.sleep(0.0005)
        if process.poll() is not None:
            raise AssertionError(f"ended too early: {process.communicate()}")
        assert time.monotonic() < deadline, "no progress"


def test_a_run_killed_ten_times_ends_like_an_undisturbed_one(tmp_path: Path) -> None:
    recipe, run = write_recipe(tmp_path, train={"epochs": 4}), tmp_path / "killed"
    each_step = "train.checkpoint_minutes=0"
    train(small_recipe(tmp_path, train={"epochs": 4}), tmp_path / "undisturbed", quiet=True)

    dice = random.Random(2017)
    moments = ["starting"] * 3 + ["training"] * 4 + ["writing"] * 3
    dice.shuffle(moments)
    caught_writing = 0
    for moment in moments:
        goal = steps_saved(run) + dice.randint(1, 8)
        process = start(recipe, run, each_step)
        try:
            if moment == "starting":
                time.sleep(dice.uniform(0.0, 1.5))
            else:
                wait_until(process, lambda goal=goal: steps_saved(run) >= goal)  # type: ignore[misc]
                if moment == "training":
                    time.sleep(dice.uniform(0.0, 0.02))
                else:
                    wait_until(process, lambda: is_writing(run))
        finally:
            process.kill()
            process.communicate()
        assert process.returncode == -signal.SIGKILL
        caught_writing += is_writing(run)
    assert caught_writing > 0

    process = start(recipe, run)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert "resuming at step" in errors
    assert_same_end(run, tmp_path / "undisturbed")
    left = [path.name for path in run.rglob("*") if LEFTOVER.fullmatch(path.name)]
    assert left == []


def test_a_training_whose_terminal_is_closed_saves_and_can_go_on(tmp_path: Path) -> None:
    recipe, run = write_recipe(tmp_path), tmp_path / "run"
    terminal, end = pty.openpty()
    process = subprocess.Popen(
        train_command(recipe, run, "train.epochs=5000", "train.checkpoint_minutes=0.0002"),
        env=environment(),
        stdout=end,
        stderr=end,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    os.close(end)
    try:
        wait_until(process, lambda: steps_saved(run) > 0)
        os.close(terminal)
        saved = steps_saved(run)
        wait_until(process, lambda: steps_saved(run) > saved + 5)  # it does not need to be seen
        process.send_signal(signal.SIGHUP)
        process.wait(timeout=PATIENCE)
    finally:
        process.kill()
    assert "stopped by SIGHUP" in (run / "log.txt").read_text().splitlines()[-1]
    facts = read_folder(checkpoint_folders(run)[-1], "checkpoint", "manifest.json")[1]
    longer = {"train": {"epochs": 5000, "max_steps": facts["step"] + 3}}
    assert train(small_recipe(tmp_path, **longer), run, quiet=True).finished


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_asked_to_stop_saves_and_says_how_to_go_on(
    number: signal.Signals, tmp_path: Path
) -> None:
    recipe, run = write_recipe(tmp_path), tmp_path / "run"
    process = start(recipe, run, "train.epochs=5000", "train.checkpoint_minutes=0.0002", "--json")
    try:
        wait_until(process, lambda: steps_saved(run) > 0)
        process.send_signal(number)
        output, errors = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 0
    assert "Traceback" not in errors
    assert f"stopped by {number.name}" in errors
    assert "Run the same command to go on" in errors
    figures = json.loads(output)
    assert figures["finished"] is False
    assert 0 < figures["steps"] == steps_saved(run) < 5000 * EPOCH
    facts = read_folder(checkpoint_folders(run)[-1], "checkpoint", "manifest.json")[1]
    assert facts["step"] == figures["steps"]
    epochs = figures["epochs"]
    assert epochs_missing(run, read_recipe(run / "recipe.toml")) == 5000 - epochs

    longer = {"train": {"epochs": 5000, "max_steps": figures["steps"] + 3}}
    outcome = train(small_recipe(tmp_path, **longer), run, quiet=True)
    assert (outcome.steps, outcome.finished) == (figures["steps"] + 3, True)
    assert epochs_missing(run, read_recipe(run / "recipe.toml")) == 0
    assert f"resuming at step {figures['steps']} " in (run / "log.txt").read_text()
