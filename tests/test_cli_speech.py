"""Speech on the command line."""

import json
from pathlib import Path

import numpy as np
import pytest

from bayesrnn.recipe import to_toml
from small_runs import Cli, write_recipe
from speech_runs import RATE, soundfile, speech_recipe, tone, write_corpus


@pytest.fixture
def run(tmp_path: Path, cli: Cli) -> Path:
    write_corpus(tmp_path / "toy")
    settings = {"epochs": 25, "keep": "best"}
    recipe = speech_recipe(
        tmp_path / "toy",
        posterior={"kind": "gaussian", "scale": 0.02},
        prior={"kind": "normal"},
        train=settings,
    )
    (tmp_path / "recipe.toml").write_text(to_toml(recipe))
    features = cli("features", tmp_path / "recipe.toml", "--out", tmp_path / "kept", "--json")
    assert json.loads(features.out)["utterances"] == 30
    kept = f"data.path={tmp_path / 'kept'}"
    done = cli(
        "train", tmp_path / "recipe.toml", kept, "--out", tmp_path / "run", "--quiet", "--json"
    )
    assert json.loads(done.out)["finished"]
    return tmp_path / "run"


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
    assert "features are made of speech" in cli("features", recipe).errors[0]
    assert cli("evaluate", tmp_path / "run", "--decoding", "beam").code == 2
