"""Speech on the command line."""

import json
from pathlib import Path

import numpy as np
import pytest

from bayesrnn import train
from bayesrnn.recipe import to_toml
from small_runs import Cli, write_recipe
from speech_runs import RATE, soundfile, speech_recipe, tone, write_corpus

GAUSSIAN = {"posterior": {"kind": "gaussian", "scale": 0.02}, "prior": {"kind": "normal"}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    write_corpus(folder / "toy")
    settings = {"epochs": 20, "keep": "best"}
    train(speech_recipe(folder / "toy", train=settings, **GAUSSIAN), folder / "run", quiet=True)
    return folder / "run"


def test_features_are_made_once_and_trained_on(tmp_path: Path, cli: Cli) -> None:
    recipe, kept = tmp_path / "recipe.toml", tmp_path / "kept"
    recipe.write_text(to_toml(speech_recipe(write_corpus(tmp_path / "toy"), **GAUSSIAN)))
    few = "data.valid=0.01"  # of 6 speakers, which is a matter of the training
    made = json.loads(cli("prepare", recipe, few, "--out", kept, "--json").out)
    assert (made["utterances"], made["labels"]) == (30, 3)
    assert "exists" in cli("prepare", recipe, "--out", kept).errors[0]
    given = (f"data.path={kept}", "train.epochs=1", "--out", tmp_path / "run", "--quiet", "--json")
    done = json.loads(cli("train", recipe, *given).out)
    assert done["finished"]
    assert done["kept_epoch"] == 1
    assert done["ratio"] > 0


def test_transcribe_and_evaluate(run: Path, tmp_path: Path, cli: Cli) -> None:
    said = ["A", "B", "C", "A"]
    soundfile.write(tmp_path / "good.flac", tone(said, seed=99), RATE)
    one = cli("transcribe", run, tmp_path / "good.flac")
    assert one.code == 0
    assert [part.split("(")[0] for part in one.out.split(": ")[1].split()] == said
    drawn = cli("transcribe", run, tmp_path / "good.flac", "--samples", 5, "--json")
    (found,) = json.loads(drawn.out)["files"]
    assert found["phones"] == said
    assert len(found["confidence"]) == len(said)
    assert all(0 < value <= 1 for value in found["confidence"])
    scores = json.loads(cli("evaluate", run, "--json").out)
    assert (scores["decoding"], scores["utterances"]) == ("prefix", 6)
    assert scores["per"] < 20
    assert scores["complexity_bits"] > 0
    beam = json.loads(cli("evaluate", run, "--decoding", "beam", "--samples", 2, "--json").out)
    assert beam["expected_nll"] is not None
    assert cli("evaluate", run, "--streams", 2).code == 2
    assert "bayesrnn transcribe" in cli("uncertainty", run).errors[0]
    assert cli("evaluate", run, "--predictions", tmp_path / "p.csv").code == 2


def test_runs_that_hear_other_steps_are_no_ensemble(run: Path, tmp_path: Path, cli: Cli) -> None:
    settings = {"model": {"stack": 1}, "train": {"epochs": 1}}
    train(speech_recipe(run.parent / "toy", **settings), tmp_path / "slow", quiet=True)
    [line] = cli("evaluate", run, tmp_path / "slow").errors
    assert f"frames a step (model.stack or model.windows) is 1 in {tmp_path / 'slow'}" in line


def test_pruning_and_retraining_give_the_columns_of_table_2(
    run: Path, tmp_path: Path, cli: Cli
) -> None:
    given = ("--thresholds", "0,0.5,2", "--retrain", 1, "--out", tmp_path / "pruned", "--quiet")
    found = json.loads(cli("prune", run, *given, "--json").out)
    assert found["figure"] == "valid_per"
    rows = found["points"]
    assert [row["threshold"] for row in rows] == [0.0, 0.5, 2.0]
    assert rows[0]["percent"] == 100 > rows[1]["percent"] > rows[2]["percent"]
    assert all(row["retrained"] is not None and row["bits_per_weight"] > 0 for row in rows)
    on_test = json.loads(cli("prune", run, "--thresholds", "0", "--split", "test", "--json").out)
    assert on_test["figure"] == "test_per"


def test_bad_audio_gets_a_line_and_the_rest_is_heard(run: Path, tmp_path: Path, cli: Cli) -> None:
    soundfile.write(tmp_path / "good.flac", tone(["A", "B"]), RATE)
    soundfile.write(tmp_path / "fast.wav", np.zeros(RATE), 2 * RATE)
    soundfile.write(tmp_path / "short.wav", np.zeros(50), RATE)
    (tmp_path / "empty.wav").write_bytes(b"")
    (tmp_path / "text.wav").write_text("no sound " * 99)
    (tmp_path / "cut.flac").write_bytes((tmp_path / "good.flac").read_bytes()[:900])
    names = ["fast.wav", "short.wav", "good.flac", "empty.wav", "text.wav", "cut.flac", "no.wav"]
    result = cli("transcribe", run, *(tmp_path / name for name in names))
    assert result.code == 1
    assert len(result.errors) == 6
    for name, line in zip([n for n in names if n != "good.flac"], result.errors, strict=True):
        assert name in line
    assert len(result.out.splitlines()) == 1
    assert "good.flac: " in result.out
    as_json = cli("transcribe", run, *(tmp_path / name for name in names), "--json")
    assert [
        name
        for name, one in zip(names, json.loads(as_json.out)["files"], strict=True)
        if "error" not in one
    ] == ["good.flac"]


def test_other_runs_hear_nothing(tmp_path: Path, cli: Cli) -> None:
    recipe = write_recipe(tmp_path, train={"max_steps": 1})
    cli("train", recipe, "--out", tmp_path / "run", "--quiet")
    assert cli("transcribe", tmp_path / "run", "x.wav").errors == [
        f"{tmp_path / 'run'} is a run on text, which hears nothing"
    ]
    assert "only speech is prepared" in cli("prepare", recipe, "--out", tmp_path / "x").errors[0]
    assert cli("evaluate", tmp_path / "run", "--decoding", "beam").code == 2
