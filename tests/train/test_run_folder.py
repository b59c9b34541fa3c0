"""Whose folder it is: in use, another recipe's, no run at all, or damaged."""

import math
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bayesrnn.data import text
from bayesrnn.errors import Invalid, UserError
from bayesrnn.recipe import read_recipe
from bayesrnn.storage import Damaged
from bayesrnn.train import loop
from bayesrnn.train.loop import train
from bayesrnn.train.metrics import MetricsLog, epochs_missing, read_metrics
from bayesrnn.train.run import Run
from small_runs import (
    EPOCH,
    assert_same_end,
    checkpoint_folders,
    folder_contents,
    metrics,
    small_recipe,
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, with a checkpoint at each step while it lasted."""
    folder = tmp_path_factory.mktemp("finished")
    train(small_recipe(folder, train={"checkpoint_minutes": 0}), folder / "run", quiet=True)
    return folder / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it, to be harmed."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def recipe_of(finished: Path, **changes: object):  # type: ignore[no-untyped-def]
    return small_recipe(finished.parent, **{"train": {"checkpoint_minutes": 0}} | changes)


# --- the folder ------------------------------------------------------------------------------


def test_a_folder_in_use_is_refused_and_free_again_afterwards(finished: Path, run: Path) -> None:
    with Run(run).locked():
        before = folder_contents(run)
        with pytest.raises(UserError, match=r"in use by another process \(number \d+\)"):
            train(recipe_of(finished), run, quiet=True)
        assert folder_contents(run) == before
    assert train(recipe_of(finished), run, quiet=True).finished


def test_the_run_of_another_recipe_is_refused_with_the_keys_that_differ(
    finished: Path, run: Path
) -> None:
    other = recipe_of(finished, train={"lr": 0.25}, model={"hidden": 9})
    before = folder_contents(run)
    with pytest.raises(UserError) as caught:
        train(other, run, quiet=True)
    message = str(caught.value)
    assert "train.lr is 0.5 there and 0.25 here" in message
    assert "model.hidden is 8 there and 9 here" in message
    assert "--fresh" in message
    assert "train.epochs" not in message
    assert folder_contents(run) == before


def test_a_folder_that_became_another_recipes_in_the_meantime_is_refused(
    finished: Path, run: Path
) -> None:
    """While the text was read, say: what was checked before is checked again under the lock."""
    before = folder_contents(run)
    with pytest.raises(UserError, match="holds the run of another recipe"):
        Run(run).prepare(recipe_of(finished, train={"lr": 0.25}), fresh=False)
    assert folder_contents(run) == before


def test_the_same_patterns_in_another_order_are_another_recipe(
    finished: Path, tmp_path: Path
) -> None:
    wide, narrow = {"kind": "gaussian", "scale": 0.1}, {"kind": "gaussian", "scale": 0.01}
    first = recipe_of(finished, posterior={"rnn.*": wide, "*": narrow}, train={"max_steps": 1})
    other = recipe_of(finished, posterior={"*": narrow, "rnn.*": wide}, train={"max_steps": 1})
    train(first, tmp_path / "new", quiet=True)
    with pytest.raises(UserError, match="another recipe: posterior is"):
        train(other, tmp_path / "new", quiet=True)


@pytest.mark.parametrize("steps", [30, 33, 60])  # an epoch has 30, and 20 now
def test_a_run_whose_data_an_older_version_cut_otherwise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    table: dict[str, Any] = {"data": {"tokens": "words"}, "train": {"epochs": 3, "streams": 4}}
    recipe = small_recipe(tmp_path, **table)
    Path(recipe.data.path).write_text("it’s w1 w2\n" * 125)
    with monkeypatch.context() as older:
        older.setattr(text, "CACHE_FORMAT", 0)
        older.setattr(text, "_find_words", re.compile(r"\w+|[^\w\s]").findall)
        train(
            replace(recipe, train=replace(recipe.train, max_steps=steps)),
            tmp_path / "run",
            quiet=True,
        )
    with pytest.raises(UserError, match="run was begun with another version, which cut the same"):
        train(recipe, tmp_path / "run", quiet=True)


def test_fresh_starts_over(finished: Path, run: Path) -> None:
    (run / "notes.txt").write_text("mine")
    other = recipe_of(finished, train={"lr": 0.25, "max_steps": 3})
    outcome = train(other, run, fresh=True, quiet=True)
    assert outcome.steps == 3
    assert [path.name for path in checkpoint_folders(run)] == ["000000003"]
    assert "resuming" not in (run / "log.txt").read_text()
    assert (run / "notes.txt").read_text() == "mine"


def test_what_cannot_be_cleared_is_not_gone_on_with(finished: Path, run: Path) -> None:
    """Nothing is removed behind a link."""
    kept = (run / "checkpoints").rename(run.with_name("elsewhere"))
    (run / "checkpoints").symlink_to(kept)
    before = folder_contents(kept)
    with pytest.raises(UserError, match=r"checkpoints: .* link; remove it, or choose another"):
        train(recipe_of(finished), run, fresh=True, quiet=True)
    assert folder_contents(kept) == before


@pytest.mark.parametrize("fresh", [False, True])
def test_a_folder_that_is_no_run_is_refused_and_left_alone(
    fresh: bool, finished: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter1.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"not empty and holds no run \(chapter1.tex is there\)"):
        train(recipe_of(finished), folder, fresh=fresh, quiet=True)
    assert folder_contents(folder) == {"chapter1.tex": b"years of work"}


def test_a_recipe_made_in_python_is_kept_so_that_it_can_be_read(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path)
    swept = replace(recipe.train, epochs=np.int64(1), lr=np.float32(0.25))
    train(replace(recipe, train=swept), tmp_path / "run", quiet=True)
    kept = read_recipe(tmp_path / "run/recipe.toml").train
    assert (kept.epochs, kept.lr) == (1, 0.25)
    wrong = replace(recipe, train=replace(recipe.train, seed=True))
    with pytest.raises(Invalid, match=r"train\.seed must be a whole number, got True"):
        train(wrong, tmp_path / "other", quiet=True)
    assert not (tmp_path / "other").exists()


def test_an_output_that_is_a_file_is_refused(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(UserError, match="file"):
        train(recipe_of(finished), tmp_path / "file", quiet=True)
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize(
    "changes",
    [
        {"data": {"path": "nowhere.txt"}},
        {"data": {"max_vocabulary": 3, "split": [0.001, 0.5, 0.499]}},
        {"train": {"streams": 400}},
        {"train": {"options": {"momentum": -1.0}}},
        {"posterior": {"no_such_*": {"kind": "delta"}}},
        {"bayes": {"where": ["no_such_*"]}},
    ],
    ids=lambda changes: next(iter(changes)),
)
@pytest.mark.parametrize("fresh", [False, True])
def test_a_run_that_cannot_start_neither_makes_nor_clears_a_folder(
    changes: dict[str, dict[str, object]], fresh: bool, finished: Path, run: Path, tmp_path: Path
) -> None:
    wrong = recipe_of(finished, **changes)
    with pytest.raises((UserError, Invalid)):
        train(wrong, tmp_path / "new", fresh=fresh, quiet=True)
    assert not (tmp_path / "new").exists()
    before = folder_contents(run)
    with pytest.raises((UserError, Invalid)):
        train(wrong, run, fresh=fresh, quiet=True)
    assert folder_contents(run) == before


def test_what_a_killed_start_left_behind_is_swept_away(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".recipe.toml.0123abcd.tmp").write_text("half a reci")
    train(recipe_of(finished, train={"max_steps": 1}), folder, quiet=True)
    assert not list(folder.glob(".*.tmp"))


# --- a damaged model -------------------------------------------------------------------------


@pytest.mark.parametrize("harm", ["truncated", "empty", "gone", "all gone"])
def test_a_run_replaces_its_own_model_however_damaged(harm: str, finished: Path, run: Path) -> None:
    config = run / "model/config.json"
    if harm in ("gone", "all gone"):
        config.unlink()
    else:
        config.write_bytes(b"" if harm == "empty" else config.read_bytes()[:50])
    if harm == "all gone":
        (run / "model/model.safetensors").unlink()
    train(recipe_of(finished), run, quiet=True)
    assert folder_contents(run / "model") == folder_contents(finished / "model")


def test_what_somebody_put_beside_a_runs_model_is_left_alone(finished: Path, run: Path) -> None:
    (run / "model/notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds more than a model \(notes.txt\)"):
        train(recipe_of(finished), run, quiet=True)
    assert (run / "model/notes.txt").read_text() == "mine"


# --- damaged checkpoints ---------------------------------------------------------------------


def cut_short(folder: Path) -> None:
    file = folder / "parameters.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def flip_a_bit(folder: Path) -> None:
    file = folder / "optimizer.safetensors"
    data = bytearray(file.read_bytes())
    data[-7] ^= 0b100
    file.write_bytes(data)


def lose_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def lose_a_file(folder: Path) -> None:
    (folder / "carried.safetensors").unlink()


def change_a_number(folder: Path) -> None:
    file = folder / "manifest.json"
    text = file.read_text()
    assert f'"step": {2 * EPOCH}' in text
    file.write_text(text.replace(f'"step": {2 * EPOCH}', f'"step": {2 * EPOCH - 2}'))


def empty_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_bytes(b"")


HARM = [cut_short, flip_a_bit, lose_the_manifest, lose_a_file, change_a_number, empty_the_manifest]


@pytest.mark.parametrize("harm", HARM)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    harm: Callable[[Path], None],
    finished: Path,
    run: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    newest = checkpoint_folders(run)[-1]
    assert newest.name == f"{2 * EPOCH:09d}"
    harm(newest)
    train(recipe_of(finished), run)
    said = capsys.readouterr().err
    assert "skipping a damaged checkpoint" in said
    assert newest.name in said
    assert f"resuming at step {2 * EPOCH - 1} " in said
    assert_same_end(run, finished)


def test_a_folder_whose_name_is_no_text_is_named_all_the_same(finished: Path, run: Path) -> None:
    run = run.rename(run.with_name(os.fsdecode(b"run\xff")))
    lose_the_manifest(checkpoint_folders(run)[-1])
    assert train(recipe_of(finished), run, quiet=True).finished
    assert rb"run\udcff" in (run / "log.txt").read_bytes()


def test_when_every_checkpoint_is_damaged_the_run_says_so_and_keeps_them(
    finished: Path, run: Path
) -> None:
    for folder in checkpoint_folders(run):
        flip_a_bit(folder)
    before = folder_contents(run / "checkpoints")
    with pytest.raises(UserError, match=r"every checkpoint in .* is damaged; start over with"):
        train(recipe_of(finished), run, quiet=True)
    assert folder_contents(run / "checkpoints") == before
    assert train(recipe_of(finished), run, fresh=True, quiet=True).finished
    assert_same_end(run, finished)


@pytest.mark.parametrize("harm", [b'{"kind": "ep', b"\xff\xfe\n"], ids=["cut off", "no text"])
def test_metrics_that_cannot_be_read_are_named_and_keep_nobody_from_the_model(
    run: Path, harm: bytes
) -> None:
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(harm)
    with pytest.raises(Damaged, match=r"metrics.jsonl is damaged: line \d+ is not JSON"):
        read_metrics(run)
    assert epochs_missing(run, read_recipe(run / "recipe.toml")) == 0


def lose_all(file: Path) -> None:
    file.unlink()


def lose_half(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])


def lose_the_first(file: Path) -> None:
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[1:]))


def scratch_one(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[10] = 0xFF
    file.write_bytes(data)


@pytest.mark.parametrize("harm", [lose_all, lose_half, lose_the_first, scratch_one])
def test_damaged_metrics_are_noticed_before_the_training_which_goes_on(
    harm: Callable[[Path], None],
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(loop, "LOG_STEPS", 10)
    whole, run = tmp_path / "whole", tmp_path / "run"
    for out in (whole, run):
        train(recipe_of(finished, train={"epochs": 3, "max_steps": 2 * EPOCH}), out, quiet=True)
    harm(run / "metrics.jsonl")
    capsys.readouterr()
    for out in (whole, run):
        outcome = train(recipe_of(finished, train={"epochs": 3}), out)
        assert (outcome.epoch, outcome.kept, outcome.finished) == (3, 3, True)
    warnings = [line for line in capsys.readouterr().err.splitlines() if "damaged" in line]
    assert len(warnings) == 1
    assert str(run / "metrics.jsonl") in warnings[0]
    found = metrics(run)
    assert found == [line for line in metrics(whole) if line in found]
    assert found[-2:] == metrics(whole)[-2:]
    assert (run / "model/model.safetensors").read_bytes() == (
        whole / "model/model.safetensors"
    ).read_bytes()


def test_a_figure_that_is_not_finite_is_null_in_the_metrics(tmp_path: Path) -> None:
    log = MetricsLog(Run(tmp_path), 0, 0, 0, pytest.fail)
    line = {"kind": "epoch", "step": 1, "epoch": 1, "valid_nll": 800.0}
    log.write({**line, "valid_perplexity": math.inf})
    log.close()
    assert "Infinity" not in (tmp_path / "metrics.jsonl").read_text()
    assert read_metrics(tmp_path) == [{**line, "valid_perplexity": None}]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_metrics_that_a_full_disk_does_not_take_are_one_line(tmp_path: Path) -> None:
    log = MetricsLog(Run(tmp_path), 0, 0, 0, print)
    log._file.close()
    with Path("/dev/full").open("ab") as log._file:
        with pytest.raises(UserError, match=r"metrics\.jsonl: No space left on device; free some"):
            log.write({"kind": "step", "step": 1})
        log.close()  # which tries again


def test_metrics_that_were_mended_have_no_line_twice(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have grown past what the checkpoint says when the process is killed."""
    monkeypatch.setattr(loop, "LOG_STEPS", 2)
    run, once = tmp_path / "run", {"epochs": 3, "checkpoint_minutes": 9}
    train(recipe_of(finished, train={**once, "max_steps": EPOCH}), run, quiet=True)
    size = (run / "metrics.jsonl").stat().st_size
    lose_the_first(run / "metrics.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "save", lambda _: pytest.exit("killed"))
        with pytest.raises(pytest.exit.Exception):
            train(recipe_of(finished, train={**once, "max_steps": 2 * EPOCH}), run, quiet=True)
    assert (run / "metrics.jsonl").stat().st_size > size
    train(recipe_of(finished, train=once), run, quiet=True)
    lines = [(line["kind"], line["step"]) for line in metrics(run)]
    expected = [("step", step) for step in range(4, 3 * EPOCH + 1, 2)]
    assert [line for line in lines if line[0] == "step"] == expected


def test_the_checkpoint_before_the_newest_is_kept(finished: Path) -> None:
    names = [path.name for path in checkpoint_folders(finished)]
    assert names == [f"{2 * EPOCH - 1:09d}", f"{2 * EPOCH:09d}"]


def test_a_run_is_not_resumed_on_another_text(tmp_path: Path) -> None:
    run = tmp_path / "run"
    recipe = small_recipe(tmp_path, train={"max_steps": 3})
    longer = small_recipe(tmp_path, train={"max_steps": 5})
    train(recipe, run, quiet=True)
    text = Path(recipe.data.path)
    text.write_text(text.read_text() + "w1 w2 w3\n")
    with pytest.raises(UserError, match=r"data are not those that the run in .* began with"):
        train(longer, run, quiet=True)
