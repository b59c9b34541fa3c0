"""The command line: what it prints, and one clear line for whatever is wrong."""

import errno
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import bayesrnn
from bayesrnn import storage
from bayesrnn.train import loop
from small_runs import (
    EPOCH,
    Cli,
    Result,
    assert_same_end,
    checkpoint_folders,
    environment,
    folder_contents,
    metrics,
    small_recipe,
    write_recipe,
    write_text,
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run beside its recipe."""
    folder = tmp_path_factory.mktemp("finished")
    recipe = write_recipe(folder)
    loop.train(bayesrnn.read_recipe(recipe), folder / "run", quiet=True)
    return folder / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy, to be harmed."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path)


# --- what works ------------------------------------------------------------------------------


def test_the_package_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bayesrnn", "--help"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert all(
        command in done.stdout for command in ("train", "evaluate", "uncertainty", "generate")
    )
    assert done.stderr == ""


@pytest.mark.parametrize("command", ["train", "evaluate", "uncertainty", "generate"])
def test_help_shows_an_example(command: str, cli: Cli) -> None:
    result = cli(command, "--help")
    assert result.code == 0
    assert f"bayesrnn {command} r" in result.out
    assert "--json" in result.out


def test_the_version_is_printed(cli: Cli) -> None:
    assert cli("--version") == Result(0, bayesrnn.__version__ + "\n", "")


def test_train_prints_figures_and_json(cli: Cli, recipe: Path, tmp_path: Path) -> None:
    result = cli("train", recipe, "train.epochs=1", "--out", tmp_path / "run", "--json")
    assert result.code == 0
    figures = json.loads(result.out)
    assert figures["run"] == str(tmp_path / "run")
    assert (figures["finished"], figures["steps"], figures["epochs"]) == (True, EPOCH, 1)
    assert figures["valid_perplexity"] == figures["best_valid_perplexity"] > 1
    assert figures["complexity_bits"] > 0
    assert f"starting on cpu: {bayesrnn.load(tmp_path / 'run').weight_count:,} " in result.err
    again = cli("train", recipe, "train.epochs=1", "--out", tmp_path / "run", "--quiet")
    assert again.code == 0
    assert again.err == ""
    assert "valid perplexity" in again.out


def test_the_best_epoch_is_not_always_the_last(cli: Cli, recipe: Path, tmp_path: Path) -> None:
    lines = []
    for epochs in (1, 2, 3):
        settings = [f"train.epochs={epochs}", "--out", tmp_path / "run", "--json", "--quiet"]
        lines.append(json.loads(cli("train", recipe, *settings).out))
    expected = min(line["valid_perplexity"] for line in lines)
    assert lines[-1]["best_valid_perplexity"] == expected


def test_evaluate_prints_the_mean_and_the_average_of_draws(cli: Cli, finished: Path) -> None:
    mean = json.loads(cli("evaluate", finished, "--json").out)
    assert (mean["split"], mean["weights"], mean["samples"]) == ("test", "mean", 0)
    assert mean["expected_nll"] is None
    assert mean["complexity_nats"] > 0
    assert json.loads(cli("evaluate", finished, "--samples", 0, "--json").out) == mean
    three = json.loads(cli("evaluate", finished, "--samples", 3, "--json").out)
    assert (three["weights"], three["samples"]) == ("sample", 3)
    assert three["nll"] <= three["expected_nll"]
    assert json.loads(cli("evaluate", finished, "--samples", 3, "--json").out) == three
    seed = json.loads(cli("evaluate", finished, "--samples", 3, "--seed", 2, "--json").out)
    assert seed["nll"] != three["nll"]
    ten = json.loads(cli("evaluate", finished, "--weights", "sample", "--json").out)
    assert ten["samples"] == 10


def test_evaluate_agrees_with_the_training_on_the_validation_text(cli: Cli, finished: Path) -> None:
    found = json.loads(cli("evaluate", finished, "--split", "valid", "--json").out)
    last = [line for line in metrics(finished) if line["kind"] == "epoch"][-1]
    assert found["nll"] == pytest.approx(last["valid_nll"], rel=1e-9)


def test_evaluate_reads_another_text_with_the_runs_vocabulary(
    cli: Cli, finished: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.txt"
    other.write_text("w1 w2 something else\n" * 60)
    here = json.loads(cli("evaluate", finished, "--json").out)
    there = json.loads(cli("evaluate", finished, "--data", other, "--json").out)
    assert there["tokens"] == 29  # a tenth of 300 tokens, less the first
    assert there["nll"] != here["nll"]
    assert cli("evaluate", finished, "--streams", 5).code == 0


def test_evaluate_reads_all_of_a_text_as_one(cli: Cli, finished: Path, tmp_path: Path) -> None:
    """As if it were split in no way: against the same text read by hand, as one stream."""
    other = tmp_path / "other.txt"
    other.write_text("w1 w2 w3\nw4 w2 something\n" * 40)
    result = cli("evaluate", finished, "--data", other, "--split", "all", "--json")
    found = json.loads(result.out)
    assert result.err == ""
    vocabulary = bayesrnn.load_vocabulary(finished)
    words = [word for line in other.read_text().splitlines() for word in (*line.split(), "<eos>")]
    ids = torch.tensor([vocabulary.index.get(w, vocabulary.index["<unk>"]) for w in words])
    with torch.no_grad():
        logits, _ = bayesrnn.load(finished)(ids[:-1, None])
    nll = torch.nn.functional.cross_entropy(logits[:, 0], ids[1:]).item()
    assert found["tokens"] == len(ids) - 1
    assert found["nll"] == pytest.approx(nll, rel=1e-5)
    for command in ("evaluate", "uncertainty"):
        said = cli(command, finished, "--data", other, "--json").err
        assert f"'test' part of {other}; --split all" in said
    other.write_text("w1 w2 w3\nw4 w2\nw5 w1\n")  # too short to learn from
    found = json.loads(cli("evaluate", finished, "--data", other, "--split", "all", "--json").out)
    assert found["tokens"] == 9


def test_a_tilde_is_the_home_folder(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write_recipe(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    run = tmp_path / "run"
    home = ["data.path=~/text.txt", "train.epochs=1"]
    assert cli("train", recipe, *home, "--out", run, "--quiet").code == 0
    assert bayesrnn.read_recipe(run / "recipe.toml").data.path == str(tmp_path / "text.txt")
    assert cli("evaluate", run, "--data", "~/text.txt").code == 0
    pruned = ["prune", run, "--fraction", 0.5, "--out", tmp_path / "small"]
    assert cli(*pruned, "--data", "~/text.txt").code == 0
    small = bayesrnn.read_recipe(tmp_path / "small" / "recipe.toml")
    assert small.data.path == str(tmp_path / "text.txt")


def test_a_tilde_that_the_shell_left_is_the_home_folder(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_recipe(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert cli("train", "~/small.toml", "train.epochs=1", "--out=~/run", "--quiet").code == 0
    told = cli("evaluate", "~/run", "--json")
    assert json.loads(told.out)["run"] == str(tmp_path / "run")
    text = ["--text=~/text.txt", "--out=~/tokens.csv", "--samples=1"]
    assert cli("uncertainty", "~/run", *text).code == 0
    page = ["--out=~/page.html", "--samples=0", "--tokens=20"]
    assert cli("report", "~/run", "~/run", *page).code == 0
    assert cli("prune", "~/run", "--fraction=0.5", "--out=~/small").code == 0
    made = {"run", "small", "tokens.csv", "page.html"}
    assert made <= {path.name for path in tmp_path.iterdir()}
    assert list(Path().iterdir()) == []
    assert cli("evaluate", "~nosuchuser/run").errors == [
        "there is no home folder for the ~ of ~nosuchuser/run; write the whole path"
    ]


def test_a_tilde_is_the_home_folder_in_python_too(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(finished, tmp_path / "run")
    recipe = bayesrnn.read_recipe("~/run/recipe.toml")
    assert bayesrnn.load_vocabulary("~/run").tokens
    bayesrnn.prune_run("~/run", "~/small", fraction=0.5)
    bayesrnn.train(recipe, "~/run", quiet=True)
    bayesrnn.save(bayesrnn.load("~/small"), "~/mine")
    assert {"run", "small", "mine"} <= {path.name for path in tmp_path.iterdir()}


def test_the_home_of_nobody_is_one_line(cli: Cli, finished: Path, recipe: Path) -> None:
    nobody = "~nosuchuser/x"
    for asked in (
        ["evaluate", finished, "--data", nobody],
        ["train", recipe, f"data.path={nobody}"],
    ):
        result = cli(*asked)
        assert result.code == 1
        assert result.errors == [
            f"there is no home folder for the ~ of {nobody}; write the whole path"
        ]


def test_evaluate_dynamic_learns_at_the_rate_given(cli: Cli, finished: Path) -> None:
    still = json.loads(cli("evaluate", finished, "--json").out)
    zero = json.loads(cli("evaluate", finished, "--dynamic", 0, "--json").out)
    assert zero == still | {"rate": 0.0, "segment": 5, "by_variance": False} | {
        key: pytest.approx(still[key], rel=1e-6) for key in ("nll", "perplexity")
    }  # cut at other places, and float32
    found = json.loads(cli("evaluate", finished, "--dynamic", "0.1", "--segment", 7, "--json").out)
    assert (found["rate"], found["segment"], found["weights"]) == (0.1, 7, "mean")
    assert found["tokens"] == still["tokens"]
    assert found["nll"] != still["nll"]
    assert "search" not in found
    by_variance = ["evaluate", finished, "--dynamic", 0.1, "--segment", 7, "--by-variance"]
    other = json.loads(cli(*by_variance, "--json").out)
    assert other["by_variance"]
    assert other["nll"] not in (found["nll"], still["nll"])
    assert json.loads(cli("evaluate", finished, "--json").out) == still


def test_evaluate_dynamic_searches_on_the_validation_text(cli: Cli, finished: Path) -> None:
    search = ["evaluate", finished, "--dynamic", "search"]
    found = json.loads(cli(*search, "--json").out)
    best = min((t for t in found["search"] if t["nll"] is not None), key=lambda t: t["nll"])
    assert found["rate"] == best["rate"]
    asked = ["evaluate", finished, "--dynamic", best["rate"], "--json"]
    assert json.loads(cli(*asked).out)["nll"] == found["nll"]
    valid = json.loads(cli(*asked, "--split", "valid").out)
    assert (valid["nll"], valid["perplexity"]) == (best["nll"], best["perplexity"])
    shown = cli(*search)
    assert (shown.code, "valid perplexity" in shown.out) == (0, True)
    assert all(f" {trial['rate']:g} " in shown.out for trial in found["search"])


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--samples", 3],
        ["--streams", 3],
        ["--dynamic", 0.1],
        ["--dynamic", 0.1, "--by-variance"],
    ],
)
def test_a_temperature_is_searched_on_the_validation_text(
    more: list[Any], cli: Cli, finished: Path
) -> None:
    """By the same draws, or rate: the validation text's own figures are those of the search."""
    search = ["evaluate", finished, *more, "--temperature", "search"]
    found = json.loads(cli(*search, "--json").out)
    tried = found["temperatures"]
    best = min(tried, key=lambda trial: trial["nll"])
    assert best["temperature"] / 1.1 < found["temperature"] < best["temperature"] * 1.1
    asked = ["evaluate", finished, *more, "--temperature", found["temperature"], "--json"]
    assert json.loads(cli(*asked).out) == {k: v for k, v in found.items() if k != "temperatures"}
    at = [*asked[:-2], tried[3]["temperature"], "--json", "--split", "valid"]
    assert json.loads(cli(*at).out)["nll"] == pytest.approx(tried[3]["nll"], rel=1e-6)
    as_it_is = json.loads(cli("evaluate", finished, *more, "--json").out)
    one = json.loads(cli("evaluate", finished, *more, "--temperature", 1, "--json").out)
    assert one == as_it_is | {"temperature": 1.0}
    valid = cli("evaluate", finished, *more, "--split", "valid", "--temperature", "search")
    assert "note: the temperature is chosen on the validation set, which is part" in valid.err
    shown = cli(*search)
    assert (shown.code, "temperatures tried" in shown.out) == (0, True)


def test_dynamic_evaluation_that_cannot_be_is_one_line(cli: Cli, finished: Path) -> None:
    diverges = cli("evaluate", finished, "--dynamic", "1e30")
    assert (diverges.code, diverges.out) == (1, "")
    [line] = diverges.errors
    assert "with the rate 1e+30 diverges" in line
    for split in ("test", "valid"):
        too_long = cli("evaluate", finished, "--split", split, "--dynamic", 0.1, "--segment", 4000)
        [line] = too_long.errors
        assert f"a segment of 4000 steps is longer than text '{split}'" in line


def test_a_plain_network_has_no_complexity(cli: Cli, tmp_path: Path) -> None:
    plain: dict[str, Any] = {"posterior": {"kind": "delta"}, "prior": {"kind": "uniform"}}
    recipe = write_recipe(tmp_path, **plain)
    trained = cli("train", recipe, "train.epochs=1", "--out", tmp_path / "run", "--json")
    assert json.loads(trained.out)["complexity_bits"] is None
    assert json.loads(cli("evaluate", tmp_path / "run", "--json").out)["complexity_nats"] is None
    assert re.search(r"complexity nats\s*│\s*-\s", cli("evaluate", tmp_path / "run").out)


@pytest.mark.parametrize("flag", [["--samples", 3], ["--weights", "sample"]], ids=["n", "which"])
def test_points_are_not_drawn_but_masks_are(cli: Cli, tmp_path: Path, flag: list[Any]) -> None:
    plain: dict[str, Any] = {"posterior": {"kind": "delta"}, "prior": {"kind": "uniform"}}
    recipe = write_recipe(tmp_path, **plain)
    train = ["train", recipe, "train.epochs=1", "--json"]
    assert cli(*train, "--out", tmp_path / "points").code == 0
    refused = cli("evaluate", tmp_path / "points", *flag)
    assert refused.code == 1
    assert "its weights are points and no masks are drawn" in refused.errors[0]
    for rate, code in (("dropout.word=0.3", 1), ("dropout.output=0.3", 0)):  # words: in training
        out = tmp_path / rate
        assert cli(*train, rate, "--out", out).code == 0
        assert cli("evaluate", out, *flag).code == code


def test_generate_writes_the_same_text_for_the_same_seed(cli: Cli, finished: Path) -> None:
    words = ["generate", finished, "--prompt", "w1 w2", "--tokens", 30]
    first = cli(*words, "--seed", 4)
    assert first == cli(*words, "--seed", 4)
    assert first.code == 0
    assert first.out.startswith("w1 w2 ")
    assert first.out != cli(*words, "--seed", 5).out
    found = json.loads(cli(*words, "--seed", 4, "--json").out)
    assert found["prompt"] == "w1 w2"
    assert first.out == f"w1 w2 {found['text']}\n"
    drawn = json.loads(cli(*words, "--seed", 4, "--weights", "sample", "--json").out)
    assert drawn["weights"] == "sample"
    assert drawn["text"] != found["text"]


def test_a_run_that_has_not_come_to_its_end_is_told_by_every_command(
    cli: Cli, finished: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    assert not cli("evaluate", run, "--json").err
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    first = next(i for i, line in enumerate(lines) if '"kind": "epoch"' in line)
    (run / "metrics.jsonl").write_text("".join(lines[: first + 1]))
    page = ["--out", tmp_path / "page.html", "--samples", 0, "--tokens", 20]
    commands = [["evaluate", run], ["generate", run], ["uncertainty", run], ["report", run, *page]]
    commands += [["prune", run, "--curve", "0.5"]]
    for words in (*commands, ["prune", run, "--fraction", 0.5, "--out", tmp_path / "small"]):
        told = cli(*words)
        assert told.code == 0
        assert told.err.splitlines()[0] == (
            f"note: the training of {run} is not finished, 1 of 2 epochs are to come; run its "
            "train command again to go on"
        )


def test_data_that_have_changed_since_the_training_are_told_by_every_command(
    cli: Cli, recipe: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert cli("train", recipe, "train.epochs=1", "--out", run, "--quiet").code == 0
    page = ["--out", tmp_path / "page.html", "--samples", 0, "--tokens", 20]
    commands = [["evaluate", run], ["uncertainty", run], ["report", run, *page]]
    commands += [["prune", run, "--curve", "0.5"]]
    for words in commands:
        assert cli(*words).err == ""
    text = tmp_path / "text.txt"
    text.write_text(text.read_text() + "w1 w2 w3\n")
    for words in commands:
        told = cli(*words)
        assert told.code == 0
        [line] = told.err.splitlines()
        assert line.startswith(f"note: {text} is not what {run} was trained with")
        meant = ["--split", "all"] if words[0] in ("evaluate", "uncertainty") else []
        assert cli(*words, *meant, "--data", text).err == ""
    again = ["prune", run, "--fraction", 0.5, "--retrain", 1, "--quiet", "--out"]
    told = cli(*again, tmp_path / "small")
    assert told.code == 0
    [line] = told.err.splitlines()
    assert line.startswith(f"note: {text} is not what {run} was trained with")
    assert cli(*again, tmp_path / "meant", "--data", text).err == ""
    table = ["prune", run, "--curve", "0,0.5,0.7", "--retrain", 1, "--quiet"]
    assert len(cli(*table, "--out", tmp_path / "table").err.splitlines()) == 1
    shutil.rmtree(run / "checkpoints")
    assert cli("evaluate", run).err == ""  # it cannot be told


def test_letters_that_a_terminal_does_not_know_are_replaced(finished: Path) -> None:
    asked = ["generate", str(finished), "--prompt", "é w1", "--tokens", "3"]
    done = subprocess.run(
        [sys.executable, "-m", "bayesrnn", *asked],
        env=environment() | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"? w1 ")


@pytest.mark.parametrize("closed", ["1>&-", "2>&-", "1>&- 2>&-"])
def test_closed_output_is_no_reason_to_fail(closed: str, finished: Path, tmp_path: Path) -> None:
    written = tmp_path / "tokens.csv"
    words = [sys.executable, "-m", "bayesrnn", "uncertainty", finished, "--out", written]
    done = subprocess.run(
        ["sh", "-c", f"{shlex.join(map(str, words))} {closed}"],
        env=environment(),
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert written.read_text().startswith('"samples","place","token"')


def test_generate_says_which_words_of_the_prompt_it_does_not_know(cli: Cli, finished: Path) -> None:
    assert not cli("generate", finished, "--prompt", "w1 w2", "--tokens", 3).err
    told = cli("generate", finished, "--prompt", "w1 zebra apple zebra", "--tokens", 3)
    assert told.code == 0
    assert told.err == (
        "note: the model does not know 'apple', 'zebra' of the prompt, and reads <unk> there\n"
    )


# --- bad input to train ----------------------------------------------------------------------


def file_with(contents: bytes) -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        path = folder / "bad.txt"
        path.write_bytes(contents)
        return f"data.path={path}"

    return make


def short_text(folder: Path) -> str:
    return f"data.path={write_text(folder, words=6, name='short.txt')}"


@pytest.mark.parametrize(
    ("settings", "code", "said"),
    [
        (
            lambda _: "data.path=no/such.txt",
            1,
            ["no/such.txt does not exist; set data.path to a text file"],
        ),
        (file_with(b""), 1, ["bad.txt is empty or blank"]),
        (file_with(b" \n\n"), 1, ["bad.txt is empty or blank"]),
        (file_with(b"some words\0\1\2" * 99), 1, ["bad.txt is binary (NUL at byte 10)"]),
        (file_with(b"some words\xff and more" * 99), 1, ["bad.txt is not UTF-8 (at byte 10)"]),
        (short_text, 1, ["short.txt has 6 tokens, too few to split"]),
        (
            lambda _: "train.streams=600",
            1,
            ["600 streams need (601); set data.path to a longer text, or change train.streams"],
        ),
        (
            lambda _: "train.valid_streams=51",
            1,
            ["(52); set data.path to a longer text, or change train.valid_streams"],
        ),
        (
            lambda _: "data.split=[0.498,0.002,0.5]",
            1,
            ["(2); set data.path to a longer text, or change data.split"],
        ),
        (lambda _: "train.learning_speed=3", 2, ["train.learning_speed is not a setting; allowed"]),
        (lambda _: "train.epochs=many", 2, ["train.epochs must be a whole number, got 'many'"]),
        (lambda _: "train.lr=-0.5", 2, ["train.lr must be a finite number above 0, got -0.5"]),
        (lambda _: "prior.pi=1.5", 2, ["prior.pi must be between 0 and 1, got 1.5"]),
        (lambda _: "prior.kind=spike", 2, ["prior.kind is 'spike'; allowed: uniform, normal"]),
        (lambda _: "train.lr", 2, ["'train.lr' is no setting; write it as table.key=value"]),
        (lambda _: "train.device=cuda:77", 1, ["train.device is 'cuda:77'"]),
        (lambda _: "train.options.momentum=-2", 1, ["train.options do not suit SGD"]),
        (lambda _: 'bayes.where=["head.*"]', 2, ["where pattern 'head.*' matches no trainable"]),
        (
            lambda _: "train.lr=-1 train.learning_speed=3 prior.pi=7 model.cell=9 data.tokens=0",
            2,
            ["data.tokens", "model.cell", "prior.pi", "train.learning_speed", "train.lr"],
        ),
    ],
)
def test_bad_input_is_one_clear_line_a_problem_and_nothing_is_made(
    settings: Callable[[Path], str],
    code: int,
    said: list[str],
    cli: Cli,
    recipe: Path,
    tmp_path: Path,
) -> None:
    given = settings(tmp_path)
    before = {k: v for k, v in folder_contents(tmp_path).items() if not k.startswith("cache")}
    words = given.split(" ") if given.count("=") > 1 else [given]
    result = cli("train", recipe, *words, "--out", tmp_path / "run")
    assert result.code == code
    assert result.out == ""
    assert len(result.errors) == len(said)
    for line, fragment in zip(sorted(result.errors), said, strict=True):
        assert fragment in line
    after = {k: v for k, v in folder_contents(tmp_path).items() if not k.startswith("cache")}
    assert after == before
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        (None, "no recipe at"),
        (b"[train\nlr = 1", "is not valid TOML: "),
        (b"\x00\xff\xfe", "is not UTF-8 text, so it is no recipe"),
    ],
)
def test_a_recipe_that_cannot_be_read_is_named(
    contents: bytes | None, said: str, cli: Cli, tmp_path: Path
) -> None:
    path = tmp_path / "recipe.toml"
    if contents is not None:
        path.write_bytes(contents)
    result = cli("train", path, "--out", tmp_path / "run")
    assert result.code == 1
    [line] = result.errors
    assert str(path) in line
    assert said in line
    assert not (tmp_path / "run").exists()


def test_another_recipes_run_is_refused_untouched_until_fresh_is_said(
    cli: Cli, finished: Path, run: Path
) -> None:
    recipe = finished.parent / "small.toml"
    before = folder_contents(run)
    result = cli("train", recipe, "train.lr=0.125", "--out", run)
    assert result.code == 1
    [line] = result.errors
    assert "train.lr is 0.5 there and 0.125 here" in line
    assert "--fresh" in line
    assert folder_contents(run) == before
    settings = ["train.lr=0.125", "train.max_steps=2", "--out", run, "--fresh", "--quiet"]
    assert cli("train", recipe, *settings).code == 0
    assert [path.name for path in checkpoint_folders(run)] == ["000000002"]


def test_a_mistyped_path_corrected_is_no_other_recipe(
    cli: Cli, recipe: Path, tmp_path: Path
) -> None:
    out = ["--out", tmp_path / "run", "--quiet"]
    assert cli("train", recipe, "data.path=txet.txt", *out).code == 1
    assert cli("train", recipe, "train.max_steps=1", *out).code == 0


def test_a_training_goes_on_where_its_data_were_moved(
    cli: Cli, recipe: Path, tmp_path: Path
) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert cli("train", recipe, "--out", whole, "--quiet").code == 0
    assert cli("train", recipe, "train.epochs=1", "--out", run, "--quiet").code == 0
    moved = (tmp_path / "text.txt").rename(tmp_path / "moved.txt")
    again = ["train", recipe, "--out", run, "--quiet"]
    before = folder_contents(run)
    other = write_text(tmp_path, words=480, name="other.txt")
    [line] = cli(*again, f"data.path={other}").errors
    assert line.startswith(f"the data are not those that the run in {run} began with")
    assert folder_contents(run) == before
    assert cli(*again, f"data.path={moved}").code == 0
    assert bayesrnn.read_recipe(run / "recipe.toml").data.path == str(moved)
    assert_same_end(run, whole, with_steps=False)
    shutil.rmtree(run / "checkpoints")
    assert "holds the run of another recipe: data.path is" in cli(*again, f"data.path={other}").err


def test_a_model_without_a_checkpoint_is_not_replaced(cli: Cli, finished: Path, run: Path) -> None:
    shutil.rmtree(run / "checkpoints")  # as someone in need of space would
    before = folder_contents(run)
    words = ["train", finished.parent / "small.toml", "--out", run, "--quiet"]
    assert cli(*words).errors == [
        f"{run} holds a model and no checkpoint to go on from; choose another --out, or --fresh to "
        "train it anew"
    ]
    assert folder_contents(run) == before
    assert cli("evaluate", run).code == 0
    assert cli(*words, "--fresh").code == 0


def test_a_loss_that_is_not_finite_is_one_line(cli: Cli, recipe: Path, tmp_path: Path) -> None:
    settings = ["train.lr=1e38", "train.clip=0", "train.checkpoint_minutes=0"]
    result = cli("train", recipe, *settings, "--out", tmp_path / "run", "--quiet")
    assert result.code == 1
    [line] = result.errors
    assert re.match(r"step \d+: .* is not finite", line)
    assert "train.lr=5e+37" in line


@pytest.mark.parametrize("command", ["train", "prepare"])
@pytest.mark.parametrize(
    ("option", "key"),
    [
        (["--epochs", "3"], "train.epochs=..."),
        (["--valid-streams=3"], "train.valid_streams=..."),
        (["--scale", "1"], "data.scale=... or posterior.scale=... or prior.scale=..."),
        (["--epoch", "3"], "train.epochs=..."),
        (["--train.epochs=3"], "train.epochs=..."),
        (["--kind", "delta"], "data.kind=... or dropout.kind=... or posterior.kind=... or prior"),
        (["-e", "3"], "table.key=value"),
    ],
)
def test_a_setting_written_as_an_option_is_told_how_it_is_written(
    command: str, option: list[str], key: str, cli: Cli, recipe: Path, tmp_path: Path
) -> None:
    result = cli(command, recipe, *option, "--out", tmp_path / "run")
    said = " ".join(re.sub(r"[│╭╮╰╯─]", " ", result.err).split())
    assert result.code == 2
    wanted = f"there is no option {option[0].partition('=')[0]}; settings of the recipe are given"
    assert f"{wanted} as {key}" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("command", "option", "meant"),
    [
        ("train", "--strat", "--start"),
        ("train", "--quite", "--quiet"),
        ("prepare", "--jsn", "--json"),
    ],
)
def test_an_option_that_is_mistyped_is_guessed(
    command: str, option: str, meant: str, cli: Cli, recipe: Path, tmp_path: Path
) -> None:
    result = cli(command, recipe, option, "x", "--out", tmp_path / "run")
    said = " ".join(re.sub(r"[│╭╮╰╯─]", " ", result.err).split())
    assert (result.code, f"there is no option {option}; did you mean {meant}?" in said) == (2, True)


# --- disks -----------------------------------------------------------------------------------


def fail_at(where: str, number: int) -> Callable[[Path, bytes], None]:
    """Half of a file is written, then the disk is full, or no longer ours."""
    write = storage._write_synced

    def fails(path: Path, data: bytes) -> None:
        if where in str(path):
            path.write_bytes(data[: len(data) // 2])
            raise OSError(number, "No space left on device")
        write(path, data)

    return fails


@pytest.mark.parametrize("where", ["checkpoints", "/.model."])
def test_a_full_disk_is_one_line_and_what_was_saved_stays(
    where: str,
    cli: Cli,
    finished: Path,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = finished.parent / "small.toml"
    saved = {k: v for k, v in folder_contents(run).items() if k.startswith(("check", "model"))}
    longer = ["train.epochs=3", "--out", run, "--quiet"]
    with monkeypatch.context() as patch:
        patch.setattr(storage, "_write_synced", fail_at(where, errno.ENOSPC))
        result = cli("train", recipe, *longer)
    assert result.code == 1
    [line] = result.errors
    assert re.fullmatch(r"cannot write .*: No space left on device; free some space", line)
    if where == "checkpoints":
        now = {k: v for k, v in folder_contents(run).items() if k.startswith(("check", "model"))}
        assert now == saved
    else:
        assert all(folder_contents(run)[k] == v for k, v in saved.items() if k[:5] == "model")
    assert cli("train", recipe, *longer).code == 0  # there is room again
    settings = ["train.epochs=3", "--out", tmp_path / "undisturbed", "--quiet"]
    assert cli("train", recipe, *settings).code == 0
    assert_same_end(run, tmp_path / "undisturbed", with_steps=False)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_log_that_cannot_be_written_is_one_line(cli: Cli, finished: Path, run: Path) -> None:
    (run / "log.txt").unlink()
    (run / "log.txt").symlink_to("/dev/full")
    result = cli("train", finished.parent / "small.toml", "--out", run)
    assert result.code == 1
    [line] = result.errors
    assert re.fullmatch(r"cannot write .*log\.txt: No space left on device; free some space", line)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_lock_that_cannot_be_written_is_one_line(
    cli: Cli, finished: Path, tmp_path: Path
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    (small / ".lock").symlink_to("/dev/full")
    result = cli("prune", finished, "--fraction", "0.5", "--out", small)
    assert result.code == 1
    [line] = result.errors
    assert re.fullmatch(rf"cannot write {small}: .*; .*", line)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="there is no /proc here")
def test_metrics_that_cannot_be_written_are_one_line(
    cli: Cli, finished: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = os.fsync

    def full(descriptor: int) -> None:
        if "metrics.jsonl" in str(Path(f"/proc/self/fd/{descriptor}").resolve()):
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr("os.fsync", full)
    recipe = finished.parent / "small.toml"
    result = cli("train", recipe, "train.epochs=3", "--out", run, "--quiet")
    assert result.code == 1
    [line] = result.errors
    assert "metrics.jsonl: No space left on device; free some space" in line


def test_a_place_one_may_not_write_to_is_one_line(
    cli: Cli, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Path.mkdir

    def refused(self: Path, *args: Any, **kwargs: Any) -> None:
        if self.name == "locked":
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        make(self, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", refused)
    result = cli("train", recipe, "--out", tmp_path / "locked")
    assert result.code == 1
    [line] = result.errors
    assert re.fullmatch(r"cannot write .*locked: Permission denied; choose another --out", line)


def test_an_error_of_the_system_is_still_one_line(
    cli: Cli, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error", "some/file")

    monkeypatch.setattr("bayesrnn.commands.options.load", fails)
    result = cli("evaluate", finished)
    assert (result.code, result.errors) == (1, ["some/file: Input/output error"])


# --- ensembles -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def second(finished: Path) -> Path:
    """A run like the finished one, of another seed."""
    recipe = bayesrnn.read_recipe(finished.parent / "small.toml", ["train.seed=7"])
    loop.train(recipe, finished.parent / "second", quiet=True)
    return finished.parent / "second"


def test_several_runs_are_an_ensemble(cli: Cli, finished: Path, second: Path) -> None:
    one, two = (json.loads(cli("evaluate", run, "--json").out) for run in (finished, second))
    both = json.loads(cli("evaluate", finished, second, "--json").out)
    assert both["runs"] == [str(finished), str(second)]
    assert both["expected_nll"] == pytest.approx((one["nll"] + two["nll"]) / 2, rel=1e-9)
    assert both["nll"] < both["expected_nll"]
    assert "complexity_nats" not in both
    shown = cli("evaluate", finished, second, "--samples", 2)
    assert (shown.code, shown.err) == (0, "")
    found = json.loads(cli("uncertainty", finished, second, "--samples", "0,2", "--json").out)
    assert found["by_draws"][0]["nll"] == pytest.approx(both["nll"], rel=1e-6)
    assert found["by_draws"][0]["epistemic"] > 0


def test_runs_that_are_no_ensemble(cli: Cli, finished: Path, second: Path, tmp_path: Path) -> None:
    twice = cli("evaluate", finished, finished)
    assert (twice.code, twice.errors) == (
        1,
        ["an ensemble is of several runs, and one is given twice; give each once"],
    )
    learning = cli("evaluate", finished, second, "--dynamic", "0.1")
    assert learning.code == 2
    assert "--dynamic is of one run, and 2 are given" in learning.err
    for change, message in (
        ("v", "has another vocabulary than {}"),
        ("w", "reads its data in another way than {} (data.lowercase is true, not false)"),
    ):
        folder = tmp_path / change
        recipe = small_recipe(folder, data={"lowercase": change == "w"})
        text = folder / "text.txt"
        text.write_text(text.read_text().replace("w", change))
        loop.train(recipe, folder / "run", quiet=True)
        other = cli("evaluate", finished, folder / "run")
        assert other.code == 1
        assert f"{folder / 'run'} {message.format(finished)}" in other.errors[0]


# --- bad input to evaluate and generate ------------------------------------------------------


def cut_short(run: Path) -> None:
    path = run / "model/model.safetensors"
    path.write_bytes(path.read_bytes()[:-50])


def flip_a_bit(run: Path) -> None:
    path = run / "model/model.safetensors"
    data = bytearray(path.read_bytes())
    data[-9] ^= 16
    path.write_bytes(data)


def replace_by_anothers(run: Path) -> None:
    (run / "model/config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')


def never_finish(run: Path) -> None:
    shutil.rmtree(run / "model")


def lose_the_recipe(run: Path) -> None:
    (run / "recipe.toml").unlink()


def lose_the_vocabulary(run: Path) -> None:
    (run / "vocabulary.json").unlink()


def lose_everything(run: Path) -> None:
    shutil.rmtree(run)


def cut_the_recipe(run: Path) -> None:
    data = (run / "recipe.toml").read_bytes()
    (run / "recipe.toml").write_bytes(data[: data.index(b"[train]")])


def cut_the_recipe_in_a_line(run: Path) -> None:
    data = (run / "recipe.toml").read_bytes()
    (run / "recipe.toml").write_bytes(data[: data.index(b"[train]") + 3])


@pytest.mark.parametrize("command", ["evaluate", "generate"])
@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (cut_short, r"model\.safetensors is damaged: its SHA-256 is not the one in config.json"),
        (flip_a_bit, r"model\.safetensors is damaged: its SHA-256 is not the one in config.json"),
        (replace_by_anothers, r"config\.json does not describe a bayesrnn model"),
        (never_finish, r"run holds no finished model yet; train it first"),
        (lose_the_recipe, r"is no run's folder"),
        (cut_the_recipe, r"run/recipe\.toml is damaged, or was edited: .*; restore it from a copy"),
        (cut_the_recipe_in_a_line, r"run/recipe\.toml is damaged, or was edited"),
        (lose_the_vocabulary, r"vocabulary\.json: No such file"),
        (
            lose_everything,
            r"no run at .*run: there is no such folder; give one made by train --out$",
        ),
    ],
)
def test_a_run_that_cannot_be_loaded_is_named_and_left_alone(
    command: str, harm: Callable[[Path], None], said: str, cli: Cli, run: Path, tmp_path: Path
) -> None:
    harm(run)
    before = folder_contents(tmp_path)
    result = cli(command, run)
    assert (result.code, result.out) == (1, "")
    [line] = result.errors
    assert re.search(said, line)
    assert folder_contents(tmp_path) == before


@pytest.mark.parametrize("harm", [flip_a_bit, replace_by_anothers])
def test_a_damaged_model_of_a_run_is_written_anew_by_its_training(
    harm: Callable[[Path], None], cli: Cli, finished: Path, run: Path
) -> None:
    harm(run)
    [line] = cli("evaluate", run).errors
    assert line.endswith("; the command that trained it, run again, writes the model anew")
    assert cli("train", finished.parent / "small.toml", "--out", run, "--quiet").code == 0
    assert cli("evaluate", run).code == 0


def test_every_command_notices_a_damaged_recipe_of_a_run(
    cli: Cli, run: Path, tmp_path: Path
) -> None:
    cut_the_recipe(run)
    for words in (
        ["report", run, "--out", tmp_path / "page.html"],
        ["prune", run, "--fraction", 0.5, "--out", tmp_path / "small"],
        ["prune", run, "--curve", "0.5"],
        ["uncertainty", run],
    ):
        result = cli(*words)
        assert result.code == 1
        [line] = result.errors
        assert f"{run / 'recipe.toml'} is damaged, or was edited" in line


def empty_the_recipe(run: Path) -> None:
    (run / "recipe.toml").write_bytes(b"")


@pytest.mark.parametrize(
    "harm", [cut_the_recipe, cut_the_recipe_in_a_line, empty_the_recipe, lose_the_recipe]
)
def test_training_goes_on_without_its_recipe_by_that_of_the_checkpoint(
    harm: Callable[[Path], None], cli: Cli, recipe: Path, tmp_path: Path
) -> None:
    """And what cannot be read is kept."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    begun = ["train", recipe, "train.epochs=1", "--quiet", "--out"]
    assert cli(*begun, run).code == 0
    harm(run)
    harmed = (run / "recipe.toml").read_bytes() if (run / "recipe.toml").exists() else None
    before = folder_contents(run)
    result = cli("train", recipe, "train.epochs=2", "train.lr=0.25", "--out", run)
    assert "run holds the run of another recipe: train.lr is 0.5 there and 0.25" in result.errors[0]
    assert folder_contents(run) == before
    for _ in range(2):
        result = cli("train", recipe, "train.epochs=2", "--out", run)
        assert result.code == 0
    assert cli("train", recipe, "train.epochs=2", "--quiet", "--out", whole).code == 0
    assert_same_end(run, whole, with_steps=False)
    assert (run / "recipe.toml").read_bytes() == (whole / "recipe.toml").read_bytes()
    log = (run / "log.txt").read_text()
    assert log.count("is put back") == 1
    aside = run / "recipe.damaged-1.toml"
    assert (aside.read_bytes() if aside.exists() else None) == harmed


def test_a_damaged_recipe_that_no_checkpoint_knows_is_left_alone(
    cli: Cli, finished: Path, run: Path
) -> None:
    """As of runs that were begun before checkpoints had it."""
    cut_the_recipe(run)
    for folder in checkpoint_folders(run):
        tensors, facts = storage.read_folder(folder, "checkpoint", "manifest.json")
        del facts["recipe"]
        storage.write_folder(folder, "checkpoint", "manifest.json", tensors, facts)
    before = folder_contents(run)
    words = ["train", finished.parent / "small.toml", "--quiet", "--out", run]
    [line] = cli(*words).errors
    assert f"{run / 'recipe.toml'} is damaged, or was edited" in line
    assert line.endswith("no checkpoint says what it was, --fresh starts over")
    assert folder_contents(run) == before
    assert cli(*words, "--fresh").code == 0


def test_a_recipe_of_a_run_without_a_checksum_is_read(cli: Cli, finished: Path, run: Path) -> None:
    """As old runs have it, and those where someone has changed it on purpose."""
    text = (run / "recipe.toml").read_text()
    (run / "recipe.toml").write_text(text.partition("\n")[2])
    assert cli("evaluate", run).code == 0
    assert cli("train", finished.parent / "small.toml", "--out", run, "--quiet").code == 0
    assert (run / "recipe.toml").read_text() == text


@pytest.mark.parametrize(
    "wrong",
    [
        ["evaluate", "RUN", "--split", "dev"],
        ["evaluate", "RUN", "--weights", "median"],
        ["evaluate", "RUN", "--samples", "-1"],
        ["evaluate", "RUN", "--samples", "0", "--weights", "sample"],
        ["evaluate", "RUN", "--samples", "0", "--sharpened"],
        ["evaluate", "RUN", "--samples", "few"],
        ["evaluate", "RUN", "--weights", "mean", "--samples", "3"],
        ["evaluate", "RUN", "--streams", "0"],
        ["evaluate", "RUN", "--dynamic", "fast"],
        ["evaluate", "RUN", "--dynamic", "nan"],
        ["evaluate", "RUN", "--dynamic=-1"],
        ["evaluate", "RUN", "--dynamic", "0.1", "--samples", "3"],
        ["evaluate", "RUN", "--dynamic", "0.1", "--weights", "sample"],
        ["evaluate", "RUN", "--segment", "0", "--dynamic", "0.1"],
        ["evaluate", "RUN", "--segment", "5"],
        ["evaluate", "RUN", "--by-variance"],
        ["evaluate", "RUN", "--temperature", "0"],
        ["evaluate", "RUN", "--temperature", "warm"],
        ["evaluate", "RUN", "--temperature", "2", "--sharpened"],
        ["uncertainty", "RUN", "--temperature=-1"],
        ["evaluate", "RUN", "--seed", str(10**30)],
        ["evaluate"],
        ["generate", "RUN", "--tokens", "0"],
        ["generate", "RUN", "--temperature", "-1"],
        ["generate", "RUN", "--temperature", "nan"],
        ["generate", "RUN", "--seed", "-1"],
        ["train"],
        ["train", "RUN", "--speed", "3"],
        ["prune-nothing"],
    ],
)
def test_wrong_use_exits_with_2(wrong: list[str], cli: Cli, finished: Path) -> None:
    result = cli(*(finished if word == "RUN" else word for word in wrong))
    assert (result.code, result.out) == (2, "")
    assert "Traceback" not in result.err
    flag = next((word for word in wrong if word.startswith("--")), "").partition("=")[0]
    assert flag.lstrip("-") in result.err


@pytest.mark.parametrize("device", ["abacus", "mps", "meta", "cpu:x"])
def test_a_device_that_is_not_for_this_is_one_line(cli: Cli, finished: Path, device: str) -> None:
    result = cli("evaluate", finished, "--device", device)
    assert (result.code, result.errors) == (1, [f"--device is {device!r}; use auto, cpu or cuda"])


def test_a_text_that_is_gone_is_named(cli: Cli, run: Path) -> None:
    result = cli("evaluate", run, "--data", "gone.txt")
    assert result.code == 1
    assert result.errors == ["gone.txt does not exist; give with --data where the data are"]


def test_data_of_another_kind_are_told_by_what_gave_them(
    cli: Cli, finished: Path, recipe: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    wanted = "a text file or a folder that has some"
    result = cli("evaluate", finished, "--data", folder)
    assert result.errors == [f"{folder} has no .txt files; give {wanted} as --data"]
    result = cli("train", recipe, f"data.path={folder}", "--out", tmp_path / "new")
    assert result.errors == [f"{folder} has no .txt files; set data.path to {wanted}"]


@pytest.mark.parametrize(
    "words",
    [
        ["evaluate", "RUN"],
        ["uncertainty", "RUN"],
        ["report", "RUN", "--out", "page.html"],
        ["prune", "RUN", "--curve", "0.5"],
        ["prune", "RUN", "--fraction", "0.5", "--retrain", "1", "--out", "small"],
    ],
)
def test_a_run_whose_text_is_gone_says_which_flag_helps(
    words: list[str], cli: Cli, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli("train", recipe, "train.max_steps=1", "--out", "run", "--quiet").code == 0
    text = (tmp_path / "text.txt").rename(tmp_path / "moved.txt")
    result = cli(*("run" if word == "RUN" else word for word in words))
    assert result.code == 1
    said = [line for line in result.err.splitlines() if not line.startswith("note: ")]
    there = tmp_path / "text.txt"
    assert said == [f"error: the data of run are no longer at {there}; say where with --data"]
    assert cli(*("run" if word == "RUN" else word for word in words), "--data", text).code == 0


def test_a_text_of_which_little_is_known_is_noted(cli: Cli, finished: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    other.write_text("date,flow\n" + "".join(f"2024-01-{i:02},{i}\n" for i in range(200)))
    every = ["evaluate", finished, "--split", "all", "--data"]
    for words in (every, ["uncertainty", finished, "--text"]):
        told = cli(*words, other)
        assert told.code == 0
        [line] = told.err.splitlines()
        assert re.match(rf"note: \d+% of the tokens of {other} are none that the run knows", line)
    assert cli("evaluate", finished).err == ""


def test_too_many_streams_to_evaluate_with_are_named_by_their_flag(
    cli: Cli, finished: Path
) -> None:
    result = cli("evaluate", finished, "--streams", 100_000)
    assert result.code == 1
    assert "(100001); lower --streams, or give more text" in result.errors[0]


def test_a_text_without_a_known_word_is_said(cli: Cli, recipe: Path, tmp_path: Path) -> None:
    settings = ["data.min_count=100000", "train.max_steps=1", "--out", tmp_path / "run"]
    result = cli("train", recipe, *settings)
    assert result.code == 0
    assert "no token of the training text is known" in result.err
    assert "lower data.min_count" in result.err


def test_a_sharpened_bound_with_dynamic_evaluation(tmp_path: Path, cli: Cli) -> None:
    posterior = {"kind": "sharpened", "scale": 0.05, "sigma0": 0.02, "eta": 0.0016}
    run = tmp_path / "run"
    recipe = small_recipe(tmp_path, posterior=posterior, train={"options": {}})
    loop.train(recipe, run, quiet=True)
    still, moving, by_variance = (
        json.loads(cli("evaluate", run, "--sharpened", *flags, "--json").out)
        for flags in ([], ["--dynamic", 0.1], ["--dynamic", 0.1, "--by-variance"])
    )
    assert (still["rate"], moving["rate"], by_variance["rate"]) == (0.0, 0.1, 0.1)
    assert len({found["perplexity"] for found in (still, moving, by_variance)}) == 3
    [line] = cli("evaluate", run, "--sharpened", "--dynamic", "1e30", "--json").errors
    assert "with the rate 1e+30 diverges" in line
    long = ["--look", 1, "--streams", 1, "--segment", 10**6, "--dynamic", 0.1]
    [line] = cli("evaluate", run, "--sharpened", *long).errors
    assert "a segment of 1000000 steps is longer than text 'test'" in line
    refused = cli("evaluate", run, "--sharpened", "--dynamic", "search")
    assert refused.code == 2
    assert "no search" in " ".join(refused.err.replace("│", " ").split())


def test_a_model_may_look_though_it_was_not_trained_to(tmp_path: Path, cli: Cli) -> None:
    run = tmp_path / "run"
    loop.train(small_recipe(tmp_path, train={"options": {}}), run, quiet=True)
    found = json.loads(cli("evaluate", run, "--sharpened", "--look", "search", "--json").out)
    tried = {trial["look"]: trial["perplexity"] for trial in found["search"]}
    assert found["look"] == min(tried, key=tried.__getitem__)
    again = cli("evaluate", run, "--sharpened", "--look", found["look"], "--json")
    assert json.loads(again.out)["bound"] == found["bound"]
    twice = cli("evaluate", run, "--sharpened", "--look", found["look"], "--looks", 2, "--json")
    assert (found["looks"], json.loads(twice.out)["looks"]) == (1, 2)
    assert json.loads(twice.out)["bound"] != found["bound"]
    weighed = cli("evaluate", run, "--sharpened", "--look", found["look"], "--samples", 4, "--json")
    tighter = json.loads(weighed.out)
    assert (found["draws"], tighter["draws"], tighter["around"]) == (1, 4, "mean")
    assert tighter["kl"] == pytest.approx(found["kl"], rel=0.2)  # the states are other ones
    assert tighter["bound"] < tighter["nll"] + tighter["kl"]
    assert "looks tried" in cli("evaluate", run, "--sharpened", "--look", "search").out
    assert "let it look with --look" in cli("evaluate", run, "--sharpened").err
    shaped = ["--sharpened", "--look", "1", "--streams", 1, "--segment", 7, "--dynamic", "0.1"]
    other = json.loads(cli("evaluate", run, *shaped, "--json").out)
    assert (other["streams"], other["unroll"], other["rate"]) == (1, 7, 0.1)
    assert other["tokens"] > found["tokens"]  # fewer streams leave fewer tokens over
    for flags, message in (
        (["--sharpened", "--streams", "1"], "with --streams or --segment give --look"),
        (["--sharpened", "--segment", "7"], "with --streams or --segment give --look"),
        (["--segment", "7"], "is of --dynamic and --sharpened"),
        (["--look", "1"], "give that too"),
        (["--looks", "2"], "--looks is of --sharpened"),
        (["--sharpened", "--look", "1", "--looks", "0"], "greater than or equal to 1"),
        (["--sharpened", "--look", "-1"], "a width above 0"),
        (["--sharpened", "--look", "1", "--look-at", "softmax"], "error: --look-at must name some"),
        (["--sharpened", "--look-at", "rnn.*"], "--look-at is of --look"),
        (["--look-at", "rnn.*"], "--look-at is of --look"),
        (["--sharpened", "--predictions", str(tmp_path / "x.csv")], "--predictions is not for"),
        (["--sharpened", "--beam", "7"], "--beam is not for a run on text"),
        (["--sharpened", "--meteor"], "--meteor is not for a run on text"),
        (["--sharpened", "--decoding", "beam"], "--decoding is not for a run on text"),
    ):
        refused = cli("evaluate", run, *flags)
        assert refused.code == 2
        assert message in " ".join(refused.err.replace("│", " ").split())
